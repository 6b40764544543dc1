"""Which Config a problem gets. docs/tuning.md has the measurements behind every number here."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fa3.kernels.forward.config import TILES, Config, Spec

DTYPES = ("bfloat16", "float16")
PADDING = 1.08  # a larger tile may compute this much more padding than a smaller one
FILLED = 0.9  # of the multiprocessors, over all rounds of a persistent causal grid
ALWAYS = 2**31


@dataclass(frozen=True)
class Row:
    """One tile's choices, full and causal."""

    large: Config  # where its padding is small beside the smaller tile's
    small: Config | None = None
    long: Config | None = None  # instead of large, beyond the persistent limit
    persistent_full: int = 1024  # up to this many keys: the share of a tile that is not its main loop is worth hiding
    persistent_causal: int = 1024


ROWS: dict[tuple[int, int], Row] = {
    # 3 warpgroups keep the exponentials busier (+12 % at 4K and above); 192 rows do not divide 512 or 1024.
    (64, 64): Row(Config(3, 128), Config(2, 128), persistent_causal=4096),
    # With 3 warpgroups a thread has registers for 80 keys only, which is slower below 4K and no faster above.
    (96, 96): Row(Config(2, 128), persistent_full=ALWAYS, persistent_causal=ALWAYS),
    # The turns of ping-pong cost 2 % at 16K and gain 1 % at 1K.
    (128, 128): Row(Config(2, 128), None, Config(2, 128, pingpong=False), persistent_full=4096, persistent_causal=4096),
    (192, 128): Row(Config(2, 128), persistent_causal=ALWAYS),
    # What shared memory holds. O leaves through Q's place, so that a persistent grid hides less.
    (192, 192): Row(Config(2, 112)),
    # 128 O registers a thread: rescaled under QK +4 % over rescaled among the exponentials. 80 does not divide 512.
    (256, 256): Row(Config(2, 80, rescale_early=True), Config(2, 64, rescale_early=True)),
}


def config_for(spec: Spec, seqlen_q: int, seqlen_k: int, heads: int, batch: int, num_sms: int) -> Config:
    """The Config for a problem of these sizes on a chip with num_sms multiprocessors."""
    row = ROWS[spec.head_dim, spec.head_dim_v]
    config = row.large
    if row.small is not None and _padding(row.large, row.small, seqlen_q, seqlen_k) > PADDING:
        config = row.small
    if seqlen_k > (row.persistent_causal if spec.causal else row.persistent_full):
        return row.long if row.long is not None and config is row.large else config
    persistent = replace(config, persistent=True)
    return persistent if _fills(persistent, spec.causal, seqlen_q, heads * batch, num_sms) else config


def all_configs() -> Iterator[tuple[Spec, Config]]:
    """Every (Spec, Config) that config_for can return."""
    for dtype in DTYPES:
        for tile in TILES:
            row = ROWS[tile]
            chosen = [row.large, row.small, row.long]
            chosen += [replace(config, persistent=True) for config in (row.large, row.small) if config is not None]
            for causal in (False, True):
                yield from ((Spec(dtype, *tile, causal), config) for config in chosen if config is not None)


def num_items(config: Config, causal: bool, seqlen_q: int, sequences: int) -> int:
    """What CTAs take one at a time: query tiles; of a persistent causal grid a long and a short tile of a head."""
    m_blocks = -(-seqlen_q // config.tile_m)
    return sequences * ((m_blocks + 1) // 2 if causal and config.persistent else m_blocks)


def _padding(large: Config, small: Config, seqlen_q: int, seqlen_k: int) -> float:
    """Scores that the large tile computes over those that the small one computes."""

    def scores(c: Config) -> int:
        return -(-seqlen_q // c.tile_m) * c.tile_m * -(-seqlen_k // c.tile_n) * c.tile_n

    return scores(large) / scores(small)


def _fills(config: Config, causal: bool, seqlen_q: int, sequences: int, num_sms: int) -> bool:
    """Whether a persistent grid keeps the multiprocessors busy: more tiles than CTAs; causal, whole rounds of pairs."""
    items = num_items(config, causal, seqlen_q, sequences)
    if not causal:
        return items > num_sms
    rounds = -(-items // num_sms)
    return items >= FILLED * rounds * num_sms
