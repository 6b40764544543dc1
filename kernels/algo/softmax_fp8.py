"""Online softmax on block-scaled FP8 scores: where the scales of Q, K and V enter, and how P uses the range of E4M3.

The scales of Q and K multiply the score in the fused multiply-add before exp2. V's scale rides on the exponent, so that
the tensor core sums P V over blocks of different scales: what is rounded to E4M3 is e = p * v_scale / v_max in units of
2^(R - 8), where the reference R makes the largest e of a row in this key block 2^8, which E4M3 holds exactly. R may
fall by up to FALL below the highest so far: a block far below the running maximum keeps its precision.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..prims.ptx import fma_up
from ..prims.wgmma import ROWS
from .scheduler import WorkTile
from .softmax import add, fold, quad

SCALE_ROWS = 64  # keys that share a scale
TOP = 8.0  # e is 2^TOP at most: E4M3 ends at 448
FALL = 32.0  # log2: how far the reference may fall; O and the row sum, which grow by as much, stay in FP32's range
SMALLEST = 2.0**-60  # stands for a scale of 0, which would make NaN of a masked score
SPAN_LOG2 = 23  # scores of this magnitude and more, base 2, are shrunk: see shrink_of
EXPONENT, BIAS, MANTISSA_BITS = 0x7F800000, 127, 23  # of a float


def shrink_of(R: Float32) -> Float32:
    """1, or the power of two that brings R below 2^SPAN_LOG2.

    Beyond, R is rounded so coarsely that e could pass E4M3's largest. Shrunk by a power of two, the difference of a
    score to R stays exact to FP32 and the largest score of a row and block still gives 2^TOP. Softmax among scores that
    differ by less than 2^-22 of their size gets flatter; the accumulator of an FP8 product resolves 2^-14.
    """
    limit = (BIAS + SPAN_LOG2 - 1) << MANTISSA_BITS
    exponent = cutlass.max(R.bitcast(Int32) & EXPONENT, Int32(limit))
    return (Int32(limit + (BIAS << MANTISSA_BITS) - 2**32) - exponent).bitcast(Float32)


class Scales(NamedTuple):
    """Of Q, K and V, as the kernel is given them."""

    mQ: cute.Tensor  # (b, h, ceil(sq / q_rows)) float32
    # (b, h_kv, blocks, 4) float32: k_scale, log2(v_scale / v_max), v_max / v_scale of 64 keys each; with as many blocks
    # past the last as a tile may reach
    mKV: cute.Tensor
    mVMax: cute.Tensor  # (b, h_kv) float32: the largest scale of V in a head
    q_rows: Int32  # rows of Q that share a scale


class KeyScales(NamedTuple):
    """The scales of the keys of one K/V head, in groups of columns of a block that share them."""

    mKV: cute.Tensor  # (blocks of 64, 4): see Scales
    tile_n: int

    @property
    def group(self) -> int:
        """Columns of a group: a block of keys may begin in the middle of a scale's rows."""
        return math.gcd(self.tile_n, SCALE_ROWS)

    @property
    def groups(self) -> int:
        return self.tile_n // self.group

    def of_block(self, n_block: Int32) -> list[tuple[Float32, ...]]:
        """(scale of K, log2 of V's, V's inverse) of every group."""
        found, whole = [], self.tile_n % SCALE_ROWS == 0
        for first in range(0, self.tile_n, self.group):
            if whole:  # the same number without a division
                block = n_block * (self.tile_n // SCALE_ROWS) + first // SCALE_ROWS
            else:
                block = (n_block * self.tile_n + first) // SCALE_ROWS
            record = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(self.mKV[block, None], record)
            found.append((record[0], record[1], record[2]))
        return found


class BlockScaledSoftmax(NamedTuple):
    """State of one warpgroup's rows; `update_row` turns a row of a block of scores into e.

    NOTE: the register fields are memory, changed in place by methods called from run-time loops.
    """

    scales: Scales
    scale_log2: Float32  # softmax scale * log2(e)
    tile_n: int
    keys: KeyScales | None  # of the work tile
    v_max: Float32 | None  # of the work tile's K/V head
    rows: tuple | None  # of the work tile: see begin_tile
    q_scale: cute.Tensor  # (2) scale_log2 * scale of Q's row
    reference: cute.Tensor  # (2) R of the last block, -inf for a row that has seen no key
    highest: cute.Tensor  # (2) largest R so far
    row_sum: cute.Tensor  # (2) this thread's part, in units of 2^(R - TOP)
    factor: cute.Tensor  # (2) what O must be multiplied with before it takes the block
    ahead: cute.Tensor  # (groups, 3) scales of a block to come

    @staticmethod
    def create(scales: Scales, scale_log2: Float32, tile_n: int) -> "BlockScaledSoftmax":
        state = [cute.make_rmem_tensor(ROWS, Float32) for _ in range(5)]
        ahead = cute.make_rmem_tensor((KeyScales(scales.mKV, tile_n).groups, 3), Float32)
        return BlockScaledSoftmax(scales, scale_log2, tile_n, None, None, None, *state, ahead)

    def of_tile(self, tile: WorkTile, head_kv: Int32, row: Int32) -> "BlockScaledSoftmax":
        """With the scales of a work tile; this thread's rows are row and row + 8."""
        s = self.scales
        keys = KeyScales(s.mKV[tile.batch, head_kv, None, None], self.tile_n)
        rows = (s.mQ[tile.batch, tile.head, None], row)
        return self._replace(keys=keys, v_max=s.mVMax[tile.batch, head_kv], rows=rows)

    def begin_tile(self):
        """The scales of this thread's rows."""
        mQ, row = self.rows
        for r in range(ROWS):
            i = cutlass.min(cutlass.max(row + 8 * r, 0) // self.scales.q_rows, mQ.shape[0] - 1)
            q_scale = self.scale_log2 * mQ[i]
            # NOTE: the difference keeps a NaN, which fmax drops.
            self.q_scale[r] = cute.arch.fmax(q_scale, Float32(SMALLEST)) + (q_scale - q_scale)

    def reset(self):
        self.reference.fill(-Float32.inf)
        self.highest.fill(-Float32.inf)
        self.row_sum.fill(0.0)

    def of_block(self, n_block: Int32) -> list[tuple[Float32, ...]]:
        """The scales of a key block, for the methods below. It reads memory: ask long before the scores are there."""
        return self.keys.of_block(n_block)

    def fetch(self, n_block: Int32):
        """Read the scales of a block ahead, into registers."""
        for g, scales in enumerate(self.keys.of_block(n_block)):
            for i, scale in enumerate(scales):
                self.ahead[g, i] = scale

    def fetched(self) -> list[tuple[Float32, ...]]:
        groups, numbers = self.ahead.shape
        return [tuple(self.ahead[g, i] for i in range(numbers)) for g in range(groups)]

    def update_row(self, acc_S: cute.Tensor, r: int, keys: list, is_first: bool, check_inf: bool):
        """Row r of acc_S becomes e, unrounded. check_inf: the block may hide every key of a row."""
        self.exponentiate(acc_S, r, keys, self.refer(r, self.largest(acc_S, r), keys, is_first, check_inf))

    def largest(self, acc_S: cute.Tensor, r: int) -> list[Float32]:
        """This thread's largest score of row r in every group."""
        return [fold(cute.arch.fmax, [acc_S[i] for i in self.places(r, g)]) for g in range(self.keys.groups)]

    def refer(self, r: int, largest: list, keys: list, is_first: bool, check_inf: bool) -> tuple[list, Float32]:
        """The reference of row r in a block; gives what its groups' scores are multiplied with, and R - TOP."""
        factors, top = [], None
        for score, (k_scale, v_log2, _) in zip(largest, keys, strict=True):
            factor = self.q_scale[r] * k_scale
            factors.append(factor)
            # NOTE: rounded up, so that no e passes 2^TOP, however large the scores.
            y = fma_up(score, factor, v_log2)
            top = y if top is None else cute.arch.fmax(top, y)
        R = quad(cute.arch.fmax, top)
        if not is_first:
            R = cute.arch.fmax(R, self.highest[r] - FALL)
        # NOTE: fmax makes a number of the NaN of two references of -inf.
        self.factor[r] = cute.math.exp2(cute.arch.fmax(self.reference[r] - R, Float32(-127.0)), fastmath=True)
        self.highest[r] = cute.arch.fmax(self.highest[r], R)
        self.reference[r] = R
        shrink = shrink_of(R)
        base = R * shrink - TOP
        if check_inf:  # a row without a key so far: exp2(-inf * scale - 0) = 0, not NaN; small scales must not become 0
            has_key = R != -Float32.inf
            base = cutlass.select_(has_key, base, Float32(0.0))
            shrink = cutlass.select_(has_key, shrink, Float32(1.0))
        return [factor * shrink for factor in factors], base

    def exponentiate(self, acc_S: cute.Tensor, r: int, keys: list, reference: tuple[list, Float32], groups=None):
        """Row r of acc_S becomes e, and enters the row's sum. groups: whose columns; those of group 0 come first."""
        scales, base = reference
        groups = range(len(keys)) if groups is None else groups
        total = self.row_sum[r] * self.factor[r] if 0 in groups else self.row_sum[r]
        for g in groups:
            _, v_log2, v_inverse = keys[g]
            offset, sums = base - v_log2, []
            for i in self.places(r, g):
                e = cute.math.exp2(acc_S[i] * scales[g] - offset, fastmath=True)
                acc_S[i] = e
                sums = [sums[1], sums[0] + e] if len(sums) == 2 else [*sums, e]
            total = total + (sums[0] + sums[1]) * v_inverse
        self.row_sum[r] = total

    def places(self, r: int, g: int) -> list[int]:
        """Where row r of group g stands in a thread's accumulator."""
        width = self.keys.group // 4
        return [4 * (c // 2) + 2 * r + c % 2 for c in range(g * width, (g + 1) * width)]

    @cute.jit
    def finish(self, inverse: cute.Tensor, lse: cute.Tensor):
        """(2) v_max / row_sum, 0 for a row that saw no key, and (2) log-sum-exp, natural log, -inf for such a row."""
        for r in cutlass.range_constexpr(ROWS):
            total = quad(add, self.row_sum[r])
            inverse[r] = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total) * self.v_max
            lse[r] = (self.reference[r] - TOP + cute.math.log2(total, fastmath=True)) * math.log(2)
