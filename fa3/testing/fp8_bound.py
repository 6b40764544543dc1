"""How wrong FP8 attention may be: derived from the steps of the quantisation.

Against float64 attention to the same quantised tensors, their scores shrunk as the forward shrinks what passes float32
(`Bound`):

- P is e <= 2^8 in E4M3. Rounding e is an error of up to 2^-4 e, or of 2^-10 where e is below the normal numbers. One
  unit of e is 2^-8 of the largest p * v_scale of its key block, so that with M, the largest of the row,
  |error| <= 2^-4 sum p |v| + 2^-18 M sum |v8|.
- Scores are off by up to score_eps * scale * |q| |k|, O by sum_eps * sum p |v| (sums, log2(v_scale), exp2), and O is
  rounded to its type.
- Roundings of different keys are independent and uniform within +-2^-4 e: the mean square error of an element is at
  most (2^-4)^2 / 3 * sum p^2 v^2. The root of its mean over all elements is what the RMSE is compared with.

Against attention to the tensors before they were quantised (`predicted_rmse`), with h the half step of the format at an
element: a score has the variance scale^2 sum_d (h_q^2 k^2 + q^2 h_k^2) / 3, moves its p by p times its error, and so O
by p (v - O) times it; v has the variance h_v^2 / 3.
"""

import math
from dataclasses import dataclass

import torch

from fa3.quant.cast import spread, unpack_v
from fa3.quant.formats import BLOCK, E4M3, PER_BLOCK, Granularity, QuantizedQKV
from fa3.quant.reference import dequantize_qkv
from fa3.testing.tolerance import UNIT, exact


@dataclass(frozen=True)
class Stored:
    """One tensor of a QuantizedQKV, row-major: codes and scales."""

    codes: torch.Tensor  # (B, S, H, D)
    scale: torch.Tensor
    granularity: Granularity

    @property
    def step(self) -> torch.Tensor:
        """The scale of every element, in float64."""
        return spread(self.scale, self.codes.shape, self.granularity).double().expand(self.codes.shape)


@dataclass(frozen=True)
class Bound:
    """Float64 attention to a QuantizedQKV, and what may be missed of it."""

    out: torch.Tensor  # (B, Sq, H, Dv)
    lse: torch.Tensor  # (B, H, Sq)
    limit: torch.Tensor  # of the error of every element of out
    rms: float  # the RMSE as predicted, without room
    lse_limit: float

    @staticmethod
    def of(
        x: QuantizedQKV, softmax_scale: float, causal: bool, score_eps: float = 2.0**-20, sum_eps: float = 2.0**-14
    ) -> "Bound":
        q, k, v = dequantize_qkv(x)
        out, lse = exact(q, k, v, softmax_scale, causal)
        p = weights(q, k, lse, softmax_scale, causal)
        ratio = p.shape[1] // v.shape[2]
        values, unit, scale = (  # (B, H, Sk, Dv) twice, (B, H, 1, Sk)
            per_query_head(v, ratio),
            per_query_head(spread(x.v_scale, v.shape, PER_BLOCK).double().expand(v.shape), ratio),
            x.v_scale.double().repeat_interleave(BLOCK, -1)[..., None, : x.seqlen_k].repeat_interleave(ratio, 1),
        )
        codes = torch.where(unit == 0, 0.0, values / unit).abs().sum(2, keepdim=True)  # (B, H, 1, Dv)
        mean = p @ values.abs()
        score = score_eps * softmax_scale * _longest(q) * _longest(k)
        moved = min(2.0, 2 * math.expm1(min(2 * score, 1.0)))  # share of the weights that may be elsewhere
        rounded = UNIT[str(x.dtype).removeprefix("torch.")]
        limit = (E4M3.half_step + sum_eps) * mean + 2.0**-18 * (p * scale).amax(-1, keepdim=True) * codes
        limit = (limit + moved * values.abs().amax(2, keepdim=True)).transpose(1, 2)
        limit = limit + rounded * (out.abs() + limit + torch.finfo(x.dtype).smallest_normal)
        rms = math.sqrt(E4M3.half_step**2 / 3 * _mean_square(p.square() @ values.square(), 1))
        rms += rounded * math.sqrt(_mean_square(out)) + (sum_eps + moved) * math.sqrt(_mean_square(mean))
        return Bound(out, lse, limit, rms, 1e-5 + score + 2.0**-20 * largest(lse[torch.isfinite(lse)]))

    def share(self, out: torch.Tensor) -> float:
        """The error as a share of what is allowed, of the worst element; inf where there is a NaN."""
        error = (out.double() - self.out).abs()
        return largest(torch.where(error == 0, 0.0, error / self.limit))


def predicted_rmse(x: QuantizedQKV, softmax_scale: float, causal: bool, key_eps: float = 0.0) -> float:
    """The RMSE against attention to the tensors that x was made of, to first order. key_eps: what the keys had lost
    before, relative to themselves."""
    q, k, v = dequantize_qkv(x)
    half_q, half_k, half_v = (E4M3.half_ulp(s.codes.float()) * s.step for s in stored(x))
    half_k = half_k + key_eps * k.abs()
    out, lse = exact(q, k, v, softmax_scale, causal)
    p = weights(q, k, lse, softmax_scale, causal)
    ratio = p.shape[1] // v.shape[2]
    keys, values, half_keys, half_values = (per_query_head(t, ratio).square() for t in (k, v, half_k, half_v))
    queries, half_queries, out = (t.transpose(1, 2) for t in (q, half_q, out))
    variance = softmax_scale**2 / 3 * (half_queries.square() @ keys.mT + queries.square() @ half_keys.mT)
    moved = p.square() * torch.expm1(variance.clamp_max(4.0))
    # sum_c moved_c (v_c - out)^2, multiplied out
    signed = per_query_head(v, ratio)
    by_scores = moved @ values - 2 * out * (moved @ signed) + out.square() * moved.sum(-1, keepdim=True)
    by_rounding = p.square() @ (half_values / 3 + E4M3.half_step**2 / 3 * values)
    rounded = UNIT[str(x.dtype).removeprefix("torch.")]
    return math.sqrt(_mean_square(by_scores.clamp_min(0) + by_rounding + (rounded * out).square(), 1))


def stored(x: QuantizedQKV) -> tuple[Stored, Stored, Stored]:
    q = Stored(x.q, x.q_scale, Granularity("block", x.q_rows))
    return q, Stored(x.k, x.k_scale, PER_BLOCK), Stored(unpack_v(x.v, x.seqlen_k), x.v_scale, PER_BLOCK)


def weights(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, softmax_scale: float, causal: bool) -> torch.Tensor:
    """P (B, H, Sq, Sk) in float64, all at once."""
    scores = softmax_scale * (q.transpose(1, 2) @ per_query_head(k, q.shape[2] // k.shape[2]).mT)
    if causal:
        i, j = (torch.arange(n, device=q.device) for n in (q.shape[1], k.shape[1]))
        scores = scores.masked_fill(j > i[:, None] + k.shape[1] - q.shape[1], -math.inf)
    return torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])


def per_query_head(x: torch.Tensor, ratio: int) -> torch.Tensor:
    """(B, S, Hkv, D) as (B, H, S, D)."""
    return x.transpose(1, 2).repeat_interleave(ratio, 1)


def largest(x: torch.Tensor) -> float:
    """Of the magnitudes; inf where there is a NaN."""
    return torch.nan_to_num(x.abs().double(), nan=math.inf, posinf=math.inf).max().item() if x.numel() else 0.0


def _longest(x: torch.Tensor) -> float:
    return largest(torch.linalg.vector_norm(x.double(), dim=-1))


def _mean_square(x: torch.Tensor, power: int = 2) -> float:
    """The mean of x to a power."""
    return (x**power).mean().item() if x.numel() else 0.0
