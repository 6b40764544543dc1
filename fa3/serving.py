"""What a serving call says of its keys and queries beside the tensors: lengths, pages, places, all on the device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Serving(NamedTuple):
    """Lists are int32 on q's device. The keys of sequence b are rows leftpad[b] .. lengths[b] + added - 1 of its cache.

    The cache is (batch, seqlen, heads_kv, d), or with a page_table (pages, page_size, heads_kv, d).
    """

    lengths: Tensor | None  # (batch,): rows in the cache before this call added its own; None: 0
    added: int  # rows that this call added, or, without `lengths`, the number of all rows
    cu_seqlens_k_new: Tensor | None  # (batch + 1,): added rows of each sequence where they differ; then `added` is 0
    leftpad: Tensor | None  # (batch,): first row that counts; None: 0
    batch_idx: Tensor | None  # (batch,): which sequence of the cache; None: its own number. Not with pages
    page_table: Tensor | None  # (batch, width), any strides: page numbers; with indptr (n,): those of all sequences
    indptr: Tensor | None  # (batch + 1,): the pages of sequence b are page_table[indptr[b] : indptr[b + 1]]
    cu_seqlens_q: Tensor | None  # (batch + 1,): q is (total_q, heads, d), ragged; None: (batch, seqlen_q, heads, d)
    max_seqlen_q: int  # bound on the queries of a sequence
