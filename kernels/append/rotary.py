"""Rotary embedding of a chunk of eight columns, in fp32, every product rounded as the formula says.

x cos - y sin of the first of a pair, y cos + x sin of the second. A chunk's partners lie in the chunk itself
(interleaved) or in another one, which is loaded too: its own thread loads it at the same time, so one comes from L1.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..prims.fp8 import product, unpack
from ..prims.memory import load_floats
from ..prims.ptx import pack
from .config import CHUNK, Rotary

NAN = float("nan")


class Tables(NamedTuple):
    """cos and sin (positions, rotary_dim / 2)."""

    cos: cute.Tensor
    sin: cute.Tensor
    rotary: Rotary
    dtype: type  # of what is rotated
    aligned: bool

    @cute.jit
    def apply(self, words: cute.Tensor, row: Int64, position: Int32, column: Int32):
        """words (4) are columns `column`.. of the row at address `row`; changed in place.

        A position outside the tables makes NaN: nothing is read there.
        """
        if column < 2 * self.cos.shape[1]:
            last = self.cos.shape[0] - 1
            is_known = (position >= 0) & (position <= last)
            place = cutlass.max(cutlass.min(position, last), 0)
            if cutlass.const_expr(self.rotary.interleaved):
                values = self._pairs(words, place, column)
            else:
                values = self._halves(words, row, place, column)
            known = [cutlass.select_(is_known, x, Float32(NAN)) for x in values]
            for i in cutlass.range_constexpr(CHUNK // 2):
                words[i] = pack(known[2 * i], known[2 * i + 1], self.dtype)

    def _pairs(self, words: cute.Tensor, place: Int32, column: Int32) -> list:
        cos, sin = (self._load(t, place, column // 2, CHUNK // 2) for t in (self.cos, self.sin))
        values = []
        for i in range(CHUNK // 2):
            first, second = unpack(words[i], self.dtype)
            values.append(product(first, cos[i]) - product(second, sin[i]))
            values.append(product(second, cos[i]) + product(first, sin[i]))
        return values

    def _halves(self, words: cute.Tensor, row: Int64, place: Int32, column: Int32) -> list:
        half = Int32(self.cos.shape[1])
        is_second = column >= half
        angle = Int32(cutlass.select_(is_second, column - half, column))
        partner = Int32(cutlass.select_(is_second, column - half, column + half))
        sign = Float32(cutlass.select_(is_second, Float32(1.0), Float32(-1.0)))
        other = load_floats(row + 2 * Int64(partner), CHUNK, self.dtype, self.aligned)
        cos, sin = (self._load(t, place, angle, CHUNK) for t in (self.cos, self.sin))
        values = [x for i in range(CHUNK // 2) for x in unpack(words[i], self.dtype)]
        return [product(values[i], cos[i]) + product(product(other[i], sin[i]), sign) for i in range(CHUNK)]

    def _load(self, table: cute.Tensor, place: Int32, first: Int32, count: int) -> list:
        size = table.element_type.width // 8
        address = table[place, None].iterator.toint() + size * Int64(first)
        return load_floats(address, count, table.element_type, self.aligned)
