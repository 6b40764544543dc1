"""Ping-pong: the consumer warpgroups take turns at the tensor cores, so that one's softmax runs under another's GEMMs.

One named barrier a warpgroup. A warpgroup waits at its own and, once its GEMMs are issued, arrives at the next one's.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

PAIR = 256  # threads: the warpgroup that waits and the one that lets it go


class Turns(NamedTuple):
    warpgroup: Int32
    warpgroups: int
    barrier: int  # first of `warpgroups` named barriers

    def take(self):
        cute.arch.barrier(barrier_id=self.barrier + self.warpgroup, number_of_threads=PAIR)

    def give(self):
        following = (self.warpgroup + 1) % self.warpgroups if self.warpgroups > 2 else 1 - self.warpgroup
        cute.arch.barrier_arrive(barrier_id=self.barrier + following, number_of_threads=PAIR)

    @cute.jit
    def start(self):
        """The first turn is warpgroup 0's: its predecessor in the round hands it over."""
        if self.warpgroup == self.warpgroups - 1:
            self.give()


class NoTurns:
    """Every warpgroup goes when it likes."""

    def take(self): ...

    def give(self): ...

    def start(self): ...
