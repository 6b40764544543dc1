"""Producer role: one warp feeds Q once a tile and then K and V, K one block ahead of V.

K and V come from `DenseKV` or, in pages, from `PagedKV`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..algo.blocks import WARPGROUP_ROWS, Blocks, ceil_div
from ..algo.gqa import HeadMap
from ..algo.scheduler import WorkTile
from ..algo.seqlen import DenseSeqlen, PagedSeqlen, Pages, RaggedSeqlen
from ..algo.window import LocalBlocks
from ..prims.ring import Ring
from ..prims.tma import Feed, Operand


class QuerySource(NamedTuple):
    """Q tiles of 64 rows, one a warpgroup, all under one barrier."""

    operand: Operand
    sQ: cute.Tensor  # (64, head_dim, warpgroup of a stage)
    ring: Ring
    warpgroups: int
    head_dim: int

    def put(self, seqlen: DenseSeqlen | RaggedSeqlen | PagedSeqlen, tile: WorkTile, row: Int32):
        """The tile's queries from `row` on, zeros past the last of the sequence.

        A warpgroup that begins before query 0 gets the first rows in their stead: it has nothing to store.
        """
        mQ = seqlen.queries(self.operand.tensor, tile.head, tile.batch)
        gQ = cute.local_tile(mQ, (WARPGROUP_ROWS, self.head_dim), (None, 0))
        first = row // WARPGROUP_ROWS
        places = [cutlass.max(first + i, 0) for i in range(self.warpgroups)]
        Feed.create(self.ring, self.operand.atom, gQ, self.sQ).put_all(tile.nth, places)


class DenseKV(NamedTuple):
    """K and V that lie in memory as whole tensors: one TMA box a block, zeros past the end of the keys."""

    K: Operand
    V: Operand
    sK: cute.Tensor  # (tile_n, head_dim, stage)
    sV: cute.Tensor  # (head_dim_v, tile_n, stage)
    k_ring: Ring
    v_ring: Ring
    heads: HeadMap
    tile_n: int
    head_dim: int
    head_dim_v: int

    def feeds(self, seqlen: DenseSeqlen | RaggedSeqlen, tile: WorkTile) -> tuple[Feed, Feed]:
        """K and V of the tile's head, block by block."""
        head = self.heads.kv_head(tile.head)
        gK = cute.local_tile(seqlen.keys(self.K.tensor, head, tile.batch), (self.tile_n, self.head_dim), (None, 0))
        gV = cute.local_tile(seqlen.values(self.V.tensor, head, tile.batch), (self.head_dim_v, self.tile_n), (0, None))
        k = Feed.create(self.k_ring, self.K.atom, gK, self.sK)
        v = Feed.create(self.v_ring, self.V.atom, gV, self.sV)
        return k, v


class PagedKV(NamedTuple):
    """K and V in pages of a pool: several TMA boxes a block, each of keys that lie in one page.

    What lies behind a sequence's last page is not read, nor are the table's entries for it; what lies behind the last
    key in its page is, as far as its box goes.
    """

    K: Operand  # (row, head_dim, h_kv, page), boxes of `box` rows
    V: Operand  # (head_dim_v, row, h_kv, page)
    sK: cute.Tensor  # (tile_n, head_dim, stage)
    sV: cute.Tensor  # (head_dim_v, tile_n, stage)
    k_ring: Ring
    v_ring: Ring
    heads: HeadMap
    tile_n: int
    head_dim: int
    head_dim_v: int
    box: int

    def feeds(self, seqlen: PagedSeqlen, tile: WorkTile) -> tuple["PagedFeed", "PagedFeed"]:
        head = self.heads.kv_head(tile.head)
        k_box, v_box = (self.box, self.head_dim), (self.head_dim_v, self.box)
        gK = cute.flat_divide(self.K.tensor[None, None, head, None], k_box)[None, None, None, 0, None]
        gV = cute.flat_divide(self.V.tensor[None, None, head, None], v_box)[None, None, 0, None, None]
        sK = cute.flat_divide(self.sK, k_box)[None, None, None, 0, None]
        sV = cute.flat_divide(self.sV, v_box)[None, None, 0, None, None]
        pages, length = Table(seqlen.k, tile.batch, self.box, self.tile_n), seqlen.k.length(tile.batch)
        k = Feed.create(self.k_ring, self.K.atom, gK, sK)
        v = Feed.create(self.v_ring, self.V.atom, gV, sV)
        return PagedFeed(k, pages, length), PagedFeed(v, pages, length)


class Table(NamedTuple):
    """Where the boxes of a sequence's key blocks lie."""

    pages: Pages
    batch: Int32
    box: int
    tile_n: int

    @cute.jit
    def look_up(self, key: Int32, count: Int32) -> Int32:
        """In lane i the page of the i-th of `count` boxes from `key` on."""
        page, lane = Int32(0), cute.arch.lane_idx()
        if lane < count:
            page = self.pages.table[self.batch, (key + lane * self.box) // self.pages.page_size]
        return page


class PagedFeed(NamedTuple):
    """As Feed, of a stage that several boxes fill; a block's boxes behind the last key are left out."""

    feed: Feed  # g (.., row of boxes, page), s (.., box, stage)
    table: Table
    length: Int32

    @cute.jit
    def put(self, i: Int32, n_block: Int32):
        feed, box, boxes = self.feed, self.table.box, self.table.tile_n // self.table.box
        key = n_block * self.table.tile_n
        count = cutlass.min(ceil_div(cutlass.max(self.length - key, 0), box), boxes)
        # NOTE: asked before the stage is free, so that the answer comes while this warp waits.
        page = self.table.look_up(key, count)
        full = feed.ring.claim(i, count * (feed.ring.tile_bytes // boxes))
        stage, size = feed.ring.stage(i), self.table.pages.page_size
        for j in cutlass.range(count, unroll=1):
            source = feed.g[None, (key + j * box) % size // box, cute.arch.shuffle_sync(page, j)]
            cute.copy(feed.atom, source, feed.s[None, j, stage], tma_bar_ptr=full)


@cute.jit
def load_kv(
    k: cutlass.Constexpr, v: cutlass.Constexpr, blocks: Blocks | LocalBlocks, base: Int32,
    before_last: cutlass.Constexpr,
):  # fmt: skip
    """The key blocks of one tile at ring positions base.. ; what before_last() gives."""
    k.put(base, blocks.n_block(0))
    for i in cutlass.range(1, blocks.count, unroll=1):
        k.put(base + i, blocks.n_block(i))
        v.put(base + i - 1, blocks.n_block(i - 1))
    result = before_last()
    v.put(base + blocks.count - 1, blocks.leftmost)
    return result
