"""Validated tensors -> outputs, on the current stream of their device: allocate, fetch the compiled kernel, call it.

What a call needs beyond its tensors (kernel, output shapes, device) is a Plan, made once for the shapes, types and
devices of a call and found again by one dictionary hit, so that a repeated call costs microseconds of host time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, contiguous_format, empty_like, float32, int32
from torch.cuda import current_device

from fa3 import launch_fp8
from fa3.device import chip
from fa3.heuristics import config_of
from fa3.kernels.compile import load
from fa3.launch_fp8 import PLANS_MAX, REFUSALS
from fa3.problem import (
    FP8,
    MAX_SCALE,
    check_chip,
    check_scale,
    check_sizes,
    check_tensors,
    default_scale,
    problem_of,
)
from fa3.reference import LOG2_E, SMALLEST_SCALE
from fa3.tma import fitted


class Plan(NamedTuple):
    run: Callable[..., object] | None  # None: an empty problem
    out_shape: tuple[int, ...] | None  # None: q's
    lse_shape: tuple[int, ...]
    scale_log2: float  # of the default scale
    device: int
    num_sms: int
    is_dynamic: bool  # the kernel takes a counter, 0 at its start


_plans: dict[tuple, Plan] = {}


def forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """O (B, Sq, Hq, Dv) in q's dtype and LSE (B, Hq, Sq) in fp32, both contiguous. Never waits for the device.

    Strides, addresses and the dtypes of k and v are not part of the plan: the compiled function looks at them in every
    call anyway and refuses, before it launches anything, what it cannot take. Only then are they looked at here.
    """
    key = (q.shape, k.shape, v.shape, q.dtype, q.device, k.device, v.device, causal)
    plan = _plans.get(key)
    if plan is None:
        if q.dtype == FP8:
            return launch_fp8.row_major(q, k, v, softmax_scale, causal)  # has plans of its own
        plan = _plan(q, k, v, causal)
        if len(_plans) >= PLANS_MAX:
            _plans.clear()
        _plans[key] = plan
    run, out_shape, lse_shape, scale_log2, device, num_sms, is_dynamic = plan
    if softmax_scale is not None:
        if not 0.0 <= softmax_scale <= MAX_SCALE:
            check_scale(softmax_scale)
        scale_log2 = max(softmax_scale, SMALLEST_SCALE) * LOG2_E
    # NOTE: empty_like takes 4/5 of the time of new_empty.
    out = empty_like(q, memory_format=contiguous_format) if out_shape is None else q.new_empty(out_shape)
    lse = q.new_empty(lse_shape, dtype=float32)
    if run is None:
        check_tensors(q, k, v)
        return out.zero_(), lse.fill_(-math.inf)
    if current_device() != device:
        with torch.cuda.device(device):
            tickets = q.new_zeros(1, dtype=int32) if is_dynamic else None
            _run(run, q, k, v, out, lse, None, None, None, tickets, scale_log2, num_sms)
    else:
        # NOTE: a counter of its own for every call: one that calls share would tie their streams together.
        tickets = q.new_zeros(1, dtype=int32) if is_dynamic else None
        try:
            run(q, k, v, out, lse, None, None, None, tickets, scale_log2, num_sms)
        except REFUSALS:
            _run(run, q, k, v, out, lse, None, None, None, tickets, scale_log2, num_sms)
    return out, lse


def _run(run: Callable[..., object], q: Tensor, k: Tensor, v: Tensor, *others: object) -> None:
    """With tensors that the compiled function takes, or the error that says why they cannot be had."""
    check_tensors(q, k, v)
    run(fitted(q), fitted(k), fitted(v), *others)


def _plan(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Plan:
    scale = default_scale(q)
    problem = problem_of(q, k, v, scale, causal)
    device = q.get_device()
    found = chip(device)
    check_chip(found)
    config = config_of(problem, found.num_sms)
    check_sizes(problem, config)
    run = None if problem.is_empty else load(problem.spec, config)
    out_shape = None if problem.out_shape == q.shape else problem.out_shape
    return Plan(run, out_shape, problem.lse_shape, scale * LOG2_E, device, found.num_sms, config.dynamic)
