"""How long each sequence of the batch is and where it lies."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..prims.ptx import read
from ..prims.tma import LONGEST


class Lengths(NamedTuple):
    """Of one sequence."""

    q: Int32
    k: Int32


class DenseSeqlen(NamedTuple):
    """(b, s, h, d) tensors: every sequence has the same lengths and a batch index of its own."""

    lengths: Lengths

    def of(self, batch: Int32) -> Lengths:
        return self.lengths

    def queries(self, mX: cute.Tensor, head: Int32, batch: Int32) -> cute.Tensor:
        """Q or O of one head of one sequence, of mX (row, column, h, b)."""
        return mX[None, None, head, batch]

    keys = queries

    def values(self, mX: cute.Tensor, head: Int32, batch: Int32) -> cute.Tensor:
        """V of one head of one sequence, of mX (column, row, h, b)."""
        return mX[None, None, head, batch]

    def lse(self, mLSE: cute.Tensor, head: Int32, batch: Int32) -> cute.Tensor:
        """(seqlen_q) of mLSE (b, h, s)."""
        return mLSE[batch, head, None]


def uniform(x: Int32) -> Int32:
    """Of a number that all lanes have: it needs no register of theirs."""
    return cute.arch.make_warp_uniform(x)


class Ragged(NamedTuple):
    """Where sequences begin and end, and how much of each counts, as the kernel is given it: int32."""

    cu_q: cute.Tensor  # (b + 1)
    cu_k: cute.Tensor
    used_q: cute.Tensor  # (b); where all counts, anything of one number or more
    used_k: cute.Tensor
    counts_q: Int32  # 0 where all queries count
    counts_k: Int32


class Paged(NamedTuple):
    """The same where keys lie in pages of a pool: those of sequence b in the pages table[b, :], one after the other."""

    cu_q: cute.Tensor  # (b + 1)
    table: cute.Tensor  # (b, width), any strides
    used_q: cute.Tensor  # (b); where all counts, anything of that size
    used_k: cute.Tensor  # (b)
    counts_q: Int32  # 0 where all queries count


class Side(NamedTuple):
    """The queries or the keys of a ragged batch."""

    cu: cute.Tensor
    used: cute.Tensor
    counts: Int32

    def first(self, batch: Int32) -> Int32:
        return uniform(read(self.cu, batch))

    def length(self, batch: Int32) -> Int32:
        whole = uniform(read(self.cu, batch + 1)) - self.first(batch)
        # NOTE: where all counts, of one number that is there, and dropped.
        used = uniform(read(self.used, batch * self.counts))
        return cutlass.select_(self.counts != 0, cutlass.max(cutlass.min(used, whole), 0), whole)

    def place(self, batch: Int32) -> tuple[Int32, tuple]:
        """Of the coordinates that `prims.tma.ragged` makes: that of the sequence's row 0, and its own."""
        n = self.length(batch)
        return LONGEST - n, (self.first(batch) + n, LONGEST)


class RaggedSeqlen(NamedTuple):
    """(total, h, d) tensors: sequences of their own lengths, one behind the other; no row outside is touched."""

    q: Side
    k: Side

    @staticmethod
    def create(given: Ragged) -> "RaggedSeqlen":
        return RaggedSeqlen(
            Side(given.cu_q, given.used_q, given.counts_q), Side(given.cu_k, given.used_k, given.counts_k)
        )

    def of(self, batch: Int32) -> Lengths:
        return Lengths(self.q.length(batch), self.k.length(batch))

    def queries(self, mX: cute.Tensor, head: Int32, batch: Int32) -> cute.Tensor:
        row, sequence = self.q.place(batch)
        return cute.domain_offset((row, 0), mX[None, None, head, sequence])

    def keys(self, mX: cute.Tensor, head: Int32, batch: Int32) -> cute.Tensor:
        row, sequence = self.k.place(batch)
        return cute.domain_offset((row, 0), mX[None, None, head, sequence])

    def values(self, mX: cute.Tensor, head: Int32, batch: Int32) -> cute.Tensor:
        row, sequence = self.k.place(batch)
        return cute.domain_offset((0, row), mX[None, None, head, sequence])

    def lse(self, mLSE: cute.Tensor, head: Int32, batch: Int32) -> cute.Tensor:
        """(length) of mLSE (1, h, total)."""
        whole = cute.domain_offset((self.q.first(batch),), mLSE[0, head, None])
        return cute.make_tensor(whole.iterator, cute.make_layout((self.q.length(batch),), stride=(1,)))


class Pages(NamedTuple):
    """The keys of a paged batch."""

    table: cute.Tensor
    used: cute.Tensor
    page_size: Int32

    def length(self, batch: Int32) -> Int32:
        """No more than the table has room for."""
        room = self.table.shape[1] * self.page_size
        return cutlass.max(cutlass.min(uniform(read(self.used, batch)), room), 0)


class PagedSeqlen(NamedTuple):
    """Queries as in RaggedSeqlen, keys in pages."""

    q: Side
    k: Pages

    @staticmethod
    def create(given: Paged, page_size: Int32) -> "PagedSeqlen":
        side = Side(given.cu_q, given.used_q, given.counts_q)
        return PagedSeqlen(side, Pages(given.table, given.used_k, page_size))

    of, queries, lse = RaggedSeqlen.of, RaggedSeqlen.queries, RaggedSeqlen.lse
