"""Rows appended to a cache and rotary embedding on the CPU, in torch: the specification of the append kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fa3.serving import Serving


def append(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, serving: Serving,
    cos: Tensor | None, sin: Tensor | None, rotary_seqlens: Tensor | None, interleaved: bool,
    each_query_its_own_position: bool, start: int,
) -> Tensor:  # fmt: skip
    """As `fa3.append.append`. Raises ValueError where a list says what is impossible, before anything is written."""
    q_rows = rows_of("cu_seqlens_q", serving.cu_seqlens_q, q)
    lengths = [start] * len(q_rows) if serving.lengths is None else serving.lengths.tolist()
    positions = lengths if rotary_seqlens is None else rotary_seqlens.tolist()
    writes = []
    if k is not None and v is not None:
        k_rows = rows_of("cu_seqlens_k_new", serving.cu_seqlens_k_new, k)
        places = [place(b, lengths[b], len(rows), k_cache, serving) for b, rows in enumerate(k_rows)]
        new_k, new_v = (x.flatten(0, 1) if x.dim() == 4 else x for x in (k, v))
        for b, (rows, at) in enumerate(zip(k_rows, places, strict=True)):
            part = new_k[rows.start : rows.stop]
            if cos is not None and sin is not None:
                part = rotate(part, cos, sin, positions_of(b, positions[b], len(rows), cos), interleaved)
            writes += [(k_cache, at, part), (v_cache, at, new_v[rows.start : rows.stop])]
    rotated = q
    if cos is not None and sin is not None:
        rotated = torch.empty_like(q, memory_format=torch.contiguous_format).copy_(q)
        flat, source = (x.flatten(0, 1) if x.dim() == 4 else x for x in (rotated, q))
        for b, rows in enumerate(q_rows):
            count = len(rows) if each_query_its_own_position else min(len(rows), 1)
            known = positions_of(b, positions[b], count, cos)
            flat[rows.start : rows.stop] = rotate(source[rows.start : rows.stop], cos, sin, known, interleaved)
    for cache, at, part in writes:
        cache[at] = part
    return rotated


def rows_of(name: str, offsets: Tensor | None, x: Tensor) -> list[range]:
    """The rows of every sequence in x (batch, seqlen, ..) with these two dimensions as one, or in x (total, ..)."""
    if offsets is None:
        return [range(b * x.shape[1], (b + 1) * x.shape[1]) for b in range(x.shape[0])]
    edges = offsets.tolist()
    for before, edge in zip([0, *edges], [*edges, x.shape[0]]):
        if edge < before:
            raise ValueError(f"{name} is {edges}; allowed: ascending from 0 or more to at most {x.shape[0]} rows")
    return [range(*edge) for edge in zip(edges, edges[1:])]


def place(b: int, length: int, added: int, cache: Tensor, serving: Serving) -> tuple[Tensor, Tensor]:
    """Of each new row of sequence b: which sequence or page of the cache it is written to, and which row of it."""
    rows = torch.arange(length, length + added)
    size, blocks = cache.shape[1], cache.shape[0]
    if serving.page_table is None:
        room, pages = size, None
    else:
        pages = pages_of(b, serving.page_table, serving.indptr)
        room = len(pages) * size
    if length < 0 or (added and length + added > room):
        raise ValueError(
            f"sequence {b} has {length} rows in the cache and {added} new ones; allowed: at most {room} rows in all"
        )
    if pages is None:
        block = torch.full_like(rows, b if serving.batch_idx is None else int(serving.batch_idx[b]))
        name = "cache_batch_idx"
    else:
        block, name = pages[rows // size].long(), "page_table"
    if added and not 0 <= int(block.min()) <= int(block.max()) < blocks:
        raise ValueError(f"{name} of sequence {b} holds {block.unique().tolist()}; allowed: 0 to {blocks - 1}")
    return block, rows if pages is None else rows % size


def pages_of(b: int, page_table: Tensor, indptr: Tensor | None) -> Tensor:
    """The page numbers of sequence b."""
    if indptr is None:
        return page_table[b]
    first, end = indptr[b : b + 2].tolist()
    if not 0 <= first <= end <= page_table.shape[0]:
        raise ValueError(
            f"indptr of sequence {b} says pages {first} to {end}; allowed: ascending up to {page_table.shape[0]}"
        )
    return page_table[first:end]


def positions_of(b: int, first: int, count: int, cos: Tensor) -> Tensor:
    """first, first + 1, .. (count), all of which the tables must have."""
    if count and not 0 <= first <= first + count - 1 < cos.shape[0]:
        raise ValueError(
            f"sequence {b} has rotary positions {first} to {first + count - 1}; allowed: 0 to {cos.shape[0] - 1}, "
            "which rotary_cos has"
        )
    return torch.arange(first, first + count)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x (n, heads, d) at positions (n) or (1), in float32 (float64 of such), rounded once.

    Of pairs (2i, 2i + 1), or (i, i + rotary_dim / 2). Su et al., RoFormer, arXiv 2104.09864, equation 34.
    """
    half = cos.shape[1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table[positions].to(wide)[:, None] for table in (cos, sin))  # (n, 1, rotary_dim / 2)
    turned = x[..., : 2 * half].to(wide)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = first * c - second * s, second * c + first * s
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)
