"""Which queries a tile holds and which key blocks it takes."""

from typing import NamedTuple

import cutlass
from cutlass import Int32

from .seqlen import Lengths

WARPGROUP_ROWS = 64


class Blocks(NamedTuple):
    """Key blocks of one query tile, taken right to left: first those that need a mask, then those that do not."""

    count: Int32  # at least 1
    masked: Int32  # at least 1: the last block may pass the end of the keys
    has_edge = False  # see window.LocalBlocks

    def n_block(self, i):
        """The i-th block taken."""
        return self.count - 1 - i

    @property
    def unmasked(self):
        """Where the blocks without a mask end."""
        return self.count

    @property
    def leftmost(self):
        """The block taken last."""
        return 0


def first_row(m_block, lengths: Lengths, tile_m: int, causal: bool):
    """The query that tile m_block begins with, a multiple of 64: the rows of a warpgroup.

    Causal tiles are counted from the last query: the one that is not full, which then begins before query 0, is the
    one with the fewest keys.
    """
    if not causal:
        return m_block * tile_m
    end = ceil_div(lengths.q, WARPGROUP_ROWS) * WARPGROUP_ROWS
    return end - (ceil_div(lengths.q, tile_m) - m_block) * tile_m


def key_blocks(row, lengths: Lengths, tile_m: int, tile_n: int, causal: bool) -> Blocks:
    """Of the query tile that begins at `row`; blocks beyond the diagonal are left out.

    A tile that sees no key takes one block, wholly masked.
    """
    count, masked = cutlass.max(ceil_div(lengths.k, tile_n), 1), 1
    if causal:
        seen_first = row + 1 + lengths.k - lengths.q  # keys that the tile's first row sees
        seen_last = cutlass.max(seen_first + tile_m - 1, 1)
        count = cutlass.min(count, ceil_div(seen_last, tile_n))
        masked = cutlass.max(count - cutlass.max(seen_first, 0) // tile_n, 1)
    return Blocks(count, masked)


def ceil_div(a, b):
    # NOTE: not cute.ceil_div: with a divisor that folds to 1 it fails to legalise.
    return (a + (b - 1)) // b
