"""Which Config a problem gets. docs/tuning.md has the measurements behind every number here."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from fa3.kernels.forward.config import FP8, Config, Spec

if TYPE_CHECKING:
    from fa3.problem import Problem

DTYPES = ("bfloat16", "float16")
PADDING = {False: 1.13, True: 1.08}  # how much more padding a larger tile may compute than a smaller one; causal or not
BALANCED = 0.95  # mean over longest load of the multiprocessors: less costs more than a persistent causal grid gains
DRAWN = 4  # tiles a multiprocessor: with fewer, clearing the counter of a dynamic grid (2 us) is not worth it
MANY_TILES = 2**15
ALWAYS = 2**31
LONG = 2**14  # stands for the longest sequence where nobody says how long it is


@dataclass(frozen=True)
class Row:
    """One tile's choices. A persistent grid is dynamic where nothing else is said."""

    config: Config
    dynamic: dict[str, bool] = field(default_factory=dict)  # what else differs in a dynamic grid
    fixed_full: int = 0  # up to this many keys a persistent grid goes by the fixed rule
    fixed_causal: int = 0
    causal_fixed: bool = True  # whether a causal grid may go by the fixed rule at all
    two_q: int = 0  # up to this many keys a persistent grid has two places for Q
    small: "Row | None" = None  # a smaller tile, for where this one computes more padding
    small_to: int = 0  # up to this many keys it is taken whatever the padding
    full_only: bool = False  # never causal: with fewer keys than rows more blocks have a mask

    def sizes(self, causal: bool) -> Iterator["Row"]:
        """This one and the smaller ones that a mask may have."""
        size: Row | None = self
        while size is not None and not (causal and size.full_only):
            yield size
            size = size.small

    def schedules(self, seqlen_k: int, causal: bool) -> tuple[Config, Config, Config]:
        """One tile a CTA, persistent by the fixed rule, dynamic."""
        persistent = replace(self.config, persistent=True, q_stages=2 if seqlen_k <= self.two_q else 1)
        dynamic = replace(persistent, dynamic=True, **self.dynamic)
        return self.config, dynamic if causal and not self.causal_fixed else persistent, dynamic

    def goes_by_rule(self, seqlen_k: int, causal: bool) -> bool:
        return seqlen_k <= (self.fixed_causal if causal else self.fixed_full)

    def all_schedules(self, causal: bool) -> Iterator[Config]:
        edges = {0, self.fixed_full, self.fixed_causal, self.two_q} - {ALWAYS}
        for seqlen_k in sorted(edge + 1 for edge in edges):
            one_tile, fixed, dynamic = self.schedules(seqlen_k, causal)
            never = not causal and self.goes_by_rule(seqlen_k, causal)
            yield from (one_tile, fixed) if never else (one_tile, fixed, dynamic)

    def ragged(self) -> Config:
        """NOTE: with one place for Q: with two, causal kernels of 3 warpgroups spill."""
        return replace(self.config, persistent=True, dynamic=True, **self.dynamic)


OPTIMISTIC, FREE = {"optimistic": True}, {"pingpong": False}
ROWS: dict[tuple[int, int], Row] = {
    # 3 warpgroups keep the exponentials busier (+12 % at 4K and above); 192 rows do not divide 512 or 1024. 112 keys
    # are for lengths that end early in a block of 128, all of them below 800: 197 (ViT) takes 0.95 of the time of 256,
    # with 128 keys 1.06; causal 1.18.
    (64, 64): Row(
        Config(3, 128, 3, **OPTIMISTIC),
        fixed_full=1024,
        two_q=ALWAYS,
        small=Row(
            Config(2, 128, **OPTIMISTIC),
            fixed_full=1024,
            fixed_causal=1024,
            two_q=ALWAYS,
            small=Row(Config(2, 112, **OPTIMISTIC), fixed_full=ALWAYS, two_q=ALWAYS, full_only=True),
        ),
    ),
    # +5 % over 2 warpgroups at 4K; with 112 keys +1 % more, which divide fewer lengths.
    (96, 96): Row(Config(3, 96, **OPTIMISTIC), two_q=ALWAYS, small=Row(Config(2, 128, **OPTIMISTIC), two_q=ALWAYS)),
    # Up to 1K keys the fixed rule and two places for Q: +3 to 7 %; at 16K one place, +1 to 2 %.
    (128, 128): Row(Config(2, 128, **OPTIMISTIC), FREE, fixed_full=1024, fixed_causal=1024, two_q=1024),
    (192, 128): Row(Config(2, 128, **OPTIMISTIC), fixed_full=ALWAYS, fixed_causal=ALWAYS),
    # What shared memory holds.
    (192, 192): Row(Config(2, 112, **OPTIMISTIC), fixed_causal=ALWAYS),
    # Up to 1K 64 keys are 1 to 7 % faster. Causal kernels of the fixed rule spill.
    (256, 256): Row(
        Config(2, 80, **OPTIMISTIC),
        causal_fixed=False,
        small=Row(Config(2, 64, **OPTIMISTIC), fixed_full=1024, causal_fixed=False),
        small_to=1024,
    ),
}

# How P V of an FP8 kernel is summed. accurate: every key block's in FP32. fast: the fastest; without promotion all in
# the tensor core's accumulator of about 14 bits, whose error grows with the number of keys. Measured at 16K; head dims
# 96 and (192, 128) at 4K, head dim 192 not at all. Two places for Q: measured at head dims 64 and 128.
AHEAD = {**FREE, "prefetch": True}
# With (192, 128), where alternating is 1 % faster, a causal kernel of one tile spills.
HALVED = Row(Config(2, 128, promotion=1, **FREE))
ALTERNATING = Row(Config(2, 128, 3, promotion=1, alternate=True, **FREE), fixed_full=1024, two_q=4096)
# At 512 and 1K keys 4 to 10 % faster than 2 warpgroups, although 192 rows do not divide them.
PREFETCHING = Row(Config(3, 128, 3, promotion=1, chunk=32, **AHEAD), two_q=ALWAYS)
FP8_ROWS: dict[str, dict[tuple[int, int], Row]] = {
    "accurate": {
        (64, 64): PREFETCHING,
        (96, 96): HALVED,
        (128, 128): ALTERNATING,
        (192, 128): HALVED,
        # With overlap only 64 keys fit, which is slower.
        (192, 192): Row(Config(2, 128, promotion=1, chunk=64, overlap=False)),
        (256, 256): Row(Config(2, 128, promotion=1, chunk=64, overlap=False)),
    },
    "fast": {
        # Faster than any that sums in the tensor core.
        (64, 64): PREFETCHING,
        (96, 96): HALVED,
        (128, 128): ALTERNATING,
        (192, 128): HALVED,
        (192, 192): Row(Config(2, 128, **FREE)),
        (256, 256): Row(Config(2, 128), causal_fixed=False),  # it would spill
    },
}
ACCUMULATIONS = tuple(FP8_ROWS)  # the first is the default


def config_of(problem: "Problem", num_sms: int) -> Config:
    """The Config of a call on a chip of that many SMs; an empty size is taken as 1."""
    p = problem
    seqlen_q, seqlen_k, heads, batch = (max(1, size) for size in (p.seqlen_q, p.seqlen_k, p.heads, p.batch))
    return config_for(p.spec, seqlen_q, seqlen_k, heads, batch, num_sms, p.accumulation)


def config_for(
    spec: Spec,
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    batch: int,
    num_sms: int,
    accumulation: str = ACCUMULATIONS[0],
) -> Config:
    """The Config for a problem of these sizes on a chip with num_sms multiprocessors. accumulation: of FP8."""
    row = _row_for(spec, seqlen_q, seqlen_k, accumulation)
    one_tile, fixed, dynamic = row.schedules(seqlen_k, spec.causal)
    m_blocks, sequences = -(-seqlen_q // one_tile.tile_m), heads * batch
    tiles = m_blocks * sequences
    if tiles <= num_sms:
        return one_tile
    is_balanced = not spec.causal or balance(m_blocks, sequences, num_sms) >= BALANCED
    by_rule = is_balanced and row.goes_by_rule(seqlen_k, spec.causal)
    if tiles >= DRAWN * num_sms and not by_rule:
        return dynamic
    return fixed if is_balanced else one_tile


def ragged_config_for(spec: Spec, max_seqlen_q: int, max_seqlen_k: int, page_size: int = 0) -> Config:
    """The Config for sequences none of which is longer than the two maxima: the tile of a batch of such. How the tiles
    are spread is on the device alone. page_size: of paged K and V, a multiple of 16.
    """
    config = _row_for(spec, max(1, max_seqlen_q), max(1, max_seqlen_k)).ragged()
    return replace(config, box=math.gcd(page_size, config.tile_n)) if spec.paged else config


def ragged_tiles(total_q: int, tile_m: int, heads: int, batch: int) -> int:
    """Work tiles that sequences of total_q queries together make at most, whatever their lengths."""
    return (total_q // tile_m + batch) * heads


def all_configs() -> Iterator[tuple[Spec, Config]]:
    """Every (Spec, Config) that config_for and ragged_config_for can return; of FP8 those without scales of V's
    channels.
    """
    kinds = [(dtype, "", ROWS) for dtype in DTYPES]
    kinds += [(FP8, dtype_o, rows) for dtype_o in DTYPES for rows in FP8_ROWS.values()]
    found: dict[tuple[Spec, Config], None] = {}  # as a set that keeps the order
    for dtype, dtype_o, rows in kinds:
        for tile, row in rows.items():
            for causal in (False, True):
                spec = Spec(dtype, *tile, causal, dtype_o)
                for size in row.sizes(causal):
                    found |= dict.fromkeys((spec, c) for c in size.all_schedules(causal))
    for dtype, (tile, row), causal in product(DTYPES, ROWS.items(), (False, True)):
        spec = Spec(dtype, *tile, causal, ragged=True)
        for size in row.sizes(causal):
            found[spec, size.ragged()] = None
    yield from found


# Of well-known models: a window, with sinks or a soft cap; layers of the same models that see all keys; chunks.
VARIANTS: tuple[dict[str, Any], ...] = (
    dict(causal=False, local="window"),
    dict(causal=False, local="window", sink="bfloat16"),
    dict(causal=False, local="window", softcap=True),
    dict(causal=False, local="chunk"),
    dict(causal=True, sink="bfloat16"),
    dict(causal=True, softcap=True),
)


def variant_configs() -> Iterator[tuple[Spec, Config]]:
    """The (Spec, Config) of VARIANTS. Other ones differ in the type of the sinks and in what they combine."""
    found: dict[tuple[Spec, Config], None] = {}
    for dtype, (head_dim, head_dim_v), variant, ragged in product(DTYPES, ROWS, VARIANTS, (False, True)):
        spec = Spec(dtype, head_dim, head_dim_v, ragged=ragged, **variant)
        for size in _sizes(spec, ROWS):
            configs = [size.ragged()] if ragged else size.all_schedules(spec.causal)
            found |= dict.fromkeys((spec, c) for c in configs)
    yield from found


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


def _row_for(spec: Spec, seqlen_q: int, seqlen_k: int, accumulation: str = ACCUMULATIONS[0]) -> Row:
    rows = FP8_ROWS[accumulation] if spec.is_fp8 else ROWS
    row, *smaller = _sizes(spec, rows)
    for small in smaller:
        padding = _padding(row.config, small.config, seqlen_q, seqlen_k)
        if seqlen_k > row.small_to and padding <= PADDING[spec.causal]:
            break
        row = small
    return row


def _sizes(spec: Spec, rows: dict[tuple[int, int], Row]) -> list[Row]:
    """The tiles of a Spec, the largest first."""
    sizes = rows[spec.head_dim, spec.head_dim_v].sizes(spec.causal or bool(spec.local))
    # NOTE: with the ends of intervals kernels of 3 warpgroups spill, and a window is narrow beside 192 rows.
    return [size for size in sizes if not spec.local or size.config.warpgroups < 3]


def _padding(large: Config, small: Config, seqlen_q: int, seqlen_k: int) -> float:
    """Scores that the large tile computes over those that the small one computes."""

    def scores(c: Config) -> int:
        return -(-seqlen_q // c.tile_m) * c.tile_m * -(-seqlen_k // c.tile_n) * c.tile_n

    return scores(large) / scores(small)
