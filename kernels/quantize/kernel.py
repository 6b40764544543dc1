"""Q, K and V to FP8 in one launch: a CTA takes 128 keys of a head of V, or 64 rows of a head of Q or K.

Every CTA has 256 threads, holds its values in registers from one load to one store, and needs one reduction between
them. Heads come first in the order of CTAs: those that run together read whole rows of memory. V comes first, because
its CTAs move most.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from . import qk, v
from .config import BLOCK, GROUP, KEYS, THREADS, WARP_WORDS, WARPS, Config, Rotary, Spec
from .rotary import Tables

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}


class Order(NamedTuple):
    """The CTAs of one tensor: its heads, then its tiles, then its batch."""

    heads: cute.FastDivmodDivisorV2
    tiles: cute.FastDivmodDivisorV2
    count: Int32

    @staticmethod
    def create(batch, rows, heads, tile: int) -> "Order":
        tiles = (rows + tile - 1) // tile
        divisors = (cute.FastDivmodDivisorV2(cutlass.max(Int32(n), 1)) for n in (heads, tiles))
        return Order(*divisors, batch * heads * tiles)

    def at(self, item: Int32) -> tuple[Int32, Int32, Int32]:
        """(head, tile, batch)"""
        rest, head = divmod(item, self.heads)
        batch, tile = divmod(rest, self.tiles)
        return head, tile, batch


class Rows(NamedTuple):
    """Q or K."""

    x: cute.Tensor  # (b, s, h, d) 16-bit
    y: cute.Tensor  # (b, s, h, d) e4m3
    scale: cute.Tensor  # (b, h, blocks or s)
    order: Order
    position: Int32  # of row 0, for the rotary embedding
    by_row: bool

    def place(self, item: Int32) -> qk.Place:
        head, block, batch = self.order.at(item)
        x, y, scale = self.x[batch, None, head, None], self.y[batch, None, head, None], self.scale[batch, head, None]
        return qk.Place(
            x.iterator.toint(), 2 * Int64(x.stride[0]), y.iterator.toint(), Int64(y.stride[0]), scale.iterator.toint(),
            Int32(x.shape[0]), block, self.position, Boolean(self.by_row),
        )  # fmt: skip


class Keys(NamedTuple):
    """V."""

    x: cute.Tensor  # (b, s, h, d)
    y: cute.Tensor  # (b, h, d, padded) e4m3
    scale: cute.Tensor | None  # (b, h, blocks)
    order: Order

    def place(self, item: Int32) -> v.Place:
        head, tile, batch = self.order.at(item)
        x, y = self.x[batch, None, head, None], self.y[batch, head, None, None]
        scale = Int64(0) if self.scale is None else self.scale[batch, head, None].iterator.toint()
        stride = Int64(x.stride[0]) * (self.x.element_type.width // 8)
        return v.Place(
            x.iterator.toint(), stride, y.iterator.toint(), scale, Int32(x.shape[0]), Int32(y.shape[1]), tile
        )  # fmt: skip


class Quantize:
    def __init__(self, spec: Spec, config: Config):
        self.spec, self.config = spec, config
        self.dtype = DTYPES[spec.dtype]

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mQ8: cute.Tensor, mQScale: cute.Tensor,
        mK8: cute.Tensor, mKScale: cute.Tensor, mV8: cute.Tensor, mVScale: cute.Tensor,
        mSigns: cute.Tensor | None, mCos: cute.Tensor | None, mSin: cute.Tensor | None, q_position: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Shapes as `Rows` and `Keys` have them; mSigns (d) +-1; mCos, mSin (positions, dim / 2).

        Key j is at position j, query i at q_position + i.
        """
        q = Rows(mQ, mQ8, mQScale, Order.create(*mQ.shape[:3], BLOCK), q_position, self.spec.q_rows == 1)
        k = Rows(mK, mK8, mKScale, Order.create(*mK.shape[:3], BLOCK), Int32(0), False)
        values = Keys(mV, mV8, mVScale, Order.create(*mV.shape[:3], KEYS))
        ctas = q.order.count + k.order.count + values.order.count
        self.kernel(q, k, values, mSigns, mCos, mSin).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.ctas,
            preferred_smem_carveout=self.config.carveout(self.spec),
        )

    @cute.kernel
    def kernel(self, q: Rows, k: Rows, values: Keys, mSigns, mCos, mSin):
        spec = self.spec
        smem = cutlass.memory.SmemAllocator()
        sV = smem.allocate_tensor(Int32, cute.make_layout(KEYS // 4 * spec.head_dim_v), byte_alignment=16)
        sWarps = smem.allocate_tensor(Int32, cute.make_layout(WARP_WORDS * WARPS), byte_alignment=16)
        thread, _, _ = cute.arch.thread_idx()
        item, _, _ = cute.arch.block_idx()
        first_k, first_q = values.order.count, values.order.count + k.order.count
        if item < first_k:
            v.KeyTile(values.place(item), sV, sWarps, thread, spec.head_dim_v, self.dtype).quantize()
        else:
            place = qk.Place.empty()
            if item < first_q:
                place = k.place(item - first_k)
            else:
                place = q.place(item - first_q)
            signs = Int64(0) if mSigns is None else mSigns.iterator.toint()
            tables = None
            if cutlass.const_expr(spec.rotary is not None):
                tables = Tables(mCos.iterator.toint(), mSin.iterator.toint(), spec.rotary, self.dtype)
            qk.RowBlock(place, signs, tables, sWarps, thread, self.dtype, spec).run()


def signature(spec: Spec, config: Config) -> tuple:
    """What cute.compile takes: fn(q, k, v, q8, q_scale, k8, k_scale, v8, v_scale, signs, cos, sin, q_position).

    On the current stream. signs is None without rotation, cos and sin without rotary embedding.
    """
    batch, heads, heads_kv, seqlen_q, seqlen_k, q_scales, blocks = (cute.sym_int() for _ in range(7))
    dtype = DTYPES[spec.dtype]
    q_shape, k_shape = (batch, seqlen_q, heads, spec.head_dim), (batch, seqlen_k, heads_kv, spec.head_dim)
    q, k = strided(dtype, q_shape), strided(dtype, k_shape)
    q8, k8 = compact(Float8E4M3FN, q_shape), compact(Float8E4M3FN, k_shape)
    v16 = strided(dtype, (batch, seqlen_k, heads_kv, spec.head_dim_v))
    v8 = compact(Float8E4M3FN, (batch, heads_kv, spec.head_dim_v, cute.sym_int(divisibility=GROUP)))
    q_scale = compact(Float32, (batch, heads, q_scales))
    k_scale, v_scale = (compact(Float32, (batch, heads_kv, blocks)) for _ in range(2))
    signs = compact(dtype, (spec.head_dim,)) if spec.rotate else None
    cos, sin = (table(spec.rotary) for _ in range(2))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return Quantize(spec, config), (q, k, v16, q8, q_scale, k8, k_scale, v8, v_scale, signs, cos, sin, Int32(0), stream)


def strided(dtype, shape: tuple) -> cute.Tensor:
    """Any strides that are multiples of 16 bytes, the last dimension contiguous."""
    step = 128 // dtype.width
    strides = tuple(cute.sym_int64(divisibility=step) for _ in shape[:-1])
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)


def compact(dtype, shape: tuple) -> cute.Tensor:
    """Contiguous; NOTE: its strides are 64 bits wide, which static ones would not be."""
    strides = tuple(cute.sym_int64() for _ in shape[:-1])
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)


def table(rotary: Rotary | None) -> cute.Tensor | None:
    if rotary is None:
        return None
    return make_fake_tensor(
        DTYPES[rotary.dtype], (cute.sym_int(), rotary.dim // 2), (rotary.dim // 2, 1), assumed_align=16
    )
