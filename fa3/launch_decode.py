"""Attention to a cache on CUDA tensors: as launch.py does it, with plans of its own.

A plan is made for what a call looks like: how long each sequence is, and in which pages it lies, only the device knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, empty_like, float32, int32

from fa3.device import chip
from fa3.heuristics_decode import config_for, pages_of, shares_for
from fa3.kernels.compile import load
from fa3.kernels.decode.config import ROWS, Spec
from fa3.kernels.forward.config import tile_for
from fa3.launch import REFUSALS, _without_memory, remember
from fa3.problem import KERNEL_DTYPES, check_chip
from fa3.problem_kvcache import check_decode
from fa3.reference import LOG2_E, SMALLEST_SCALE
from fa3.serving import Serving
from fa3.tma import fitted, strides_for, why_copied
from fa3.variant import Variant

FAR = 2**30  # keys: no limit


class Plan(NamedTuple):
    """NOTE: out, lse and parts have sizes and no memory: empty_like of one takes half the time of new_empty."""

    run: Callable[..., object] | None  # None: no query, or no key
    out: Tensor
    lse: Tensor
    parts: tuple[Tensor, Tensor] | None  # partial O and LSE
    flags: tuple[int, ...]  # which lists are given
    stand_in: int | None  # the list that stands for the others; None: none is given
    sizes: tuple[int, int, int]  # queries, capacity, batch
    window: tuple
    granule: tuple[int, int] | tuple[None, None]
    tiles: int
    shares: int


_plans: dict[tuple, Plan] = {}


def forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    serving: Serving,
    softmax_scale: float,
    variant: Variant,
    sink: Tensor | None,
    num_splits: int,
    split_size: int,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """O in q's dtype, or out, and LSE in fp32: (B, Hq, Sq), of ragged queries (Hq, total). Waits for nothing."""
    s = serving
    is_ragged = s.cu_seqlens_q is not None
    table = s.page_table
    lists = s.lengths, s.cu_seqlens_k_new, s.leftpad, s.batch_idx, s.indptr, s.cu_seqlens_q
    key = (
        q.shape, k_cache.shape, v_cache.shape, q.dtype, q.get_device(), table is not None and table.shape,
        is_ragged and s.max_seqlen_q, variant, sink is not None and sink.dtype, num_splits, split_size,
        *[x is not None and x.shape for x in lists],
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        check_decode(q, k_cache, v_cache, serving, softmax_scale, sink, num_splits, split_size, out)
        plan = _plan(q, k_cache, v_cache, serving, variant, sink, num_splits, split_size)
        remember(_plans, key, plan)
    made = empty_like(plan.out) if out is None else out
    lse = empty_like(plan.lse)
    if plan.run is None:
        check_decode(q, k_cache, v_cache, serving, softmax_scale, sink, num_splits, split_size, out)
        return _nothing(made, lse, sink, s.cu_seqlens_q)
    parts = plan.parts
    if parts is not None:
        parts = empty_like(parts[0]), empty_like(parts[1])
    scale_log2, cap = max(softmax_scale, SMALLEST_SCALE) * LOG2_E, None
    if variant.softcap > 0:
        scale_log2, cap = variant.softcap * LOG2_E, 2 * scale_log2 / variant.softcap
    tensors = (q, k_cache, v_cache, made, lse)
    if is_ragged:
        tensors = q.unsqueeze(0), k_cache, v_cache, made.unsqueeze(0), lse.unsqueeze(0)
    if s.indptr is not None:
        table = table.unsqueeze(0)  # type: ignore[union-attr]
    # A list that is not given is not read, and any other stands for it.
    one = lse.view(int32).view(-1)[:1] if plan.stand_in is None else lists[plan.stand_in]
    told = (*[one if x is None else x for x in lists], *plan.flags, s.added, *plan.sizes)
    others = (
        parts, table, sink, told, plan.window, *plan.granule, scale_log2, cap,
        plan.tiles, plan.shares,
    )  # fmt: skip
    try:
        plan.run(*tensors, *others)
    except REFUSALS:
        check_decode(q, k_cache, v_cache, serving, softmax_scale, sink, num_splits, split_size, out)
        _launch_on_copies(plan.run, tensors, others)
    return made, lse


def _launch_on_copies(run: Callable[..., object], tensors: tuple[Tensor, ...], others: tuple) -> None:
    """With tensors that the compiled function takes. A cache is never copied."""
    q, k, v, out, lse = tensors
    caches = []
    for name, cache in (("k_cache", k), ("v_cache", v)):
        strides = strides_for(cache)
        cache = cache if strides is None else cache.as_strided(cache.shape, strides)
        reason = why_copied(cache, cache.data_ptr())
        if reason:
            raise ValueError(f"{name} cannot be read by TMA: its {reason}; a cache is not copied")
        caches.append(cache)
    parts, table, sink, lists, *rest = others
    lists = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in lists)
    place = fitted(out)
    run(fitted(q), *caches, place, lse, parts, table, sink, lists, *rest)
    if place.data_ptr() != out.data_ptr():
        out.copy_(place)


def _nothing(out: Tensor, lse: Tensor, sink: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where no query sees a key. Rows that are no queries keep what they hold."""
    lse.fill_(-torch.inf)
    if sink is not None:
        lse.copy_(sink[:, None].expand_as(lse))
    if offsets is None:
        return out.zero_(), lse
    rows = torch.arange(out.shape[0], device=out.device)
    is_query = (rows >= offsets[0]) & (rows < offsets[-1])
    return out.masked_fill_(is_query[:, None, None], 0.0), lse


def _plan(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, s: Serving, variant: Variant, sink: Tensor | None, num_splits: int,
    split_size: int,
) -> Plan:  # fmt: skip
    found = chip(q.get_device())
    check_chip(found)
    heads, head_dim = q.shape[-2:]
    _, rows, heads_kv, head_dim_v = v_cache.shape
    is_ragged = s.cu_seqlens_q is not None
    batch = q.shape[0] if s.cu_seqlens_q is None else s.cu_seqlens_q.shape[0] - 1
    seqlen_q = min(s.max_seqlen_q, q.shape[0]) if is_ragged else q.shape[1]
    capacity = rows
    if s.page_table is not None:
        capacity = min(FAR, rows * s.page_table.shape[-1])
    page_size = None if s.page_table is None else rows
    sink_dtype = "" if sink is None else str(sink.dtype).removeprefix("torch.")
    spec = Spec(
        KERNEL_DTYPES[q.dtype], *tile_for(head_dim, head_dim_v), pages_of(page_size, s.leftpad is not None), chunk=variant.attention_chunk > 0,
        softcap=variant.softcap > 0, sink=sink_dtype,
    )  # fmt: skip
    config = config_for(spec, split_size)
    out = _without_memory(q, (*q.shape[:-1], head_dim_v))
    lse = _without_memory(q, (heads, q.shape[0]) if is_ragged else (batch, heads, seqlen_q), float32)
    if 0 in (q.numel(), batch, seqlen_q, k_cache.numel(), v_cache.numel()):
        return Plan(None, out, lse, None, (), None, (0, 0, 0), (), (None, None), 0, 0)
    query_rows = seqlen_q * (heads // heads_kv)
    tiles = -(-query_rows // ROWS)
    units = tiles * heads_kv
    blocks = -(-capacity // config.tile_n)
    shares = shares_for(units, batch * blocks, found.num_sms)
    granule: tuple[int, int] | tuple[None, None] = (None, None)
    slots = 2 * shares if shares > 1 else 0
    if num_splits or split_size:
        granule = split_size, max(1, num_splits)
        slots = batch * (min(num_splits, blocks) or -(-capacity // split_size))
        slots = 0 if num_splits == 1 else slots
    spec = Spec(**{**spec.__dict__, "splits": slots > 0, "granules": granule[0] is not None})
    left, right = (FAR if x < 0 else min(x, FAR) for x in (variant.window_left, variant.window_right))
    window: tuple = left, 0 if variant.causal else right
    if variant.attention_chunk:
        window = window, variant.attention_chunk
    run, parts = load(spec, config), None
    if slots:
        size = slots * units, min(query_rows, ROWS)
        parts = _without_memory(q, (*size, spec.head_dim_v), float32), _without_memory(q, size, float32)
    lists = s.lengths, s.cu_seqlens_k_new, s.leftpad, s.batch_idx, s.indptr, s.cu_seqlens_q
    flags = tuple(int(x is not None) for x in lists)
    return Plan(
        run, out, lse, parts, flags, flags.index(1) if 1 in flags else None, (seqlen_q, capacity, batch), window,
        granule, tiles, shares,
    )  # fmt: skip
