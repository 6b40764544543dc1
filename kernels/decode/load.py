"""Producer role: K and V of a piece, block by block, from right to left.

In shared memory a block of K or V is the same: groups of columns that a swizzle spans, one behind the other, and in a
group key after key. So both go the same way, as boxes of some keys and one group, or row by row.
"""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from ..algo.pieces import Batch, Line, Piece
from ..algo.scheduler import LANES
from ..prims.address import words_at
from ..prims.branch import when
from ..prims.ptx import copy_async
from ..prims.ring import Ring
from .rows import Place

PIECE = 16  # bytes of a cp.async


class Tile(NamedTuple):
    """K or V of a block as its bytes lie in shared memory."""

    sX: cute.Tensor  # a stage a mode
    columns: int  # of the tile
    keys: int
    width: int  # columns of a group

    @property
    def groups(self) -> int:
        return self.columns // self.width

    @property
    def number(self) -> int:
        """Elements."""
        return self.columns * self.keys

    def address(self, stage) -> Int32:
        return Int32(self.sX.iterator.toint()) + 2 * self.number * stage

    def row(self, stage, group: int, key) -> Int32:
        """The address of a key's row of a group."""
        return self.address(stage) + 2 * self.width * (group * self.keys + key)

    def piece(self, key, c):
        """Where the c-th 16 bytes of a key lie, from its row of group 0 on. The swizzle takes 8 rows of 128 bytes."""
        a_row = self.width // 8
        group, c = c // a_row, c % a_row
        swizzled = c ^ (key // (8 // a_row) % a_row)
        return 2 * self.width * self.keys * group + PIECE * swizzled


class Queries(NamedTuple):
    """Q, row by row, by the warps that load keys: the rows of a piece may be heads of many tokens."""

    mQ: cute.Tensor  # (b, s, h, d), of ragged queries (1, total, h, d)
    tile: Tile  # of ROWS queries
    ring: Ring
    line: Line
    head_kv: Int32
    warp: Int32  # of the loaders
    warps: int

    @cute.jit
    def put(self: cutlass.Constexpr, piece: Piece):
        """The rows that there are; the others hold anything, and so do their scores, which nobody reads. Columns that
        do not exist become 0.
        """
        place = Place.of(self.line.batch, piece, self.head_kv, self.line.ratio, self.line.row)
        self.ring.wait_empty(piece.nth)
        stage, columns = self.ring.stage(piece.nth), self.mQ.shape[3]
        a_row = self.tile.columns // 8
        pieces, start = place.count * a_row, self.warp * LANES + cute.arch.lane_idx()
        for x in cutlass.range(start, pieces, LANES * self.warps, unroll=1):
            i, c = x // a_row, x % a_row
            address = self.mQ.iterator.toint() + 2 * place.offset(self.mQ, i) + PIECE * c
            size = cutlass.select_(8 * c < columns, Int32(PIECE), Int32(0))
            copy_async(self.tile.row(stage, 0, i) + self.tile.piece(i, c), address, size)
        cute.arch.cp_async_mbarrier_arrive_noinc(self.ring.full + stage)


class Boxes(NamedTuple):
    """K or V by TMA: boxes of some keys of one page; the cache of a sequence is a page where there are none."""

    atom: cute.CopyAtom
    tensor: cute.Tensor  # coordinates (row, column, head, page)
    tile: Tile
    ring: Ring
    rows: int  # of a box

    @staticmethod
    def create(mX: cute.Tensor, swizzle, rows: int, width: int) -> tuple:
        """Copy atom and coordinates of mX (page, row, head, column)."""
        mX = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[1, 3, 2, 0]))
        box = cute.make_composed_layout(swizzle, 0, cute.make_layout((rows, width), stride=(width, 1)))
        atom, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, box, (rows, width))
        return atom, tensor

    def put(self, full, stage, nth: int, row, head, page):
        """The nth box of a stage."""
        g = cute.domain_offset((row, 0), self.tensor[None, None, head, page])
        one, tile = cute.make_layout(1), self.tile
        for group in range(tile.groups):
            gX = cute.local_tile(g, (self.rows, tile.width), (0, group))
            to = cute.make_ptr(
                self.tile.sX.element_type, tile.row(stage, group, nth * self.rows), cute.AddressSpace.smem,
                assumed_align=1024,
            )  # fmt: skip
            sX = cute.make_tensor(to, cute.make_layout((self.rows, tile.width), stride=(tile.width, 1)))
            s, x = cpasync.tma_partition(self.atom, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))
            cute.copy(self.atom, x, s, tma_bar_ptr=full)

    @property
    def box_bytes(self) -> int:
        return 2 * self.rows * self.tile.columns


class Contiguous(NamedTuple):
    """Where a key lies: every sequence has rows of its own."""

    batch: Batch

    def of(self, piece: Piece) -> "ContiguousPiece":
        return ContiguousPiece(self.batch.cache_batch(piece.batch), self.batch.leftpad(piece.batch))


class ContiguousPiece(NamedTuple):
    sequence: Int32  # of the cache
    start: Int32  # row of key 0

    def page(self, key, there):
        return self.sequence

    def row(self, key):
        return self.start + key


class Paged(NamedTuple):
    """Where a key lies: in the pages that a table lists, each of page_size keys."""

    table: cute.Tensor  # (b, width), or (1, all) with indptr
    page_size: Int32
    batch: Batch

    def of(self, piece: Piece) -> "PagedPiece":
        given, b = self.batch.given, piece.batch
        first = self.batch.flagged(given.indptr, b, given.has_indptr)
        row = cutlass.select_(given.has_indptr != 0, Int32(0), b)
        steps = Int64(row) * Int64(self.table.stride[0]) + Int64(first) * Int64(self.table.stride[1])
        return PagedPiece(
            self.table.iterator.toint() + 4 * steps, 4 * Int64(self.table.stride[1]), self.page_size,
            self.batch.leftpad(b),
        )  # fmt: skip


class PagedPiece(NamedTuple):
    table: Int64  # address of the sequence's first entry
    step: Int64  # bytes to the next one
    page_size: Int32
    start: Int32  # row of key 0

    @cute.jit
    def page(self: cutlass.Constexpr, key: Int32, there: cutlass.Boolean) -> Int32:
        """That holds the key; where it is not there the table is not read."""
        page = Int32(0)
        if there:
            page = words_at(self.table + Int64((self.start + key) // self.page_size) * self.step, 1)[0]
        return page

    def row(self, key):
        return (self.start + key) % self.page_size


class BoxLoader(NamedTuple):
    """By one warp, whose lanes look up the pages of as many boxes at a time."""

    Q: Queries
    K: Boxes
    V: Boxes
    source: Contiguous | Paged
    head: Int32
    tile_n: int

    @cute.jit
    def run(self: cutlass.Constexpr, piece: Piece):
        self.Q.put(piece)
        place = self.source.of(piece)
        boxes = self.tile_n // self.K.rows  # of a block
        blocks = LANES // boxes
        for start in cutlass.range(0, piece.count, blocks, unroll=1):
            pages = self.pages(place, piece, start, boxes)
            for i in cutlass.range(start, cutlass.min(start + blocks, piece.count), unroll=1):
                for x in cutlass.range_constexpr(2):
                    self.put((self.K, self.V)[x], place, piece, pages, i, start, boxes)

    def key(self, piece: Piece, i, box):
        """The first key of a box of the i-th block taken."""
        return (piece.n_block + piece.count - 1 - i) * self.tile_n + box * self.K.rows

    def is_there(self, piece: Piece, key):
        return (key < piece.end) & (key + self.K.rows > piece.first)

    def pages(self, place, piece: Piece, start, boxes: int) -> Int32:
        """One a lane, those of the blocks from `start` on."""
        lane = cute.arch.lane_idx()
        key = self.key(piece, start + lane // boxes, lane % boxes)
        return place.page(cutlass.max(key, piece.first), self.is_there(piece, key))

    @cute.jit
    def put(
        self: cutlass.Constexpr, x: cutlass.Constexpr, place: cutlass.Constexpr, piece: cutlass.Constexpr,
        pages: Int32, i: Int32, start: Int32, boxes: cutlass.Constexpr,
    ):  # fmt: skip
        """The i-th block taken: of its boxes those that hold keys."""
        position = piece.base + i
        x.ring.wait_empty(position)
        number = Int32(0)
        for box in cutlass.range_constexpr(boxes):
            there = self.is_there(piece, self.key(piece, i, box))
            number = number + cutlass.select_(there, Int32(x.box_bytes), Int32(0))
        full, stage = x.ring.announce(position, number), x.ring.stage(position)
        for box in cutlass.range_constexpr(boxes):
            key = self.key(piece, i, box)
            page = cute.arch.shuffle_sync(pages, (i - start) * boxes + box)
            when(self.is_there(piece, key), partial(x.put, full, stage, box, place.row(key), self.head, page))


class Rows(NamedTuple):
    """K or V of one head, row by row."""

    mX: cute.Tensor  # (page, row, head, column)
    tile: Tile
    ring: Ring

    def address(self, page, row, head) -> Int64:
        mX = self.mX
        steps = Int64(page) * Int64(mX.stride[0]) + Int64(row) * Int64(mX.stride[1]) + Int64(head) * Int64(mX.stride[2])
        return mX.iterator.toint() + 2 * steps


class RowLoader(NamedTuple):
    """By four warps: each has a quarter of a block's keys, a lane the page of one of them."""

    Q: Queries
    K: Rows
    V: Rows
    source: Contiguous | Paged
    head: Int32
    tile_n: int
    warp: Int32  # 0 .. 3

    @cute.jit
    def run(self: cutlass.Constexpr, piece: Piece):
        self.Q.put(piece)
        place = self.source.of(piece)
        page = self.page(place, piece, Int32(0))
        for i in cutlass.range(piece.count, unroll=1):
            following = self.page(place, piece, i + 1)
            for x in cutlass.range_constexpr(2):
                self.put((self.K, self.V)[x], place, piece, page, i)
            page = following

    @property
    def share(self) -> int:
        """Keys of a warp."""
        return self.tile_n // 4

    def key(self, piece: Piece, i, nth):
        """The nth key of this warp in the i-th block taken."""
        return (piece.n_block + piece.count - 1 - i) * self.tile_n + self.warp * self.share + nth

    def page(self, place, piece: Piece, i) -> Int32:
        """Of the key of this lane in the i-th block taken."""
        lane = cute.arch.lane_idx()
        key = self.key(piece, i, lane % self.share)
        return place.page(key, (key >= piece.first) & (key < piece.end) & (i < piece.count))

    @cute.jit
    def put(
        self: cutlass.Constexpr,
        x: cutlass.Constexpr,
        place: cutlass.Constexpr,
        piece: cutlass.Constexpr,
        page: Int32,
        i: Int32,
    ):
        """Rows that are not there become 0."""
        position = piece.base + i
        x.ring.wait_empty(position)
        stage, tile = x.ring.stage(position), x.tile
        lane = cute.arch.lane_idx()
        a_row = tile.columns // 8  # pieces of 16 bytes
        address = x.address(page, place.row(self.key(piece, i, lane % self.share)), self.head)
        low, high = Int32(address & 0xFFFFFFFF), Int32(address >> 32)
        columns = x.mX.shape[3]
        for first in cutlass.range_constexpr(0, self.share * a_row, LANES):
            n = first + lane
            nth, c = n // a_row, n % a_row
            key = self.key(piece, i, nth)
            source = (Int64(cute.arch.shuffle_sync(high, nth)) << 32) | Int64(Uint32(cute.arch.shuffle_sync(low, nth)))
            there = (key >= piece.first) & (key < piece.end) & (8 * c < columns)
            to = tile.row(stage, 0, self.warp * self.share + nth) + tile.piece(self.warp * self.share + nth, c)
            address = cutlass.select_(there, source + PIECE * c, x.mX.iterator.toint())
            copy_async(to, address, cutlass.select_(there, Int32(PIECE), Int32(0)))
        cute.arch.cp_async_mbarrier_arrive_noinc(x.ring.full + stage)
