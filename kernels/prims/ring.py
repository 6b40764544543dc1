"""Tiles in flight between the TMA warp and the consumer warpgroups.

A position in a ring is one number: how many tiles came before. Stage and phase follow from it, so a role carries no
state but its loop counter. NOTE: positions are divided as Uint32; the signed modulo costs instructions.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Uint32


class Ring(NamedTuple):
    full: cute.Pointer  # (stages) mbarriers: the tile's bytes have landed
    empty: cute.Pointer  # (stages) mbarriers: every consumer is done with the tile
    stages: int
    tile_bytes: int
    consumers: int  # arrivals that empty a stage
    producers: int = 1  # arrivals that fill it

    def init(self):
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, self.producers)
            cute.arch.mbarrier_init(self.empty + stage, self.consumers)

    def stage(self, i):
        return Int32(Uint32(i) % self.stages)

    def phase(self, i):
        return Int32(Uint32(i) // self.stages) & 1

    def wait_full(self, i):
        cute.arch.mbarrier_wait(self.full + self.stage(i), self.phase(i))

    def wait_empty(self, i):
        """Until every consumer has released what stood in the stage of position i before it."""
        cute.arch.mbarrier_wait(self.empty + self.stage(i), self.phase(i) ^ 1)

    def release(self, i):
        """One arrival from the calling warp."""
        with cute.arch.elect_one():
            self.free(i)

    def free(self, i):
        """One arrival from the calling thread."""
        cute.arch.mbarrier_arrive(self.empty + self.stage(i))

    def fill(self, i):
        """One thread's word that the tile is there, where no TMA says so."""
        cute.arch.mbarrier_arrive(self.full + self.stage(i))

    def claim(self, i, tile_bytes=None):
        """Wait until the stage is free and announce its bytes, by default a whole tile's; returns the mbarrier that the
        copies must signal.
        """
        self.wait_empty(i)
        return self.announce(i, self.tile_bytes if tile_bytes is None else tile_bytes)

    def announce(self, i, number):
        """So many bytes will land in a stage that is free; returns the mbarrier that the copies must signal."""
        full = self.full + self.stage(i)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, number)
        return full
