"""Which Config a problem gets. docs/tuning.md has the measurements behind every number here."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fa3.kernels.forward.config import TILES, Config, Spec

DTYPES = ("bfloat16", "float16")
PADDING = {False: 1.13, True: 1.08}  # how much more padding a larger tile may compute than a smaller one; causal or not
BALANCED = 0.95  # mean over longest load of the multiprocessors: less costs more than a persistent causal grid gains
MANY_TILES = 2**15
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
    (64, 64): Row(Config(3, 128), Config(2, 128), persistent_full=4096, persistent_causal=ALWAYS),
    # With 3 warpgroups a thread has registers for 80 keys only, which is slower below 4K and no faster above.
    (96, 96): Row(Config(2, 128), persistent_full=ALWAYS, persistent_causal=ALWAYS),
    # The turns of ping-pong cost 1 to 2 % at 16K and gain 1 % at 1K.
    (128, 128): Row(Config(2, 128), None, Config(2, 128, pingpong=False), persistent_full=4096, persistent_causal=4096),
    (192, 128): Row(Config(2, 128), persistent_full=ALWAYS, persistent_causal=ALWAYS),
    # What shared memory holds. O leaves through V's place.
    (192, 192): Row(Config(2, 112), persistent_full=ALWAYS, persistent_causal=4096),
    # 128 O registers a thread: rescaled under QK +4 % over rescaled among the exponentials. 80 does not divide 512.
    (256, 256): Row(Config(2, 80, rescale_early=True), Config(2, 64, rescale_early=True), persistent_causal=4096),
}


def config_for(spec: Spec, seqlen_q: int, seqlen_k: int, heads: int, batch: int, num_sms: int) -> Config:
    """The Config for a problem of these sizes on a chip with num_sms multiprocessors."""
    row = ROWS[spec.head_dim, spec.head_dim_v]
    config = row.large
    if row.small is not None and _padding(row.large, row.small, seqlen_q, seqlen_k) > PADDING[spec.causal]:
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


def num_ctas(config: Config, seqlen_q: int, sequences: int, num_sms: int) -> int:
    """The grid: one CTA a query tile, of a persistent one no more than multiprocessors."""
    tiles = sequences * -(-seqlen_q // config.tile_m)
    return min(tiles, num_sms) if config.persistent else tiles


def balance(m_blocks: int, sequences: int, num_sms: int) -> float:
    """Mean over longest load of the multiprocessors, in key blocks, where a persistent causal grid deals out its tiles.

    kernels/algo/scheduler.py, Folded: rounds of pairs, then the other tiles back and forth, longest first.
    """
    sequences = min(sequences, -(-MANY_TILES // m_blocks))  # more change little
    folds = (m_blocks + 1) // 2
    rounds = max(folds * sequences // num_sms - 1, 0)
    pairs = np.arange(rounds * num_sms) % folds
    loads = np.where(2 * pairs == m_blocks - 1, folds, m_blocks + 1).reshape(rounds, num_sms).sum(0)
    cut, fold = divmod(rounds * num_sms, folds)
    copies = np.full(m_blocks, sequences - 1 - cut)
    copies[fold : m_blocks - fold] += 1
    lengths = np.repeat(np.arange(m_blocks, 0, -1), copies)
    dealt = np.pad(lengths, (0, -len(lengths) % num_sms)).reshape(-1, num_sms)
    dealt[1::2] = dealt[1::2, ::-1]
    loads = loads + dealt.sum(0)
    return float(loads.mean() / loads.max())


def _padding(large: Config, small: Config, seqlen_q: int, seqlen_k: int) -> float:
    """Scores that the large tile computes over those that the small one computes."""

    def scores(c: Config) -> int:
        return -(-seqlen_q // c.tile_m) * c.tile_m * -(-seqlen_k // c.tile_n) * c.tile_n

    return scores(large) / scores(small)


def _fills(config: Config, causal: bool, seqlen_q: int, sequences: int, num_sms: int) -> bool:
    """Whether a persistent grid keeps the multiprocessors busy: more tiles than CTAs; causal, balanced."""
    m_blocks = -(-seqlen_q // config.tile_m)
    if not causal:
        return m_blocks * sequences > num_sms
    return balance(m_blocks, sequences, num_sms) >= BALANCED
