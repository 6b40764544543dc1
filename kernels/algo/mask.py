"""Which keys a row may see.

A mask hides columns from a per-row limit on. The columns are known at compile time up to the thread's own offset, so
hiding one score is a compare and a select.
"""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..prims.branch import when
from ..prims.wgmma import ROWS, rows
from .seqlen import Lengths

GROUP = 32  # columns that a branch may pass over


class Mask(NamedTuple):
    """The end of the keys and, if causal, the bottom-right aligned diagonal: the last query sees the last key."""

    row: Int32  # this thread's first query row in the sequence; the second is 8 below
    column: Int32  # this thread's first column in a block
    lengths: Lengths
    tile_n: int
    causal: bool

    @cute.jit
    def apply(self, acc_S: cute.Tensor, n_block: Int32):
        """Scores of keys that the row may not see become -inf."""
        if cutlass.const_expr(self.causal):
            self.hide_diagonal(acc_S, n_block)
        else:
            end = self.lengths.k - n_block * self.tile_n
            if end < self.tile_n:
                self.hide_end(acc_S, end)

    def hide_diagonal(self, acc_S: cute.Tensor, n_block: Int32):
        S = rows(acc_S)
        for r in range(ROWS):
            limit = cutlass.min(self.lengths.k, self.row + 8 * r + 1 + self.lengths.k - self.lengths.q)
            limit = limit - n_block * self.tile_n - self.column
            for c in range(self.tile_n // 4):
                S[r, c] = cutlass.select_(8 * (c // 2) + c % 2 < limit, S[r, c], -Float32.inf)

    def hide_end(self, acc_S: cute.Tensor, end: Int32):
        """From the column `end` of the block on. NOTE: group by group, because few of them may hold it: at head dim 64
        and 577 keys 2.5 % faster than all.
        """
        for first in range(0, self.tile_n, GROUP):
            last = min(first + GROUP, self.tile_n)
            when(end < last, partial(self.hide_columns, rows(acc_S), first, last, end - self.column))

    def hide_columns(self, S: cute.Tensor, first: int, last: int, limit: Int32):
        for c in range(first // 4, last // 4):
            is_seen = 8 * (c // 2) + c % 2 < limit
            for r in range(ROWS):
                S[r, c] = cutlass.select_(is_seen, S[r, c], -Float32.inf)
