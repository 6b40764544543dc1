"""New rows of K and V into their cache, and Q rotated into a new tensor, in one launch.

A CTA takes one token of Q, K or V, or a slice of one that has more chunks than it has threads; a thread moves 16 bytes.
Where a token goes is read from lists on the device: lengths, pages, places of sequences. K and Q get their rotary
embedding on the way. What the lists do not allow is not written: rows past the cache or past a page table.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..prims.memory import load_words, store_words
from .config import CARVEOUT, CHUNK, THREADS, Config, Spec
from .place import Lists, Part, Place
from .rotary import Tables

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": Float32}


class Append:
    def __init__(self, spec: Spec, config: Config):
        self.spec, self.config = spec, config
        self.dtype = DTYPES[spec.dtype]

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor | None, mQOut: cute.Tensor | None, mK: cute.Tensor, mV: cute.Tensor,
        mKCache: cute.Tensor, mVCache: cute.Tensor, mCos: cute.Tensor | None, mSin: cute.Tensor | None, lists: Lists,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Shapes as `Part` has them; mCos, mSin (positions, rotary_dim / 2). Q, cos and sin with a rotary embedding."""
        k, v = Part.create(mK, mKCache), Part.create(mV, mVCache)
        q, count = None, k.count + v.count
        if cutlass.const_expr(self.spec.rotary is not None):
            q = Part.create(mQ, mQOut)
            count = count + q.count
        self.kernel(q, k, v, mCos, mSin, lists).launch(
            grid=(count, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.ctas,
            preferred_smem_carveout=CARVEOUT,
        )

    @cute.kernel
    def kernel(self, q: Part | None, k: Part, v: Part, mCos, mSin, lists: Lists):
        thread, _, _ = cute.arch.thread_idx()
        item, _, _ = cute.arch.block_idx()
        place = Place.empty()
        if item < k.count:
            place = k.into_cache(item, lists, thread, True)
        elif item < k.count + v.count:
            place = v.into_cache(item - k.count, lists, thread, False)
        else:
            if cutlass.const_expr(q is not None):
                place = q.rotated(item - k.count - v.count, lists, thread)
        self.move(place, mCos, mSin)

    @cute.jit
    def move(self, place: Place, mCos, mSin):
        aligned = self.spec.aligned
        if place.exists:
            words = load_words(place.x + 2 * place.column, CHUNK // 2, aligned)
            if cutlass.const_expr(self.spec.rotary is not None):
                if place.rotates:
                    tables = Tables(mCos, mSin, self.spec.rotary, self.dtype, aligned)
                    tables.apply(words, place.x, place.position, place.column)
            store_words(place.y + 2 * place.column, words, aligned)


def signature(spec: Spec, config: Config) -> tuple:
    """What cute.compile takes: fn(q, q_out, k, v, k_cache, v_cache, cos, sin, lists), on the current stream.

    lists as `Lists` has them. Without a rotary embedding q, q_out, cos and sin are None.
    """
    dtype = DTYPES[spec.dtype]
    heads, heads_kv, dim, dim_v = cute.sym_int(), cute.sym_int(), *(cute.sym_int(divisibility=CHUNK) for _ in "kv")
    batch, rows = cute.sym_int(), cute.sym_int()

    def tensor(dtype, *shape):
        step = 128 // dtype.width if spec.aligned else 1
        strides = tuple(cute.sym_int64(divisibility=step) for _ in shape[:-1])
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16 if spec.aligned else dtype.width // 8)

    k, v = (tensor(dtype, batch, rows, heads_kv, d) for d in (dim, dim_v))
    k_cache, v_cache = (tensor(dtype, cute.sym_int(), cute.sym_int(), heads_kv, d) for d in (dim, dim_v))
    q = q_out = cos = sin = None
    if spec.rotary is not None:
        shape = cute.sym_int(), cute.sym_int(), heads, dim
        q, q_out = tensor(dtype, *shape), tensor(dtype, *shape)
        table = cute.sym_int(), cute.sym_int(divisibility=CHUNK)
        cos, sin = (tensor(DTYPES[spec.rotary.dtype], *table) for _ in range(2))
    one = [_list(1) for _ in range(3)]
    lists = Lists(*one, _list(2), _list(1), _list(1), _list(1), Int32(0), Int32(0))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return Append(spec, config), (q, q_out, k, v, k_cache, v_cache, cos, sin, lists, stream)


def _list(rank: int) -> cute.Tensor:
    """int32 of any sizes and strides."""
    shape, strides = (tuple(make() for _ in range(rank)) for make in (cute.sym_int, cute.sym_int64))
    return make_fake_tensor(Int32, shape, strides, assumed_align=4)
