"""Rotary embedding of a chunk of eight columns, in fp32, every product rounded as the formula says.

x cos - y sin of the first of a pair, y cos + x sin of the second. A chunk's partners lie in the chunk itself
(interleaved) or in another one, which is loaded again: it was loaded by this CTA, so it comes from L1.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..prims.address import words_at
from ..prims.fp8 import product, unpack
from .config import CHUNK, Rotary


class Tables(NamedTuple):
    """cos and sin (positions, dim / 2), by address."""

    cos: Int64
    sin: Int64
    rotary: Rotary
    dtype: type  # of the inputs

    @cute.jit
    def apply(self, x: cute.Tensor, address: Int64, position: Int32, column: Int32, exists: Boolean):
        """x (8) are columns `column`.. of the row at `address` and `position`, if it exists; changed in place."""
        if exists & (column < self.rotary.dim):
            if cutlass.const_expr(self.rotary.interleaved):
                self._pairs(x, position, column)
            else:
                self._halves(x, address, position, column)

    def _pairs(self, x: cute.Tensor, position: Int32, column: Int32):
        cos, sin = (self._load(t, position, column // 2, CHUNK // 2) for t in (self.cos, self.sin))
        for i in range(CHUNK // 2):
            first, second = x[2 * i], x[2 * i + 1]
            x[2 * i] = product(first, cos[i]) - product(second, sin[i])
            x[2 * i + 1] = product(second, cos[i]) + product(first, sin[i])

    @cute.jit
    def _halves(self, x: cute.Tensor, address: Int64, position: Int32, column: Int32):
        half = self.rotary.dim // 2
        partner, angle, sign = column + half, column, Float32(-1.0)
        if column >= half:
            partner, angle, sign = column - half, column - half, Float32(1.0)
        words = cute.make_rmem_tensor(CHUNK // 2, Int32)
        cute.autovec_copy(words_at(address + 2 * Int64(partner), CHUNK // 2), words)
        other = [v for i in range(CHUNK // 2) for v in unpack(words[i], self.dtype)]
        cos, sin = (self._load(t, position, angle, CHUNK) for t in (self.cos, self.sin))
        for i in cutlass.range_constexpr(CHUNK):
            x[i] = product(x[i], cos[i]) + product(product(other[i], sin[i]), sign)

    def _load(self, table: Int64, position: Int32, first: Int32, count: int) -> list:
        """count values of a table's row, as floats."""
        wide = self.rotary.dtype == "float32"
        size = 4 if wide else 2
        address = table + size * (Int64(position) * (self.rotary.dim // 2) + Int64(first))
        words = cute.make_rmem_tensor(count * size // 4, Int32)
        if wide:
            words = cute.make_rmem_tensor(count, Float32)
            for i in range(count // 4):
                source = words_at(address + 16 * i, 4, Float32)
                cute.autovec_copy(source, cute.local_tile(words, (4,), (i,)))
            return [words[i] for i in range(count)]
        cute.autovec_copy(words_at(address, count // 2), words)
        return [v for i in range(count // 2) for v in unpack(words[i], self.dtype)]
