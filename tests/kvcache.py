"""Caches that are NaN wherever no query may look, and the formula in float64, one query and one head at a time."""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fa3.serving import Serving

NO_PAGE = 2**31 - 1  # stands where no page number is


@dataclass
class Cache:
    """Sequences as plain tensors and as a call takes them."""

    queries: list[Tensor]  # (seqlen_q, heads, head_dim) of each sequence
    keys: list[Tensor]  # (seqlen_k, heads_kv, head_dim)
    values: list[Tensor]
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lists: dict[str, Any] = field(default_factory=dict)  # arguments of flash_attn_with_kvcache

    def call(self, function, **options):
        return function(self.q, self.k_cache, self.v_cache, return_softmax_lse=True, **{**self.lists, **options})


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def make(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    *,
    page_size: int = 0,  # 0: no pages
    csr: bool = False,
    leftpad: Sequence[int] | None = None,
    permuted: bool = False,  # the cache has more sequences, in another order
    spare: int = 3,  # rows past the longest sequence, or pages of nobody
    ragged: bool = True,
    heads_kv: int = 1,
    ratio: int = 1,
    head_dim: int = 16,
    head_dim_v: int = 24,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Cache:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    queries = [draw(n, heads_kv * ratio, head_dim) for n in lengths_q]
    keys, values = ([draw(n, heads_kv, width) for n in lengths_k] for width in (head_dim, head_dim_v))
    lists: dict[str, Any] = {}
    if ragged:
        q = torch.cat([*queries, draw(0, heads_kv * ratio, head_dim)])
        lists["cu_seqlens_q"] = ints([sum(lengths_q[:i]) for i in range(len(lengths_q) + 1)])
        lists["max_seqlen_q"] = max(lengths_q, default=0)
    else:
        q = torch.stack(queries)
    widths = (head_dim, head_dim_v)
    if page_size:
        caches, more = _paged(keys, values, page_size, csr, spare, heads_kv, widths, generator)
    else:
        caches, more = _dense(keys, values, leftpad, permuted, spare, heads_kv, widths, generator)
    return Cache(queries, keys, values, q, *caches, {**lists, **more})


def _dense(keys, values, leftpad, permuted, spare, heads_kv, widths, generator):
    batch, left = len(keys), [0] * len(keys) if leftpad is None else leftpad
    ends = [first + len(x) for first, x in zip(left, keys)]
    places = torch.randperm(batch + 2, generator=generator)[:batch].tolist() if permuted else range(batch)
    caches = []
    for sequences, width in zip((keys, values), widths):
        cache = sequences[0].new_full((batch + 2 * permuted, max(ends) + spare, heads_kv, width), math.nan)
        for x, place, first, end in zip(sequences, places, left, ends):
            cache[place, first:end] = x
        caches.append(cache)
    lists = {"cache_seqlens": ints(ends)}
    if leftpad is not None:
        lists["cache_leftpad"] = ints(leftpad)
    if permuted:
        lists["cache_batch_idx"] = ints(places)
    return caches, lists


def _paged(keys, values, page_size, csr, spare, heads_kv, widths, generator):
    counts = [-(-len(x) // page_size) for x in keys]
    ids = torch.randperm(sum(counts) + spare, generator=generator)[: sum(counts)].split(counts)
    caches = []
    for sequences, width in zip((keys, values), widths):
        pool = sequences[0].new_full((sum(counts) + spare, page_size, heads_kv, width), math.nan)
        for x, pages in zip(sequences, ids):
            for i, row in enumerate(x):
                pool[pages[i // page_size], i % page_size] = row
        caches.append(pool)
    if csr:
        indices = torch.cat([*ids, ids[0].new_tensor([NO_PAGE])]).int()
        last = [len(x) - (n - 1) * page_size if n else NO_PAGE for x, n in zip(keys, counts)]
        edges = [sum(counts[:i]) for i in range(len(counts) + 1)]
        return caches, {"kv_indptr": ints(edges), "kv_indices": indices, "kv_last_page_len": ints(last)}
    wide = torch.full((len(keys), 2 * max(counts, default=0) + 4), NO_PAGE, dtype=torch.int32)
    table = wide[:, 1::2]  # neither stride is that of a tensor of its own
    for row, pages in zip(table, ids):
        row[: len(pages)] = pages
    return caches, {"page_table": table, "cache_seqlens": ints([len(x) for x in keys])}


def sees(key: int, position: int, causal=False, window_size=(-1, -1), attention_chunk=0, **_) -> bool:
    left, right = window_size
    return not (
        (causal and key > position)
        or (left is not None and left >= 0 and key < position - left)
        or (right is not None and right >= 0 and key > position + right)
        or (attention_chunk > 0 and key // attention_chunk != position // attention_chunk)
    )


def formula(x: Cache, softmax_scale=None, softcap=0.0, learnable_sink=None, **mask) -> list[tuple[Tensor, Tensor]]:
    """Of each sequence out (seqlen_q, heads, head_dim_v) and lse (heads, seqlen_q)."""
    return [
        _formula(q.double(), k.double(), v.double(), softmax_scale, softcap, learnable_sink, mask)
        for q, k, v in zip(x.queries, x.keys, x.values)
    ]


def _formula(q, k, v, softmax_scale, softcap, sink, mask):
    (seqlen_q, heads, head_dim), (seqlen_k, heads_kv, head_dim_v) = q.shape, v.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out, lse = torch.zeros(seqlen_q, heads, head_dim_v).double(), torch.full((heads, seqlen_q), -math.inf).double()
    for i in range(seqlen_q):
        seen = [j for j in range(seqlen_k) if sees(j, i + seqlen_k - seqlen_q, **mask)]
        for h in range(heads):
            group = h // (heads // heads_kv)
            scores = k[seen, group] @ q[i, h] * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            extra = [] if sink is None else [sink[h].double()]
            everything = torch.cat([scores, torch.tensor(extra, dtype=torch.float64)])
            if len(everything):
                lse[h, i] = torch.logsumexp(everything, 0)
                out[i, h] = torch.exp(scores - lse[h, i]) @ v[seen, group]
    return out, lse


def by_sequence(x: Cache, out: Tensor, lse: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What a call returned, as `formula` gives it."""
    if "cu_seqlens_q" not in x.lists:
        return list(zip(out, lse))
    edges = x.lists["cu_seqlens_q"].tolist()
    return [(out[a:b], lse[:, a:b]) for a, b in zip(edges, edges[1:])]


def assert_is(x: Cache, got: tuple[Tensor, Tensor], wanted: list[tuple[Tensor, Tensor]], tolerance: float = 1e-12):
    out, lse = got
    assert out.shape == (*x.q.shape[:-1], x.v_cache.shape[3]) and out.dtype == x.q.dtype
    assert lse.shape == (x.q.shape[1::-1] if x.q.dim() == 3 else (x.q.shape[0], x.q.shape[2], x.q.shape[1]))
    assert lse.dtype == (torch.float64 if x.q.dtype == torch.float64 else torch.float32)
    parts = by_sequence(x, out, lse)
    assert len(parts) == len(wanted)
    for (o, l), (want_o, want_l) in zip(parts, wanted):
        torch.testing.assert_close(o.double(), want_o, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(l.double(), want_l, rtol=min(tolerance, 1e-4), atol=min(tolerance, 1e-4))


def plain_append(q, k_cache, v_cache, k, v, serving: Serving, cos, sin, rotary_seqlens, interleaved, own, start=0):
    """The contract of `fa3.append.append` without rotary: row by row."""
    assert cos is sin is rotary_seqlens is None
    s, page_size = serving, k_cache.shape[1]
    batch = len(k) if s.cu_seqlens_k_new is None else len(s.cu_seqlens_k_new) - 1
    for b in range(batch):
        first = start if s.lengths is None else int(s.lengths[b])
        rows = range(k.shape[1]) if s.cu_seqlens_k_new is None else range(*s.cu_seqlens_k_new[b : b + 2].tolist())
        for i, row in enumerate(rows):
            at = first + i
            for new, cache in ((k, k_cache), (v, v_cache)):
                value = new[b, row] if s.cu_seqlens_k_new is None else new[row]
                if s.page_table is None:
                    cache[b if s.batch_idx is None else int(s.batch_idx[b]), at] = value
                else:
                    pages = s.page_table[b] if s.indptr is None else s.page_table[int(s.indptr[b]) :]
                    cache[int(pages[at // page_size]), at % page_size] = value
    return q


def with_append(monkeypatch, stand_in=plain_append) -> None:
    """fa3.append where it is there, else what stands for it."""
    if importlib.util.find_spec("fa3.append") is None:
        module = types.ModuleType("fa3.append")
        module.append = stand_in
        monkeypatch.setitem(sys.modules, "fa3.append", module)
