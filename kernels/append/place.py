"""Where a token of K, V or Q comes from and where it goes: lists on the device, read by every thread."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from .config import BATCH_IDX, CHUNK, CU_K, CU_Q, INDPTR, LENGTHS, OWN_POSITION, PAGE_TABLE, ROTARY_SEQLENS, THREADS


class Lists(NamedTuple):
    """int32, any strides. Which of them are there says `given`; what stands for the others is never read."""

    lengths: cute.Tensor  # (b)
    cu_k: cute.Tensor  # (b + 1)
    batch_idx: cute.Tensor  # (b)
    page_table: cute.Tensor  # (b, width), or (1, n) with indptr
    indptr: cute.Tensor  # (b + 1)
    cu_q: cute.Tensor  # (b + 1)
    rotary: cute.Tensor  # (b)
    given: Int32
    start: Int32  # rows in the cache where there are no lengths

    def has(self, which: int):
        return (self.given & which) != 0

    @cute.jit
    def length(self, sequence: Int32) -> Int32:
        found = self.start
        if self.has(LENGTHS):
            found = self.lengths[sequence]
        return found

    @cute.jit
    def first_position(self, sequence: Int32) -> Int32:
        found = Int32(0)
        if self.has(ROTARY_SEQLENS):
            found = self.rotary[sequence]
        else:
            found = self.length(sequence)
        return found


class Token(NamedTuple):
    """A row of K, V or Q."""

    batch: Int32  # where it lies in its tensor
    row: Int32
    sequence: Int32
    at: Int32  # its number in the sequence
    exists: Boolean


class Place(NamedTuple):
    """One chunk of a token."""

    x: Int64  # address of the row of its head
    y: Int64
    column: Int32
    position: Int32
    exists: Boolean
    rotates: Boolean

    @staticmethod
    def empty() -> "Place":
        return Place(Int64(0), Int64(0), Int32(0), Int32(0), Boolean(False), Boolean(False))


class Part(NamedTuple):
    """Q, K or V: its tokens, each in slices of as many chunks as a CTA has threads."""

    x: cute.Tensor  # (b, s, h, d), or (1, total, h, d)
    y: cute.Tensor  # the cache (sequences or pages, rows, h, d), or of Q the like of x
    rows: cute.FastDivmodDivisorV2
    block: cute.FastDivmodDivisorV2  # rows of a block of y, a page or a sequence
    slices: cute.FastDivmodDivisorV2
    chunks: cute.FastDivmodDivisorV2  # of a head
    count: Int32  # CTAs

    @staticmethod
    def create(x: cute.Tensor, y: cute.Tensor) -> "Part":
        batch, rows, heads, dim = x.shape
        chunks = dim // CHUNK
        slices = (heads * chunks + THREADS - 1) // THREADS
        divisors = (cute.FastDivmodDivisorV2(cutlass.max(Int32(n), 1)) for n in (rows, y.shape[1], slices, chunks))
        return Part(x, y, *divisors, batch * rows * slices)

    @cute.jit
    def token(self, item: Int32, lists: Lists, cu: cute.Tensor, which: cutlass.Constexpr) -> tuple:
        """The token of CTA `item`, and its slice."""
        number, part = divmod(item, self.slices)
        batch, row = divmod(number, self.rows)
        sequence, at, exists = batch, row, Boolean(True)
        if lists.has(which):
            sequence = sequence_of(cu, row)
            first = cu[sequence]
            exists = (row >= first) & (row < cu[sequence + 1])
            at = row - first
        return Token(batch, row, sequence, at, exists), part

    def head_and_column(self, part: Int32, thread: Int32) -> tuple:
        head, chunk = divmod(part * THREADS + thread, self.chunks)
        return head, chunk * CHUNK, head < self.x.shape[2]

    def into_cache(self, item: Int32, lists: Lists, thread: Int32, rotates: bool) -> Place:
        token, part = self.token(item, lists, lists.cu_k, CU_K)
        return self._into_cache(token, part, lists, thread, Boolean(rotates))

    @cute.jit
    def _into_cache(self, token: Token, part: Int32, lists: Lists, thread: Int32, rotates: Boolean) -> Place:
        """A row past the cache, past the page table, or of a page that is none, does not exist."""
        head, column, has_head = self.head_and_column(part, thread)
        blocks, size = self.y.shape[0], self.y.shape[1]
        row = lists.length(token.sequence) + token.at
        exists = token.exists & has_head & (row >= 0)
        block, slot = token.sequence, row
        if lists.has(PAGE_TABLE):
            page, slot = divmod(row, self.block)
            first, end, line = Int32(0), Int32(lists.page_table.shape[1]), token.sequence
            if lists.has(INDPTR):
                first, line = lists.indptr[token.sequence], Int32(0)
                end = cutlass.min(end, lists.indptr[token.sequence + 1])
            exists = exists & (first >= 0) & (page < end - first) & (slot < size)
            if exists:
                block = lists.page_table[line, first + page]
        else:
            if lists.has(BATCH_IDX):
                block = lists.batch_idx[token.sequence]
            exists = exists & (row < size)
        exists = exists & (block >= 0) & (block < blocks)
        x, y = Int64(0), Int64(0)
        if exists:
            x = self.x[token.batch, token.row, head, None].iterator.toint()
            y = self.y[block, slot, head, None].iterator.toint()
        position = lists.first_position(token.sequence) + token.at
        return Place(x, y, column, position, exists, rotates)

    @cute.jit
    def rotated(self, item: Int32, lists: Lists, thread: Int32) -> Place:
        """A query; one that belongs to no sequence is copied."""
        token, part = self.token(item, lists, lists.cu_q, CU_Q)
        head, column, exists = self.head_and_column(part, thread)
        x, y = Int64(0), Int64(0)
        if exists:
            x = self.x[token.batch, token.row, head, None].iterator.toint()
            y = self.y[token.batch, token.row, head, None].iterator.toint()
        position = lists.first_position(token.sequence)
        if lists.has(OWN_POSITION):
            position = position + token.at
        return Place(x, y, column, position, exists, token.exists)


@cute.jit
def sequence_of(cu: cute.Tensor, row: Int32) -> Int32:
    """The last sequence that begins at or before the row; a warp looks at 32 places at a time. 0 where none does."""
    lane = cute.arch.lane_idx()
    low, count = Int32(0), Int32(cu.shape[0]) - 1  # it is one of low .. low + count - 1
    while count > 1:
        step = (count + 31) // 32
        place = lane * step
        begins = Boolean(False)
        if place < count:
            begins = cu[low + place] <= row
        before = cute.arch.popc(cute.arch.vote_ballot_sync(begins))
        skipped = cutlass.max(before - 1, 0) * step
        low, count = low + skipped, cutlass.min(count - skipped, step)
    return low
