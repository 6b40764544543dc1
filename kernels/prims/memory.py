"""Values of global memory by address, 16 bytes at a time or one by one."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .fp8 import from_bits, unpack
from .ptx import pack


def load_words(address: Int64, count: int, aligned: bool) -> cute.Tensor:
    """`count` 32-bit words."""
    words = cute.make_rmem_tensor(count, Int32)
    _copy(_at(address, count, aligned), _pieces(words, aligned))
    return words


def load_into(address: Int64, words: cute.Tensor):
    """As many 32-bit words as `words` has, a multiple of 4, at a multiple of 16 bytes."""
    for i in range(cute.size(words) // 4):
        _copy(_at(address + 16 * i, 4, True), cute.local_tile(words, (4,), (i,)))


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
    return floats_of(load_words(address, count // 2, aligned), dtype)


def store_floats(address: Int64, values: list, dtype: type):
    """Values rounded to type dtype, at a multiple of 16 bytes."""
    if dtype is Float32:
        for i in range(0, len(values), 4):
            part = cute.make_rmem_tensor(4, Float32)
            for j in range(4):
                part[j] = values[i + j]
            cute.autovec_copy(part, _gmem(address + 4 * i, 4, Float32, 16))
        return
    words = cute.make_rmem_tensor(len(values) // 2, Int32)
    for i in range(len(values) // 2):
        words[i] = pack(values[2 * i], values[2 * i + 1], dtype)
    store_words(address, words, True)


def floats_of(words: cute.Tensor, dtype: type) -> list:
    """The values of type dtype in 32-bit words as floats, exactly."""
    if dtype is Float32:
        return [from_bits(words[i]) for i in range(cute.size(words))]
    return [value for i in range(cute.size(words)) for value in unpack(words[i], dtype)]


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
