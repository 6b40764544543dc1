"""Sequences whose keys lie in pages of a pool, and what attention to them must give."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from fa3.testing.inputs import draw
from fa3.variant import Variant
from tests.variants import expected

NO_PAGE = 2**31 - 1  # in entries of the table that stand for nothing


@dataclass(frozen=True, repr=False)
class Paged:
    """The tensors of a call. Keys that belong to no sequence are NaN."""

    q: torch.Tensor
    k: torch.Tensor  # (pages, page_size, heads_kv, head_dim)
    v: torch.Tensor
    cu_q: torch.Tensor
    used_q: torch.Tensor | None
    used_k: torch.Tensor
    table: torch.Tensor
    queries: list[range]
    dense: list[tuple[torch.Tensor, torch.Tensor]]  # K and V (length, heads_kv, d) of each sequence

    @property
    def is_query(self) -> torch.Tensor:
        found = torch.zeros(self.q.shape[0], dtype=torch.bool)
        found[[i for r in self.queries for i in r]] = True
        return found.to(self.q.device)

    def call(self, function, scale=None, causal=False, **options):
        longest = max(map(len, self.queries), default=0), max((len(k) for k, _ in self.dense), default=0)
        lists = self.cu_q, None, *longest, self.used_q, self.used_k
        given = {"return_lse": True, "page_table": self.table, **options}
        return function(self.q, self.k, self.v, *lists, scale, causal, **given)

    def assert_right(self, got, variant: Variant, scale=None, sink=None) -> None:
        out, lse = got
        for queries, (k, v) in zip(self.queries, self.dense, strict=True):
            if not queries:
                continue
            at = slice(queries.start, queries.stop)
            want = expected(self.q[None, at], k[None], v[None], scale, variant, sink)
            want.assert_out(out[None, at], f"{len(queries)} queries, {len(k)} keys")
            want.assert_lse(lse[None, :, at], f"{len(queries)} queries, {len(k)} keys")


def make(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    page_size: int,
    *,
    room_q: Sequence[int] | None = None,
    heads_kv: int = 1,
    ratio: int = 1,
    head_dim: int = 64,
    head_dim_v: int = 64,
    dtype: str = "bfloat16",
    device: str = "cpu",
    seed: int = 0,
    layout: str = "apart",
    spare: int = 3,
    empty: float = torch.nan,
) -> Paged:
    """Pages in a drawn order, `spare` unused ones among them. layout: "apart", "interleaved" (K and V in one pool) or
    "heads first" (a page is (heads_kv, page_size, d)). empty: what lies where no key is.
    """
    generator = torch.Generator(device).manual_seed(seed)
    edges = list(accumulate(lengths_q if room_q is None else room_q, initial=0))
    queries = [range(start, start + length) for start, length in zip(edges, lengths_q)]
    q = draw((edges[-1], heads_kv * ratio, head_dim), getattr(torch, dtype), generator)
    needed = [-(-n // page_size) for n in lengths_k]
    pages, width = sum(needed) + spare, max(needed, default=0) + 2
    k, v = _pools(pages, page_size, heads_kv, head_dim, head_dim_v, q, layout, empty)
    order = iter(torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist())
    # Every other column and row of a larger one.
    table = torch.full((2 * len(needed), 2 * width), NO_PAGE, dtype=torch.int32)[::2, ::2]
    dense = []
    for b, (length, count) in enumerate(zip(lengths_k, needed)):
        one = [draw((length, heads_kv, d), q.dtype, generator) for d in (head_dim, head_dim_v)]
        for i in range(count):
            page = next(order)
            table[b, i] = page
            for pool, x in zip((k, v), one):
                part = x[i * page_size : (i + 1) * page_size]
                pool[page, : len(part)] = part
        dense.append((one[0], one[1]))
    if room_q is not None:
        rows = torch.zeros(q.shape[0], dtype=torch.bool)
        rows[[i for r in queries for i in r]] = True
        q[~rows.to(q.device)] = torch.nan
    cu_q, used_q, used_k = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (edges, list(lengths_q), list(lengths_k))
    )
    if device != "cpu":  # with the same strides
        table = torch.empty_strided(table.shape, table.stride(), dtype=torch.int32, device=device).copy_(table)
    return Paged(q, k, v, cu_q, None if room_q is None else used_q, used_k, table, queries, dense)


def _pools(pages, page_size, heads_kv, head_dim, head_dim_v, like, layout, empty):
    def full(*shape):
        return like.new_full(shape, empty)

    if layout == "interleaved":
        both = full(pages, 2, page_size, heads_kv, max(head_dim, head_dim_v))
        return both[:, 0, ..., :head_dim], both[:, 1, ..., :head_dim_v]
    if layout == "heads first":
        return tuple(full(pages, heads_kv, page_size, d).transpose(1, 2) for d in (head_dim, head_dim_v))
    return full(pages, page_size, heads_kv, head_dim), full(pages, page_size, heads_kv, head_dim_v)
