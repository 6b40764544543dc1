"""Calls of fa3.append with everything drawn, and what they must do, by loops over single rows."""

import random
from typing import Any, NamedTuple

import torch

from fa3.serving import Serving

CANARY = 7.0
CACHES = ("dense", "batch_idx", "pages", "csr")
LAYOUTS = ("contiguous", "heads first", "one pool", "misaligned")


# A cache, what its lists must not say of a sequence, and which one: its rows are not written on a GPU.
IMPOSSIBLE = (
    ("pages", 1, lambda s: s.page_table[1].fill_(-1)),
    ("pages", 1, lambda s: s.page_table[1].fill_(1 << 30)),
    ("pages", 1, lambda s: s.lengths[1:2].fill_(-3)),
    ("pages", 1, lambda s: s.lengths[1:2].fill_(2**31 - 1)),
    ("pages", 1, lambda s: s.lengths[1:2].fill_(16 * s.page_table.shape[1])),
    ("dense", 1, lambda s: s.lengths[1:2].fill_(10**6)),
    ("dense", 1, lambda s: s.lengths[1:2].fill_(12)),  # the rows of a sequence of lengths (1, 8, 4), 2 new and room 2
    ("dense", 2, lambda s: s.lengths[2:3].fill_(-3)),
    ("batch_idx", 1, lambda s: s.batch_idx[1:2].fill_(10**6)),
    ("batch_idx", 1, lambda s: s.batch_idx[1:2].fill_(-1)),
    ("csr", 2, lambda s: s.lengths[2:3].fill_(10**6)),
    ("csr", 1, lambda s: s.lengths[1:2].fill_(16 * int(s.indptr[2] - s.indptr[1]))),
    ("csr", 0, lambda s: s.indptr[0:1].fill_(-10)),
)


class Case(NamedTuple):
    """The arguments of fa3.append.append, by name."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    serving: Serving
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    rotary_seqlens: torch.Tensor | None
    interleaved: bool
    each_query_its_own_position: bool
    start: int

    def to(self, device) -> "Case":
        """There, of the same strides."""

        def move(x):
            if isinstance(x, torch.Tensor):
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
            return Serving(*(move(y) for y in x)) if isinstance(x, Serving) else x

        return Case(*(move(x) for x in self))


def make(
    cache="dense", layout="contiguous", rotary="neox", *, lengths=(3, 0, 5), new=2, queries=3, ragged_q=False,
    ragged_k=False, head_dim=32, head_dim_v=24, rotary_dim=16, heads=4, heads_kv=2, page_size=3, dtype="bfloat16",
    table_dtype=None, has_lengths=True, has_new=True, has_rotary_seqlens=False, own=True, seed=0, room=2, device="cpu",
) -> Case:  # fmt: skip
    """new, queries: of each sequence; in ragged calls drawn up to that. rotary: none, interleaved or neox."""
    draw, dtype = random.Random(seed), getattr(torch, dtype)
    g = torch.Generator().manual_seed(seed)
    batch, start = len(lengths), max(lengths, default=0)
    ints = dict(dtype=torch.int32)
    lengths = list(lengths) if has_lengths else [start] * batch
    of_k = [draw.randint(0, new) if ragged_k else new for _ in lengths]
    of_q = [draw.randint(0, queries) if ragged_q else queries for _ in lengths]

    def values(lengths, ragged, heads, dim):
        shape = (sum(lengths) + 3 if ragged else batch, *([] if ragged else [max(lengths, default=0)]), heads, dim)
        return torch.randn(shape, generator=g).to(dtype)

    q = values(of_q, ragged_q, heads, head_dim)
    k, v = (values(of_k, ragged_k, heads_kv, d) for d in (head_dim, head_dim_v))
    most = max([n + m for n, m in zip(lengths, of_k)], default=0)
    batch_idx = page_table = indptr = None
    if cache in ("dense", "batch_idx"):
        blocks, size = batch + (3 if cache == "batch_idx" else 0), most + room
        if cache == "batch_idx":
            batch_idx = torch.tensor(draw.sample(range(blocks), batch), **ints)
    else:
        size = page_size
        widths = [-(-(n + m) // size) + draw.randint(0, 1) for n, m in zip(lengths, of_k)]
        blocks = sum(widths) + 3
        pages = draw.sample(range(blocks), sum(widths))
        if cache == "csr":
            indptr = offsets(widths, 0)
            page_table = torch.tensor(pages, **ints)
        else:
            whole = torch.full((batch, max(widths, default=0) + 2), -1, **ints)
            for b, width in enumerate(widths):
                whole[b, 1 : 1 + width] = torch.tensor([pages.pop() for _ in range(width)], **ints)
            page_table = whole[:, 1:]  # a view: rows are not contiguous
    k_cache, v_cache = caches(layout, blocks, size, heads_kv, head_dim, head_dim_v, dtype)
    cos = sin = None
    if rotary != "none":
        angles = torch.rand(most + queries + new + 4, rotary_dim // 2, generator=g) * 6.3
        cos, sin = (f(angles).to(getattr(torch, table_dtype) if table_dtype else dtype) for f in (torch.cos, torch.sin))
    serving = Serving(
        torch.tensor(lengths, **ints) if has_lengths else None, 0,
        offsets(of_k, 1) if ragged_k else None, None, batch_idx, page_table, indptr,
        offsets(of_q, 2) if ragged_q else None, queries,
    )  # fmt: skip
    positions = [draw.randint(0, most) for _ in lengths] if has_rotary_seqlens and rotary != "none" else None
    case = Case(
        q, k_cache, v_cache, k if has_new else None, v if has_new else None, serving, cos, sin,
        None if positions is None else torch.tensor(positions, **ints), rotary == "interleaved", own, start,
    )  # fmt: skip
    return case if device == "cpu" else case.to(device)


def offsets(lengths, first) -> torch.Tensor:
    return torch.tensor([first + sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)


def caches(layout, blocks, size, heads, dim, dim_v, dtype) -> list[torch.Tensor]:
    """K and V full of canaries; `around` of what they are views of holds canaries too."""
    full = dict(fill_value=CANARY, dtype=dtype)
    if layout == "one pool":
        pool = torch.full((blocks, size, 2, heads, max(dim, dim_v) + 8), **full)
        return [pool[:, :, 0, :, :dim], pool[:, :, 1, :, 8 : 8 + dim_v]]
    if layout == "heads first":
        return [torch.full((blocks, heads, size, d), **full).transpose(1, 2) for d in (dim, dim_v)]
    if layout == "misaligned":
        return [torch.full((blocks, size, heads, d + 3), **full)[..., 1 : 1 + d] for d in (dim, dim_v)]
    return [torch.full((blocks, size, heads, d), **full) for d in (dim, dim_v)]


def whole(x: torch.Tensor) -> torch.Tensor:
    """All memory of a cache, that between its elements too."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def expected(case: Case) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """q, and all memory of both caches, after the call."""
    s, (k_memory, v_memory) = case.serving, (whole(x).clone() for x in (case.k_cache, case.v_cache))
    if whole(case.k_cache).data_ptr() == whole(case.v_cache).data_ptr():
        v_memory = k_memory
    k_after, v_after = (
        x.as_strided(c.shape, c.stride(), c.storage_offset())
        for x, c in ((k_memory, case.k_cache), (v_memory, case.v_cache))
    )
    rotated = case.q.clone()
    batch = case.q.shape[0] if s.cu_seqlens_q is None else len(s.cu_seqlens_q) - 1
    for b in range(batch):
        length = case.start if s.lengths is None else int(s.lengths[b])
        position = length if case.rotary_seqlens is None else int(case.rotary_seqlens[b])
        if case.k is not None:
            for i, (k, v) in enumerate(zip(*(rows(x, s.cu_seqlens_k_new, b) for x in (case.k, case.v)))):
                block, slot = target(s, b, length + i, case.k_cache.shape[1])
                k_after[block, slot], v_after[block, slot] = embedded(case, k, position + i), v
        for i, (to, x) in enumerate(zip(rows(rotated, s.cu_seqlens_q, b), rows(case.q, s.cu_seqlens_q, b))):
            to[:] = embedded(case, x, position + (i if case.each_query_its_own_position else 0))
    return rotated, k_memory, v_memory


def assert_left_out(case: Case, k_memory, got, sequence: int) -> None:
    """All is as after the right call of this case, of one pool, but that this sequence's rows were not written."""
    changed = got != k_memory
    assert (got[changed] == CANARY).all()
    assert 0 < changed.sum() <= case.k[sequence].numel() + case.v[sequence].numel()
    block, slot = target(case.serving, sequence, int(case.serving.lengths[sequence]), case.k_cache.shape[1])
    after = got.as_strided(case.k_cache.shape, case.k_cache.stride(), case.k_cache.storage_offset())
    assert (after[block, slot] == CANARY).all()


def rows(x, cu, b):
    return x[b] if cu is None else x[int(cu[b]) : int(cu[b + 1])]


def target(s: Serving, b: int, row: int, size: int) -> tuple[int, int]:
    if s.page_table is None:
        return (b if s.batch_idx is None else int(s.batch_idx[b])), row
    pages = s.page_table[b] if s.indptr is None else s.page_table[int(s.indptr[b]) :]
    return int(pages[row // size]), row % size


def embedded(case: Case, x: torch.Tensor, position: int) -> torch.Tensor:
    """x (heads, d) with its rotary embedding, one pair after the other."""
    if case.cos is None:
        return x
    out, half = x.clone(), case.cos.shape[1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if case.interleaved else (i, i + half)
        cos, sin = case.cos[position, i].to(wide), case.sin[position, i].to(wide)
        first, second = x[:, a].to(wide), x[:, b].to(wide)
        out[:, a], out[:, b] = (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)
    return out
