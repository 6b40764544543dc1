"""Instructions that the DSL does not give, one a function."""

import cutlass
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

PACKED = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}


def asm(result, operands: list, instructions: str, constraints: str, loc, ip, stays: bool = False):
    """Instructions without side effects, as a value of type `result`. stays: LLVM may not move them."""
    return llvm.inline_asm(
        result,
        [x.ir_value(loc=loc, ip=ip) for x in operands],
        instructions,
        constraints,
        has_side_effects=stays,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def pack(low: Float32, high: Float32, dtype, *, loc=None, ip=None) -> Int32:
    """cvt.rn.{bf16x2, f16x2}.f32: two floats rounded into one register.

    NOTE: `fragment.to(dtype)` packs only sizes that are a power of two; others cost twice the conversions and spill.
    """
    instruction = f"cvt.rn.{PACKED[dtype]}.f32 $0, $1, $2;"
    return Int32(asm(T.i32(), [Float32(high), Float32(low)], instruction, "=r,f,f", loc, ip))


@dsl_user_op
def read(mX, i: Int32, *, loc=None, ip=None) -> Int32:
    """ld.global.nc.b32: mX[i] of contiguous int32 that nobody writes meanwhile; asked twice, it is read once."""
    address = mX.iterator.toint(loc=loc, ip=ip) + Int64(i) * 4
    return Int32(asm(T.i32(), [Int64(address)], "ld.global.nc.b32 $0, [$1];", "=r,l", loc, ip))


@dsl_user_op
def read_pair(address: Int64, *, loc=None, ip=None) -> list:
    """ld.global.v2.f32, at this place: it is under way while what stands behind it is worked out."""
    struct = llvm.StructType.get_literal([T.f32()] * 2)
    done = asm(struct, [Int64(address)], "ld.global.v2.f32 {$0, $1}, [$2];", "=f,=f,l,~{memory}", loc, ip, stays=True)
    return [Float32(llvm.extractvalue(T.f32(), done, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def fma_up(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """fma.rp.f32: a * b + c rounded up."""
    operands = [Float32(a), Float32(b), Float32(c)]
    return Float32(asm(T.f32(), operands, "fma.rp.f32 $0, $1, $2, $3;", "=f,f,f,f", loc, ip))


@dsl_user_op
def tanh(x: Float32, *, loc=None, ip=None) -> Float32:
    """tanh.approx.f32, to a relative error of 2^-11."""
    return Float32(asm(T.f32(), [Float32(x)], "tanh.approx.f32 $0, $1;", "=f,f", loc, ip))


@dsl_user_op
def here(x: Int32, *, loc=None, ip=None) -> Int32:
    """x, worked out at this place and once; what follows from it is worked out behind."""
    return Int32(asm(T.i32(), [Int32(x)], "mov.b32 $0, $1;", "=r,r", loc, ip, stays=True))


@dsl_user_op
def thread_here(*, loc=None, ip=None) -> Int32:
    """The thread of the warpgroup, read at this place: no register holds it until then."""
    return Int32(asm(T.i32(), [], "mov.u32 $0, %tid.x;", "=r", loc, ip, stays=True)) & 127


@dsl_user_op
def shared_here(*, loc=None, ip=None) -> Int32:
    """Where dynamic shared memory begins, read at this place."""
    return Int32(asm(T.i32(), [], "mov.u32 $0, __dynamic_shmem__0;", "=r", loc, ip, stays=True))


@dsl_user_op
def copy_async(to: Int32, address: Int64, size: Int32, *, loc=None, ip=None):
    """cp.async.cg.shared.global: 16 bytes from global to shared memory, `size` of them read, the others 0.

    NOTE: with an L2 cache hint ptxas 13.0 makes an instruction of it that sm_90 refuses.
    """
    operands = [Int32(to), Int64(address), Int32(size)]
    asm(None, operands, "cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r,~{memory}", loc, ip, stays=True)
