"""O / row_sum through shared memory and one TMA store a warpgroup; LSE straight to memory."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warp

from ..algo.blocks import WARPGROUP_ROWS
from ..algo.scheduler import WorkTile
from ..algo.seqlen import DenseSeqlen
from ..prims.ring import Ring
from ..prims.tma import Operand
from ..prims.wgmma import ROWS

WARPGROUP_THREADS = 128


class OutputTile(NamedTuple):
    """One warpgroup's 64 rows of O in shared memory, on their way to global memory.

    Over Q: the warpgroup's own Q tile, finished by then; Q is released when the store has read it.
    Own: a place of its own, so that the next Q is fetched meanwhile; the next tile's rows wait for the last store.
    """

    operand: Operand
    sO: cute.Tensor  # (64, head_dim_v)
    over_q: bool
    q_ring: Ring
    barrier: Int32  # named barrier of this warpgroup
    head_dim_v: int

    def before_last_values(self, tile: WorkTile):
        """QK of the tile is done: Q can go unless O is to lie over it."""
        if not self.over_q:
            self.q_ring.release(tile.nth)

    @cute.jit
    def store(
        self, acc_O: cute.Tensor, tiled_mma: cute.TiledMma, seqlen: DenseSeqlen, tile: WorkTile, row: Int32,
        thread: Int32,
    ):  # fmt: skip
        """acc_O (64, head_dim_v) -> sO -> O from `row` on, clipped at its end. `thread` of the warpgroup.

        NOTE: rows before query 0 must not reach the store: TMA traps on a negative coordinate there.
        """
        rO = cute.make_rmem_tensor(acc_O.shape, self.sO.element_type)
        rO.store(acc_O.load().to(self.sO.element_type))
        to_shared = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.sO.element_type)
        thr = cute.make_tiled_copy_C(to_shared, tiled_mma).get_slice(thread)
        warp_in_group = cute.arch.make_warp_uniform(thread // 32)
        if cutlass.const_expr(not self.over_q):
            if warp_in_group == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.sync()
        cute.copy(to_shared, thr.retile(rO), thr.partition_D(self.sO))
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync()
        if warp_in_group == 0:
            if row >= 0:
                mO = seqlen.select(self.operand.tensor, tile.head, tile.batch)
                gO = cute.local_tile(mO, (WARPGROUP_ROWS, self.head_dim_v), (row // WARPGROUP_ROWS, 0))
                s, g = (cute.group_modes(x, 0, 2) for x in (self.sO, gO))
                s, g = cpasync.tma_partition(self.operand.atom, 0, cute.make_layout(1), s, g)
                cute.copy(self.operand.atom, s, g)
            cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(self.over_q):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                self.q_ring.release(tile.nth)

    def sync(self):
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def store_lse(lse: cute.Tensor, mLSE: cute.Tensor, row: Int32, column: Int32):
    """lse (2) of rows row and row + 8, by the lane that holds column 0 -> mLSE (seqlen_q)."""
    if column == 0 and row >= 0:
        for r in cutlass.range_constexpr(ROWS):
            if row + 8 * r < mLSE.shape[0]:
                mLSE[row + 8 * r] = lse[r]
