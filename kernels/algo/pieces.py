"""How the keys of a batch are dealt out to CTAs: in equal parts, whatever the lengths are.

The keys of a sequence are counted in granules. All granules, sequence after sequence, make one line; part p of P gets
the same share of it as the others, and CTAs of all heads cut the line alike. A part that holds some granules of a
sequence but not all gives a partial result. Everything is worked out from the lengths by every warp that needs it:
nothing is planned on the host, and a captured graph serves any lengths.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..prims.divide import Divisor
from ..prims.ptx import read
from .blocks import ceil_div
from .scheduler import LANES
from .seqlen import Lengths, uniform
from .window import Chunk, Window


class Given(NamedTuple):
    """The lists of a call, int32, as the kernel has them. Of one whose flag is 0 any number is read and dropped."""

    lengths: cute.Tensor  # (b)
    cu_new: cute.Tensor  # (b + 1)
    leftpad: cute.Tensor  # (b)
    batch_idx: cute.Tensor  # (b)
    indptr: cute.Tensor  # (b + 1)
    cu_q: cute.Tensor  # (b + 1)
    has_lengths: Int32
    has_new: Int32
    has_leftpad: Int32
    has_batch_idx: Int32
    has_indptr: Int32
    has_cu_q: Int32
    added: Int32
    seqlen_q: Int32  # of every sequence or, with cu_q, at most
    capacity: Int32  # rows that a sequence has room for
    batch: Int32


class Sequence(NamedTuple):
    """One sequence: its queries and its keys."""

    q: Int32  # number of queries
    k: Int32  # number of keys
    first: Int32  # the first key that a query of it sees
    end: Int32  # behind the last one
    granule: Int32  # keys
    start: Int32  # the key with which the first granule begins
    count: Int32  # granules, at least 1


class Batch(NamedTuple):
    given: Given
    window: Window | Chunk
    tile_n: int
    granule: Int32 | None  # keys, 0: as `splits` says; None: a block
    splits: Int32 | None  # of every sequence

    def flagged(self, mX: cute.Tensor, i, flag):
        """mX[i], or 0 where the list is not given."""
        return cutlass.select_(flag != 0, read(mX, i * flag), Int32(0))

    def queries(self, b) -> tuple[Int32, Int32]:
        """The first row and the number of the queries of sequence b."""
        g = self.given
        first = self.flagged(g.cu_q, b, g.has_cu_q)
        ragged = self.flagged(g.cu_q, b + 1, g.has_cu_q) - first
        return first, cutlass.select_(g.has_cu_q != 0, cutlass.min(ragged, g.seqlen_q), g.seqlen_q)

    def leftpad(self, b) -> Int32:
        return self.flagged(self.given.leftpad, b, self.given.has_leftpad)

    def cache_batch(self, b) -> Int32:
        g = self.given
        return cutlass.select_(g.has_batch_idx != 0, read(g.batch_idx, b * g.has_batch_idx), b)

    def keys(self, b) -> Int32:
        g = self.given
        new = self.flagged(g.cu_new, b + 1, g.has_new) - self.flagged(g.cu_new, b, g.has_new)
        rows = self.flagged(g.lengths, b, g.has_lengths) + g.added + new
        return cutlass.max(cutlass.min(rows, g.capacity) - self.leftpad(b), 0)

    def sequence(self, b) -> Sequence:
        _, q = self.queries(b)
        k = self.keys(b)
        first, _ = self.window.interval(0, Lengths(q, k))
        _, end = self.window.interval(q - 1, Lengths(q, k))
        end = cutlass.max(end, 0)
        first = cutlass.min(first, end)
        granule, origin = self.grain(first, end)
        start = origin + (first - origin) // granule * granule
        return Sequence(q, k, first, end, granule, start, cutlass.max(ceil_div(end - start, granule), 1))

    def grain(self, first, end) -> tuple:
        """Keys in a granule, and where the first one begins: at 0, of a number of splits at the first block."""
        if self.granule is None:
            return self.tile_n, 0
        block = first // self.tile_n * self.tile_n
        by_splits = ceil_div(ceil_div(end - block, self.tile_n), self.splits) * self.tile_n
        granule = cutlass.select_(self.granule > 0, self.granule, cutlass.max(by_splits, self.tile_n))
        return granule, cutlass.select_(self.granule > 0, Int32(0), block)

    def granules(self, b, limit=None) -> Int32:
        """Of any b: 0 from `limit` on, by default the batch."""
        batch = self.given.batch
        inside = cutlass.min(b, batch - 1)
        return cutlass.select_(b < (batch if limit is None else limit), self.sequence(inside).count, Int32(0))

    def total(self) -> Int32:
        return self.before(self.given.batch)

    @cute.jit
    def before(self: cutlass.Constexpr, b: Int32) -> Int32:
        """Granules of the sequences before b, all together. By a whole warp."""
        mine = Int32(0)
        for first in cutlass.range(0, b, LANES, unroll=4):
            mine = mine + self.granules(first + cute.arch.lane_idx(), b)
        for shift in cutlass.range_constexpr(5):
            mine = mine + cute.arch.shuffle_sync_bfly(mine, offset=1 << shift)
        return uniform(mine)

    @cute.jit
    def find(self: cutlass.Constexpr, x: Int32) -> tuple[Int32, Int32]:
        """The sequence that holds the granule x of the line, and its first one's place. By a whole warp."""
        lane = cute.arch.lane_idx()
        first, before, found = Int32(0), Int32(0), Int32(0)
        start, more = Int32(0), Boolean(True)
        while more:
            mine = self.granules(first + lane)
            upto = mine
            for shift in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(upto, offset=1 << shift, mask_and_clamp=0)
                upto = upto + cutlass.select_(lane >= (1 << shift), other, Int32(0))
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(before + upto <= x))
            place = cutlass.min(passed, LANES - 1)
            start = before + cute.arch.shuffle_sync(upto - mine, place)
            found = first + place
            more = (passed == LANES) & (first + LANES < self.given.batch)
            before = before + cute.arch.shuffle_sync(upto, LANES - 1)
            first = first + LANES
        return uniform(found), uniform(start)


class Shares(NamedTuple):
    """`total` granules in shares that differ by one at most: the first `longer` have `each` + 1, the others `each`."""

    each: Int32
    longer: Int32

    @staticmethod
    def create(total, parts: Divisor) -> "Shares":
        each = parts.quotient(total)
        return Shares(each, total - each * parts.divisor)

    def first(self, part) -> Int32:
        return part * self.each + cutlass.min(part, self.longer)

    def part_of(self, x) -> Int32:
        longer = self.longer * (self.each + 1)
        return cutlass.select_(
            x < longer, x // (self.each + 1), self.longer + (x - longer) // cutlass.max(self.each, 1)
        )


class Piece(NamedTuple):
    """Granules of one sequence that one CTA takes together."""

    batch: Int32
    sequence: Sequence
    first: Int32  # key
    end: Int32
    whole: Boolean  # the whole sequence: the result is final
    slot: Int32  # where a partial result goes
    n_block: Int32  # first key block
    count: Int32  # key blocks; 0: the sequence has no such rows
    base: Int32  # key blocks that this CTA took before
    nth: Int32  # pieces that it took before


class Line(NamedTuple):
    """A CTA's walk along its share, for one tile of query rows. A piece is all of a sequence that the share holds or,
    where the granules are given, one granule.
    """

    batch: Batch
    parts: Divisor
    ratio: Divisor  # rows of a query: heads of a group
    row: Int32  # the tile's first

    @property
    def by_granule(self) -> bool:
        return self.batch.granule is not None

    @cute.jit
    def walk(self: cutlass.Constexpr, part: Int32, run: cutlass.Constexpr):
        shares = Shares.create(self.batch.total(), self.parts)
        x, last = shares.first(part), shares.first(part + 1)
        base, nth = Int32(0), Int32(0)
        if x < last:
            b, start = self.batch.find(x)
            while x < last:
                s = self.batch.sequence(b)
                at = x - start
                upto = at + 1 if cutlass.const_expr(self.by_granule) else cutlass.min(last - start, s.count)
                piece = self.piece(b, s, at, upto, part, x, base, nth)
                if piece.count > 0:
                    run(piece)
                base = base + piece.count
                nth = nth + cutlass.min(piece.count, 1)
                x = start + upto
                is_done = upto >= s.count
                b = cutlass.select_(is_done, b + 1, b)
                start = cutlass.select_(is_done, start + s.count, start)

    def piece(self, b, s: Sequence, at, upto, part, place, base, nth) -> Piece:
        """Granules at .. upto - 1 of a sequence."""
        tile_n = self.batch.tile_n
        first, end = s.start + at * s.granule, cutlass.min(s.start + upto * s.granule, s.end)
        n_block = cutlass.max(first, s.first) // tile_n
        count = cutlass.max(ceil_div(end, tile_n) - n_block, 1)
        count = cutlass.select_(self.row < s.q * self.ratio.divisor, count, Int32(0))
        slot = self.slot(part, place, cutlass.select_(at == 0, Int32(1), Int32(0)))
        is_whole = (at == 0) & (upto == s.count)
        return Piece(b, s, cutlass.max(first, s.first), end, is_whole, slot, n_block, count, base, nth)

    def slot(self, part, place, begins) -> Int32:
        """Of a partial result. A part has at most two: of a sequence that began before it, and of one that goes on
        behind it (`begins`). `place`: of the granule on the line.
        """
        return place if self.by_granule else 2 * part + begins
