"""Online softmax on a warpgroup's accumulators, base 2, two rows a thread, a row spread over four lanes.

Follows the online softmax of FlashAttention-2 (arXiv 2307.08691, section 3.1) with the scale folded into one
fused multiply-add before exp2 and a single normalisation at the end.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..prims.wgmma import ROWS, rows
from .scheduler import WorkTile

# Scaled scores up to here: S * scale - offset is one fused multiply-add, and the offset was rounded, so that a row's P
# is off by a common factor of up to 2^(EXACT * 2^-25). Beyond, that factor would overflow; there fp32 scores are 16
# apart and more, and a power of two as the scale makes the product exact: P is 1 for the largest score, else about 0.
EXACT = 2.0**28
CHAINS = 4  # independent accumulators of a reduction over registers: hides the latency of one


def fold(op, values: list):
    """Reduce a thread's values with op in CHAINS chains."""
    part = values[:CHAINS]
    for i in range(CHAINS, len(values)):
        part[i % CHAINS] = op(part[i % CHAINS], values[i])
    while len(part) > 1:
        part = [op(a, b) for a, b in zip(part[::2], part[1::2], strict=True)]
    return part[0]


def quad(op, x: Float32) -> Float32:
    """Reduce over the four lanes that share a row."""
    for lanes in (1, 2):
        x = op(x, cute.arch.shuffle_sync_bfly(x, offset=lanes))
    return x


def add(a, b):
    return a + b


def magnitude(x: Float32) -> Float32:
    return cute.arch.fmax(x, -x)


def next_power_of_two(x: Float32) -> Float32:
    """The smallest that is not below a positive normal x."""
    mantissa = 0x7FFFFF
    return ((x.bitcast(Int32) + mantissa) & ~mantissa).bitcast(Float32)


class Softmax(NamedTuple):
    """State of one warpgroup's rows; `update_row` turns a row of a block of scores into P.

    NOTE: the fields are register memory, changed in place by methods called from run-time loops.
    """

    scale_log2: Float32  # softmax scale * log2(e)
    coarse_scale: Float32  # the next power of two
    exact_max: Float32  # row_max whose scaled value is EXACT
    row_max: cute.Tensor  # (2) of the unscaled scores
    row_sum: cute.Tensor  # (2, 2) this thread's part, two independent sums a row
    factor: cute.Tensor  # (2) what O must be multiplied with before it takes the block

    @staticmethod
    def create(scale_log2: Float32) -> "Softmax":
        def state(shape=ROWS):
            return cute.make_rmem_tensor(shape, Float32)

        coarse = next_power_of_two(scale_log2)
        exact_max = EXACT * cute.arch.rcp_approx(scale_log2)
        sums = state((ROWS, 2))
        return Softmax(scale_log2, coarse, exact_max, state(), sums, state())

    def of_tile(self, tile: WorkTile, head_kv: Int32, row: Int32) -> "Softmax":
        """The state for a work tile: the same for all."""
        return self

    def begin_tile(self):
        """What a work tile needs before its first block."""

    def of_block(self, n_block: Int32) -> None:
        """What `update_row` must know of a key block: nothing."""

    def reset(self):
        self.row_sum.fill(0.0)
        self.factor.fill(1.0)

    @cute.jit
    def update_row(
        self, acc_S: cute.Tensor, r: cutlass.Constexpr, keys: None, is_first: cutlass.Constexpr,
        check_inf: cutlass.Constexpr,
    ):  # fmt: skip
        """Row r of acc_S becomes P, unrounded. check_inf: the block may hide every key of a row."""
        S = rows(acc_S)[r, None]
        new = fold(cute.arch.fmax, [S[c] for c in range(cute.size(S))])
        if cutlass.const_expr(not is_first):
            new = cute.arch.fmax(new, self.row_max[r])
        new = quad(cute.arch.fmax, new)
        scale = self.scale_log2 if magnitude(new) <= self.exact_max else self.coarse_scale
        base = new
        if cutlass.const_expr(check_inf):  # a row without a key so far: exp2(-inf - 0) = 0, not NaN
            base = Float32(0.0) if base == -Float32.inf else base
        if cutlass.const_expr(not is_first):
            # NOTE: the difference first, so that an unchanged max gives exactly 1, block after block.
            self.factor[r] = cute.math.exp2((self.row_max[r] - base) * scale, fastmath=True)
            for chain in cutlass.range_constexpr(2):
                self.row_sum[r, chain] = self.row_sum[r, chain] * self.factor[r]
        self.row_max[r] = new
        offset = base * scale
        for c in cutlass.range_constexpr(cute.size(S)):
            p = cute.math.exp2(S[c] * scale - offset, fastmath=True)
            S[c] = p
            self.row_sum[r, c % 2] = self.row_sum[r, c % 2] + p

    @cute.jit
    def finish(self, inverse: cute.Tensor, lse: cute.Tensor):
        """(2) 1 / row_sum, 0 for a row that saw no key, and (2) log-sum-exp, natural log, -inf for such a row."""
        for r in cutlass.range_constexpr(ROWS):
            total = quad(add, self.row_sum[r, 0] + self.row_sum[r, 1])
            inverse[r] = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
            lse[r] = (self.row_max[r] * self.scale_log2 + cute.math.log2(total, fastmath=True)) * math.log(2)
