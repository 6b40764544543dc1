"""Global memory by address: what differs between Q, K and V is then a number, so that they share code."""

import cutlass.cute as cute
from cutlass import Int32, Int64


def words_at(address: Int64, count: int, dtype=Int32) -> cute.Tensor:
    """`count` 32-bit words that start at a multiple of their size."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=4 * count)
    return cute.make_tensor(pointer, cute.make_layout(count))
