"""Who computes which query tile, and in which order.

An order numbers the tiles, for CTAs that come and go by the item, for CTAs that stay by the CTA's turn. Neighbours run
at the same time, so they share K and V in L2. A scheduler walks a CTA through its tiles: `lead` the producer, whose
run(tile, blocks, before_last) calls before_last ahead of the tile's last load, `follow` the consumers with
run(tile, blocks).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ..prims.ptx import read
from ..prims.ring import Ring
from .seqlen import Side

LANES = 32
L2_BYTES = 32 * 2**20  # K and V of the heads of a section stay under this (the L2 of sm_90 has 50 to 60 MB)


def pick(condition, a, b):
    """a or b. NOTE: where tests walk through an order on the host, conditions are Python's, which `select_` refuses."""
    return (a if condition else b) if isinstance(condition, bool) else cutlass.select_(condition, a, b)


class WorkTile(NamedTuple):
    m_block: Int32  # query tile: see blocks.first_row
    head: Int32  # of Q
    batch: Int32
    nth: Int32  # tiles that this CTA did before
    base: Int32  # key blocks that this CTA took before


class Grid(NamedTuple):
    """All query tiles."""

    m_blocks: Int32
    heads: Int32
    sequences: Int32  # heads * batch

    @property
    def tiles(self):
        return self.m_blocks * self.sequences

    def tile(self, m_block: Int32, sequence: Int32, nth: Int32, base: Int32) -> WorkTile:
        return WorkTile(m_block, sequence % self.heads, sequence // self.heads, nth, base)


class Turn(NamedTuple):
    """What a CTA that stays does in one of its turns."""

    exists: Boolean
    m_block: Int32
    sequence: Int32


class InOrder(NamedTuple):
    """Every tile costs the same: those of one head after the other."""

    grid: Grid

    def at(self, item: Int32) -> tuple[Int32, Int32]:
        """m_block and sequence of the item-th tile."""
        return item % self.grid.m_blocks, item // self.grid.m_blocks

    def turns(self, cta: Int32, ctas: Int32):
        return (self.grid.tiles - cta + ctas - 1) // ctas

    def turn(self, turn: Int32, cta: Int32, ctas: Int32) -> Turn:
        return Turn(Boolean(True), *self.at(turn * ctas + cta))


class LongestFirst(NamedTuple):
    """Causal tiles for CTAs that come and go: heads in sections whose K and V fit in L2 together, in a section the last
    query tile of every head first.
    """

    grid: Grid
    section: Int32  # sequences in a section

    def at(self, item: Int32) -> tuple[Int32, Int32]:
        """m_block and sequence of the item-th tile."""
        m_blocks, sequences = self.grid.m_blocks, self.grid.sequences
        first = item // (self.section * m_blocks) * self.section
        size = cutlass.min(self.section, sequences - first)
        rest = item - first * m_blocks
        return m_blocks - 1 - rest // size, first + rest % size


class Folded(NamedTuple):
    """Causal tiles for CTAs that stay.

    First rounds of pairs, a long and a short tile of one head, which all cost the same. The tiles of the last full
    round and of what is left after it are dealt out one by one, longest first and back and forth: all CTAs end at once.
    NOTE: no more than that. Dealt tiles run with those of many heads, whose K and V do not stay in L2.
    """

    grid: Grid

    @property
    def folds(self):
        """Pairs of a sequence; the middle tile of an odd number is one by itself."""
        return (self.grid.m_blocks + 1) // 2

    def rounds(self, ctas: Int32):
        """Of pairs."""
        return cutlass.max(self.folds * self.grid.sequences // ctas - 1, 0)

    def turns(self, cta: Int32, ctas: Int32):
        rounds = self.rounds(ctas)
        pairs = rounds * ctas
        alone = self.grid.m_blocks % 2 * (pairs // self.folds)  # of the pairs, those without a partner
        return 2 * rounds + (self.grid.tiles - 2 * pairs + alone + ctas - 1) // ctas

    def turn(self, turn: Int32, cta: Int32, ctas: Int32) -> Turn:
        rounds = self.rounds(ctas)
        pair, single = self.paired(turn, cta, ctas), self.dealt(turn - 2 * rounds, cta, ctas, rounds * ctas)
        return Turn(*(pick(turn < 2 * rounds, a, b) for a, b in zip(pair, single, strict=True)))

    def paired(self, turn: Int32, cta: Int32, ctas: Int32) -> Turn:
        item, part, last = turn // 2 * ctas + cta, turn % 2, self.grid.m_blocks - 1
        fold = item % self.folds
        return Turn((part == 0) | (2 * fold != last), fold + (1 - part) * (last - 2 * fold), item // self.folds)

    def dealt(self, turn: Int32, cta: Int32, ctas: Int32, pairs: Int32) -> Turn:
        """From the tiles that the pairs leave: of `sequence` those from `fold` to its mirror, of those after it all."""
        m_blocks = self.grid.m_blocks
        back = turn % 2
        place = turn * ctas + cta + back * (ctas - 1 - 2 * cta)
        sequence, fold = pairs // self.folds, pairs % self.folds
        whole = self.grid.sequences - 1 - sequence
        middle = fold * whole  # where the tiles begin of which `sequence` has one, too
        short = middle + (m_blocks - 2 * fold) * (whole + 1)
        is_middle = (place >= middle) & (place < short)
        start = pick(place < middle, 0, pick(is_middle, middle, short))
        longest = pick(place < middle, m_blocks, pick(is_middle, m_blocks - fold, fold)) - 1
        width = cutlass.max(whole + pick(is_middle, 1, 0), 1)
        rest = place - start
        first = sequence + pick(is_middle, 0, 1)
        return Turn(place < short + middle, longest - rest // width, first + rest % width)


class Slots(NamedTuple):
    """Room for the query tiles of all sequences of a ragged batch: sequence b has those from cu_q[b] // tile_m + b on,
    as many as it could need. So some hold no tile.
    """

    slots: Int32
    heads: Int32

    @property
    def tiles(self):
        return self.slots * self.heads

    tile = Grid.tile


class RaggedOrder(NamedTuple):
    """Sequence after sequence, one head after the other."""

    grid: Slots
    queries: Side
    batch: Int32
    tile_m: Int32

    def start(self, batch: Int32) -> Int32:
        """The first slot of a sequence."""
        return read(self.queries.cu, batch) // self.tile_m + batch

    def at(self, item: Int32) -> tuple[Int32, Int32]:
        """m_block, -1 where there is no tile, and sequence of the item-th slot. By a whole warp."""
        slot, head = item % self.grid.slots, item // self.grid.slots
        batch = self.find(slot)
        nth, tiles = slot - self.start(batch), (self.queries.length(batch) + self.tile_m - 1) // self.tile_m
        is_one = (nth >= 0) & (nth < tiles)  # a slot below 0 lies before the first sequence
        return cutlass.select_(is_one, self.nth_of(nth, tiles), Int32(-1)), batch * self.grid.heads + head

    def nth_of(self, nth: Int32, tiles: Int32) -> Int32:
        """The nth tile taken of a sequence that has so many."""
        return nth

    @cute.jit
    def find(self, slot: Int32) -> Int32:
        """The sequence of a slot, the first one for those before it: every lane looks at one of 32 places."""
        first, size = Int32(0), self.batch
        while size > 1:
            step = (size + LANES - 1) // LANES
            place = cutlass.min(first + cute.arch.lane_idx() * step, first + size - 1)
            at_or_before = cute.arch.popc(cute.arch.vote_ballot_sync(self.start(place) <= slot))
            chosen = cutlass.min(cutlass.max(at_or_before - 1, 0) * step, size - 1)
            first, size = first + chosen, cutlass.min(step, size - chosen)
        return first


class RaggedLongestFirst(RaggedOrder):
    """Causal: of a sequence the last tile first."""

    def nth_of(self, nth: Int32, tiles: Int32) -> Int32:
        return tiles - 1 - nth


def section_in_l2(kv_bytes: Int64, ratio: Int32, sequences: Int32) -> Int32:
    """How many query heads share the L2, `ratio` of them the kv_bytes of one K/V head."""
    fits = cutlass.max(Int64(L2_BYTES) // kv_bytes, Int64(1)) * Int64(ratio)
    return Int32(cutlass.min(fits, Int64(sequences)))


class OneTile(NamedTuple):
    """One CTA a tile: the hardware hands out the next CTA when one ends."""

    order: InOrder | LongestFirst
    rings = ()

    @cute.jit
    def follow(self, blocks_of: cutlass.Constexpr, run: cutlass.Constexpr):
        item, _, _ = cute.arch.block_idx()
        tile = self.order.grid.tile(*self.order.at(item), Int32(0), Int32(0))
        run(tile, blocks_of(tile))

    def lead(self, blocks_of, run):
        self.follow(blocks_of, lambda tile, blocks: run(tile, blocks, nothing))


class Persistent(NamedTuple):
    """One CTA an SM, tile after tile: the producer is in the next one while the consumers end the last."""

    order: InOrder | Folded
    rings = ()

    @cute.jit
    def follow(self, blocks_of: cutlass.Constexpr, run: cutlass.Constexpr):
        order = self.order
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        nth, base = Int32(0), Int32(0)
        for i in cutlass.range(order.turns(cta, ctas), unroll=1):
            turn = order.turn(i, cta, ctas)
            if turn.exists:
                tile = order.grid.tile(turn.m_block, turn.sequence, nth, base)
                blocks = blocks_of(tile)
                run(tile, blocks)
                nth = nth + 1
                base = base + blocks.count

    def lead(self, blocks_of, run):
        self.follow(blocks_of, lambda tile, blocks: run(tile, blocks, nothing))


class Dynamic(NamedTuple):
    """One CTA an SM that takes the next tile when it is ready for one: the producer draws tickets and passes them on.

    The first ticket of a CTA is its own number. NOTE: the next is drawn under the tile's last load. Drawn under the
    first one, every CTA would hold a tile that it cannot begin: 9 % longer where a CTA gets 8 tiles (hd256, simulated).
    """

    order: InOrder | LongestFirst
    tickets: cute.Tensor  # (1) int32 in global memory, 0 at the launch
    drawn: cute.Tensor  # (stages) int32 in shared memory: the ticket of the tile that follows the n-th
    ring: Ring

    @property
    def rings(self):
        return (self.ring,)

    @cute.jit
    def lead(self, blocks_of: cutlass.Constexpr, run: cutlass.Constexpr):
        order = self.order
        item, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        nth, base = Int32(0), Int32(0)
        while item < order.grid.tiles:
            tile = order.grid.tile(*order.at(item), nth, base)
            blocks = blocks_of(tile)
            item = ctas + cute.arch.shuffle_sync(run(tile, blocks, self.draw), 0)
            self.ring.wait_empty(nth)
            with cute.arch.elect_one():
                self.drawn[self.ring.stage(nth)] = item
                self.ring.fill(nth)
            nth = nth + 1
            base = base + blocks.count

    @cute.jit
    def draw(self) -> Int32:
        """The ticket, in lane 0."""
        ticket = Int32(0)
        if cute.arch.lane_idx() == 0:
            ticket = cute.arch.atomic_add(self.tickets.iterator, Int32(1), sem="relaxed", scope="gpu")
        return ticket

    @cute.jit
    def follow(self, blocks_of: cutlass.Constexpr, run: cutlass.Constexpr):
        order = self.order
        item, _, _ = cute.arch.block_idx()
        nth, base = Int32(0), Int32(0)
        while item < order.grid.tiles:
            tile = order.grid.tile(*order.at(item), nth, base)
            blocks = blocks_of(tile)
            run(tile, blocks)
            item = self.take(nth)
            nth = nth + 1
            base = base + blocks.count

    @cute.jit
    def take(self, nth: Int32) -> Int32:
        """The ticket that follows the n-th tile. NOTE: the lane that reads is the one that releases."""
        self.ring.wait_full(nth)
        ticket = Int32(0)
        if cute.arch.lane_idx() == 0:
            ticket = self.drawn[self.ring.stage(nth)]
            self.ring.free(nth)
        return cute.arch.shuffle_sync(ticket, 0)


class Announced(NamedTuple):
    """As Dynamic, of an order with empty slots: the producer looks for the next tile and tells the consumers where it
    is, of the first one too.
    """

    order: RaggedOrder
    tickets: cute.Tensor  # (1) int32 in global memory, 0 at the launch; not read where no CTA has a second slot
    found: cute.Tensor  # (stages, 3) int32 in shared memory: m_block, -1 after the last tile, head and batch
    ring: Ring

    @property
    def rings(self):
        return (self.ring,)

    @cute.jit
    def draw(self) -> Int32:
        """The ticket, in lane 0. Where every CTA has one slot at most there is no counter, and none is needed."""
        ctas, _, _ = cute.arch.grid_dim()
        ticket = Int32(0)
        if (cute.arch.lane_idx() == 0) & (ctas < self.order.grid.tiles):
            ticket = cute.arch.atomic_add(self.tickets.iterator, Int32(1), sem="relaxed", scope="gpu")
        return ticket

    @cute.jit
    def lead(self, blocks_of: cutlass.Constexpr, run: cutlass.Constexpr):
        grid = self.order.grid
        item, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        nth, base = Int32(0), Int32(0)
        m_block, sequence = self.next(item)
        self.announce(grid.tile(m_block, sequence, nth, base))
        while m_block >= 0:
            tile = grid.tile(m_block, sequence, nth, base)
            blocks = blocks_of(tile)
            m_block, sequence = self.next(ctas + cute.arch.shuffle_sync(run(tile, blocks, self.draw), 0))
            nth = nth + 1
            base = base + blocks.count
            self.announce(grid.tile(m_block, sequence, nth, base))

    @cute.jit
    def next(self, item: Int32) -> tuple[Int32, Int32]:
        """The tile of the item or, where its slot is empty, of the next item that has one."""
        ctas, _, _ = cute.arch.grid_dim()
        m_block, sequence, more = Int32(-1), Int32(0), item < self.order.grid.tiles
        while more:
            m_block, sequence = self.order.at(item)
            if m_block < 0:
                item = ctas + cute.arch.shuffle_sync(self.draw(), 0)
            more = (m_block < 0) & (item < self.order.grid.tiles)
        return m_block, sequence

    @cute.jit
    def announce(self, tile: WorkTile):
        self.ring.wait_empty(tile.nth)
        with cute.arch.elect_one():
            stage = self.ring.stage(tile.nth)
            self.found[stage, 0], self.found[stage, 1], self.found[stage, 2] = tile.m_block, tile.head, tile.batch
            self.ring.fill(tile.nth)

    @cute.jit
    def follow(self, blocks_of: cutlass.Constexpr, run: cutlass.Constexpr):
        nth, base = Int32(0), Int32(0)
        m_block, head, batch = self.take(nth)
        while m_block >= 0:
            tile = WorkTile(m_block, head, batch, nth, base)
            blocks = blocks_of(tile)
            run(tile, blocks)
            nth = nth + 1
            base = base + blocks.count
            m_block, head, batch = self.take(nth)

    @cute.jit
    def take(self, nth: Int32) -> tuple[Int32, Int32, Int32]:
        """m_block, head and batch of the n-th tile. NOTE: the lane that reads is the one that releases."""
        self.ring.wait_full(nth)
        m_block, head, batch = Int32(0), Int32(0), Int32(0)
        if cute.arch.lane_idx() == 0:
            stage = self.ring.stage(nth)
            m_block, head, batch = self.found[stage, 0], self.found[stage, 1], self.found[stage, 2]
            self.ring.free(nth)
        return tuple(cute.arch.make_warp_uniform(cute.arch.shuffle_sync(x, 0)) for x in (m_block, head, batch))


def nothing(): ...
