"""torch.ops.fa3.forward_fp8 on the tensors of a QuantizedQKV: CUDA kernel, CPU emulation, shapes for tracing.

Importing this module registers it, and with fa3.quant.ops the operators that quantise. No derivative: a call that needs
one raises.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fa3 import launch_fp8
from fa3.device import ASSUMED
from fa3.heuristics import config_of
from fa3.operators import TAGS, register
from fa3.problem import FP8, check_accumulation, check_scale
from fa3.problem_fp8 import check_quantized, quantized_problem, record
from fa3.quant.formats import QuantizedQKV
from fa3.quant.ops import refuse_derivatives
from fa3.reference_fp8 import fp8_attention

Result = tuple[Tensor, Tensor]  # out, lse

_library = torch.library.Library("fa3", "FRAGMENT")
_library.define(
    "forward_fp8(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, "
    "Tensor? v_channel_scale, ScalarType dtype, float softmax_scale, bool causal, str accumulation) -> "
    "(Tensor out, Tensor lse)",
    tags=TAGS,
)
CODES_AND_SCALES = 8  # arguments that make a record: three tensors of codes, four of scales, the type of O


def emulated(x: QuantizedQKV, softmax_scale: float, causal: bool, accumulation: str) -> Result:
    """On the CPU, with the kernel's tiles."""
    problem = quantized_problem(x, softmax_scale, causal, accumulation)
    if problem.is_empty:
        out = x.q.new_zeros(problem.out_shape, dtype=x.dtype)
        return out, x.q.new_full(problem.lse_shape, -math.inf, dtype=torch.float32)
    config = config_of(problem, ASSUMED.num_sms)
    tile = dict(tile_m=config.tile_m, tile_n=config.tile_n)
    out, lse = fp8_attention(x, softmax_scale, causal, **tile, accumulation=accumulation)
    return out.contiguous(), lse.contiguous()


def _split(arguments: tuple[Any, ...]) -> tuple[QuantizedQKV, float, bool, str]:
    return record(*arguments[:CODES_AND_SCALES]), *arguments[CODES_AND_SCALES:]


def _cuda(*arguments: Any) -> Result:
    return launch_fp8.forward(*_split(arguments))


def _cpu(*arguments: Any) -> Result:
    return emulated(*_split(arguments))


def _fake(*arguments: Any) -> Result:
    refuse_derivatives(*arguments)
    x, softmax_scale, _, accumulation = _split(arguments)
    check_quantized(x)
    check_accumulation(accumulation, FP8)
    if isinstance(softmax_scale, float):  # a symbolic one is checked when it has a value
        check_scale(softmax_scale)
    batch, seqlen_q, heads, _ = x.q.shape
    out = x.q.new_empty((batch, seqlen_q, heads, x.head_dim_v), dtype=x.dtype)
    return out, x.q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


forward_op = register(_library, "forward_fp8", _cuda, _cpu, _fake, refuse_derivatives)


def attend(x: QuantizedQKV, softmax_scale: float, causal: bool, accumulation: str) -> Result:
    """The operator on a record."""
    scales = (x.q_scale, x.k_scale, x.v_scale, x.v_channel_scale)
    return forward_op(x.q, x.k, x.v, *scales, x.dtype, softmax_scale, causal, accumulation)
