"""Division by a number that the host knows: a multiplication on the device."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Divisor(NamedTuple):
    divisor: Int32
    fast: cute.FastDivmodDivisorV2

    @staticmethod
    def of(divisor) -> "Divisor":
        return Divisor(Int32(divisor), cute.FastDivmodDivisorV2(Int32(divisor)))

    def quotient(self, x) -> Int32:
        """Of x from 0 on."""
        quotient, _ = divmod(Int32(x), self.fast)
        return quotient

    def remainder(self, x) -> Int32:
        _, remainder = divmod(Int32(x), self.fast)
        return remainder
