"""Online softmax on a warpgroup's accumulators, base 2, two rows a thread, a row spread over four lanes.

Follows the online softmax of FlashAttention-2 (arXiv 2307.08691, section 3.1) with the scale folded into one
fused multiply-add before exp2 and a single normalisation at the end.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..prims.wgmma import ROWS, rows
from .scheduler import WorkTile

# Scaled scores up to here: S * scale - offset is one fused multiply-add, and the offset was rounded, so that a row's P
# is off by a common factor of up to 2^(EXACT * 2^-25). Beyond, that factor would overflow; there fp32 scores are 16
# apart and more, and a power of two as the scale makes the product exact: P is 1 for the largest score, else about 0.
EXACT = 2.0**28
# Of a guess: how large the sum of a lane's P of a block, both rows, may be. So P stays in FP16's range, and a row's
# scores at most 15 above its reference in base 2.
LIMIT = 2.0**15
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


def exponentials(S: cute.Tensor, scale: Float32, offset: Float32) -> Float32:
    """S becomes exp2(S * scale - offset); their sum."""
    sums: list = [None, None]  # NOTE: two, that no addition waits for the one before
    for c in range(cute.size(S)):
        S[c] = p = cute.math.exp2(S[c] * scale - offset, fastmath=True)
        sums[c % 2] = p if sums[c % 2] is None else sums[c % 2] + p
    return sums[0] + sums[1]


class Softmax(NamedTuple):
    """State of one warpgroup's rows; `update_row` turns a row of a block of scores into P.

    NOTE: the fields are register memory, changed in place by methods called from run-time loops.
    """

    scale_log2: Float32  # softmax scale * log2(e)
    coarse_scale: Float32  # the next power of two
    row_max: cute.Tensor  # (2) of the unscaled scores
    row_sum: cute.Tensor  # (2) this thread's part
    factor: cute.Tensor  # (2) what O must be multiplied with before it takes the block

    @staticmethod
    def create(scale_log2: Float32) -> "Softmax":
        def state(shape=ROWS):
            return cute.make_rmem_tensor(shape, Float32)

        return Softmax(scale_log2, next_power_of_two(scale_log2), state(), state(), state())

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
        scale = self.scale_log2 if magnitude(new * self.scale_log2) <= EXACT else self.coarse_scale
        base = new
        if cutlass.const_expr(check_inf):  # a row without a key so far: exp2(-inf - 0) = 0, not NaN
            base = Float32(0.0) if base == -Float32.inf else base
        if cutlass.const_expr(not is_first):
            # NOTE: the difference first, so that an unchanged max gives exactly 1, block after block.
            self.factor[r] = cute.math.exp2((self.row_max[r] - base) * scale, fastmath=True)
        self.row_max[r] = new
        self.row_sum[r] = self.row_sum[r] * self.factor[r] + exponentials(S, scale, base * scale)

    @cute.jit
    def guessed_offset(self, r: cutlass.Constexpr) -> Float32:
        """-inf where no guess will do: its P is inf or NaN."""
        offset = self.row_max[r] * self.scale_log2
        return offset if magnitude(offset) <= EXACT else -Float32.inf

    def guess(self, acc_S: cute.Tensor) -> cute.Tensor:
        """acc_S, a block without a mask, becomes P against the max of the blocks before, whatever its scores are; the
        block's sums (2).
        """
        sums = cute.make_rmem_tensor(ROWS, Float32)
        for r in range(ROWS):
            sums[r] = exponentials(rows(acc_S)[r, None], self.scale_log2, self.guessed_offset(r))
        return sums

    def outgrown(self, sums: cute.Tensor) -> Boolean:
        """Whether a row of this warp needs the block's own max: of a sum beyond LIMIT, inf (scores far above the
        reference, or no key before) or NaN.
        """
        return cute.arch.vote_any_sync((sums[0] + sums[1] <= LIMIT) == False)  # noqa: E712

    def accept(self, sums: cute.Tensor):
        for r in range(ROWS):
            self.row_sum[r] = self.row_sum[r] + sums[r]

    @cute.jit
    def finish(self, inverse: cute.Tensor, lse: cute.Tensor):
        """(2) 1 / row_sum, 0 for a row that saw no key, and (2) log-sum-exp, natural log, -inf for such a row."""
        for r in cutlass.range_constexpr(ROWS):
            total = quad(add, self.row_sum[r])
            inverse[r] = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
            lse[r] = (self.row_max[r] * self.scale_log2 + cute.math.log2(total, fastmath=True)) * math.log(2)
