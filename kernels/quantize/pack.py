"""V that is e4m3 already, row-major, to the packed layout of the forward: transposed and permuted, not scaled."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float8E4M3FN, Int32
from cutlass.cute.runtime import make_fake_stream

from . import v
from .config import GROUP, KEYS, THREADS, WARPS, Config, PackSpec
from .kernel import Keys, Order, compact, strided


class Pack:
    def __init__(self, spec: PackSpec, config: Config):
        self.spec, self.config = spec, config

    @cute.jit
    def __call__(self, mV: cute.Tensor, mPacked: cute.Tensor, stream: cuda.CUstream):
        """mV (b, s, h, d) e4m3; mPacked (b, h, d, s rounded up to 16)."""
        keys = Keys(mV, mPacked, None, Order.create(*mV.shape[:3], KEYS))
        self.kernel(keys).launch(
            grid=(keys.order.count, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.ctas,
            preferred_smem_carveout=self.config.carveout(self.spec),
        )

    @cute.kernel
    def kernel(self, keys: Keys):
        smem = cutlass.memory.SmemAllocator()
        sV = smem.allocate_tensor(Int32, cute.make_layout(KEYS // 4 * self.spec.head_dim_v), byte_alignment=16)
        sMax = smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
        thread, _, _ = cute.arch.thread_idx()
        item, _, _ = cute.arch.block_idx()
        v.KeyTile(keys.place(item), sV, sMax, thread, self.spec.head_dim_v, Float8E4M3FN).repack()


def signature(spec: PackSpec, config: Config) -> tuple:
    """What cute.compile takes: fn(v, packed) on the current stream."""
    batch, heads, seqlen = (cute.sym_int() for _ in range(3))
    mV = strided(Float8E4M3FN, (batch, seqlen, heads, spec.head_dim_v))
    packed = compact(Float8E4M3FN, (batch, heads, spec.head_dim_v, cute.sym_int(divisibility=GROUP)))
    return Pack(spec, config), (mV, packed, make_fake_stream(use_tvm_ffi_env_stream=True))
