"""Attention to disjoint sets of keys into one: O = sum of O_i exp(LSE_i - LSE), LSE = log of the sum of exp(LSE_i).

Some lanes of a warp share a row, each takes 8 values at a time; every lane works out all weights. A product is rounded
before it is added, so that two partials give the same bits in either order. Of a partial whose LSE is -inf nothing is
read.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..prims.fp8 import from_bits, fused, product
from ..prims.memory import floats_of, load_into, store_floats
from .config import AHEAD, CARVEOUT, CHUNK, THREADS, Config, Spec

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": Float32}
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
INF = float("inf")


class Rows(NamedTuple):
    """The rows of O, heads innermost, and how many lanes share one."""

    heads: cute.FastDivmodDivisorV2
    seqlen: cute.FastDivmodDivisorV2
    count: Int32
    lanes_log2: Int32

    @property
    def of_cta(self):
        return THREADS >> self.lanes_log2

    def at(self, row: Int32) -> tuple:
        """(batch, place, head)"""
        rest, head = divmod(row, self.heads)
        batch, place = divmod(rest, self.seqlen)
        return batch, place, head


class Merge:
    def __init__(self, spec: Spec, config: Config):
        self.spec, self.config = spec, config
        self.dtype, self.dtype_o = DTYPES[spec.dtype], DTYPES[spec.dtype_o]

    @cute.jit
    def __call__(
        self, mO: cute.Tensor, mLSE: cute.Tensor, mOther: cute.Tensor | None, mOtherLSE: cute.Tensor | None,
        mOut: cute.Tensor, mOutLSE: cute.Tensor, lanes_log2: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """mOut (b, s, h, d), mOutLSE (b, s, h). Of partials likewise, or with their number in front and no others."""
        batch, seqlen, heads, _ = mOut.shape
        divisors = (cute.FastDivmodDivisorV2(Int32(n)) for n in (heads, seqlen))
        rows = Rows(*divisors, batch * seqlen * heads, lanes_log2)
        ctas = (rows.count + rows.of_cta - 1) // rows.of_cta
        self.kernel(mO, mLSE, mOther, mOtherLSE, mOut, mOutLSE, rows).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.ctas,
            preferred_smem_carveout=CARVEOUT,
        )

    @cute.kernel
    def kernel(self, mO, mLSE, mOther, mOtherLSE, mOut, mOutLSE, rows: Rows):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * rows.of_cta + (thread >> rows.lanes_log2)
        lanes = 1 << rows.lanes_log2
        lane = thread & (lanes - 1)
        exists = row < rows.count
        batch, place, head = rows.at(cutlass.min(row, rows.count - 1))  # of one more the last is done again
        gOut = mOut[batch, place, head, None]
        columns = cutlass.select_(exists, Int32(mOut.shape[3]), Int32(0))
        if cutlass.const_expr(self.spec.pair):
            parts = [(o[batch, place, head, None], lse[batch, place, head])
                     for o, lse in ((mO, mLSE), (mOther, mOtherLSE))]  # fmt: skip
            lse = self.pair(parts, gOut, lane, lanes, columns)
        else:
            gO, gLSE = mO[None, batch, place, head, None], mLSE[None, batch, place, head]
            lse = self.many(gO, gLSE, gOut, lane, lanes, columns)
        cute.arch.sync_warp()  # a given result may lie where a partial's LSE lies, which other lanes read
        if exists & (lane == 0):
            mOutLSE[batch, place, head] = lse

    @cute.jit
    def pair(self, parts: list, gOut: cute.Tensor, lane: Int32, lanes: Int32, columns: Int32) -> Float32:
        largest = cute.arch.fmax(parts[0][1], parts[1][1], nan=True)
        weights = [weight(lse, largest) for _, lse in parts]
        total = weights[0] + weights[1]
        for column in cutlass.range(lane * CHUNK, columns, lanes * CHUNK, unroll=1):
            found = cute.make_rmem_tensor(CHUNK, Float32)
            found.fill(minus_zero())
            words = [self.load(address(gO, column), lse) for gO, lse in parts]
            for i in cutlass.range_constexpr(2):
                self.add(found, words[i], parts[i][1], weights[i])
            store_floats(address(gOut, column), self.over(found, total, largest), self.dtype_o)
        return log_sum(largest, total)

    @cute.jit
    def many(
        self, gO: cute.Tensor, gLSE: cute.Tensor, gOut: cute.Tensor, lane: Int32, lanes: Int32, columns: Int32
    ) -> Float32:
        count = gLSE.shape[0]
        largest = Float32(-INF)
        for i in cutlass.range(count, unroll=AHEAD):
            largest = cute.arch.fmax(largest, gLSE[i], nan=True)
        total = Float32(0.0)
        for i in cutlass.range(count, unroll=AHEAD):
            total = total + weight(gLSE[i], largest)
        for column in cutlass.range(lane * CHUNK, columns, lanes * CHUNK, unroll=1):
            found = cute.make_rmem_tensor(CHUNK, Float32)
            found.fill(minus_zero())
            for first in cutlass.range(0, count, AHEAD, unroll=1):
                lses = [at(gLSE, first + i, count) for i in range(AHEAD)]
                words = [self.load(address(gO[first + i, None], column), lses[i]) for i in range(AHEAD)]
                for i in cutlass.range_constexpr(AHEAD):
                    self.add(found, words[i], lses[i], weight(lses[i], largest))
            store_floats(address(gOut, column), self.over(found, total, largest), self.dtype_o)
        return log_sum(largest, total)

    @cute.jit
    def load(self, address: Int64, lse: Float32) -> cute.Tensor:
        """A partial's words, if it has keys."""
        words = cute.make_rmem_tensor(CHUNK * self.dtype.width // 32, Int32)
        words.fill(0)
        if lse != -INF:
            load_into(address, words)
        return words

    def add(self, found: cute.Tensor, words: cute.Tensor, lse: Float32, weight: Float32):
        """NOTE: -0 added changes nothing; +0 would make +0 of -0."""
        for i, x in enumerate(floats_of(words, self.dtype)):
            part = cutlass.select_(lse == -INF, minus_zero(), product(x, weight))
            found[i] = found[i] + part

    def over(self, found: cute.Tensor, total: Float32, largest: Float32) -> list:
        """The values of O."""
        inverse = reciprocal(total)
        values = [product(found[i], inverse) for i in range(CHUNK)]
        return [cutlass.select_(largest == -INF, Float32(0.0), x) for x in values]


def minus_zero() -> Float32:
    """NOTE: by its bits: of 0.0 and -0.0, which Python finds equal, the compiler makes one constant."""
    return from_bits(Int32(-(2**31)))


def address(gX: cute.Tensor, column: Int32) -> Int64:
    return gX.iterator.toint() + gX.element_type.width // 8 * Int64(column)


@cute.jit
def at(gLSE: cute.Tensor, i: Int32, count: Int32) -> Float32:
    """LSE of partial i; that of no keys behind the last."""
    found = Float32(-INF)
    if i < count:
        found = gLSE[i]
    return found


def weight(lse: Float32, largest: Float32) -> Float32:
    """exp(lse - largest). Of the largest 1, also where it is infinite; of no keys 0."""
    power = cute.math.exp2((lse - largest) * LOG2_E, fastmath=True)
    return cutlass.select_(lse == -INF, Float32(0.0), cutlass.select_(lse == largest, Float32(1.0), power))


def log_sum(largest: Float32, total: Float32) -> Float32:
    """largest + log(total); of one partial its own LSE, of no keys -inf."""
    more = largest + cute.math.log2(total, fastmath=True) * LN_2
    return cutlass.select_((total == 1.0) | (largest == -INF), largest, more)


def reciprocal(x: Float32) -> Float32:
    """1 / x, and just 1 of 1."""
    guess = cute.arch.rcp_approx(x)
    return fused(guess, fused(-x, guess, Float32(1.0)), guess)


def signature(spec: Spec, config: Config) -> tuple:
    """What cute.compile takes: fn(o, lse, other, other_lse, out, out_lse, lanes_log2), on the current stream.

    other and other_lse are None but of a pair.
    """
    batch, seqlen, heads, head_dim, count = (
        *(cute.sym_int() for _ in "bsh"),
        cute.sym_int(divisibility=8),
        cute.sym_int(),
    )
    row = batch, seqlen, heads

    def values(dtype, shape):
        strides = tuple(cute.sym_int64(divisibility=128 // dtype.width) for _ in shape)
        return make_fake_tensor(dtype, (*shape, head_dim), (*strides, 1), assumed_align=16)

    def sums(shape):
        return make_fake_tensor(Float32, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=4)

    dtype, partials = DTYPES[spec.dtype], row if spec.pair else (count, *row)
    other = (values(dtype, row), sums(row)) if spec.pair else (None, None)
    out = values(DTYPES[spec.dtype_o], row), sums(row)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return Merge(spec, config), (values(dtype, partials), sums(partials), *other, *out, Int32(0), stream)
