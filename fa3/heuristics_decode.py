"""Which kernel a decode call gets, and over how many CTAs its keys are spread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from fa3.kernels.decode.config import BOXES, GATHER, Config, Spec
from fa3.kernels.forward.config import TILES

CONFIGS = {  # tile_n, stages, places for Q. 128 keys need a split_size that they divide
    (64, 64): Config(128, 4, 2),
    (96, 96): Config(64, 6, 2),
    (128, 128): Config(64, 4, 2),
    (192, 128): Config(64, 4, 1),
    (192, 192): Config(64, 4, 1),
    (256, 256): Config(64, 3, 1),
}
FULL = 0.75  # of the multiprocessors: with so many busy the memory is


def config_for(spec: Spec, split_size: int = 0) -> Config:
    config = CONFIGS[spec.head_dim, spec.head_dim_v]
    if split_size % config.tile_n:
        return replace(config, tile_n=config.tile_n // 2, stages=2 * config.stages)
    return config


def pages_of(page_size: int | None, leftpad: bool = False) -> int:
    """Spec.pages. With a padding on the left no box is known to begin with a page."""
    if page_size is None:
        return 0
    if leftpad:
        return GATHER
    return next((box for box in BOXES if page_size % box == 0), GATHER)


def shares_for(units: int, blocks: int, num_sms: int) -> int:
    """CTAs among which the keys of all sequences, `blocks` at most, are divided, for each of `units` tiles and heads.

    As many as there is a multiprocessor for; of more units, as many as leave few of them idle at the end.
    """

    def busy(shares: int) -> float:
        ctas = units * shares
        return ctas / (-(-ctas // num_sms) * num_sms)

    shares = max(1, num_sms // units)
    if busy(shares) < FULL:
        shares = max(range(1, 9), key=lambda n: (min(busy(n), 0.95), -n))
    return max(1, min(shares, blocks))


def all_configs() -> Iterator[tuple[Spec, Config]]:
    """The kernels of calls without splits given, softcap, chunks and sinks."""
    for dtype, tile, pages, splits in product(("bfloat16", "float16"), TILES, (0, *BOXES, GATHER), (True, False)):
        spec = Spec(dtype, *tile, pages, splits)
        yield spec, config_for(spec)
