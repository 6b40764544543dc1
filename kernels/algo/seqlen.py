"""How long each sequence of the batch is and where it lies."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Lengths(NamedTuple):
    """Of one sequence."""

    q: Int32
    k: Int32


class DenseSeqlen(NamedTuple):
    """(b, s, h, d) tensors: every sequence has the same lengths and a batch index of its own."""

    lengths: Lengths

    def of(self, batch: Int32) -> Lengths:
        return self.lengths

    def select(self, mX: cute.Tensor, head: Int32, batch: Int32) -> cute.Tensor:
        """One head of one sequence of mX (row, column, h, b)."""
        return mX[None, None, head, batch]
