"""The FP8 forward on CUDA tensors: as launch.py does it for 16 bits, with plans of its own.

A call allocates O and LSE, prepares the scales (a small kernel), and launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, float32
from torch.cuda import current_device

from fa3.device import chip
from fa3.heuristics import ACCUMULATIONS, config_of
from fa3.kernels.compile import load
from fa3.launch import REFUSALS, remember
from fa3.problem import MAX_SCALE, check_chip, check_scale, check_sizes, check_tensors, default_scale
from fa3.problem_fp8 import check_quantized, quantized_problem
from fa3.quant.formats import QuantizedQKV
from fa3.quant.interface import from_descales
from fa3.quant.launch import prepare
from fa3.reference import LOG2_E, SMALLEST_SCALE
from fa3.tma import fitted


class Plan(NamedTuple):
    run: Callable[..., object] | None  # None: an empty problem
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    device: int
    num_sms: int
    is_dynamic: bool  # the kernel takes a counter, 0 at its start


_plans: dict[tuple, Plan] = {}


def forward(x: QuantizedQKV, softmax_scale: float, causal: bool, accumulation: str) -> tuple[Tensor, Tensor]:
    """O (B, Sq, Hq, Dv) in x.dtype and LSE (B, Hq, Sq) in fp32, both contiguous. Never waits for the device."""
    key = (*_looks(x), x.seqlen_k, x.dtype, causal, accumulation)
    plan = _plans.get(key)
    if plan is None:
        plan = _plan(x, softmax_scale, causal, accumulation)
        remember(_plans, key, plan)
    if not 0.0 <= softmax_scale <= MAX_SCALE:
        check_scale(softmax_scale)
    out = x.q.new_empty(plan.out_shape, dtype=x.dtype)
    lse = x.q.new_empty(plan.lse_shape, dtype=float32)
    if plan.run is None:
        check_quantized(x)
        return out.zero_(), lse.fill_(-math.inf)
    scale_log2 = max(softmax_scale, SMALLEST_SCALE) * LOG2_E
    if current_device() != plan.device:
        with torch.cuda.device(plan.device):
            _run(plan, x, out, lse, scale_log2)
    else:
        _run(plan, x, out, lse, scale_log2)
    return out, lse


def row_major(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """FP8 tensors as FlashAttention-3 takes them, with descales of 1: V is packed by a kernel first."""
    check_tensors(q, k, v)
    scale = default_scale(q) if softmax_scale is None else softmax_scale
    check_scale(scale)
    return forward(from_descales(q, k, v), scale, causal, ACCUMULATIONS[0])


def _looks(x: QuantizedQKV) -> tuple[object, ...]:
    """Shapes, types and devices, and which optional input there is. The compiled function looks at strides in every
    call and refuses, before it launches anything, what it cannot take."""
    tensors = (x.q, x.k, x.v, x.q_scale, x.k_scale, x.v_scale, x.v_channel_scale)
    return tuple(None if t is None else (t.shape, t.dtype, t.device) for t in tensors)


def _run(plan: Plan, x: QuantizedQKV, out: Tensor, lse: Tensor, scale_log2: float) -> None:
    assert plan.run is not None
    prepared, tickets = prepare(x)
    scales = (prepared.q_scale, prepared.kv, prepared.v_max, prepared.q_rows)
    optional = (x.v_channel_scale, None, None, tickets if plan.is_dynamic else None)
    others = (out, lse, scales, *optional, scale_log2, plan.num_sms)
    try:
        plan.run(x.q, x.k, x.v, *others)
    except REFUSALS:
        check_quantized(x)
        plan.run(fitted(x.q), fitted(x.k), fitted(x.v), *others)


def _plan(x: QuantizedQKV, softmax_scale: float, causal: bool, accumulation: str) -> Plan:
    problem = quantized_problem(x, softmax_scale, causal, accumulation)
    device = x.q.get_device()
    found = chip(device)
    check_chip(found)
    config = config_of(problem, found.num_sms)
    check_sizes(problem, config)
    run = None if problem.is_empty else load(problem.spec, config)
    return Plan(run, problem.out_shape, problem.lse_shape, device, found.num_sms, config.dynamic)
