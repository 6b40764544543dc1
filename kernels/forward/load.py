"""Producer role: one warp feeds Q once a tile and then K and V, K one block ahead of V."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..algo.blocks import WARPGROUP_ROWS, Blocks
from ..algo.gqa import HeadMap
from ..algo.scheduler import WorkTile
from ..algo.seqlen import DenseSeqlen, RaggedSeqlen
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

    def put(self, seqlen: DenseSeqlen | RaggedSeqlen, tile: WorkTile, row: Int32):
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
