"""What the consumers of a decode kernel see of keys: limits of rows, and what is made of keys that do not exist."""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..algo.pieces import Batch, Piece
from ..algo.seqlen import Lengths
from ..prims.branch import when
from ..prims.ptx import thread_here
from ..prims.ring import Ring
from ..prims.wgmma import ROWS as OWN_ROWS
from ..prims.wgmma import rows
from .load import Tile
from .rows import Place, words_at_shared


class RowLimits(NamedTuple):
    """Each of a thread's two rows sees the keys first .. end - 1; blocks that all rows see whole need no mask."""

    first: tuple[Int32, Int32]
    end: tuple[Int32, Int32]
    inside: Int32  # from here on every row of the tile sees keys
    inside_end: Int32
    column: Int32  # the thread's first in a block
    tile_n: int
    lengths: Lengths

    @staticmethod
    def create(batch: Batch, piece: Piece, place: Place, row, column, tile_n: int) -> "RowLimits":
        lengths, last = Lengths(piece.sequence.q, piece.sequence.k), place.count - 1

        def interval(i):
            """NOTE: of a row that does not exist that of the last one."""
            return batch.window.interval(place.token(cutlass.min(i, last)), lengths)

        first, end = zip(*(interval(row + 8 * r) for r in range(OWN_ROWS)), strict=True)
        return RowLimits(first, end, interval(last)[0], interval(0)[1], column, tile_n, lengths)

    @cute.jit
    def apply(self: cutlass.Constexpr, acc_S: cute.Tensor, n_block: Int32):
        key = n_block * self.tile_n
        outside = (key < self.inside) | (key + self.tile_n > self.inside_end)
        when(outside, partial(self.hide, acc_S, key))

    def hide(self, acc_S: cute.Tensor, key: Int32):
        S = rows(acc_S)
        for r in range(OWN_ROWS):
            first, end = (x[r] - key - self.column for x in (self.first, self.end))
            for c in range(self.tile_n // 4):
                at = 8 * (c // 2) + c % 2
                S[r, c] = cutlass.select_((at >= first) & (at < end), S[r, c], -Float32.inf)


class Fenced(NamedTuple):
    """A ring whose tiles were written by threads: the tensor cores see them behind a fence."""

    ring: Ring

    @property
    def stage(self):
        return self.ring.stage

    @property
    def release(self):
        return self.ring.release

    def wait_full(self, i):
        self.ring.wait_full(i)
        cute.arch.fence_proxy("async.shared", space="cta")


class Cleaned(NamedTuple):
    """The ring of V: what stands where no key is may be NaN, so it is set to 0 before it is multiplied."""

    ring: Ring
    tile: Tile
    piece: Piece
    barrier: Int32

    @property
    def stage(self):
        return self.ring.stage

    @property
    def release(self):
        return self.ring.release

    @cute.jit
    def wait_full(self: cutlass.Constexpr, i: Int32):
        self.ring.wait_full(i)
        p, keys = self.piece, self.tile.keys
        key = (p.n_block + p.count - 1 - (i - p.base)) * keys
        outside = (key < p.sequence.first) | (key + keys > p.sequence.end)
        when(outside, partial(self.clean, i, p.sequence.first - key, p.sequence.end - key))

    @cute.jit
    def clean(self: cutlass.Constexpr, i: Int32, first: Int32, end: Int32):
        """Rows before `first` and from `end` on become 0."""
        thread = thread_here()  # of this warpgroup
        pieces = self.tile.width // 8  # of 16 bytes, in a row of a group
        stage = self.ring.stage(i)
        for n in cutlass.range_constexpr(self.tile.keys * pieces // 128):
            x = n * 128 + thread
            key = x // pieces
            when((key < first) | (key >= end), partial(self.zero, stage, key, x % pieces))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=128)

    def zero(self, stage, key, c):
        """The c-th 16 bytes of a key's row in every group."""
        for group in range(self.tile.groups):
            words_at_shared(self.tile.row(stage, group, key) + 16 * c).fill(0)
