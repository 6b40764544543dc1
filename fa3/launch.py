"""Validated tensors -> outputs, on the current stream of their device: allocate, fetch the compiled kernel, call it.

What a call needs beyond its tensors (kernel, looks of the outputs) is a Plan, made once for the shapes, type and device
of a call and found again by one dictionary hit, so that a repeated call costs microseconds of host time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, empty_like, float32, int32, zeros_like
from torch.cuda import is_current_stream_capturing

from fa3.device import chip
from fa3.heuristics import config_of
from fa3.kernels.compile import load
from fa3.problem import (
    FP8,
    MAX_SCALE,
    Problem,
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
    """NOTE: out, lse and tickets have sizes and no memory: empty_like of one takes half the time of new_empty."""

    run: Callable[..., object] | None  # None: an empty problem
    out: Tensor
    lse: Tensor
    makes_lse: bool  # else lse has memory: where an LSE goes that nobody asked for
    tickets: Tensor | None  # the counter of a dynamic grid, 0 at its start
    scale_log2: float  # of the default scale
    num_sms: int


REFUSALS = (ValueError, TypeError)  # what the compiled function raises before it launches
PLANS_MAX = 4096  # forgotten all together, so that ever new lengths do not fill the memory
SPARE_BYTES = 256 * 1024  # of a device: the kernel of a larger LSE hides the host's time

_plans: dict[tuple, Plan] = {}
_spares: dict[torch.device, Tensor] = {}


def forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, keeps_lse: bool = True
) -> tuple[Tensor, Tensor]:
    """O (B, Sq, Hq, Dv) in q's dtype and LSE (B, Hq, Sq) in fp32, both contiguous. Never waits for the device.

    Without keeps_lse any other call may write over the LSE. The compiled function looks in every call at what is not in
    the key: before it launches anything it refuses a k or v of another dtype, device or size than the others say, and
    strides and addresses that it cannot take. Only then are they looked at here. It changes to their device and back.
    """
    key = (q.shape, v.shape, q.dtype, q.get_device(), causal, keeps_lse)
    plan = _plans.get(key)
    if plan is None:
        if q.dtype == FP8:
            from fa3.launch_fp8 import row_major  # has plans of its own

            return row_major(q, k, v, softmax_scale, causal)
        plan = _plan(q, k, v, causal, keeps_lse)
        remember(_plans, key, plan)
    run, out, lse, makes_lse, tickets, scale_log2, num_sms = plan
    if softmax_scale is not None:
        if not 0.0 <= softmax_scale <= MAX_SCALE:
            check_scale(softmax_scale)
        scale_log2 = max(softmax_scale, SMALLEST_SCALE) * LOG2_E
    out = empty_like(out)
    if makes_lse:
        lse = empty_like(lse)
    if run is None:
        check_tensors(q, k, v)
        return out.zero_(), lse.fill_(-math.inf)
    if tickets is not None:
        # NOTE: a counter of its own for every call: one that calls share would tie their streams together.
        tickets = zeros_like(tickets)
    try:
        run(q, k, v, out, lse, None, None, None, None, tickets, scale_log2, num_sms)
    except REFUSALS:
        check_tensors(q, k, v)
        run(fitted(q), fitted(k), fitted(v), out, lse, None, None, None, None, tickets, scale_log2, num_sms)
    return out, lse


def remember(plans: dict[tuple, Any], key: tuple, plan: Any) -> None:
    """For the next call like this one; with PLANS_MAX others it takes the place of all."""
    if len(plans) >= PLANS_MAX:
        plans.clear()
    plans[key] = plan


def _plan(q: Tensor, k: Tensor, v: Tensor, causal: bool, keeps_lse: bool) -> Plan:
    return plan_of(problem_of(q, k, v, default_scale(q), causal), q, keeps_lse)


def plan_of(problem: Problem, q: Tensor, keeps_lse: bool) -> Plan:
    """The Plan of a validated call."""
    found = chip(q.get_device())
    check_chip(found)
    config = config_of(problem, found.num_sms)
    check_sizes(problem, config)
    run = None if problem.is_empty else load(problem.spec, config)
    out = _without_memory(q, problem.out_shape)
    tickets = _without_memory(q, (1,), int32) if config.dynamic else None
    spare = None if keeps_lse or problem.is_empty else _spare(q.device, problem.lse_shape)
    lse = _without_memory(q, problem.lse_shape, float32) if spare is None else spare
    return Plan(run, out, lse, spare is None, tickets, default_scale(q) * LOG2_E, found.num_sms)


def _fresh(size: int, device: torch.device) -> Tensor:
    """Memory that nothing under way uses any more: a block of the allocator may still be read on the default stream."""
    made = torch.empty(size, dtype=float32, device=device)
    if made.is_cuda:
        torch.cuda.default_stream(device).synchronize()
    return made


def _without_memory(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """NOTE: a plan that held memory would hold it in the pool of the CUDA graph during whose capture it was made."""
    made = like.new_empty(shape, dtype=dtype)
    made.untyped_storage().resize_(0)
    return made


def _spare(device: torch.device, shape: tuple[int, ...]) -> Tensor | None:
    """Memory that all calls on the device share, on whatever stream: it is written and never read. None: a large LSE.

    NOTE: never given back, because a captured graph keeps writing it. Not made during a capture, and made in a thread
    of its own, because what this one allocates while it warms up a graph, or uses a pool of the user, is in that pool.
    """
    size, limit = math.prod(shape), SPARE_BYTES // float32.itemsize
    if size > limit:
        return None
    if device not in _spares:
        if is_current_stream_capturing():
            return None
        with ThreadPoolExecutor(1) as another:
            made = another.submit(_fresh, limit, device).result()
        _spares.setdefault(device, made)
    return _spares[device][:size].view(shape)
