"""FP8 attention as the kernel computes it, step by step, in torch on the CPU: the specification of the FP8 forward.

`fp8_attention` takes the kernel's key blocks in its order, with the scales of `fa3.quant.prepare` where the kernel
applies them and every rounding that it makes on purpose; docs/fp8.md explains the arithmetic. `dequantized_attention`
is float64 attention to the numbers that the quantised tensors stand for: what is lost between the two is the kernel's,
what is lost before is the quantisation's.

The tensor core's accumulator is not modelled: matrix products are float32 sums here; there, the products of 32
components are aligned to the largest and keep about 14 bits. With accumulation "fast" the kernel leaves O in that
accumulator from block to block, with "accurate" it adds every block's fresh sum to O in float32; here both do the
latter.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fa3 import reference
from fa3.quant.cast import cast, unpack_v
from fa3.quant.formats import BLOCK, QuantizedQKV
from fa3.quant.prepare import SCALE_MIN, prepare
from fa3.quant.reference import dequantize_qkv

ACCUMULATIONS = ("accurate", "fast")
TOP = 8.0  # the largest P of a row in a block is 2^8, which E4M3 holds exactly; it ends at 448
SPAN_LOG2 = 23  # references of this magnitude and more, base 2, are shrunk within their block
FALL = 32.0  # how far, in powers of two, a block's reference may lie below the highest of its row


def fp8_attention(
    x: QuantizedQKV,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    tile_m: int = 128,
    tile_n: int = 128,
    accumulation: str = "accurate",
) -> tuple[Tensor, Tensor]:
    """(out (B, Sq, H, Dv) of x.dtype, lse (B, H, Sq) float32). softmax_scale >= 0, by default 1 / sqrt(D)."""
    x.validate()
    if accumulation not in ACCUMULATIONS:
        raise ValueError(f"accumulation is {accumulation!r}; allowed: {', '.join(ACCUMULATIONS)}")
    if tile_m < 1 or tile_n < 1:
        raise ValueError(f"tile_m is {tile_m} and tile_n {tile_n}; allowed: 1 and more")
    operands = _Operands.of(x, x.q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    batch, seqlen_q, heads, _ = x.q.shape
    shift = x.seqlen_k - seqlen_q if causal else None
    out = torch.zeros(batch, seqlen_q, heads, x.head_dim_v, dtype=x.dtype, device=x.q.device)
    lse = torch.full((batch, heads, seqlen_q), -math.inf, device=x.q.device)
    for row in range(0, seqlen_q, tile_m):
        rows = range(row, min(row + tile_m, seqlen_q))
        end = x.seqlen_k if shift is None else min(x.seqlen_k, rows.stop + shift)  # no row sees a key from here on
        if end > 0 and out.numel():
            o, log_sum = _tile(operands, rows, end, shift, tile_n)
            o = o.unflatten(0, (batch, x.heads_kv))  # (B, Hkv, ratio, rows, Dv)
            if x.v_channel_scale is not None:
                o = o * x.v_channel_scale[:, :, None, None]
            out[:, rows.start : rows.stop] = o.flatten(1, 2).transpose(1, 2).to(x.dtype)
            lse[:, :, rows.start : rows.stop] = log_sum.unflatten(0, (batch, x.heads_kv)).flatten(1, 2)
    return out, lse


def dequantized_attention(
    x: QuantizedQKV, softmax_scale: float | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 of attention to the exact values of x: what an FP8 kernel without errors would give."""
    return reference.tiled_attention(*dequantize_qkv(x), softmax_scale, causal, tile_m=256, tile_n=512)


@dataclass(frozen=True)
class _Operands:
    """The stored numbers as float32 and the prepared scales, per batch and KV head (N = B Hkv)."""

    q: Tensor  # (N, ratio, Sq, D)
    k: Tensor  # (N, Sk, D)
    v: Tensor  # (N, Sk, Dv)
    q_scale: Tensor  # (N, ratio, Sq): softmax scale * log2(e) * q_scale, at least SCALE_MIN
    k_scale: Tensor  # (N, blocks)
    v_log2: Tensor  # (N, blocks): log2(v_scale / v_max)
    v_inverse: Tensor  # (N, blocks): v_max / v_scale
    v_max: Tensor  # (N)

    @staticmethod
    def of(x: QuantizedQKV, softmax_scale: float) -> "_Operands":
        batch, seqlen_q, heads, dim = x.q.shape
        q = x.q.float().transpose(1, 2).reshape(batch * x.heads_kv, heads // x.heads_kv, seqlen_q, dim)
        k, v = (t.float().transpose(1, 2).flatten(0, 1) for t in (x.k, unpack_v(x.v, x.seqlen_k)))
        scales = prepare(x)
        q_scale = scales.q_scale
        if scales.q_rows != 1:
            q_scale = q_scale.repeat_interleave(scales.q_rows, -1)[..., :seqlen_q]
        scale_log2 = torch.tensor(softmax_scale * reference.LOG2_E, dtype=torch.float32, device=x.q.device)
        q_scale = (scale_log2 * q_scale).clamp_min(SCALE_MIN).reshape(q.shape[:3])
        k_scale, v_log2, v_inverse, _ = scales.kv[:, :, : x.k_scale.shape[-1]].flatten(0, 1).unbind(-1)
        return _Operands(q, k, v, q_scale, k_scale, v_log2, v_inverse, scales.v_max.flatten())


@dataclass
class _Rows:
    """What a tile's rows (N, M) carry from block to block. P, its sum and O are in units of 2^(reference - TOP)."""

    o: Tensor  # (N, M, Dv), over v_max
    row_sum: Tensor
    reference: Tensor  # R of the latest block; -inf before a key was seen
    highest: Tensor  # the largest reference

    @staticmethod
    def create(like: Tensor, head_dim_v: int) -> "_Rows":
        shape = like.shape[:2]
        unseen = like.new_full(shape, -math.inf)
        return _Rows(like.new_zeros(*shape, head_dim_v), like.new_zeros(shape), unseen, unseen)

    def add(self, scores: Tensor, q_scale: Tensor, scales: list[tuple], groups: list[slice], v8: Tensor) -> None:
        """Take one key block: scores (N, M, n), and of every group of its columns that share scales, (k_scale, v_log2,
        v_inverse), each (N, 1)."""
        factors = [q_scale * k_scale for k_scale, _, _ in scales]  # (N, M) each
        tops = [
            _rounded_up(scores[..., group].amax(-1), factor, v_log2)
            for group, factor, (_, v_log2, _) in zip(groups, factors, scales, strict=True)
        ]
        reference = torch.stack(tops).amax(0).maximum(self.highest - FALL)
        factor = torch.exp2(torch.fmax(self.reference - reference, torch.tensor(-127.0)))
        shrink = _shrink(reference)
        # A row without a key: all its P are 0.
        base = torch.where(reference == -math.inf, 0.0, reference * shrink - TOP)
        total = self.row_sum * factor
        p = torch.empty_like(scores)
        for group, mult, (_, v_log2, v_inverse) in zip(groups, factors, scales, strict=True):
            offset = (base - v_log2)[..., None]
            p[..., group] = torch.exp2(_fused(scores[..., group], (mult * shrink)[..., None], offset))
            total += p[..., group].sum(-1) * v_inverse
        self.row_sum = total
        self.o = self.o * factor[..., None] + torch.bmm(cast(p).float(), v8)
        self.highest = torch.maximum(self.highest, reference)
        self.reference = reference


def _tile(x: _Operands, rows: range, end: int, shift: int | None, tile_n: int) -> tuple[Tensor, Tensor]:
    """One query tile against the keys before end: O (N, ratio, rows, Dv) float32, normalised, and lse."""
    tile = slice(rows.start, rows.stop)
    ratio = x.q.shape[1]
    q = x.q[:, :, tile].flatten(1, 2)  # (N, M = ratio rows, D)
    q_scale = x.q_scale[:, :, tile].flatten(1, 2)
    state = _Rows.create(q, x.v.shape[-1])
    for left in reversed(range(0, end, tile_n)):
        right = min(left + tile_n, end)
        scores = torch.bmm(q, x.k[:, left:right].transpose(1, 2))
        if shift is not None and right - 1 > rows.start + shift:
            last_seen = torch.arange(rows.start, rows.stop, device=q.device).repeat(ratio) + shift
            keys = torch.arange(left, right, device=q.device)
            scores = scores.masked_fill(keys > last_seen[:, None], -math.inf)
        blocks = range(left // BLOCK, -(-right // BLOCK))
        columns = [slice(max(left, b * BLOCK) - left, min(right, (b + 1) * BLOCK) - left) for b in blocks]
        scales = [(x.k_scale[:, b, None], x.v_log2[:, b, None], x.v_inverse[:, b, None]) for b in blocks]
        state.add(scores, q_scale, scales, columns, x.v[:, left:right])
    is_empty = state.row_sum == 0
    row_sum = torch.where(is_empty, 1.0, state.row_sum)
    lse = math.log(2) * ((state.reference - TOP) + torch.log2(row_sum))
    o = state.o * torch.where(is_empty, 0.0, x.v_max[:, None] / row_sum)[..., None]
    return o.unflatten(1, (ratio, -1)), torch.where(is_empty, -math.inf, lse).unflatten(1, (ratio, -1))


def _shrink(reference: Tensor) -> Tensor:
    """1, or the power of two that brings a reference below 2^SPAN_LOG2: beyond, float32 is too coarse for e."""
    exponent = torch.frexp(reference.nan_to_num(0.0, 0.0, 0.0)).exponent
    return torch.exp2((SPAN_LOG2 - exponent).clamp_max(0).float())


def _fused(scores: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    """scores * factor - offset, rounded once."""
    return (scores.double() * factor.double()).sub_(offset).float()


def _rounded_up(scores: Tensor, factor: Tensor, addend: Tensor) -> Tensor:
    """scores * factor + addend, rounded once, up."""
    exact = scores.double() * factor.double() + addend.double()
    nearest = exact.float()
    return torch.where(nearest.double() < exact, nearest.nextafter(torch.full_like(nearest, math.inf)), nearest)
