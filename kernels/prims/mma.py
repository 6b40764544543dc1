"""Warp matrix multiply: small products of 16-bit operands that lie in registers."""

import cutlass
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .ptx import asm

KIND = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}
RESULTS = 4


@dsl_user_op
def multiply(a: list, b: list, c: list, dtype, *, loc=None, ip=None) -> list:
    """mma.sync.m16n8k16: c + a b in fp32; c four floats, a four and b two packed pairs of `dtype`.

    Lane 4 g + j holds of a rows g (a[0], a[2]) and g + 8 (a[1], a[3]), columns 2 j, 2 j + 1 and 8 more (a[2], a[3]);
    of b column g, rows 2 j, 2 j + 1 and 8 more (b[1]); of c rows g and g + 8 (c[2:]), columns 2 j and 2 j + 1.
    """
    kind = KIND[dtype]
    done = asm(
        llvm.StructType.get_literal([T.f32()] * RESULTS),
        [*map(Int32, (*a, *b)), *map(Float32, c)],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        loc,
        ip,
    )
    return [Float32(llvm.extractvalue(T.f32(), done, [i], loc=loc, ip=ip)) for i in range(RESULTS)]
