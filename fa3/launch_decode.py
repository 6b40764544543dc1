"""Attention to a cache on CUDA tensors: as launch.py does it, with plans of its own.

A plan is made for what a call looks like: how long each sequence is, and in which pages it lies, only the device knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, float32, int32

from fa3.device import chip
from fa3.heuristics_decode import config_for, pages_of, shares_for
from fa3.kernels.compile import load
from fa3.kernels.decode.config import ROWS, Spec
from fa3.kernels.forward.config import tile_for
from fa3.launch import REFUSALS, remember
from fa3.problem import KERNEL_DTYPES, check_chip
from fa3.problem_kvcache import check_decode
from fa3.problem_varlen import Sequences, existing
from fa3.reference import LOG2_E, SMALLEST_SCALE
from fa3.serving import Serving
from fa3.tma import fitted, strides_for, why_copied
from fa3.variant import Variant

FAR = 2**30  # keys: no limit
TILES_MAX = 65535  # of a grid's second and third side


class Plan(NamedTuple):
    run: Callable[..., object] | None  # None: no query, or no key
    slots: int  # of partial results
    rows: int  # of one
    part_columns: int
    capacity: int  # keys of a sequence
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
    given = tuple(None if x is None else x.shape for x in s if x is None or isinstance(x, Tensor))
    key = (
        q.shape, k_cache.shape, v_cache.shape, q.dtype, q.get_device(), given, s.max_seqlen_q if is_ragged else 0,
        variant.attention_chunk, variant.softcap > 0, variant[:3], sink is None, num_splits, split_size,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        check_decode(q, k_cache, v_cache, serving, softmax_scale, sink, num_splits, split_size, out)
        plan = _plan(q, k_cache, v_cache, serving, variant, sink is not None, num_splits, split_size)
        remember(_plans, key, plan)
    made = q.new_empty((*q.shape[:-1], v_cache.shape[3])) if out is None else out
    shape = (q.shape[1], q.shape[0]) if is_ragged else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_empty(shape, dtype=float32)
    if plan.run is None:
        check_decode(q, k_cache, v_cache, serving, softmax_scale, sink, num_splits, split_size, out)
        return _nothing(made, lse, sink, s.cu_seqlens_q, out is not None)
    parts = None
    if plan.slots:
        parts = (
            q.new_empty((plan.slots, plan.rows, plan.part_columns), dtype=float32),
            q.new_empty((plan.slots, plan.rows), dtype=float32),
        )
    scale_log2, cap = max(softmax_scale, SMALLEST_SCALE) * LOG2_E, None
    if variant.softcap > 0:
        scale_log2, cap = variant.softcap * LOG2_E, 2 * scale_log2 / variant.softcap
    if sink is not None and sink.dtype != float32:
        sink = sink.float()
    tensors = (q, k_cache, v_cache, made, lse)
    if is_ragged:
        tensors = q.unsqueeze(0), k_cache, v_cache, made.unsqueeze(0), lse.unsqueeze(0)
    table = s.page_table if s.indptr is None else s.page_table.unsqueeze(0)  # type: ignore[union-attr]
    others = (
        parts, table, sink, _lists(q, lse, serving, plan.capacity), plan.window, *plan.granule, scale_log2, cap,
        plan.tiles, plan.shares,
    )  # fmt: skip
    try:
        plan.run(*tensors, *others)
    except REFUSALS:
        check_decode(q, k_cache, v_cache, serving, softmax_scale, sink, num_splits, split_size, out)
        _launch_on_copies(plan.run, tensors, others)
    return made, lse


def _lists(q: Tensor, lse: Tensor, s: Serving, capacity: int) -> tuple:
    """The lists as the kernel takes them: one that is not given is not read, and any other stands for it."""
    lists = s.lengths, s.cu_seqlens_k_new, s.leftpad, s.batch_idx, s.indptr, s.cu_seqlens_q
    stand_in = next((x for x in lists if x is not None), None)
    if stand_in is None:
        stand_in = lse.view(int32).view(-1)[:1]
    flags = tuple(int(x is not None) for x in lists)
    lengths = tuple(stand_in if x is None else x for x in lists)
    batch = q.shape[0] if s.cu_seqlens_q is None else s.cu_seqlens_q.shape[0] - 1
    return (*lengths, *flags, s.added, q.shape[1], capacity, batch)


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


def _nothing(
    out: Tensor, lse: Tensor, sink: Tensor | None, cu_seqlens_q: Tensor | None, is_given: bool
) -> tuple[Tensor, Tensor]:
    """Where no query sees a key. Of an out that was given only the rows of queries are written."""
    lse.fill_(-torch.inf)
    if sink is not None:
        lse.copy_(sink[:, None].expand_as(lse))
    if cu_seqlens_q is None or not is_given:
        return out.zero_(), lse
    rows = existing(Sequences(cu_seqlens_q, cu_seqlens_q, None, None, 0, 0), out.shape[0])
    return out.masked_fill_(rows[:, None, None], 0.0), lse


def _plan(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, s: Serving, variant: Variant, sink: bool, num_splits: int,
    split_size: int,
) -> Plan:  # fmt: skip
    found = chip(q.get_device())
    check_chip(found)
    heads, head_dim = q.shape[-2:]
    pages, rows, heads_kv, head_dim_v = v_cache.shape
    is_ragged = s.cu_seqlens_q is not None
    batch = q.shape[0] if s.cu_seqlens_q is None else s.cu_seqlens_q.shape[0] - 1
    seqlen_q = min(s.max_seqlen_q, q.shape[0]) if is_ragged else q.shape[1]
    capacity = rows
    if s.page_table is not None:
        capacity = min(FAR, rows * (s.page_table.shape[1] if s.indptr is None else pages))
    page_size = None if s.page_table is None else rows
    spec = Spec(
        KERNEL_DTYPES[q.dtype], *tile_for(head_dim, head_dim_v), pages_of(page_size), chunk=variant.attention_chunk > 0,
        softcap=variant.softcap > 0, sink=sink,
    )  # fmt: skip
    config = config_for(spec, batch, split_size)
    if 0 in (q.numel(), batch, seqlen_q, k_cache.numel(), v_cache.numel()):
        return Plan(None, 0, 0, 0, 0, (), (None, None), 0, 0)
    query_rows = seqlen_q * (heads // heads_kv)
    tiles = -(-query_rows // ROWS)
    if tiles > TILES_MAX:
        raise ValueError(
            f"a sequence may have {seqlen_q} queries of {heads // heads_kv} heads a KV head, by q and max_seqlen_q; "
            f"allowed: {TILES_MAX * ROWS} together. Split the queries, or say max_seqlen_q"
        )
    units = tiles * heads_kv
    blocks = -(-capacity // config.tile_n)
    shares = shares_for(units, batch * blocks, found.num_sms)
    granule: tuple[int, int] | tuple[None, None] = (None, None)
    slots = 2 * shares if shares > 1 else 0
    if num_splits or split_size:
        granule = split_size, max(1, num_splits)
        slots = batch * (num_splits or -(-capacity // split_size))
        slots = 0 if num_splits == 1 else slots
    spec = Spec(**{**spec.__dict__, "splits": slots > 0, "granules": granule[0] is not None})
    left, right = (FAR if x < 0 else min(x, FAR) for x in (variant.window_left, variant.window_right))
    window: tuple = left, 0 if variant.causal else right
    if variant.attention_chunk:
        window = window, min(variant.attention_chunk, FAR)
    run = load(spec, config)
    return Plan(
        run, slots * units, min(query_rows, ROWS), spec.head_dim_v, capacity, window, granule, tiles, shares
    )  # fmt: skip
