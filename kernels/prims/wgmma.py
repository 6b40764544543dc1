"""Warpgroup matrix multiply: start a group, and the accumulator's registers as rows and columns."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

ROWS = 2  # of a 64-row accumulator that one thread holds: row and row + 8


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
