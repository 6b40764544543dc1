"""Which Config a problem gets, with the measured reason for each row (docs/tuning.md has the figures)."""

from collections.abc import Iterator

from fa3.kernels.forward.config import TILES, Config, Spec

DTYPES = ("bfloat16", "float16")

SHAPES: dict[tuple[int, int], Config] = {
    (64, 64): Config(warpgroups=3, tile_n=128),
    (96, 96): Config(warpgroups=2, tile_n=128),
    (128, 128): Config(warpgroups=2, tile_n=128),
    (192, 128): Config(warpgroups=2, tile_n=128),
    (192, 192): Config(warpgroups=2, tile_n=112),
    (256, 256): Config(warpgroups=2, tile_n=80),
}


def config_for(
    spec: Spec, seqlen_q: int, seqlen_k: int, heads: int, heads_kv: int, batch: int, num_sms: int
) -> Config:
    """The Config for a problem of these sizes on a chip with num_sms multiprocessors."""
    return SHAPES[spec.head_dim, spec.head_dim_v]


def all_configs() -> Iterator[tuple[Spec, Config]]:
    """Every (Spec, Config) that config_for can return."""
    for dtype in DTYPES:
        for tile in TILES:
            for causal in (False, True):
                yield Spec(dtype, *tile, causal), SHAPES[tile]
