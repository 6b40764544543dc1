"""What the consumers find in a stage of V behind the last key."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..prims.ptx import thread_here
from ..prims.ring import Ring
from .epilogue import WARPGROUP_THREADS, sync


class WholeValues(NamedTuple):
    """V's rows behind the last key are zeros: TMA wrote them."""

    def clear(self, i, n_block, length): ...


class PagedValues(NamedTuple):
    """V's rows behind the last key are what lies in the page, or what was in the stage before. P is 0 there, and 0
    times NaN is NaN.
    """

    sV: cute.Tensor  # (head_dim_v, tile_n, stage): rows of 64 columns, or 32, those of the same columns side by side
    ring: Ring
    tile_n: int
    head_dim_v: int
    barrier: Int32  # named barrier of this warpgroup

    @cute.jit
    def clear(self, i: Int32, n_block: Int32, length: Int32):
        """Zeros behind the last key, if it is in block n_block, the first one taken: no other passes the end.

        Every warpgroup does all of it, so that none waits for another. Swizzles move nothing out of its row.
        """
        seen = length - n_block * self.tile_n
        if seen < self.tile_n:
            self.ring.wait_full(i)
            row_bytes = 2 * cute.size(self.sV.shape[0][0])
            first, end = cutlass.max(seen, 0) * row_bytes, self.tile_n * row_bytes
            stage = self.sV.iterator.toint() + self.ring.stage(i) * self.ring.tile_bytes
            for columns in cutlass.range_constexpr(2 * self.head_dim_v // row_bytes):
                place = cute.make_ptr(Int64, stage + columns * end, cute.AddressSpace.smem, assumed_align=8)
                cells = cute.make_tensor(place, cute.make_layout(end // 8))
                for cell in cutlass.range(first // 8 + thread_here(), end // 8, WARPGROUP_THREADS, unroll=1):
                    cells[cell] = Int64(0)
            cute.arch.fence_proxy("async.shared", space="cta")
            sync(self.barrier)
