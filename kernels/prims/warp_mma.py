"""Matrix multiply of one warp alone (mma.sync), on operands that lie in shared memory as WGMMA wants them."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import AddressSpace
from cutlass.cute.nvgpu import warp

from .ptx import thread_here

ROWS, KEYS, DEPTH = 16, 8, 16  # of one mma.sync, 16 bit
AT_ONCE = 4  # of them with registers for B of their own


def plain(sX: cute.Tensor, distance: Int32) -> cute.Tensor:
    """A swizzled K-major tensor as its bytes lie, `distance` bytes further on."""
    address = sX.iterator.toint() + distance
    return cute.make_tensor(cute.make_ptr(sX.element_type, address, AddressSpace.smem, assumed_align=16), sX.layout)


class Words(NamedTuple):
    """The pair of 16-bit numbers at (row, column) of a `plain` tile, and those 8, 16, .. rows below it.

    NOTE: the swizzle repeats every 8 rows, so that it is worked out once.
    """

    words: cute.Tensor
    below: int  # words from a row to the one 8 below

    @staticmethod
    def of(sX: cute.Tensor, row: Int32, column: Int32) -> "Words":
        below = cute.crd2idx((8, 0), sX.layout)
        pieces = below // 64  # of 8 numbers in a row of the swizzle's atom, which is 8 rows high
        index = cute.crd2idx((row, column), sX.layout)
        index = index ^ (index // 64 % pieces * 8)
        return Words(
            cute.make_tensor(cute.recast_ptr(sX.iterator, dtype=Int32) + index // 2, cute.make_layout(1 << 16)),
            below // 2,
        )

    def at(self, i: int) -> Int32:
        return self.words[i * self.below]


def halves(sX: cute.Tensor, row: Int32, column: Int32) -> list[Words]:
    """A lane's pairs of one DEPTH."""
    return [Words.of(sX, row, column + 8 * half) for half in range(2)]


@cute.jit
def multiply(sA: cute.Tensor, sB: cute.Tensor, acc: cute.Tensor):
    """acc = A B^T for this warp's 16 of the 64 rows of A: sA (64, k), sB (n, k), acc (64, n) as WGMMA leaves it.

    NOTE: a lane holds the same elements of its warp's rows after m64nNk16 and after N / 8 times m16n8k16.
    """
    thread = thread_here()
    row, column = thread % 32 // 4, thread % 4 * 2
    mma = cute.make_tiled_mma(warp.MmaF16BF16Op(sA.element_type, Float32, (ROWS, KEYS, DEPTH)))
    rA = cute.make_rmem_tensor(((2, 2, 2), 1), sA.element_type)
    A = cute.recast_tensor(rA, Int32)
    acc.fill(0.0)
    for k in cutlass.range(cute.size(sA, mode=[1]) // DEPTH, unroll=1):
        a = halves(sA, thread // 32 * ROWS + row, k * DEPTH + column)
        b = halves(sB, row, k * DEPTH + column)
        for i in cutlass.range_constexpr(4):
            A[i] = a[i // 2].at(i % 2)
        for first in cutlass.range_constexpr(0, cute.size(acc) // 4, AT_ONCE):
            n = min(AT_ONCE, cute.size(acc) // 4 - first)
            rB = cute.make_rmem_tensor(((2, 2), n), sA.element_type)
            B = cute.recast_tensor(rB, Int32)
            for i in cutlass.range_constexpr(2 * n):
                B[i] = b[i % 2].at(first + i // 2)
            C = cute.make_tensor(acc.iterator + 4 * first, cute.make_layout(((2, 2), 1, n), stride=((1, 2), 0, 4)))
            cute.gemm(mma, C, rA, rB, C)
