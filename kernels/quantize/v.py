"""128 keys of one head of V to packed e4m3: head_dim-major, keys permuted inside every 16.

A thread holds 8 columns of the four keys that stand together in a packed word (2j, 2j+1, 2j+8, 2j+9 of a group of 16),
so the permutation costs nothing: four values, one of each key, are a word. A warp holds 64 columns of a group, and four
warps a 64-key block. Words go through shared memory, where a row is the 128 bytes of one column, and leave as 16 bytes
of a row. NOTE: the 16-byte pieces of a row are swapped by the column's chunk, so that neither side has bank conflicts.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ..prims.address import words_at
from ..prims.fp8 import from_bits, pack_e4m3, unpack
from .config import BLOCK, CHUNK, GROUP, KEYS, THREADS, WARPS
from .scale import Division, division, largest_of_pairs, largest_of_warps, scale_of

SLAB = 8 * CHUNK  # columns that the lanes of a warp hold
TOGETHER = 4  # keys of a packed word
ROW_WORDS = KEYS // TOGETHER
PIECE = 16  # bytes that a thread stores


class Place(NamedTuple):
    """128 keys of one head of V."""

    x: Int64  # address of key 0 of this head
    x_stride: Int64  # bytes from key to key
    y: Int64  # address of column 0 of this head's packed keys
    scale: Int64  # address of this head's first scale
    keys: Int32
    padded: Int32  # keys rounded up to whole groups: bytes from column to column of y
    tile: Int32


class KeyTile(NamedTuple):
    place: Place
    sV: cute.Tensor  # (ROW_WORDS * head_dim_v) words
    sMax: cute.Tensor  # (warps) bits of each warp's largest magnitude
    thread: Int32
    head_dim: int
    dtype: type

    @property
    def slabs(self) -> int:
        return -(-self.head_dim // SLAB)

    @property
    def chunk(self):
        """Which 8 columns of a slab a lane has."""
        return self.thread % 32 % 8

    @property
    def quad(self):
        """Which of the four words of a group a lane makes."""
        return self.thread % 32 // 8

    @property
    def group(self):
        """Which 16 keys a warp has: of a tile, the first block's first."""
        return self.thread // 32

    def quantize(self):
        """16-bit V: each 64-key block divided by its scale."""
        loaded = self.load(CHUNK // 2)
        words = [loaded[i] for i in range(cute.size(loaded))]
        divide = division(self.scale(largest_of_pairs(words, self.dtype)))
        for slab in range(self.slabs):
            self.keep(slab, [x for i in range(CHUNK // 2) for x in self.columns(loaded, slab, i, divide)])
        self.store()

    def columns(self, loaded: cute.Tensor, slab: int, i: int, divide: Division) -> list:
        """The packed words of the two columns of pair i."""
        keys = [unpack(loaded[i, key, slab], self.dtype) for key in range(TOGETHER)]
        return [pack_e4m3([divide(pair[side]) for pair in keys]) for side in range(2)]

    def repack(self):
        """V that is e4m3 already."""
        loaded = self.load(CHUNK // 4)
        for slab in range(self.slabs):
            quads = [[loaded[i, key, slab] for key in range(TOGETHER)] for i in range(CHUNK // 4)]
            self.keep(slab, [x for quad in quads for x in transposed(quad)])
        self.store()

    @cute.jit
    def load(self, words: cutlass.Constexpr[int]) -> cute.Tensor:
        """(words, TOGETHER, slabs): a chunk of each of the thread's keys; zeros beyond the last key and column."""
        loaded = cute.make_rmem_tensor((words, TOGETHER, self.slabs), Int32)
        loaded.fill(0)
        first = self.place.tile * KEYS + self.group * GROUP
        for key in cutlass.range_constexpr(TOGETHER):
            row = first + key_of(self.quad, key)
            for slab in cutlass.range_constexpr(self.slabs):
                column = SLAB * slab + CHUNK * self.chunk
                source = self.place.x + Int64(row) * self.place.x_stride + column * (4 * words // CHUNK)
                if (row < self.place.keys) & (column < self.head_dim):
                    cute.autovec_copy(words_at(source, words), loaded[None, key, slab])
        return loaded

    @cute.jit
    def scale(self, magnitude: Int32) -> Float32:
        """The scale of the thread's block; stored on the way."""
        magnitude = largest_of_warps(self.sMax, magnitude, self.thread, WARPS * BLOCK // KEYS)
        scale = scale_of(from_bits(magnitude))
        block = self.place.tile * (KEYS // BLOCK) + self.thread // (THREADS * BLOCK // KEYS)
        target = words_at(self.place.scale + 4 * Int64(block), 1, Float32)
        if (self.thread % (THREADS * BLOCK // KEYS) == 0) & (block * BLOCK < self.place.keys):
            target[0] = scale
        return scale

    @cute.jit
    def keep(self, slab: cutlass.Constexpr[int], words: list):
        """words[i]: the four keys of column i of the thread's chunk -> shared memory."""
        sV, column = self.sV, SLAB * slab + CHUNK * self.chunk
        to = slot(column, self.group, self.quad)
        if cutlass.const_expr(SLAB * (slab + 1) <= self.head_dim):
            for i in cutlass.range_constexpr(CHUNK):
                sV[to + i * ROW_WORDS] = words[i]
        else:
            if column < self.head_dim:
                for i in cutlass.range_constexpr(CHUNK):
                    sV[to + i * ROW_WORDS] = words[i]

    @cute.jit
    def store(self):
        """Shared memory -> 128 bytes of every column, zeros up to the end of the last group."""
        cute.arch.sync_threads()
        pieces = KEYS // PIECE
        piece, first = self.thread % pieces, self.thread // pieces
        key = self.place.tile * KEYS + piece * PIECE
        target = self.place.y + Int64(key)
        if key < self.place.padded:
            for i in cutlass.range_constexpr(-(-self.head_dim * pieces // THREADS)):
                column = first + i * (THREADS // pieces)
                if column < self.head_dim:
                    at = self.sV.iterator + slot(column, piece, 0)
                    source = cute.make_tensor(at.align(PIECE), cute.make_layout(4))
                    kept = cute.make_rmem_tensor(4, Int32)
                    cute.autovec_copy(source, kept)
                    cute.autovec_copy(kept, words_at(target + Int64(column) * Int64(self.place.padded), 4))


def key_of(quad: Int32, key: int) -> Int32:
    """The keys of a packed word, of its group."""
    return 2 * quad + key % 2 + 8 * (key // 2)


def slot(column: Int32, group: Int32, quad: Int32) -> Int32:
    """Where shared memory has the word of four keys. A group is a piece: its words stay together."""
    return column * ROW_WORDS + (group ^ (column // CHUNK % 8)) * TOGETHER + quad


def transposed(words: list) -> list:
    """A 4 x 4 matrix of bytes, a row a word."""
    a, b, c, d = words
    ab = [_bytes(a, b, selection) for selection in (0x5140, 0x7362)]
    cd = [_bytes(c, d, selection) for selection in (0x5140, 0x7362)]
    return [_bytes(x, y, selection) for x, y in zip(ab, cd) for selection in (0x5410, 0x7632)]


def _bytes(a: Int32, b: Int32, selection: int) -> Int32:
    return Int32(Uint32(cute.arch.prmt(a, b, selection)))
