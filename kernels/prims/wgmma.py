"""Warpgroup matrix multiply: start a group, and the accumulator's registers as rows and columns."""

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.tcgen05.helpers import int_to_smem_descriptor, smem_descriptor_to_int

from .ptx import here

HIGH = -(2**32)  # of a descriptor: what does not depend on the address
ROWS = 2  # of a 64-row accumulator that one thread holds: row and row + 8


def settled(fragment: cute.Tensor) -> cute.Tensor:
    """A fragment in shared memory, its descriptor worked out here. Left alone it is worked out at every WGMMA."""
    whole = smem_descriptor_to_int(fragment.iterator)
    low = Int64(Uint32(here(Int32(whole))))
    return cute.make_tensor(int_to_smem_descriptor((whole & HIGH) | low), fragment.layout)


def issue(tiled_mma: cute.TiledMma, acc: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor, accumulate: bool):
    """Start acc (+)= A B as one group.

    NOTE: ACCUMULATE is set on a local atom; set on tiled_mma it would leave the caller's loop.
    """
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(rA, mode=[2])):
        cute.gemm(atom, acc, rA[None, None, k], rB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def rows(acc: cute.Tensor) -> cute.Tensor:
    """m64nN accumulator ((2, 2, N/8), 1, 1) as (row, column) = (2, (2, N/8))."""
    return cute.make_tensor(acc.iterator, cute.make_layout((ROWS, (2, cute.size(acc) // 4)), stride=(2, (1, 4))))


def scale_rows(acc: cute.Tensor, factor: cute.Tensor, first: int = 0, last: int | None = None):
    """Multiply values first..last of a thread's accumulator with their row's factor (ROWS)."""
    for i in range(first, cute.size(acc) if last is None else last):
        acc[i] = acc[i] * factor[i // 2 % ROWS]
