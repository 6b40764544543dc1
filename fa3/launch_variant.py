"""Dense variants of the forward on CUDA tensors: as launch.py does it for the plain ones, with plans of their own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, empty_like, zeros_like

from fa3 import launch
from fa3.launch import REFUSALS, Plan, plan_of, remember
from fa3.problem import MAX_SCALE, check_scale, check_tensors, default_scale, problem_of
from fa3.problem_variant import check_variant, numbers_of, simplified, with_variant
from fa3.tma import fitted
from fa3.variant import Variant


class VariantPlan(NamedTuple):
    variant: Variant  # simplified
    plan: Plan | None  # None: the plain kernel does


_plans: dict[tuple, VariantPlan] = {}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    variant: Variant,
    sink: Tensor | None,
    keeps_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """O (B, Sq, Hq, Dv) in q's dtype and LSE (B, Hq, Sq) in fp32, both contiguous. Never waits for the device."""
    of_sink = None if sink is None else (sink.shape, sink.dtype, sink.get_device())
    key = (q.shape, k.shape, v.shape, q.dtype, q.get_device(), variant, of_sink, keeps_lse)
    found = _plans.get(key)
    if found is None:
        found = _plan(q, k, v, variant, sink, keeps_lse)
        remember(_plans, key, found)
    variant, plan = found
    if plan is None:
        return launch.forward(q, k, v, softmax_scale, variant.causal, keeps_lse)
    if softmax_scale is None:
        softmax_scale = default_scale(q)
    elif not 0.0 <= softmax_scale <= MAX_SCALE:
        check_scale(softmax_scale)
    out, lse = empty_like(plan.out), empty_like(plan.lse) if plan.makes_lse else plan.lse
    if plan.run is None:
        check_tensors(q, k, v)
        return out.zero_(), nothing_seen(lse, sink)
    # NOTE: a counter of its own for every call: one that calls share would tie their streams together.
    tickets = None if plan.tickets is None else zeros_like(plan.tickets)
    numbers, scale_log2 = numbers_of(variant, softmax_scale, sink)
    others = None, None, None, numbers, tickets, scale_log2, plan.num_sms
    try:
        plan.run(q, k, v, out, lse, *others)
    except REFUSALS:
        check_tensors(q, k, v)
        plan.run(fitted(q), fitted(k), fitted(v), out, lse, *others)
    return out, lse


def nothing_seen(lse: Tensor, sink: Tensor | None) -> Tensor:
    """lse (.., Hq, rows) of queries that see no key: the sinks, or -inf."""
    return lse.fill_(-float("inf")) if sink is None else lse.copy_(sink[:, None].expand(lse.shape))


def _plan(q: Tensor, k: Tensor, v: Tensor, variant: Variant, sink: Tensor | None, keeps_lse: bool) -> VariantPlan:
    problem = problem_of(q, k, v, default_scale(q), variant.causal)
    check_variant(variant, sink, q)
    variant = simplified(variant, q.shape[1], k.shape[1])
    if sink is None and variant == Variant(variant.causal):
        return VariantPlan(variant, None)
    return VariantPlan(variant, plan_of(with_variant(problem, variant, sink), q, keeps_lse))
