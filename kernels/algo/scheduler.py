"""Who computes which query tile, and in which order.

An order numbers items of about equal cost or, where the hardware balances them, the longest first. Neighbours run at
the same time, so they share K and V in L2. A scheduler hands the items to CTAs.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

L2_BYTES = 32 * 2**20  # K and V of the heads of a section stay under this (the L2 of sm_90 has 50 to 60 MB)


class WorkTile(NamedTuple):
    m_block: Int32  # query tile: see blocks.first_row
    head: Int32  # of Q
    batch: Int32
    nth: Int32  # tiles that this CTA did before
    base: Int32  # key blocks that this CTA took before


class Grid(NamedTuple):
    """All query tiles."""

    m_blocks: Int32
    heads: Int32
    sequences: Int32  # heads * batch

    @property
    def tiles(self):
        return self.m_blocks * self.sequences

    def tile(self, m_block: Int32, sequence: Int32, nth: Int32, base: Int32) -> WorkTile:
        return WorkTile(m_block, sequence % self.heads, sequence // self.heads, nth, base)


class InOrder(NamedTuple):
    """Every tile costs the same: those of one head after the other."""

    grid: Grid
    parts = 1

    @property
    def items(self):
        return self.grid.tiles

    def at(self, item: Int32, part: Int32) -> tuple[Int32, Int32]:
        """m_block and sequence of a part of an item."""
        return item % self.grid.m_blocks, item // self.grid.m_blocks

    def exists(self, item: Int32, part: Int32):
        return Boolean(True)


class LongestFirst(NamedTuple):
    """Causal tiles for CTAs that come and go: heads in sections whose K and V fit in L2 together, in a section the last
    query tile of every head first.
    """

    grid: Grid
    section: Int32  # sequences in a section
    parts = 1

    @property
    def items(self):
        return self.grid.tiles

    def at(self, item: Int32, part: Int32) -> tuple[Int32, Int32]:
        m_blocks, sequences = self.grid.m_blocks, self.grid.sequences
        first = item // (self.section * m_blocks) * self.section
        size = cutlass.min(self.section, sequences - first)
        rest = item - first * m_blocks
        return m_blocks - 1 - rest // size, first + rest % size

    def exists(self, item: Int32, part: Int32):
        return Boolean(True)


class Folded(NamedTuple):
    """Causal tiles for CTAs that stay: a long and a short tile of one head are an item, all items cost the same."""

    grid: Grid
    parts = 2

    @property
    def folds(self):
        return (self.grid.m_blocks + 1) // 2

    @property
    def items(self):
        return self.folds * self.grid.sequences

    def at(self, item: Int32, part: Int32) -> tuple[Int32, Int32]:
        fold, last = item % self.folds, self.grid.m_blocks - 1
        return fold + (1 - part) * (last - 2 * fold), item // self.folds

    def exists(self, item: Int32, part: Int32):
        """The middle tile of an odd number has no partner."""
        return (part == 0) | (2 * (item % self.folds) != self.grid.m_blocks - 1)


def section_in_l2(kv_bytes: Int64, ratio: Int32, sequences: Int32) -> Int32:
    """How many query heads share the L2, `ratio` of them the kv_bytes of one K/V head."""
    fits = cutlass.max(Int64(L2_BYTES) // kv_bytes, Int64(1)) * Int64(ratio)
    return Int32(cutlass.min(fits, Int64(sequences)))


class OneTile(NamedTuple):
    """One CTA a tile: the hardware hands out the next CTA when one ends."""

    order: InOrder | LongestFirst

    def ctas(self, num_sms: Int32):
        return self.order.items

    @cute.jit
    def for_each(self, blocks_of: cutlass.Constexpr, run: cutlass.Constexpr):
        item, _, _ = cute.arch.block_idx()
        tile = self.order.grid.tile(*self.order.at(item, Int32(0)), Int32(0), Int32(0))
        run(tile, blocks_of(tile))


class Persistent(NamedTuple):
    """One CTA an SM, item after item: the producer is in the next tile while the consumers end the last."""

    order: InOrder | Folded

    def ctas(self, num_sms: Int32):
        return cutlass.min(self.order.items, num_sms)

    def turns(self, cta, ctas):
        """How many parts of items a CTA goes through."""
        return (self.order.items - cta + ctas - 1) // ctas * self.order.parts

    def at(self, turn, cta, ctas):
        """Item and part of a turn."""
        return turn // self.order.parts * ctas + cta, turn % self.order.parts

    @cute.jit
    def for_each(self, blocks_of: cutlass.Constexpr, run: cutlass.Constexpr):
        order = self.order
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        nth, base = Int32(0), Int32(0)
        for turn in cutlass.range(self.turns(cta, ctas), unroll=1):
            item, part = self.at(turn, cta, ctas)
            if order.exists(item, part):
                tile = order.grid.tile(*order.at(item, part), nth, base)
                blocks = blocks_of(tile)
                run(tile, blocks)
                nth = nth + 1
                base = base + blocks.count
