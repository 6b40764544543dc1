"""Query rows of a decode tile: the heads of a group, token after token, so that they share K and V."""

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..algo.pieces import Batch, Piece
from ..algo.sink import joined
from ..prims.address import words_at
from ..prims.branch import either, when
from ..prims.divide import Divisor
from ..prims.ptx import pack
from ..prims.wgmma import ROWS as OWN_ROWS
from ..prims.wgmma import rows as by_row
from ..prims.wgmma import scale_rows
from .config import ROWS, Spec

LANE_BYTES = 16


class Place(NamedTuple):
    """Where the rows of one tile lie in q and out, (b, s, h, d) or ragged (1, total, h, d)."""

    b: Int32
    first: Int32  # query row of the sequence
    head: Int32  # of Q, the first of the group
    ratio: Divisor
    row: Int32  # of the tile, of all rows of the sequence
    count: Int32  # rows of the sequence from there on, at most ROWS

    @staticmethod
    def of(batch: Batch, piece: Piece, head_kv, ratio, row) -> "Place":
        first, queries = batch.queries(piece.batch)
        b = cutlass.select_(batch.given.has_cu_q != 0, Int32(0), piece.batch)
        rows = queries * ratio.divisor
        return Place(b, first, head_kv * ratio.divisor, ratio, row, cutlass.min(rows - row, ROWS))

    def token(self, i):
        """Of the tile's row i, within the sequence."""
        return self.ratio.quotient(self.row + i)

    def head_of(self, i):
        return self.head + self.ratio.remainder(self.row + i)

    def offset(self, mX: cute.Tensor, i) -> Int64:
        """Elements from the start of mX (b, s, h, d) to row i."""
        steps = Int64(self.b) * Int64(mX.stride[0]) + Int64(self.first + self.token(i)) * Int64(mX.stride[1])
        return steps + Int64(self.head_of(i)) * Int64(mX.stride[2])

    def store(self, mO: cute.Tensor, acc_O: cute.Tensor, i, column, dtype):
        """A thread's rows i and i + 8, its columns from `column` on."""
        for r in range(OWN_ROWS):
            row = by_row(acc_O)[r, None]
            when(i + 8 * r < self.count, partial(self.store_row, mO, row, i + 8 * r, column, dtype))

    def store_row(self, mO: cute.Tensor, row: cute.Tensor, i, column, dtype):
        start = mO.iterator.toint() + 2 * self.offset(mO, i)
        for c in range(cute.size(row) // 2):
            at = 8 * c + column
            when(at < mO.shape[3], partial(store_pair, start + 2 * at, row[2 * c], row[2 * c + 1], dtype))

    def store_lse(self, mLSE: cute.Tensor, lse: cute.Tensor, i, column):
        for r in range(OWN_ROWS):
            when((column == 0) & (i + 8 * r < self.count), partial(self.put_lse, mLSE, lse[r], i + 8 * r))

    def put_lse(self, mLSE: cute.Tensor, lse, i):
        mLSE[self.b, self.head_of(i), self.first + self.token(i)] = lse


def store_pair(address: Int64, low, high, dtype):
    words_at(address, 1)[0] = pack(low, high, dtype)


class Parts(NamedTuple):
    """Partial results in global memory, fp32: O divided by its sum, and LSE."""

    mO: cute.Tensor  # (slots, rows, head_dim_v of the tile), contiguous
    mLSE: cute.Tensor  # (slots, rows)

    def place(self, slot, i) -> Int64:
        return Int64(slot) * Int64(self.mLSE.shape[1]) + Int64(i)

    def o(self, slot, i) -> Int64:
        """Address of a row."""
        return self.mO.iterator.toint() + 4 * self.place(slot, i) * self.mO.shape[2]

    def lse(self, slot, i) -> cute.Tensor:
        return words_at(self.mLSE.iterator.toint() + 4 * self.place(slot, i), 1, Float32)

    def store(self, slot, count, acc_O: cute.Tensor, lse: cute.Tensor, i, column):
        """A thread's rows i and i + 8, its columns from `column` on."""
        for r in range(OWN_ROWS):
            row = by_row(acc_O)[r, None]
            when(i + 8 * r < count, partial(self.store_row, row, lse[r], slot, i + 8 * r, column))

    def store_row(self, row: cute.Tensor, lse, slot, i, column):
        for c in range(cute.size(row) // 2):
            pair = words_at(self.o(slot, i) + 4 * (8 * c + column), 2, Float32)
            pair[0], pair[1] = row[2 * c], row[2 * c + 1]
        when(column == 0, partial(self.put_lse, slot, i, lse))

    def put_lse(self, slot, i, lse):
        self.lse(slot, i)[0] = lse


class Output(NamedTuple):
    """Where the result of a piece goes."""

    mO: cute.Tensor
    mLSE: cute.Tensor
    parts: Any  # Parts, where a sequence may be split
    mSink: Any  # (heads), where there are sinks
    unit: Int32
    units: Int32
    spec: Spec
    dtype: object

    def store(self, a, piece: Piece, place: Place, row, column):
        """A thread's rows row and row + 8 of the tile, its columns from `column` on."""
        inverse, lse = (cute.make_rmem_tensor(OWN_ROWS, Float32) for _ in range(2))
        a.softmax.finish(inverse, lse)
        final = partial(self.final, a.acc_O, inverse, lse, place, row, column)
        if self.spec.splits:
            slot = piece.slot * self.units + self.unit
            either(piece.whole, final, partial(self.part, a.acc_O, inverse, lse, slot, place, row, column))
        else:
            final()

    def final(self, acc_O, inverse, lse, place: Place, row, column):
        if self.spec.sink:
            for r in range(OWN_ROWS):
                # NOTE: of a row that does not exist any sink.
                head = place.head_of(cutlass.min(row + 8 * r, place.count - 1))
                lse[r], factor = joined(lse[r], self.mSink[head].to(Float32))
                inverse[r] = inverse[r] * factor
        scale_rows(acc_O, inverse)
        place.store(self.mO, acc_O, row, column, self.dtype)
        place.store_lse(self.mLSE, lse, row, column)

    def part(self, acc_O, inverse, lse, slot, place: Place, row, column):
        scale_rows(acc_O, inverse)
        self.parts.store(slot, place.count, acc_O, lse, row, column)


def words_at_shared(address: Int32) -> cute.Tensor:
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=LANE_BYTES)
    return cute.make_tensor(pointer, cute.make_layout(4))
