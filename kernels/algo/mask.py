"""Which keys a row may see.

A mask hides columns from a per-row limit on. The columns are known at compile time up to the thread's own offset, so
hiding one score is a compare and a select.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..prims.wgmma import ROWS, rows
from .seqlen import Lengths


class Mask(NamedTuple):
    """The end of the keys and, if causal, the bottom-right aligned diagonal: the last query sees the last key."""

    row: Int32  # this thread's first query row in the sequence; the second is 8 below
    column: Int32  # this thread's first column in a block
    lengths: Lengths
    tile_n: int
    causal: bool

    @cute.jit
    def apply(self, acc_S: cute.Tensor, n_block: Int32):
        if cutlass.const_expr(self.causal):
            self.hide(acc_S, n_block)
        else:
            if (n_block + 1) * self.tile_n > self.lengths.k:
                self.hide(acc_S, n_block)

    def hide(self, acc_S: cute.Tensor, n_block: Int32):
        """Scores of keys that the row may not see become -inf."""
        S = rows(acc_S)
        for r in range(ROWS):
            limit = self.lengths.k
            if self.causal:
                limit = cutlass.min(limit, self.row + 8 * r + 1 + self.lengths.k - self.lengths.q)
            limit = limit - n_block * self.tile_n - self.column
            for c in range(self.tile_n // 4):
                S[r, c] = cutlass.select_(8 * (c // 2) + c % 2 < limit, S[r, c], -Float32.inf)
