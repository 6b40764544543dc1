"""One 64-row block of Q or K: rotary embedding, rotation, the block's scale, the cast.

LANES lanes share a row, a warp has 8 rows and 256 threads the block, so every value is loaded once, into registers,
and stays there until it is stored. Lanes that are neighbours trade halves before the store, so that it writes 16 bytes
where a load brought 8 columns.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..prims.address import words_at
from ..prims.fp8 import SIGNS, bits, from_bits, pack_e4m3, unpack, unpack_e4m3
from ..prims.mma import multiply
from ..prims.ptx import pack
from .config import BLOCK, CHUNK, LANES, WARPS, Spec
from .hadamard import COLUMNS, is_negative, normalisers, sizes, transform
from .rotary import Tables
from .scale import division, factor, fitted, largest, largest_of_warps, scale_of, sums_of_warps

PAIRS = CHUNK // 2  # 32-bit words of a chunk of 16-bit values
ONES = {cutlass.BFloat16: 0x3F803F80, cutlass.Float16: 0x3C003C00}
SPLIT = cutlass.BFloat16  # of values that are wider than 16 bits


class Place(NamedTuple):
    """A block of 64 rows of one head of Q or of K."""

    x: Int64  # address of row 0 of this head
    x_stride: Int64  # bytes from row to row
    y: Int64  # likewise of the e4m3 output
    y_stride: Int64
    scale: Int64  # address of this head's first scale
    rows: Int32
    block: Int32
    position: Int32  # of row 0, in the tables of the rotary embedding
    by_row: Boolean  # a scale a row, else a block

    @staticmethod
    def empty() -> "Place":
        return Place(*[Int64(0)] * 5, *[Int32(0)] * 3, Boolean(False))


class RowBlock(NamedTuple):
    place: Place
    signs: Int64  # address of (head_dim) +-1 in the inputs' type
    tables: Tables | None  # of the rotary embedding
    sWarps: cute.Tensor  # (WARP_WORDS * warps): bits of each warp's largest magnitude; its two sums
    thread: Int32
    dtype: type
    spec: Spec

    @property
    def row(self):
        return self.place.block * BLOCK + self.thread // LANES

    @property
    def lane(self):
        return self.thread % LANES

    @property
    def groups(self) -> int:
        return -(-self.spec.head_dim // COLUMNS)

    def is_whole(self, group: int) -> bool:
        """Whether every lane has columns of the group; of the last one perhaps only half of them do."""
        return COLUMNS * (group + 1) <= self.spec.head_dim

    def column(self, group: int):
        return COLUMNS * group + CHUNK * self.lane

    def run(self):
        words = self.load()
        if self.spec.rotate:
            values, weights = self.rotated(words), normalisers(self.spec.head_dim)
            scale = self.scale(_largest_weighted(values, weights))
            turn, packed, length, along = factor(scale), [], Float32(0.0), Float32(0.0)
            for group, weight in zip(values, weights, strict=True):
                group = [x * (turn * weight) for x in group]
                packed.append(_packed(group))
                length, along = _length_and_along(group, packed[-1], length, along)
            scale = self.fitted(scale, *_over_lanes([length, along], (1, 2)))
        else:
            values = [self.embedded(words, g) for g in range(self.groups)]
            scale = self.scale(largest([x for group in values for x in group]))
            divide = division(scale)
            packed = [_packed([divide(x) for x in group]) for group in values]
        self.store_scale(scale)
        self.store(packed)

    @cute.jit
    def fitted(self, scale: Float32, length: Float32, along: Float32) -> Float32:
        """The scale after its rows became codes: of a row its own, of a block that of its longest rows."""
        if cutlass.const_expr(self.spec.q_rows == 1):
            if self.place.by_row:
                scale = fitted(scale, length, along)
            else:
                scale = self.fitted_to_block(scale, length, along)
        else:
            scale = self.fitted_to_block(scale, length, along)
        return scale

    def fitted_to_block(self, scale: Float32, length: Float32, along: Float32) -> Float32:
        """length, along: of the thread's row, each of which counts by its length squared."""
        weight = length * length
        sums = _over_lanes([weight * length, weight * along], (4, 8, 16))
        sums = sums_of_warps(cute.make_tensor(self.sWarps.iterator + WARPS, 2 * WARPS), sums, self.thread)
        return fitted(scale, *sums)

    @cute.jit
    def load(self) -> cute.Tensor:
        """(PAIRS, groups) words of 16-bit pairs; zeros beyond the last row and column."""
        words = cute.make_rmem_tensor((PAIRS, self.groups), Int32)
        words.fill(0)
        if self.row < self.place.rows:
            for g in cutlass.range_constexpr(self.groups):
                source = words_at(self.place.x + Int64(self.row) * self.place.x_stride + 2 * self.column(g), PAIRS)
                if cutlass.const_expr(self.is_whole(g)):
                    cute.autovec_copy(source, words[None, g])
                else:
                    if self.lane < LANES // 2:
                        cute.autovec_copy(source, words[None, g])
        return words

    def embedded(self, words: cute.Tensor, group: int) -> list:
        """A group's values with their rotary embedding."""
        values = [x for i in range(PAIRS) for x in unpack(words[i, group], self.dtype)]
        if self.tables is None or group * COLUMNS >= self.tables.rotary.dim:
            return values
        x = cute.make_rmem_tensor(CHUNK, Float32)
        for i, value in enumerate(values):
            x[i] = value
        address = self.place.x + Int64(self.row) * self.place.x_stride
        self.tables.apply(x, address, self.row + self.place.position, self.column(group), self.row < self.place.rows)
        return [x[i] for i in range(CHUNK)]

    def rotated(self, words: cute.Tensor) -> list:
        """All groups' values times diag(signs) and the Hadamard matrices, not normalised."""
        dtype = self.dtype if self.tables is None else SPLIT
        operands = {size: self.operand(size, ONES[dtype]) for size in sizes(self.spec.head_dim)}
        return transform(
            lambda group: self.signed(words, group),
            self.spec.head_dim,
            operands,
            lambda a, b, c: multiply(a, b, c, dtype),
        )

    def signed(self, words: cute.Tensor, group: int) -> list:
        """A group's values times the signs, as chunks of packed pairs whose sum they are.

        NOTE: values of 16 bits stay packed; with a rotary embedding they are fp32, which three bf16 hold exactly.
        """
        lane = self.lane if self.is_whole(group) else self.lane % 2
        signs = cute.make_rmem_tensor(PAIRS, Int32)
        cute.autovec_copy(words_at(self.signs + 2 * (COLUMNS * group + CHUNK * lane), PAIRS), signs)
        if self.tables is None:
            return [[words[i, group] ^ (signs[i] & SIGNS) for i in range(PAIRS)]]
        factors = [x for i in range(PAIRS) for x in unpack(signs[i], self.dtype)]
        return split([x * sign for x, sign in zip(self.embedded(words, group), factors, strict=True)])

    def operand(self, size: int, ones: int) -> Int32:
        """This lane's pair of the Hadamard matrix of the columns that lie across lanes, block-diagonal below 32."""
        n, k = self.thread % 32 // 4, 2 * self.lane
        pair = ones ^ (is_negative(k, n) << 15) ^ (is_negative(k + 1, n) << 31)
        return pair if size == COLUMNS else _choose(k // 4 == n // 4, pair, Int32(0))

    @cute.jit
    def scale(self, magnitude: Int32) -> Float32:
        """The scale that this thread's row divides by. magnitude: bits of the thread's largest."""
        if cutlass.const_expr(self.spec.q_rows == 1):
            if self.place.by_row:
                for bit in cutlass.range_constexpr(2):
                    magnitude = cutlass.max(magnitude, cute.arch.shuffle_sync_bfly(magnitude, 1 << bit))
            else:
                magnitude = largest_of_warps(self.sWarps, magnitude, self.thread, WARPS)
        else:
            magnitude = largest_of_warps(self.sWarps, magnitude, self.thread, WARPS)
        return scale_of(from_bits(magnitude))

    @cute.jit
    def store_scale(self, scale: Float32):
        place = self.place
        index, is_first = place.block, self.thread == 0
        if cutlass.const_expr(self.spec.q_rows == 1):
            if place.by_row:
                index, is_first = self.row, (self.lane == 0) & (self.row < place.rows)
        target = words_at(place.scale + 4 * Int64(index), 1, Float32)
        if is_first:
            target[0] = scale

    def store(self, packed: list):
        """packed[group]: the two words of a lane's columns."""
        whole = [g for g in range(self.groups) if self.is_whole(g)]
        paired = len(whole) // 2 * 2
        for g in range(0, paired, 2):
            self.store_pair(g, *packed[g], *packed[g + 1])
        for g in range(paired, self.groups):
            self.store_words(self.column(g), packed[g], self.lane < (LANES if g in whole else LANES // 2))

    def store_pair(self, group: int, a0: Int32, a1: Int32, b0: Int32, b1: Int32):
        """Groups `group` (a) and the next (b): even lanes get their neighbour's half of a, odd lanes of b."""
        is_even = self.lane % 2 == 0
        sent = [_choose(is_even, b, a) for a, b in ((a0, b0), (a1, b1))]
        got = [cute.arch.shuffle_sync_bfly(x, 1) for x in sent]
        words = [_choose(is_even, a, x) for a, x in zip((a0, a1), got)]
        words += [_choose(is_even, x, b) for b, x in zip((b0, b1), got)]
        column = COLUMNS * (group + self.lane % 2) + 2 * CHUNK * (self.lane // 2)
        self.store_words(column, words, Boolean(True))

    @cute.jit
    def store_words(self, column: Int32, words: list, has_columns: Boolean):
        kept = cute.make_rmem_tensor(len(words), Int32)
        for i in cutlass.range_constexpr(len(words)):
            kept[i] = words[i]
        if has_columns & (self.row < self.place.rows):
            address = self.place.y + Int64(self.row) * self.place.y_stride + column
            cute.autovec_copy(kept, words_at(address, len(words)))


def split(x: list) -> list:
    """Three lists of bf16 pairs whose sum is x (a list of floats)."""
    pieces = []
    for _ in range(3):
        pairs = [pack(x[i], x[i + 1], SPLIT) for i in range(0, len(x), 2)]
        rounded = [value for pair in pairs for value in unpack(pair, SPLIT)]
        x = [value - near for value, near in zip(x, rounded, strict=True)]
        pieces.append(pairs)
    return pieces


def _length_and_along(values: list, words: list, length: Float32, along: Float32) -> tuple[Float32, Float32]:
    """length and along with a chunk's |y|^2 and y . c, of values y and packed codes c."""
    for y, near in zip(values, [*unpack_e4m3(words[0]), *unpack_e4m3(words[1])], strict=True):
        length, along = length + y * y, along + y * near
    return length, along


def _over_lanes(values: list, distances: tuple) -> list:
    for distance in distances:
        values = [x + cute.arch.shuffle_sync_bfly(x, distance) for x in values]
    return values


def _packed(x: list) -> list:
    """The two words of a chunk's e4m3 codes."""
    return [pack_e4m3(x[:4]), pack_e4m3(x[4:])]


def _choose(condition: Boolean, a: Int32, b: Int32) -> Int32:
    return Int32(cutlass.select_(condition, a, b))


def _largest_weighted(values: list, weights: list) -> Int32:
    """Bits of the largest magnitude after every group was multiplied with its weight."""
    found = Float32(0.0)
    for weight in dict.fromkeys(weights):
        part = [x for group, own in zip(values, weights, strict=True) if own == weight for x in group]
        found = cute.arch.fmax(found, from_bits(largest(part)) * weight, nan=True)
    return bits(found)
