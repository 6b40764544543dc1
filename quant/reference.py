"""Quantising Q, K and V in plain torch, on CPU or GPU: the specification of the quantise kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import cast, hadamard
from .formats import BLOCK, E4M3, PER_BLOCK, PER_CHANNEL, Granularity, QuantizedQKV


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (arXiv:2104.09864) of the first 2 * cos.shape[1] components of every head.

    cos, sin: (positions, rotary_dim / 2). Key j is at position j, query i at i + q_offset. Pairs are (x[i], x[i +
    rotary_dim / 2]) as GPT-NeoX has them, or neighbours where interleaved.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    q_offset: int = 0

    def apply(self, x: Tensor, offset: int = 0) -> Tensor:
        """x (B, S, H, D) in float32, its row 0 at position `offset`; nothing is rounded to 16 bits."""
        x = x.float()
        half = self.cos.shape[1]
        turned, rest = x[..., : 2 * half], x[..., 2 * half :]
        rows = slice(offset, offset + x.shape[1])
        cos, sin = (t[rows, None, :].float() for t in (self.cos, self.sin))  # (S, 1, rotary_dim / 2)
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned[..., :half], turned[..., half:]
        pair = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat((turned, rest), -1)

    def check(self, seqlen_q: int, seqlen_k: int, head_dim: int) -> None:
        if self.cos.dim() != 2 or self.cos.shape != self.sin.shape:
            raise ValueError(f"cos is {tuple(self.cos.shape)}, sin {tuple(self.sin.shape)}: allowed: one 2-d shape")
        positions, half = self.cos.shape
        if 2 * half > head_dim:
            raise ValueError(f"cos has {half} columns, for {2 * half} components; allowed: up to head_dim {head_dim}")
        needed = max(seqlen_k, seqlen_q + self.q_offset)
        if self.q_offset < 0 or positions < needed:
            raise ValueError(
                f"cos has {positions} rows and q_offset is {self.q_offset}; {seqlen_q} queries and {seqlen_k} keys "
                f"need {needed} rows and an offset of 0 or more"
            )


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotate: bool = True,
    seed: int = 0,
    rotary: Rotary | None = None,
    q_rows: int = 1,
    fit: bool = True,
    v_channel: bool = False,
    granularity: Granularity = PER_BLOCK,
) -> QuantizedQKV:
    """Q (B, Sq, H, D), K (B, Sk, Hkv, D) and V (B, Sk, Hkv, Dv) in E4M3.

    Q and K: rotary embedding, then the rotation by random signs of `seed`, then scale and cast, in float32 all the way.
    q_rows: rows of Q that share a scale, 64 or 1. fit: the scales of rotated Q and K are moved by cast.fit. v_channel:
    V is divided by a scale per channel before its block scales are taken. granularity: PER_TENSOR or PER_HEAD for
    coarser scales, which are never fitted and then repeated per block.
    """
    if q_rows not in (1, BLOCK):
        raise ValueError(f"q_rows is {q_rows}; allowed: 1 and {BLOCK}")
    if rotary is not None:
        rotary.check(q.shape[1], k.shape[1], q.shape[3])
    dtype, seqlen_k = q.dtype, k.shape[1]
    q, k = (_turn(x, offset, rotary, rotate, seed) for x, offset in ((q, rotary.q_offset if rotary else 0), (k, 0)))
    v_channel_scale = None
    if v_channel:
        v_channel_scale = cast.scale_of(v, PER_CHANNEL)
        v = cast.divide(v, v_channel_scale, PER_CHANNEL)
    fitted = fit and rotate and granularity == PER_BLOCK
    q8, q_scale = _quantize(q, Granularity("block", q_rows) if granularity == PER_BLOCK else granularity, fitted)
    k8, k_scale = _quantize(k, granularity, fitted)
    v8, v_scale = _quantize(v, granularity)
    packed = cast.pack_v(v8)
    done = QuantizedQKV(q8, k8, packed, q_scale, k_scale, v_scale, v_channel_scale, seqlen_k, dtype, rotate)
    done.validate()
    return done


def from_descales(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> QuantizedQKV:
    """E4M3 tensors as FlashAttention-3 takes them: row-major q, k, v and descales of shape (B, Hkv), by default 1.

    q_descale counts for all query heads of its KV head. The scales are views that repeat.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != E4M3.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {E4M3.dtype}")
    per_head = k.shape[0], k.shape[2]
    scales = []
    for name, scale in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        scale = torch.ones(per_head, device=q.device) if scale is None else scale
        if scale.dtype != torch.float32 or tuple(scale.shape) != per_head:
            raise ValueError(f"{name} is {scale.dtype} {tuple(scale.shape)}; allowed: torch.float32 {per_head}")
        scales.append(scale)
    done = with_descales(q, k, cast.pack_v(v), scales, dtype)
    done.validate()
    return done


def with_descales(q: Tensor, k: Tensor, packed: Tensor, scales: list[Tensor], dtype: torch.dtype) -> QuantizedQKV:
    """The record of E4M3 q, k and packed V with q_descale, k_descale and v_descale (B, Hkv) that were checked."""
    ratio = q.shape[2] // max(1, k.shape[2])
    q_scale = _per_block(scales[0].repeat_interleave(ratio, 1), q.shape[1])
    k_scale, v_scale = (_per_block(scale, k.shape[1]) for scale in scales[1:])
    return QuantizedQKV(q, k, packed, q_scale, k_scale, v_scale, None, k.shape[1], dtype)


def dequantize_qkv(x: QuantizedQKV, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (B, S, H, D) that the record stands for, rotated where it is; exact in float64."""
    q = cast.dequantize(x.q, x.q_scale, Granularity("block", x.q_rows), dtype)
    k = cast.dequantize(x.k, x.k_scale, PER_BLOCK, dtype)
    v = cast.dequantize(cast.unpack_v(x.v, x.seqlen_k), x.v_scale, PER_BLOCK, dtype)
    if x.v_channel_scale is not None:
        v = v * cast.spread(x.v_channel_scale, v.shape, PER_CHANNEL).to(dtype)
    return q, k, v


def _turn(x: Tensor, offset: int, rotary: Rotary | None, rotate: bool, seed: int) -> Tensor:
    if rotary is not None:
        x = rotary.apply(x, offset)
    return hadamard.rotate(x.float(), hadamard.random_signs(x.shape[-1], seed)) if rotate else x


def _quantize(x: Tensor, granularity: Granularity, fitted: bool = False) -> tuple[Tensor, Tensor]:
    """The codes, contiguous, and scales per block or row; coarser scales are repeated by views."""
    codes, scale = cast.quantize(x, granularity, fitted)
    if granularity.kind == "tensor":
        scale = scale.expand(x.shape[0], x.shape[2])
    return codes.contiguous(), scale if granularity.kind == "block" else _per_block(scale, x.shape[1])


def _per_block(scale: Tensor, seqlen: int) -> Tensor:
    """(B, H) as (B, H, ceil(seqlen / 64)) of stride 0."""
    return scale[..., None].expand(*scale.shape, -(-seqlen // BLOCK))
