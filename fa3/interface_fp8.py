"""The public functions of FP8: 16-bit tensors that are quantised on the way, and records that were before.

NOTE: a module of its own, because importing what quantises takes as long as the rest of fa3: a 16-bit call never does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fa3 import ops_fp8  # registers the operators
from fa3.heuristics import ACCUMULATIONS
from fa3.problem import (
    FP8,
    check_accumulation,
    check_descales_apply,
    check_flags,
    check_later_arguments,
    check_no_variant,
    check_scale,
    check_tensors,
)
from fa3.problem_fp8 import check_quantized, default_scale_of
from fa3.quant.formats import QuantizedQKV
from fa3.quant.interface import from_descales, quantize_qkv

ACCURATE = ACCUMULATIONS[0]


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    rotate: bool = True,
    seed: int = 0,
    accumulation: str = ACCURATE,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_q_offset: int = 0,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    return_lse: bool = False,
) -> Any:  # Tensor, or (Tensor, Tensor)
    """Attention in FP8 on 16-bit tensors: quantise, attend. FlashAttention-3 (arXiv:2407.08608), section 3.3.

    Q and K are rotated by a random orthogonal matrix, which changes no score and spreads outliers; Q gets a scale
    per row, K and V per 64 rows. To quantise once and attend many times: `fa3.quant.quantize_qkv`,
    `flash_attn_quantized_func`.

    Args:
        q, k, v: as in `flash_attn_func`, bfloat16 or float16, head dims multiples of 16.
        rotate, seed: whether, and by which matrix.
        accumulation: of P V. "accurate": every block of keys is added in float32, so that the error does not grow with
            seqlen_k. "fast": the fastest kernel, beyond head dim 128 of V all in the FP8 tensor core, whose accumulator
            keeps about 14 bits: for short lengths.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), float32 or of q's dtype: rotary embedding of Q and K on the
            way, in the same kernel. rotary_interleaved: pairs are neighbours, else halves. rotary_q_offset: position of
            the first query; the first key is at 0.
        Every other argument: as in `flash_attn_func`.

    Returns:
        As `flash_attn_func`, out in q's dtype. CPU tensors run `fa3.reference_fp8.fp8_attention`; any float type there.

    Raises: as `flash_attn_func`.
    """
    check_no_variant(window_size, attention_chunk, softcap)
    check_later_arguments(None, num_splits, pack_gqa, sm_margin)
    check_flags(deterministic=deterministic)
    _check_quantized_call(softmax_scale, causal, accumulation, return_attn_probs, return_lse)
    x = quantize_qkv(
        q,
        k,
        v,
        rotate=rotate,
        seed=seed,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_q_offset=rotary_q_offset,
    )
    return _quantized(x, softmax_scale, causal, accumulation, return_attn_probs or return_lse)


def flash_attn_quantized_func(
    x: QuantizedQKV,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    accumulation: str = ACCURATE,
    return_lse: bool = False,
) -> Any:  # Tensor, or (Tensor, Tensor)
    """`flash_attn_fp8_func` on what `fa3.quant.quantize_qkv` returned, as often as wanted. Nothing is changed in x.

    Returns out (batch, seqlen_q, heads, head_dim_v) in x.dtype and, with return_lse, lse as `flash_attn_func` does.

    Raises: as `flash_attn_func`, naming the fields of x.
    """
    check_quantized(x)
    _check_quantized_call(softmax_scale, causal, accumulation, False, return_lse)
    return _quantized(x, softmax_scale, causal, accumulation, return_lse)


def with_descales(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    return_attn_probs: bool,
    return_lse: bool,
) -> Any:  # Tensor, or (Tensor, Tensor)
    """`flash_attn_func` on FP8 tensors with one scale a KV head, as FlashAttention-3 takes them."""
    check_descales_apply(q, q_descale, k_descale, v_descale)
    check_tensors(q, k, v)
    _check_quantized_call(softmax_scale, causal, ACCURATE, return_attn_probs, return_lse)
    x = from_descales(q, k, v, q_descale, k_descale, v_descale)
    return _quantized(x, softmax_scale, causal, ACCURATE, return_attn_probs or return_lse)


def _check_quantized_call(
    softmax_scale: float | None, causal: bool, accumulation: str, return_attn_probs: bool, return_lse: bool
) -> None:
    """Before anything is quantised or packed."""
    check_flags(causal=causal, return_attn_probs=return_attn_probs, return_lse=return_lse)
    check_accumulation(accumulation, FP8)
    if softmax_scale is not None:
        check_scale(softmax_scale)


def _quantized(x: QuantizedQKV, softmax_scale: float | None, causal: bool, accumulation: str, return_lse: bool) -> Any:
    scale = default_scale_of(x) if softmax_scale is None else float(softmax_scale)
    out, lse = ops_fp8.attend(x, scale, causal, accumulation)
    return (out, lse) if return_lse else out
