"""Q, K and V to FP8: kernels on Hopper GPUs, the reference on CPU. Every error comes before a launch."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .formats import QuantizedQKV
from .ops import pack_op, quantize_op  # registers torch.ops.fa3.quantize_qkv and pack_v
from .reference import with_descales


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotate: bool = True,
    seed: int = 0,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_q_offset: int = 0,
    q_rows: int = 1,
) -> QuantizedQKV:
    """Q (B, Sq, H, D), K (B, Sk, Hkv, D) and V (B, Sk, Hkv, Dv) of one 16-bit type in E4M3, a scale per row of Q
    and per 64 rows of K and V.

    rotate: Q and K are multiplied with the random orthogonal matrix of `seed`. rotary_cos, rotary_sin (positions,
    rotary_dim / 2), float32 or of q's type: rotary embedding before that, key j at position j, query i at
    rotary_q_offset + i. q_rows: rows of Q that share a scale, 64 or 1. D and Dv are multiples of 16 up to 256. On CUDA
    tensors one kernel on the current stream, which never waits for the host; CPU tensors may be of any float type.

    Raises TypeError or ValueError, naming the argument, what was got and what is allowed; NotImplementedError where a
    gradient would be needed.
    """
    checks.check_are_tensors(q=q, k=k, v=v)
    checks.check_options(rotate, seed, rotary_interleaved, rotary_q_offset, q_rows)
    for name, table in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if table is not None:
            checks.check_are_tensors(**{name: table})
    q8, k8, v8, q_scale, k_scale, v_scale = quantize_op(
        q, k, v, rotate, seed, rotary_cos, rotary_sin, rotary_interleaved, rotary_q_offset, q_rows
    )
    return QuantizedQKV(q8, k8, v8, q_scale, k_scale, v_scale, None, k.shape[1], q.dtype, rotate)


def pack_v(v: Tensor) -> Tensor:
    """V (B, Sk, Hkv, Dv) that is E4M3 already, packed as the forward takes it: (B, Hkv, Dv, Sk rounded up to 16).

    Raises TypeError or ValueError, naming what was got and what is allowed.
    """
    if not isinstance(v, Tensor):
        checks.check_codes(v=v)
    return pack_op(v)


def from_descales(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> QuantizedQKV:
    """E4M3 tensors as FlashAttention-3 takes them: row-major q, k, v and descales of shape (B, Hkv), None for 1.

    q_descale counts for all query heads of its KV head. V is packed by a kernel; the scales are views that repeat.
    dtype: of O. Raises TypeError or ValueError, naming the argument, what was got and what is allowed.
    """
    checks.check_codes(q=q, k=k, v=v)
    checks.check_alike(q, k, v)
    batch, _, heads_kv, _ = k.shape
    scales = []
    for name, scale in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if scale is None:
            scale = torch.ones((), dtype=torch.float32, device=q.device).expand(batch, heads_kv)
        checks.check_descale(name, scale, (batch, heads_kv), q.device)
        scales.append(scale)
    return with_descales(q, k, pack_v(v), scales, dtype)
