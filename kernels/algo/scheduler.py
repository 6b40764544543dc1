"""Who computes which query tile, and in which order.

Tiles are numbered so that neighbours run at the same time: heads in sections whose K and V fit in L2 together, in a
section the query tiles one after the other with the head fastest; if causal the last query tile, the longest, first.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .blocks import Blocks

L2_BYTES = 32 * 2**20  # K and V of the heads of a section stay under this (the L2 of sm_90 has 50 to 60 MB)


class WorkTile(NamedTuple):
    m_block: Int32
    head: Int32  # of Q
    batch: Int32
    nth: Int32  # tiles that this CTA did before
    base: Int32  # key blocks that this CTA took before


class TileOrder(NamedTuple):
    m_blocks: Int32
    heads: Int32
    sequences: Int32  # heads * batch
    section: Int32  # sequences in a section
    first: Int32  # query tile that a section begins with
    step: Int32  # 1, or -1: the longest of a causal mask first

    @staticmethod
    def create(m_blocks: Int32, heads: Int32, sequences: Int32, section: Int32, longest_first: bool) -> "TileOrder":
        first, step = (m_blocks - 1, Int32(-1)) if longest_first else (Int32(0), Int32(1))
        return TileOrder(m_blocks, heads, sequences, section, first, step)

    @property
    def tiles(self):
        return self.m_blocks * self.sequences

    def at(self, index: Int32, nth: Int32, base: Int32) -> WorkTile:
        section = index // (self.section * self.m_blocks) * self.section
        size = cutlass.min(self.section, self.sequences - section)
        rest = index - section * self.m_blocks
        m_block, sequence = self.first + self.step * (rest // size), section + rest % size
        return WorkTile(m_block, sequence % self.heads, sequence // self.heads, nth, base)


def section_in_l2(kv_bytes: Int64, ratio: Int32, sequences: Int32) -> Int32:
    """How many query heads share the L2, `ratio` of them the kv_bytes of one K/V head."""
    fits = cutlass.max(Int64(L2_BYTES) // kv_bytes, Int64(1)) * Int64(ratio)
    return Int32(cutlass.min(fits, Int64(sequences)))


class OneTile(NamedTuple):
    """One CTA a tile: the hardware hands out the next CTA when one ends."""

    order: TileOrder

    def ctas(self, num_sms: Int32):
        return self.order.tiles

    @cute.jit
    def for_each(self, blocks_of: cutlass.Constexpr, run: cutlass.Constexpr):
        index, _, _ = cute.arch.block_idx()
        tile = self.order.at(index, Int32(0), Int32(0))
        run(tile, blocks_of(tile))


class Persistent(NamedTuple):
    """One CTA an SM. It goes through the tiles back and forth (a snake), so that of tiles sorted by length every CTA
    gets its share of long and short ones; the producer is already in the next tile while the consumers end the last.
    """

    order: TileOrder

    def ctas(self, num_sms: Int32):
        return cutlass.min(self.order.tiles, num_sms)

    @cute.jit
    def for_each(self, blocks_of: cutlass.Constexpr, run: cutlass.Constexpr):
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        base = Int32(0)
        rounds = (self.order.tiles + ctas - 1) // ctas
        for nth in cutlass.range(rounds, unroll=1):
            index = nth * ctas + (cta if nth % 2 == 0 else ctas - 1 - cta)
            if index < self.order.tiles:
                tile = self.order.at(index, nth, base)
                blocks = blocks_of(tile)
                run(tile, blocks)
                base = base + blocks.count
