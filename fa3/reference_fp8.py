"""FP8 attention as the kernel computes it, step by step, in torch on the CPU: the specification of the FP8 forward.

`fp8_attention` takes the kernel's key blocks in its order, with every scale where the kernel applies it and every
rounding that it makes on purpose; docs/fp8.md explains the arithmetic. `dequantized_attention` is float64 attention to
the numbers that the quantised tensors stand for: what is lost between the two is the kernel's, what is lost before is
the quantisation's.

The tensor core's accumulator is not modelled: matrix products are float32 sums here; there, the products of 32
components are aligned to the largest and keep about 14 bits. With accumulation "fast" the kernel leaves O in that
accumulator from block to block, with "accurate" it adds every block's fresh sum to O in float32; here both do the
latter. Scores beyond float32 give NaN.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fa3 import reference
from fa3.quant.cast import SMALLEST_SCALE, cast, unpack_v
from fa3.quant.formats import BLOCK, QuantizedQKV
from fa3.quant.reference import dequantize_qkv

ACCUMULATIONS = ("accurate", "fast")
P_EXPONENT = 8  # the largest P of a block is 2^8, which E4M3 holds exactly; it ends at 448
REACH = 32  # how far, in powers of two, a block's reference may lie below the highest of its row
LV_STEP = 2.0**-16  # log2(v_scale) is rounded to a multiple
LV_UNKNOWN = -64.0  # stands for log2 of a scale of 0 before any other has been seen
# Adding it to a scaled score and taking it away rounds to a multiple of 2^-12 (of the float32 spacing beyond 2^10).
ROUNDER = 1.5 * 2.0**11
HUGE = 2.0**14  # scaled scores, base 2, that are taken relative to an anchor: beyond, float32 has few fraction bits


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
    """The stored numbers as float32 and the scales, per batch and KV head (N = B Hkv)."""

    q: Tensor  # (N, ratio, Sq, D)
    k: Tensor  # (N, Sk, D)
    v: Tensor  # (N, Sk, Dv)
    row_scale: Tensor  # (N, ratio, Sq): softmax scale * log2(e) * q_scale
    k_scale: Tensor  # (N, blocks)
    log_v: Tensor  # (N, blocks): log2(v_scale) in steps, -inf where the scale is 0

    @staticmethod
    def of(x: QuantizedQKV, softmax_scale: float) -> "_Operands":
        batch, seqlen_q, heads, dim = x.q.shape
        q = x.q.float().transpose(1, 2).reshape(batch * x.heads_kv, heads // x.heads_kv, seqlen_q, dim)
        k, v = (t.float().transpose(1, 2).flatten(0, 1) for t in (x.k, unpack_v(x.v, x.seqlen_k)))
        q_scale = x.q_scale if x.q_rows == 1 else x.q_scale.repeat_interleave(BLOCK, -1)[..., :seqlen_q]
        scale_log2 = torch.tensor(softmax_scale * reference.LOG2_E, dtype=torch.float32, device=x.q.device)
        log_v = torch.round(torch.log2(x.v_scale.double()) / LV_STEP) * LV_STEP
        row_scale = (scale_log2 * q_scale).reshape(q.shape[:3])
        return _Operands(q, k, v, row_scale, x.k_scale.flatten(0, 1), log_v.float().flatten(0, 1))

    def log_v_before(self, end: int) -> Tensor:
        """(N, blocks) for a tile whose last key is end - 1: a block of zeros takes the value of the nearest block
        after it that is none."""
        log_v = self.log_v[:, : -(-end // BLOCK)]
        at = torch.arange(log_v.shape[1], device=log_v.device).where(log_v != -math.inf, log_v.shape[1])
        nearest = at.flip(-1).cummin(-1).values.flip(-1)
        return torch.nn.functional.pad(log_v, (0, 1), value=LV_UNKNOWN).gather(-1, nearest)


@dataclass
class _Rows:
    """What a tile's rows (N, M) carry from block to block. P and its sum are in units of 2^(anchor + reference - 8)."""

    o: Tensor  # (N, M, Dv)
    row_sum: Tensor
    reference: Tensor  # of the latest block; -inf before a key was seen
    highest: Tensor  # the largest reference
    anchor: Tensor  # what scaled scores are relative to; 0 unless they are huge

    @staticmethod
    def create(like: Tensor, head_dim_v: int) -> "_Rows":
        shape = like.shape[:2]
        unseen = like.new_full(shape, -math.inf)
        zero = like.new_zeros(shape)
        return _Rows(like.new_zeros(*shape, head_dim_v), zero, unseen, unseen, zero)

    def move_anchor(self, top: Tensor) -> None:
        """Take huge scores relative to the block's largest, `top`. What was summed before is then next to nothing."""
        above = top - self.anchor
        is_huge = (above > HUGE) | ((above < -HUGE) & (self.reference == -math.inf) & (top != -math.inf))
        moved = torch.where(is_huge, top, self.anchor)
        self.reference = self.reference + (self.anchor - moved)
        self.highest = self.highest + (self.anchor - moved)
        self.anchor = moved

    def add(self, scores: Tensor, mult: Tensor, log_v: Tensor, groups: list[slice], v8: Tensor) -> None:
        """Take one key block: scores (N, M, n), its groups of columns with mult (N, M, G) and log_v (N, G)."""
        log_v = log_v[:, None]
        largest = torch.stack([scores[..., group].amax(-1) for group in groups], -1)  # (N, M, G)
        self.move_anchor((largest * mult).amax(-1))
        anchor = self.anchor[..., None]
        # NOTE: rounded before log_v is added, so that twice the scale of V moves everything by exactly 1.
        top = (_scaled(largest, mult, torch.full_like(mult, -ROUNDER), anchor) - ROUNDER + log_v).amax(-1)
        reference = torch.maximum(top, self.highest - REACH)
        base = torch.where(reference == -math.inf, 0.0, reference)  # a row without a key: all its P are 0
        factor = torch.exp2(self.reference - base)
        offset = (base[..., None] - P_EXPONENT) - log_v  # (N, M, G)
        total = torch.zeros_like(self.row_sum)
        p = torch.empty_like(scores)
        for g, group in enumerate(groups):
            one = slice(g, g + 1)
            p[..., group] = torch.exp2(_scaled(scores[..., group], mult[..., one], offset[..., one], anchor))
            total += p[..., group].sum(-1) * torch.exp2(-log_v[..., g])
        self.row_sum = self.row_sum * factor + total
        self.o = self.o * factor[..., None] + torch.bmm(cast(p).float(), v8)
        self.highest = torch.maximum(self.highest, reference)
        self.reference = reference


def _tile(x: _Operands, rows: range, end: int, shift: int | None, tile_n: int) -> tuple[Tensor, Tensor]:
    """One query tile against the keys before end: O (N, ratio, rows, Dv) float32, normalised, and lse."""
    tile = slice(rows.start, rows.stop)
    ratio = x.q.shape[1]
    q = x.q[:, :, tile].flatten(1, 2)  # (N, M = ratio rows, D)
    row_scale = x.row_scale[:, :, tile].flatten(1, 2)[..., None]
    log_v = x.log_v_before(end)
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
        part = slice(blocks.start, blocks.stop)
        mult = (row_scale * x.k_scale[:, None, part]).clamp_min(SMALLEST_SCALE)  # 0 would make NaN of a masked score
        state.add(scores, mult, log_v[:, part], columns, x.v[:, left:right])
    is_empty = state.row_sum == 0
    row_sum = torch.where(is_empty, 1.0, state.row_sum)
    lse = math.log(2) * (state.anchor + ((state.reference - P_EXPONENT) + torch.log2(row_sum)))
    o = state.o / row_sum[..., None]
    return o.unflatten(1, (ratio, -1)), torch.where(is_empty, -math.inf, lse).unflatten(1, (ratio, -1))


def _scaled(scores: Tensor, mult: Tensor, offset: Tensor, anchor: Tensor) -> Tensor:
    """scores * mult - offset as one fused multiply-add; relative to the anchor where there is one.

    NOTE: with an anchor the product is rounded before the anchor is taken away, so that a row's largest score gives
    exactly 0; fused, the rounding of the anchor itself would be left, which for huge scores is not small.
    """
    fused = (scores.double() * mult.double()).sub_(offset).float()
    if not (anchor != 0).any():
        return fused
    return torch.where(anchor == 0, fused, (scores * mult - anchor) - offset)
