"""Validated tensors -> outputs, on the current stream of their device: allocate, fetch the compiled kernel, call it.

What a call needs beyond its tensors (kernel, output shapes, device) is a Plan, made once for the shapes, types and
devices of a call and found again by one dictionary hit, so that a repeated call costs microseconds of host time.

What TMA can take: a data pointer that is a multiple of 16 bytes, and strides that are multiples of 8 elements in every
dimension of more than one element; expanded dimensions (stride 0) too. A tensor that does not fit is copied into a
contiguous one first; a dimension of one element whose stride does not fit gets another stride, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, contiguous_format, empty_like, float32, int32
from torch.cuda import current_device

from fa3.device import chip
from fa3.heuristics import config_for
from fa3.kernels.compile import load
from fa3.kernels.forward.config import Config
from fa3.problem import (
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

TMA_ALIGNMENT = 16  # bytes
STRIDE_STEP = 8  # elements: 16 bytes of a 16-bit type
REFUSALS = (ValueError, TypeError)  # what the compiled function raises before it launches
PLANS_MAX = 4096  # forgotten all together, so that ever new lengths do not fill the memory

Strides = tuple[int, ...]


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
            _run(run, q, k, v, out, lse, None, None, tickets, scale_log2, num_sms)
    else:
        # NOTE: a counter of its own for every call: one that calls share would tie their streams together.
        tickets = q.new_zeros(1, dtype=int32) if is_dynamic else None
        try:
            run(q, k, v, out, lse, None, None, tickets, scale_log2, num_sms)
        except REFUSALS:
            _run(run, q, k, v, out, lse, None, None, tickets, scale_log2, num_sms)
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


def config_of(problem: Problem, num_sms: int) -> Config:
    """The Config that the heuristics choose for it on a chip of that many SMs; an empty size is taken as 1."""
    p = problem
    seqlen_q, seqlen_k, heads, batch = (max(1, size) for size in (p.seqlen_q, p.seqlen_k, p.heads, p.batch))
    return config_for(p.spec, seqlen_q, seqlen_k, heads, batch, num_sms)


def strides_for(tensor: Tensor) -> Strides | None:
    """The strides with those of one-element dimensions set to what TMA can take; None when all are good as they are."""
    if not any(stride % STRIDE_STEP for stride in tensor.stride()[:-1]):
        return None
    row = tensor.shape[-1]
    pairs = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return (*(row if size == 1 and stride % STRIDE_STEP else stride for size, stride in pairs), 1)


def why_copied(tensor: Tensor, address: int | None) -> str:
    """Why TMA cannot take the tensor, in words; empty when it can. An unknown address (None) counts as aligned."""
    for dim, (size, stride) in enumerate(zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)):
        if size > 1 and stride % STRIDE_STEP:
            return f"stride {stride} of dimension {dim} is not a multiple of {STRIDE_STEP} elements"
    if address is not None and address % TMA_ALIGNMENT:
        return f"data pointer is {address % TMA_ALIGNMENT} bytes past a multiple of {TMA_ALIGNMENT}"
    return ""


def fitted(tensor: Tensor) -> Tensor:
    """The tensor as TMA can take it: itself, the same memory under other strides, or a contiguous copy."""
    strides = strides_for(tensor)
    if tensor.data_ptr() % TMA_ALIGNMENT or (strides and any(stride % STRIDE_STEP for stride in strides[:-1])):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor if strides is None else tensor.as_strided(tensor.shape, strides)
