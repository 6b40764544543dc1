"""How P V of a block reaches O: when O is rescaled, and where the tensor core sums.

In place: P V is added to O by the tensor core. Promoted: it goes to a fresh accumulator that is then added to O in
FP32, because the accumulator of an FP8 WGMMA keeps about 14 bits and a long sum would lose small terms.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from ..prims.wgmma import ROWS, scale_rows


class AmongExponentials:
    """O takes a block's factor with the rounding of P: ptxas puts both under the latency of exp2."""

    def round_p(self, a, acc_S: cute.Tensor):
        a.round_p(acc_S, lambda k: scale_rows(a.acc_O, a.softmax.factor, *share(a.acc_O, k, a.steps)))

    def before_pv(self, a): ...

    def issue_pv(self, a, i, n: int):
        a.issue_pv(i, a.acc_O, True, n)

    def complete(self, a, n: int): ...


class UnderQK:
    """O takes the last block's factor while the next QK runs: where O is large, nothing else hides it."""

    def round_p(self, a, acc_S: cute.Tensor):
        a.round_p(acc_S)

    def before_pv(self, a):
        scale_rows(a.acc_O, a.softmax.factor)

    def issue_pv(self, a, i, n: int):
        a.issue_pv(i, a.acc_O, True, n)

    def complete(self, a, n: int): ...


class Promoted(NamedTuple):
    """O = O * factor + P V with the rounding of the next block's P."""

    fresh: cute.Tensor  # registers, (64, head_dim_v) or (64, chunk)
    factor: cute.Tensor  # (2) of the block whose P V is fresh: the softmax is one block ahead

    @classmethod
    def create(cls, pv: cute.TiledMma, columns: int) -> "Promoted":
        fresh = cute.make_rmem_tensor(pv.partition_shape_C((64, columns)), Float32)
        return cls(fresh, cute.make_rmem_tensor(ROWS, Float32))

    def at(self, place: cute.Tensor) -> "Promoted":
        """With the registers of an accumulator that is free, where they are as many."""
        if cute.size(place) != cute.size(self.fresh):
            return self
        return self._replace(fresh=cute.make_tensor(place.iterator, self.fresh.layout))

    def round_p(self, a, acc_S: cute.Tensor):
        a.round_p(acc_S, lambda k: self.add(a.acc_O, *share(a.acc_O, k, a.steps)))

    def before_pv(self, a):
        for r in range(ROWS):
            self.factor[r] = a.softmax.factor[r]

    def issue_pv(self, a, i, n: int):
        a.issue_pv(i, self.fresh, False, n)

    def complete(self, a, n: int):
        size = cute.size(self.fresh)
        self.add(a.acc_O, 0, size, n * size)

    def add(self, acc_O: cute.Tensor, first: int, last: int, offset: int = 0):
        """Values first..last of a thread's fresh accumulator, which is O from `offset` on."""
        for i in range(first, last):
            acc_O[offset + i] = acc_O[offset + i] * self.factor[i // 2 % ROWS] + self.fresh[i]


class PromotedAtOnce(Promoted):
    """Without overlap: O = O * factor + P V as soon as P V is there."""

    def round_p(self, a, acc_S: cute.Tensor):
        a.round_p(acc_S)


def share(acc: cute.Tensor, k: int, steps: int) -> tuple[int, int]:
    """The values that go with step k."""
    return cute.size(acc) * k // steps, cute.size(acc) * (k + 1) // steps
