"""A QuantizedQKV -> Problem: what fa3/problem.py is for tensors. The errors of the FP8 forward are raised here."""

from __future__ import annotations

import torch
from torch import Tensor

from fa3.kernels.forward.config import FP8 as FP8_NAME
from fa3.kernels.forward.config import Spec, tile_for
from fa3.problem import (
    DEVICES,
    FP8,
    KERNEL_DTYPES,
    Problem,
    check_accumulation,
    check_are_tensors,
    check_head_dim,
    check_scale,
)
from fa3.quant.formats import QuantizedQKV

CODES = ("q", "k", "v")
SCALES = ("q_scale", "k_scale", "v_scale")


def quantized_problem(x: QuantizedQKV, softmax_scale: float, causal: bool, accumulation: str) -> Problem:
    """The Problem of a call, or the ValueError / TypeError that says what is wrong with it."""
    check_quantized(x)
    check_scale(softmax_scale)
    check_accumulation(accumulation, FP8)
    batch, seqlen_q, heads, head_dim = x.q_shape
    # Other types of O are the CPU's, in the order of the kernel with BF16.
    dtype_o = KERNEL_DTYPES.get(x.dtype, "bfloat16")
    spec = Spec(FP8_NAME, *tile_for(head_dim, x.head_dim_v), causal, dtype_o, x.v_channel_scale is not None)
    sizes = batch, seqlen_q, x.seqlen_k, heads, x.heads_kv, head_dim, x.head_dim_v
    return Problem(spec, *sizes, accumulation)


def check_quantized(x: QuantizedQKV) -> None:
    """Sizes may be symbolic: no comparison fixes a length."""
    if not isinstance(x, QuantizedQKV):
        raise TypeError(f"x must be a fa3.quant.QuantizedQKV, got {type(x).__name__}")
    check_are_tensors(**{name: getattr(x, name) for name in (*CODES, *SCALES)})
    if x.v_channel_scale is not None:
        check_are_tensors(v_channel_scale=x.v_channel_scale)
    if x.q.device.type not in DEVICES:
        raise ValueError(f"q is on {x.q.device}; allowed: {', '.join(DEVICES)}")
    x.validate()
    if x.q.device.type == "cuda" and x.dtype not in KERNEL_DTYPES:
        raise TypeError(f"dtype is {x.dtype} on cuda; allowed: {', '.join(map(str, KERNEL_DTYPES))}")
    check_head_dim("q", x.q.shape[3], FP8)
    check_head_dim("v", x.head_dim_v, FP8)
    for name in CODES:
        _check_last_stride(name, getattr(x, name))


def _check_last_stride(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 0 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension, which must be contiguous (stride 1): "
            f"call {name}.contiguous() first"
        )


def default_scale_of(x: QuantizedQKV) -> float:
    """1 / sqrt(head_dim)."""
    check_are_tensors(q=x.q)
    return x.q.shape[-1] ** -0.5


def record(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, v_channel: Tensor | None,
    dtype: torch.dtype,
) -> QuantizedQKV:  # fmt: skip
    """The record of an operator's tensors."""
    seqlen_k = k.shape[1] if k.dim() > 1 else 0
    return QuantizedQKV(q, k, v, q_scale, k_scale, v_scale, v_channel, seqlen_k, dtype)
