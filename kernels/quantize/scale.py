"""From a block's largest magnitude to its scale, and values divided by it.

scale = absmax / 448, rounded to nearest, at least 2^-126; 0 for a block of zeros, NaN for one with Inf or NaN. Of
rotated rows it is moved after the cast: see `fitted`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..prims.fp8 import absmax_pairs, bits, from_bits, fused, magnitude, product, unpack
from .config import WARPS

E4M3_MAX = 448.0
E4M3_MAX_INVERSE = 0.002232142857142857  # rounded to fp32 by the compiler
SMALLEST = 2.0**-126
FIT_MAX = 1 / 16  # the half step of e4m3: what rounding may change of a length, as a share
EXPONENT = 0x7F800000


@cute.jit
def scale_of(absmax: Float32) -> Float32:
    """absmax / 448.

    NOTE: a quotient by reciprocal and one correction. With a constant divisor that is the correctly rounded one; the
    test goes through every significand. Inf becomes NaN in the correction.
    """
    quotient = product(absmax, E4M3_MAX_INVERSE)
    rest = fused(quotient, -E4M3_MAX, absmax)
    scale = cute.arch.fmax(fused(rest, E4M3_MAX_INVERSE, quotient), SMALLEST, nan=True)
    if absmax == 0.0:
        scale = Float32(0.0)
    return scale


def fitted(scale: Float32, length: Float32, along: Float32) -> Float32:
    """scale * length / along: of a row with values y over the scale and codes c, |y|^2 and y . c. 0 and NaN stay."""
    ratio = length * cute.arch.rcp_approx(cute.arch.fmax(along, SMALLEST))
    ratio = cute.arch.fmin(cute.arch.fmax(ratio, 1 - FIT_MAX), 1 + FIT_MAX)
    return cute.arch.fmax(scale * ratio, cute.arch.fmin(scale, SMALLEST), nan=True)


class Division(NamedTuple):
    """x / scale as the e4m3 cast sees it, without a division.

    x is brought to the scale's exponent (exact) and multiplied with high + low, which is 1 / scale to 45 bits. high is
    just below 1 / scale and low positive, so that -0 stays -0. The result differs from the rounded quotient in its
    last bit at most, and only where x / scale is within 2^-20 units in the last place of the middle between two floats.
    Such an x of 11 bits or fewer is never a middle's neighbour that decides an e4m3 rounding: with significands X of x,
    S of scale and 2^j M of the e4m3 tie (M below 32), X 2^k = (2^j M +- 1) S + n with |n| < 25 needs
    2^(j - 20) M n' = -+S / 2^20, where the left side is 0 or at least 16 and the right side is between 8 and 15.
    """

    up: Float32  # power of two that brings the scale to [1, 2)
    high: Float32
    low: Float32

    def __call__(self, x: Float32) -> Float32:
        x = x * self.up
        return fused(x, self.high, product(x, self.low))


@cute.jit
def division(scale: Float32) -> Division:
    """NOTE: where the scale is 0 low is negative, so that both zeros give +0."""
    up, scale, inverse = reciprocal(scale)
    high = from_bits(bits(inverse) - 1)
    low = inverse * fused(-scale, high, Float32(1.0))
    if scale == 0.0:
        low = Float32(-1.0)
    return Division(up, high, low)


def factor(scale: Float32) -> Float32:
    """1 / scale to two units in the last place: for values that a transform has rounded before. Finite for 0."""
    up, _, inverse = reciprocal(scale)
    return inverse * up


def reciprocal(scale: Float32) -> tuple[Float32, Float32, Float32]:
    """(power of two up, scale * up in [1, 2), its reciprocal to one unit in the last place); (2^126, 0, 1) for 0."""
    exponent = cutlass.max(bits(scale) & EXPONENT, 1 << 23)
    up = from_bits(Int32(254 << 23) - exponent)
    scale = scale * up
    scale_or_1 = cute.arch.fmax(scale, 1.0, nan=True)
    guess = cute.arch.rcp_approx(scale_or_1)
    return up, scale, fused(guess, fused(-scale_or_1, guess, Float32(1.0)), guess)


def largest(values: list) -> Int32:
    """Bits of the largest magnitude. NaN is larger than everything."""
    found = Float32(0.0)
    for x in values:
        found = cute.arch.fmax(found, magnitude(x), nan=True)
    return bits(found)


def largest_of_pairs(words: list, dtype) -> Int32:
    """The same of packed pairs."""
    found = Int32(0)
    for word in words:
        found = absmax_pairs(found, word, dtype)
    return largest([*unpack(found, dtype)])


@cute.jit
def largest_of_warps(sMax: cute.Tensor, magnitude: Int32, thread: Int32, warps: cutlass.Constexpr[int]) -> Int32:
    """The largest of the `warps` warps that stand together, of which the caller's is one. sMax: a word a warp, or more.

    NOTE: of bits, because integers order magnitudes as floats do, with NaN above Inf, and REDUX takes integers.
    """
    warp = thread // 32
    found = Int32(cute.arch.warp_redux_sync(magnitude, "max"))
    if thread % 32 == 0:
        sMax[warp] = found
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(warps):
        found = cutlass.max(found, sMax[warp // warps * warps + i])
    return found


def sums_of_warps(sSums: cute.Tensor, values: list, thread: Int32) -> list:
    """Sums over the CTA's warps of values that all lanes of a warp have; sSums has a word a value and warp.

    NOTE: in other words than `largest_of_warps` uses, which a slower warp may still be reading.
    """
    _leave(sSums, values, thread)
    sums = []
    for i in range(len(values)):
        found = [from_bits(sSums[i * WARPS + warp]) for warp in range(WARPS)]
        while len(found) > 1:
            found = [a + b for a, b in zip(found[::2], found[1::2])]
        sums += found
    return sums


@cute.jit
def _leave(sSums: cute.Tensor, values: list, thread: Int32):
    if thread % 32 == 0:
        for i in cutlass.range_constexpr(len(values)):
            sSums[i * WARPS + thread // 32] = bits(values[i])
    cute.arch.sync_threads()
