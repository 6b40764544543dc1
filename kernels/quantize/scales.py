"""The scales of K and V as the FP8 forward reads them, of one K/V head a CTA: what quant/prepare.py specifies."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .config import BEYOND, RATIO_LOG2_MIN, SCALE_MIN, SCALE_THREADS, Config, ScalesSpec


class PrepareScales:
    def __init__(self, spec: ScalesSpec, config: Config): ...

    @cute.jit
    def __call__(
        self, mK: cute.Tensor, mV: cute.Tensor, mKV: cute.Tensor, mMax: cute.Tensor, mTickets: cute.Tensor,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """mK, mV (b, h, n); mKV (b, h, n + BEYOND, 4); mMax (b, h), all float32; mTickets (1) int32 becomes 0."""
        batch, heads, _ = mV.shape
        self.kernel(mK, mV, mKV, mMax, mTickets).launch(
            grid=(batch * heads, 1, 1), block=(SCALE_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mK: cute.Tensor, mV: cute.Tensor, mKV: cute.Tensor, mMax: cute.Tensor, mTickets: cute.Tensor):
        smem = cutlass.memory.SmemAllocator()
        sWarps = smem.allocate_tensor(Float32, cute.make_layout((SCALE_THREADS // 32, 2)), byte_alignment=16)
        thread, _, _ = cute.arch.thread_idx()
        item, _, _ = cute.arch.block_idx()
        _, heads, count = mV.shape
        batch, head = item // heads, item % heads
        if item == 0 and thread == 0:
            mTickets[0] = Int32(0)
        largest = Float32(0.0)  # NOTE: fmax drops NaN
        for i in cutlass.range(thread, count, SCALE_THREADS, unroll=1):
            largest = cute.arch.fmax(largest, mV[batch, head, i])
        largest = among(cute.arch.fmax, largest, sWarps[None, 0], thread)
        smallest = Float32(0.0)
        for i in cutlass.range(thread, count, SCALE_THREADS, unroll=1):
            scale = mV[batch, head, i]
            smallest = cute.arch.fmin(smallest, cutlass.select_(scale > 0.0, ratio_log2(scale, largest), Float32(0.0)))
        smallest = among(cute.arch.fmin, smallest, sWarps[None, 1], thread)
        record = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range(thread, count + BEYOND, SCALE_THREADS, unroll=1):
            record.fill(1.0)
            if i < count:
                scale = mV[batch, head, i]
                lv = cutlass.select_(scale == 0.0, smallest, ratio_log2(scale, largest))
                record[0] = cute.arch.fmax(mK[batch, head, i], Float32(SCALE_MIN), nan=True)
                record[1] = lv
                record[2] = cute.math.exp2(-lv, fastmath=True)
            cute.autovec_copy(record, mKV[batch, head, i, None])
        if thread == 0:
            mMax[batch, head] = largest


def ratio_log2(scale: Float32, largest: Float32) -> Float32:
    """NOTE: of the quotient, which a common power of two leaves as it is."""
    return cute.arch.fmax(cute.math.log2(scale / largest, fastmath=True), Float32(RATIO_LOG2_MIN), nan=True)


@cute.jit
def among(op: cutlass.Constexpr, x: Float32, sWarps: cute.Tensor, thread: Int32) -> Float32:
    """op over the CTA's x."""
    for bit in cutlass.range_constexpr(5):
        x = op(x, cute.arch.shuffle_sync_bfly(x, 1 << bit))
    if thread % 32 == 0:
        sWarps[thread // 32] = x
    cute.arch.sync_threads()
    for warp in cutlass.range_constexpr(SCALE_THREADS // 32):
        x = op(x, sWarps[warp])
    return x


def signature(spec: ScalesSpec, config: Config) -> tuple:
    """What cute.compile takes: fn(k_scale, v_scale, kv, v_max, tickets) on the current stream."""
    batch, heads, count = (cute.sym_int() for _ in range(3))

    def floats(*shape, align=4):
        return make_fake_tensor(Float32, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=align)

    kv_strides = (cute.sym_int64(divisibility=4), cute.sym_int64(divisibility=4), 4, 1)
    kv = make_fake_tensor(Float32, (batch, heads, cute.sym_int(), 4), kv_strides, assumed_align=16)
    k, v, largest = floats(batch, heads, count), floats(batch, heads, count), floats(batch, heads)
    tickets = make_fake_tensor(Int32, (1,), (1,), assumed_align=4)
    return PrepareScales(spec, config), (k, v, kv, largest, tickets, make_fake_stream(use_tvm_ffi_env_stream=True))
