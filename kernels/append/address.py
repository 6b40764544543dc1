"""Values of global memory by address, 16 bytes at a time or one by one."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..prims.fp8 import unpack


def load_words(address: Int64, count: int, aligned: bool) -> cute.Tensor:
    """`count` 32-bit words."""
    words = cute.make_rmem_tensor(count, Int32)
    _copy(_at(address, count, aligned), _pieces(words, aligned))
    return words


def store_words(address: Int64, words: cute.Tensor, aligned: bool):
    _copy(_pieces(words, aligned), _at(address, cute.size(words), aligned))


def load_floats(address: Int64, count: int, dtype: type, aligned: bool) -> list:
    """`count` values of type dtype as floats, exactly."""
    if dtype is Float32:
        values = []
        for i in range(0, count, 4):
            part = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(_gmem(address + 4 * i, 4, Float32, 16 if aligned else 4), part)
            values += [part[j] for j in range(4)]
        return values
    words = load_words(address, count // 2, aligned)
    return [value for i in range(count // 2) for value in unpack(words[i], dtype)]


def _at(address: Int64, count: int, aligned: bool) -> cute.Tensor:
    if aligned:
        return _gmem(address, count, Int32, 4 * count)
    return _gmem(address, 2 * count, cutlass.Uint16, 2)


def _pieces(words: cute.Tensor, aligned: bool) -> cute.Tensor:
    return words if aligned else cute.recast_tensor(words, cutlass.Uint16)


def _gmem(address: Int64, count: int, dtype: type, align: int) -> cute.Tensor:
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


def _copy(source: cute.Tensor, target: cute.Tensor):
    cute.autovec_copy(source, target)
