"""O / row_sum through shared memory and one TMA store a warpgroup; LSE straight to memory."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warp

from ..algo.blocks import WARPGROUP_ROWS
from ..algo.scheduler import WorkTile
from ..algo.seqlen import DenseSeqlen, RaggedSeqlen
from ..prims.ring import Ring
from ..prims.tma import Feed, Operand
from ..prims.wgmma import ROWS

WARPS, WARPGROUP_THREADS = 4, 128  # of a warpgroup


class OverQ(NamedTuple):
    """O leaves through its warpgroup's own Q tile, which is finished by then."""

    q_ring: Ring

    def before_last_values(self, tile: WorkTile): ...

    def take(self, tile: WorkTile, end: Int32): ...

    def give_back(self, tile: WorkTile):
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.q_ring.release(tile.nth)

    def guard(self, v: Feed, tile: WorkTile) -> Feed:
        return v


class Apart(NamedTuple):
    """O has shared memory of its own: the next tile's rows wait for the last store to have read it."""

    q_ring: Ring
    barrier: Int32

    def before_last_values(self, tile: WorkTile):
        self.q_ring.release(tile.nth)

    @cute.jit
    def take(self, tile: WorkTile, end: Int32):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        sync(self.barrier)

    def give_back(self, tile: WorkTile): ...

    def guard(self, v: Feed, tile: WorkTile) -> Feed:
        return v


class OverV(NamedTuple):
    """O leaves through a V stage, one a warpgroup, when both warpgroups are done with V; the next tile's V waits."""

    q_ring: Ring
    v_ring: Ring
    stored: Ring  # one position a tile: each warpgroup's O has left
    stage: Int32  # of V

    def before_last_values(self, tile: WorkTile):
        self.q_ring.release(tile.nth)

    def take(self, tile: WorkTile, end: Int32):
        ahead = (self.stage + self.v_ring.stages - self.v_ring.stage(end)) % self.v_ring.stages
        self.v_ring.wait_empty(end + ahead)

    def give_back(self, tile: WorkTile):
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.stored.release(tile.nth)

    def guard(self, v: Feed, tile: WorkTile) -> "Guarded":
        return Guarded(v, self.stored, tile.nth)


class Guarded(NamedTuple):
    """A feed that waits until the stages that it fills hold no O."""

    feed: Feed
    stored: Ring
    nth: Int32

    def put(self, i, tile):
        self.stored.wait_empty(self.nth)
        self.feed.put(i, tile)


class OutputTile(NamedTuple):
    """One warpgroup's 64 rows of O in shared memory, on their way to global memory."""

    operand: Operand
    sO: cute.Tensor  # (64, head_dim_v)
    place: OverQ | Apart | OverV
    barrier: Int32  # named barrier of this warpgroup
    head_dim_v: int

    @cute.jit
    def store(
        self, acc_O: cute.Tensor, tiled_mma: cute.TiledMma, seqlen: DenseSeqlen | RaggedSeqlen, tile: WorkTile,
        row: Int32, thread: Int32, end: Int32,
    ):  # fmt: skip
        """acc_O (64, head_dim_v) -> sO -> O from `row` on, clipped at its end. `thread` of the warpgroup; the tile's
        key blocks lie in the rings before `end`.

        NOTE: rows before query 0 must not reach the store: TMA traps on a negative coordinate there.
        """
        rO = cute.make_rmem_tensor(acc_O.shape, self.sO.element_type)
        rO.store(acc_O.load().to(self.sO.element_type))
        to_shared = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.sO.element_type)
        thr = cute.make_tiled_copy_C(to_shared, tiled_mma).get_slice(thread)
        self.place.take(tile, end)
        cute.copy(to_shared, thr.retile(rO), thr.partition_D(self.sO))
        cute.arch.fence_proxy("async.shared", space="cta")
        sync(self.barrier)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            if row >= 0:
                mO = seqlen.queries(self.operand.tensor, tile.head, tile.batch)
                gO = cute.local_tile(mO, (WARPGROUP_ROWS, self.head_dim_v), (row // WARPGROUP_ROWS, 0))
                s, g = (cute.group_modes(x, 0, 2) for x in (self.sO, gO))
                s, g = cpasync.tma_partition(self.operand.atom, 0, cute.make_layout(1), s, g)
                cute.copy(self.operand.atom, s, g)
            cute.arch.cp_async_bulk_commit_group()
            self.place.give_back(tile)


def sync(barrier: Int32):
    """Of one warpgroup."""
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)


def scale_columns(acc_O: cute.Tensor, scale: cute.Tensor, column: Int32):
    """Multiply a thread's accumulator with the scale (head_dim_v) of its columns; `column` is its first."""
    for i in range(0, cute.size(acc_O), 4):
        for e in range(2):
            factor = scale[cutlass.min(2 * i + column + e, scale.shape[0] - 1)]
            acc_O[i + e], acc_O[i + 2 + e] = acc_O[i + e] * factor, acc_O[i + 2 + e] * factor


@cute.jit
def store_lse(lse: cute.Tensor, mLSE: cute.Tensor, row: Int32, column: Int32):
    """lse (2) of rows row and row + 8, by the lane that holds column 0 -> mLSE (seqlen_q)."""
    if column == 0 and row >= 0:
        for r in cutlass.range_constexpr(ROWS):
            if row + 8 * r < mLSE.shape[0]:
                mLSE[row + 8 * r] = lse[r]
