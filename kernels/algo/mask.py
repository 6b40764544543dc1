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
        S = rows(acc_S)
        for r in cutlass.range_constexpr(ROWS):
            limit = self.lengths.k
            if cutlass.const_expr(self.causal):
                limit = cutlass.min(limit, self.row + 8 * r + 1 + self.lengths.k - self.lengths.q)
            limit = limit - n_block * self.tile_n - self.column
            for c in cutlass.range_constexpr(self.tile_n // 4):
                S[r, c] = S[r, c] if 8 * (c // 2) + c % 2 < limit else -Float32.inf
