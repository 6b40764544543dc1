"""Attention of queries to a cache of keys in plain torch: the specification of the decode kernel.

Of each sequence the rows that its queries see are gathered, wherever they lie; no other row and no other page is read.
A part of the keys is attended to alone, parts are joined by `reference.merge`, and a sink is one more part: its O is 0
and its LSE is its value. So it counts once, however the keys are cut.

16-bit inputs are worked on in float32, others in their own type. Row sums take P before it is rounded to the inputs'
type for P V, and O is divided once, at the end, as in `reference.tiled_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa3.reference import SMALLEST_SCALE, merge
from fa3.serving import Serving
from fa3.variant import Variant


class Stored(NamedTuple):
    """Where a sequence is: its queries in q (of dense ones (batch * seqlen_q, ..)), its keys in its cache."""

    queries: range
    keys: range  # rows of the cache that count
    slot: int  # which sequence of the cache; of no meaning with pages
    pages: Tensor | None  # page numbers: row i is in page pages[i // page_size]

    def rows_seen(self, variant: Variant) -> range:
        """Rows of the cache from the first that a query sees to the last."""
        intervals = [i for i in self.intervals(variant) if i[0] < i[1]]
        if not intervals:
            return range(0)
        start = self.keys.start
        return range(start + min(first for first, _ in intervals), start + max(end for _, end in intervals))

    def intervals(self, variant: Variant) -> list[tuple[int, int]]:
        """Of each query the keys that it sees, counted from the first that counts."""
        return [variant.interval(i, len(self.queries), len(self.keys)) for i in range(len(self.queries))]


def kvcache_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    serving: Serving,
    variant: Variant = Variant(),  # noqa: B008 (a record that cannot change)
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    splits: int | Sequence[int] = 0,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each sequence's queries to the keys that the cache holds of it; softmax_scale >= 0.

    q is (batch, seqlen_q, Hq, D), or with cu_seqlens_q (total_q, Hq, D); k_cache (batch, rows, Hkv, D) or (pages,
    page_size, Hkv, D), v_cache likewise with Dv. sink (Hq,): a further score of every query, on the scale of natural
    logarithms, which takes part in the row sum and the LSE and adds nothing to O. splits: keys a part, or the
    boundaries of parts, counted from the first key; neither changes more than the rounding.

    Returns out (.., Hq, Dv) in q's dtype and lse (batch, Hq, seqlen_q) or (Hq, total_q) in the type that is worked in.
    A query that sees no key has out 0 and the sink as LSE, -inf without; rows of no sequence have 0 and -inf.
    """
    work = torch.float32 if q.dtype.itemsize == 2 else q.dtype
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else max(softmax_scale, SMALLEST_SCALE)
    rows = q if serving.cu_seqlens_q is not None else q.flatten(0, 1)
    total, heads, _ = rows.shape
    out = rows.new_zeros((total, heads, v_cache.shape[3]), dtype=work)
    lse = rows.new_full((heads, total), -math.inf, dtype=work)
    for stored in sequences_of(q, k_cache, serving):
        at = slice(stored.queries.start, stored.queries.stop)
        out[at], lse[:, at] = _sequence(rows[at], k_cache, v_cache, stored, variant, scale, sink, splits)
    out = out.to(q.dtype)
    if serving.cu_seqlens_q is not None:
        return out, lse
    batch, seqlen_q = q.shape[:2]
    dense_lse = lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1).contiguous()
    return out.unflatten(0, (batch, seqlen_q)), dense_lse


def sequences_of(q: Tensor, k_cache: Tensor, serving: Serving) -> list[Stored]:
    """Where each sequence is, as lists on the CPU say."""
    s = serving
    if s.cu_seqlens_q is None:
        batch, seqlen_q = q.shape[:2]
        edges = [b * seqlen_q for b in range(batch + 1)]
    else:
        edges = s.cu_seqlens_q.tolist()
        batch = len(edges) - 1
    ends = [x + s.added for x in _listed(s.lengths, [0] * batch)]
    if s.cu_seqlens_k_new is not None:
        new = s.cu_seqlens_k_new.tolist()
        ends = [end + after - before for end, before, after in zip(ends, new, new[1:])]
    left, slots = _listed(s.leftpad, [0] * batch), _listed(s.batch_idx, list(range(batch)))
    found = []
    for b in range(batch):
        pages = s.page_table
        if pages is not None:
            pages = pages[b] if s.indptr is None else pages[int(s.indptr[b]) : int(s.indptr[b + 1])]
        found.append(Stored(range(edges[b], edges[b + 1]), range(left[b], ends[b]), slots[b], pages))
    return found


def _listed(x: Tensor | None, otherwise: list[int]) -> list[int]:
    return otherwise if x is None else x.tolist()


def _sequence(q, k_cache, v_cache, stored: Stored, variant: Variant, scale: float, sink, splits):
    """q (Sq, Hq, D) -> out (Sq, Hq, Dv) and lse (Hq, Sq), not rounded."""
    (seqlen_q, heads, _), work = q.shape, torch.float32 if q.dtype.itemsize == 2 else q.dtype
    edges = _edges(splits, len(stored.keys))
    rows, intervals = stored.rows_seen(variant), stored.intervals(variant)
    first, end = (q.new_tensor([i[side] for i in intervals], dtype=torch.int64) for side in (0, 1))
    start = stored.keys.start
    parts = []
    for left, right in zip(edges, edges[1:]):
        part = range(max(rows.start, start + left), min(rows.stop, start + right))
        if part:
            keys = torch.arange(part.start, part.stop) - start
            visible = (first[:, None] <= keys) & (keys < end[:, None])
            k, v = (_gather(x, stored, part) for x in (k_cache, v_cache))
            parts.append(_part(q, k, v, visible, variant.softcap, scale, work))
    if not parts:
        nothing = q.new_zeros((seqlen_q, heads, v_cache.shape[3]), dtype=work)
        parts.append((nothing, q.new_full((heads, seqlen_q), -math.inf, dtype=work)))
    if sink is not None:
        parts.append((torch.zeros_like(parts[0][0]), sink.to(work)[:, None].expand(heads, seqlen_q)))
    outs, lses = zip(*parts)
    out, lse = merge([x[None] for x in outs], [x[None] for x in lses])
    return out[0], lse[0]


def _edges(splits: int | Sequence[int], keys: int) -> list[int]:
    if isinstance(splits, int):
        return [*range(0, keys, splits), keys] if splits > 0 else [0, keys]
    return [0, *splits, keys]


def _gather(cache: Tensor, stored: Stored, rows: range) -> Tensor:
    if stored.pages is None:
        return cache[stored.slot, rows.start : rows.stop]
    at = torch.arange(rows.start, rows.stop)
    page_size = cache.shape[1]
    return cache[stored.pages[at // page_size].long(), at % page_size]


def _part(q, k, v, visible, softcap: float, scale: float, work) -> tuple[Tensor, Tensor]:
    """Attention to the keys k (n, Hkv, D), v (n, Hkv, Dv) alone; visible (Sq, n)."""
    heads_kv = k.shape[1]
    queries = q.to(work).unflatten(1, (heads_kv, q.shape[1] // heads_kv)).permute(1, 2, 0, 3)  # (Hkv, ratio, Sq, D)
    keys, values = (x.to(work).transpose(0, 1)[:, None] for x in (k, v))  # (Hkv, 1, n, D | Dv)
    scores = torch.matmul(queries, keys.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    row_max = scores.amax(-1, keepdim=True)
    base = torch.where(row_max == -math.inf, 0.0, row_max)
    p = torch.exp(scores - base)
    row_sum = p.sum(-1, keepdim=True)
    divisor = torch.where(row_sum == 0, 1.0, row_sum)
    out = torch.matmul(p.to(q.dtype).to(work), values) / divisor
    lse = torch.where(row_sum == 0, -math.inf, base + torch.log(divisor))
    return out.flatten(0, 1).transpose(0, 1), lse.flatten(0, 1)[..., 0]
