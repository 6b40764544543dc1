"""The ragged forward on CUDA tensors: as launch.py does it for dense ones, with plans of its own.

A plan is made for heads, head dims, number of sequences, type, device and maximal lengths, not for total lengths. How
long each sequence is only the device knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, float32, int32

from fa3.device import chip
from fa3.heuristics import ragged_config_for, ragged_tiles
from fa3.kernels.compile import load
from fa3.launch import REFUSALS, remember
from fa3.problem import MAX_SCALE, SIZE_MAX, check_chip, check_scale
from fa3.problem_paged import check_layout_of_pool, check_paged, check_pages_of_kernel, paged_problem
from fa3.problem_variant import Extras, Numbers, check_variant, numbers_of, simplified, with_variant
from fa3.problem_varlen import (
    TOTAL_MAX,
    Sequences,
    check_out,
    check_ragged,
    check_totals,
    default_scale,
    existing,
    ragged_problem,
)
from fa3.reference import LOG2_E, SMALLEST_SCALE
from fa3.tma import fitted
from fa3.variant import Variant

STEP = 16  # divides every size and limit by which a Config is chosen: lengths are as good as rounded up to it


class Plan(NamedTuple):
    run: Callable[..., object] | None  # None: an empty problem
    tile_m: int
    heads: int
    head_dim_v: int
    batch: int
    scale_log2: float  # of the default scale
    num_sms: int
    variant: Variant | None = None  # simplified; None: the plain kernel


_plans: dict[tuple, Plan] = {}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    softmax_scale: float | None,
    causal: bool,
    out: Tensor | None = None,
    extras: Extras | None = None,
) -> tuple[Tensor, Tensor]:
    """O (total_q, Hq, Dv) in q's dtype, or out, and LSE (Hq, total_q) in fp32. Never waits for the device.

    A new O whose sequences may leave rows unused (seqused_q) is 0 there, an LSE -inf. The compiled function looks in
    every call at what is in no plan's key, as in launch.py, at the lists too, and refuses what it cannot take.
    """
    plan = _plan_of(q, k, v, sequences, causal, extras)
    page_table = None if extras is None else extras.page_table
    scale_log2, numbers = plan.scale_log2, None
    if softmax_scale is not None:
        if not 0.0 <= softmax_scale <= MAX_SCALE:
            check_scale(softmax_scale)
        scale_log2 = max(softmax_scale, SMALLEST_SCALE) * LOG2_E
    if plan.variant is not None and extras is not None:
        scale = default_scale(q) if softmax_scale is None else softmax_scale
        numbers, scale_log2 = numbers_of(plan.variant, scale, extras.sink)
    if out is not None:
        check_out(q, v, out)
    total_q = q.shape[0]
    if plan.run is None:
        _check(q, k, v, sequences, page_table)
        return _nothing(q, plan, sequences, out, None if extras is None else extras.sink)
    if sequences.seqused_q is None:
        made = q.new_empty((total_q, plan.heads, plan.head_dim_v)) if out is None else out
        lse = q.new_empty((plan.heads, total_q), dtype=float32)
    else:
        made = q.new_zeros((total_q, plan.heads, plan.head_dim_v)) if out is None else out
        lse = q.new_full((plan.heads, total_q), -math.inf, dtype=float32)
    _launch(plan, q, k, v, sequences, made, lse, scale_log2, numbers, page_table)
    return made, lse


def _launch(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, out: Tensor, lse: Tensor, scale_log2: float,
    numbers: Numbers | None, page_table: Tensor | None,
) -> None:  # fmt: skip
    tiles = ragged_tiles(q.shape[0], plan.tile_m, plan.heads, plan.batch)
    total_k = k.shape[0] if page_table is None else 0
    if tiles > SIZE_MAX or q.shape[0] > TOTAL_MAX or total_k > TOTAL_MAX:
        check_totals(q.shape[0], total_k, plan.heads, plan.batch, plan.tile_m)
    cu_q, cu_k, used_q, used_k, _, _ = sequences
    # Two that are None, or one, are not read: what stands for them has the size that the compiled function expects.
    stand_in = cu_q if used_q is used_k else used_k if used_q is None else used_q
    lists = cu_q, cu_k, stand_in if used_q is None else used_q, stand_in if used_k is None else used_k
    ragged: tuple = *lists, int(used_q is not None), int(used_k is not None)
    if page_table is not None:
        ragged = cu_q, page_table, lists[2], used_k, int(used_q is not None)
    # NOTE: a counter of its own for every call: one that calls share would tie their streams together. Where no CTA has
    # a second tile none is drawn: any number stands for the counter.
    tickets = q.new_zeros(1, dtype=int32) if tiles > plan.num_sms else cu_q[:1]
    others = None, None, ragged, numbers, tickets, scale_log2, plan.num_sms
    tensors = [t.unsqueeze(0) for t in (q, k, v, out, lse)]
    if page_table is not None:
        tensors[1:3] = k, v
    assert plan.run is not None
    try:
        plan.run(*tensors, *others)
    except REFUSALS:
        _check(q, k, v, sequences, page_table)
        if page_table is not None:
            check_layout_of_pool(k, v)
        _launch_on_copies(plan.run, tensors, others)


def _launch_on_copies(run: Callable[..., object], tensors: list[Tensor], others: tuple) -> None:
    """With tensors that the compiled function takes."""
    q, k, v, out, lse = tensors
    scales, v_channel, ragged, *rest = others
    lists = [x if isinstance(x, int) or x.dim() != 1 or x.stride(0) == 1 else x.contiguous() for x in ragged]
    place = fitted(out)  # a copy holds what is in out, because not every row is written
    run(fitted(q), fitted(k), fitted(v), place, lse, scales, v_channel, tuple(lists), *rest)
    if place.data_ptr() != out.data_ptr():
        out.copy_(place)


def _check(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, page_table: Tensor | None) -> None:
    if page_table is None:
        check_ragged(q, k, v, sequences)
    else:
        check_paged(q, k, v, sequences, page_table)


def _nothing(
    q: Tensor, plan: Plan, sequences: Sequences, out: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Where no query sees a key. Of an out that was given only the rows of queries are written."""
    total_q = q.shape[0]
    lse = q.new_full((plan.heads, total_q), -math.inf, dtype=float32)
    if sink is not None:
        lse = lse.where(~existing(sequences, total_q), sink[:, None].float())
    if out is None:
        return q.new_zeros((total_q, plan.heads, plan.head_dim_v)), lse
    return out.masked_fill_(existing(sequences, total_q)[:, None, None], 0.0), lse


def _plan_of(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, causal: bool, extras: Extras | None) -> Plan:
    cu_q, _, used_q, used_k, max_q, max_k = sequences
    used = None if used_q is None else used_q.shape, None if used_k is None else used_k.shape
    bounds = -(-max_q // STEP), -(-max_k // STEP)
    is_empty = 0 in (*q.shape[:1], *k.shape[:1])
    key: tuple = (q.shape[1:], v.shape[1:], q.dtype, q.get_device(), causal, cu_q.shape, used, bounds, is_empty)
    if extras is not None:
        variant, sink, page_table, _ = extras
        of_sink = None if sink is None else (sink.shape, sink.dtype, sink.get_device())
        of_pages = None if page_table is None else (k.shape[1], sequences.cu_seqlens_k is None)
        key += variant, of_sink, of_pages
    plan = _plans.get(key)
    if plan is None:
        plan = _plan(q, k, v, sequences, causal, extras)
        remember(_plans, key, plan)
    return plan


def _plan(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, causal: bool, extras: Extras | None) -> Plan:
    scale = default_scale(q)
    variant, page_size = None, 0
    if extras is None or extras.page_table is None:
        problem = ragged_problem(q, k, v, sequences, scale, causal)
    else:
        problem = paged_problem(q, k, v, sequences, extras.page_table, scale, causal)
        check_pages_of_kernel(k, v)
        page_size = k.shape[1]
    if extras is not None:
        check_variant(extras.variant, extras.sink, q)
        variant = simplified(extras.variant)
        problem = with_variant(problem, variant, extras.sink)
        variant = variant if problem.spec.is_variant else None
    found = chip(q.get_device())
    check_chip(found)
    p, bounds = problem, (sequences.max_seqlen_q, sequences.max_seqlen_k)
    config = ragged_config_for(p.spec, *bounds, page_size)
    run = None if p.is_empty else load(p.spec, config)
    return Plan(run, config.tile_m, p.heads, p.head_dim_v, p.batch, scale * LOG2_E, found.num_sms, variant)
