"""Which keys a query sees, and which key blocks a tile of queries takes for it.

Every mask is an interval of keys: `fa3.variant.Variant.interval` is the rule. Both ends of it grow with the query, so
that the first and the last row of a tile say all about its blocks.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..prims.wgmma import ROWS, rows
from .blocks import Blocks, ceil_div, key_blocks
from .mask import Mask
from .scheduler import pick
from .seqlen import Lengths


class Diagonal(NamedTuple):
    """All keys or, if causal, those up to the query's own."""

    causal: bool

    def blocks(self, row: Int32, lengths: Lengths, tile_m: int, tile_n: int) -> Blocks:
        return key_blocks(row, lengths, tile_m, tile_n, self.causal)

    def mask(self, row: Int32, column: Int32, lengths: Lengths, tile_n: int) -> Mask:
        return Mask(row, column, lengths, tile_n, self.causal)


class LocalBlocks(NamedTuple):
    """Key blocks of one query tile, taken right to left: those that need a mask on the right, those that need none,
    those that need one on the left.
    """

    count: Int32  # at least 1
    masked: Int32  # at least 1
    unmasked: Int32  # where the blocks without a mask end
    last: Int32  # number of the block that is taken first
    has_edge = True

    def n_block(self, i):
        """The i-th block taken."""
        return self.last - i

    @property
    def leftmost(self):
        """The block taken last."""
        return self.last + 1 - self.count


def local_blocks(keys, row, lengths: Lengths, tile_m: int, tile_n: int) -> LocalBlocks:
    """Of the query tile that begins at `row`. A tile that sees no key takes one block, wholly masked."""
    start, seen_by_all = keys.interval(row, lengths)
    hidden_from_some, stop = keys.interval(cutlass.min(row + tile_m, lengths.q) - 1, lengths)
    first, end = start // tile_n, ceil_div(cutlass.max(stop, 1), tile_n)
    count = end - first
    masked = cutlass.min(cutlass.max(end - cutlass.max(seen_by_all, 0) // tile_n, 1), count)
    edge = ceil_div(hidden_from_some, tile_n) - first
    return LocalBlocks(count, masked, cutlass.max(count - edge, masked), end - 1)


class Window(NamedTuple):
    """`left` keys before the query's own position, the position, and `right` keys behind it: 0 to 2^31 - 2."""

    left: Int32
    right: Int32

    def interval(self, row, lengths: Lengths):
        """Query `row` sees the keys first..end - 1; none where end <= first. NOTE: no sum here passes 2^31."""
        position = row + lengths.k - lengths.q
        first = cutlass.max(position - cutlass.min(self.left, cutlass.max(position, 0)), 0)
        return first, position + cutlass.min(self.right + 1, lengths.q - row)

    def blocks(self, row: Int32, lengths: Lengths, tile_m: int, tile_n: int) -> LocalBlocks:
        return local_blocks(self, row, lengths, tile_m, tile_n)

    def mask(self, row: Int32, column: Int32, lengths: Lengths, tile_n: int) -> "LocalMask":
        return LocalMask(row, column, lengths, tile_n, self)


class Chunk(NamedTuple):
    """Of a window, the keys in the same chunk of `size` keys as the query's position; none before position 0."""

    window: Window
    size: Int32

    def interval(self, row, lengths: Lengths):
        first, end = self.window.interval(row, lengths)
        position = row + lengths.k - lengths.q
        inside = cutlass.max(position, 0) % self.size
        room = pick(position < 0, Int32(0) if isinstance(position, Int32) else 0, self.size - inside)
        return cutlass.max(first, position - inside), position + cutlass.min(end - position, room)

    blocks, mask = Window.blocks, Window.mask


class LocalMask(NamedTuple):
    """Hides what lies outside of each row's interval."""

    row: Int32  # this thread's first query row in the sequence; the second is 8 below
    column: Int32  # this thread's first column in a block
    lengths: Lengths
    tile_n: int
    keys: Window | Chunk

    @cute.jit
    def apply(self, acc_S: cute.Tensor, n_block: Int32):
        """Scores of keys that the row may not see become -inf."""
        S = rows(acc_S)
        for r in cutlass.range_constexpr(ROWS):
            first, end = self.keys.interval(self.row + 8 * r, self.lengths)
            begin = n_block * self.tile_n + self.column
            for c in cutlass.range_constexpr(self.tile_n // 4):
                at = 8 * (c // 2) + c % 2
                is_seen = (at >= first - begin) & (at < end - begin)
                S[r, c] = cutlass.select_(is_seen, S[r, c], -Float32.inf)
