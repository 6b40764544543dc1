"""Instructions around 8-bit floats, one a function: packing, absolute maxima, and arithmetic whose rounding is fixed.

NOTE: the DSL lets ptxas fuse a * b + c in either way. Where a result depends on which product is rounded, `product`
and `fused` say so.
"""

import cutlass
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .ptx import PACKED, asm

SIGNS = -0x7FFF8000  # the two sign bits of a packed pair, 0x80008000
MAGNITUDES = 0x7FFF7FFF  # all others


@dsl_user_op
def pack_e4m3(x: list, *, loc=None, ip=None) -> Int32:
    """cvt.rn.satfinite.e4m3x2.f32, twice: four floats to the bytes of a register, x[0] lowest. NaN becomes 0x7f."""
    body = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
    )
    return Int32(asm(T.i32(), [Float32(v) for v in x], body, "=r,f,f,f,f", loc, ip))


@dsl_user_op
def unpack_e4m3(word: Int32, *, loc=None, ip=None) -> list:
    """cvt.rn.f16x2.e4m3x2, twice, and cvt.f32.f16: the four floats of a register's bytes, exactly, lowest first."""
    body = (
        "{ .reg .b16 low, high, a, b, c, d; .reg .b32 ab, cd; mov.b32 {low, high}, $4; "
        "cvt.rn.f16x2.e4m3x2 ab, low; cvt.rn.f16x2.e4m3x2 cd, high; mov.b32 {a, b}, ab; mov.b32 {c, d}, cd; "
        "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"
    )
    struct = llvm.StructType.get_literal([T.f32()] * 4)
    done = asm(struct, [Int32(word)], body, "=f,=f,=f,=f,r", loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), done, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def absmax_pairs(a: Int32, b: Int32, dtype, *, loc=None, ip=None) -> Int32:
    """max.NaN.{bf16x2, f16x2} of |b| and of a, whose signs are clear."""
    operands = [Int32(a), Int32(b) & MAGNITUDES]
    return Int32(asm(T.i32(), operands, f"max.NaN.{PACKED[dtype]} $0, $1, $2;", "=r,r,r", loc, ip))


@dsl_user_op
def product(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """mul.rn.f32: rounded by itself, never fused into an addition."""
    return Float32(asm(T.f32(), [Float32(a), Float32(b)], "mul.rn.f32 $0, $1, $2;", "=f,f,f", loc, ip))


@dsl_user_op
def fused(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """fma.rn.f32: a * b + c, rounded once."""
    operands = [Float32(a), Float32(b), Float32(c)]
    return Float32(asm(T.f32(), operands, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", loc, ip))


@dsl_user_op
def magnitude(x: Float32, *, loc=None, ip=None) -> Float32:
    """abs.f32: a modifier of the instruction that takes it."""
    return Float32(asm(T.f32(), [Float32(x)], "abs.f32 $0, $1;", "=f,f", loc, ip))


@dsl_user_op
def bits(x: Float32, *, loc=None, ip=None) -> Int32:
    """mov.b32: a float's bits."""
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def from_bits(x: Int32, *, loc=None, ip=None) -> Float32:
    """mov.b32: the float of these bits."""
    return Float32(llvm.bitcast(T.f32(), Int32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def _high_half(word: Int32, *, loc=None, ip=None) -> Float32:
    """cvt.f32.f16 of the high half."""
    body = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, high; }"
    return Float32(asm(T.f32(), [Int32(word)], body, "=f,r", loc, ip))


@dsl_user_op
def _low_half(word: Int32, *, loc=None, ip=None) -> Float32:
    """cvt.f32.f16 of the low half."""
    body = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"
    return Float32(asm(T.f32(), [Int32(word)], body, "=f,r", loc, ip))


def unpack(word: Int32, dtype) -> tuple[Float32, Float32]:
    """The two floats of a packed pair, exactly."""
    if dtype is cutlass.BFloat16:
        return from_bits(word << 16), from_bits(word & -0x10000)
    return _low_half(word), _high_half(word)
