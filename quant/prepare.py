"""A quantised Q, K and V's scales as the FP8 forward reads them: a few small torch operations that wait for nothing.

The kernel multiplies scores with the scales of Q and K, and carries V's on the exponent of P (kernels/algo/
softmax_fp8.py). So V's scales are given as log2 of their ratio to the largest of their head, v_max, which multiplies O
at the end: V times a number moves v_max alone, and so O by exactly that number.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import E4M3, QuantizedQKV

SMALLEST = 2.0**-60  # least scale of K: 0 would make NaN of a masked score
RATIO_LOG2_MIN = -96.0  # least lv: row sums, which grow by its inverse, stay in float32's range
# NOTE: references of rows are float32 sums of a score and lv. From 2^24 on they are rounded by so much that e may pass
# E4M3's 448 = 2^8.8; scores of this size are one-hot either way.
SCORE_MAX = 2.0**23


@dataclass(frozen=True)
class Prepared:
    """Of a head: (batch, head) for Q, (batch, KV head) for the rest. nb = ceil(Sk / 64)."""

    q_scale: Tensor  # (B, H, ceil(Sq / q_rows)) as it came
    q_rows: int  # rows that share a scale of Q
    kv: Tensor  # (B, Hkv, nb, 4) float32: k_scale, at least SMALLEST; lv = log2(v_scale / v_max); 2^-lv; 0
    head: Tensor  # (B, Hkv, 2) float32: cap, the largest that softmax_scale * log2(e) * q_scale may be; v_max


def prepare(x: QuantizedQKV) -> Prepared:
    """The record's scales for the forward.

    - Scores cannot pass SCORE_MAX (base 2) with cap; beyond it they shrink, with LSE, and the largest still wins.
    - A block of V of scale 0, whatever its lv, adds nothing to O; the smallest lv of its head leaves the range of P to
      the others. A head of zeros has lv = 0 and v_max = 0.
    - NaN stays with its block and does not enter cap and v_max: rows whose tile visits the block become NaN.
    """
    k_scale = x.k_scale.clamp_min(SMALLEST)
    largest_k, v_max = (_largest(scale) for scale in (k_scale, x.v_scale))
    cap = SCORE_MAX / (E4M3.max**2 * x.q.shape[-1]) / largest_k
    ratio = torch.log2(x.v_scale / v_max[..., None]).clamp_min(RATIO_LOG2_MIN)
    smallest = torch.where(x.v_scale > 0, ratio, 0.0).amin(-1, keepdim=True) if ratio.shape[-1] else 0.0
    lv = torch.where(x.v_scale == 0, smallest, ratio)
    kv = torch.stack((k_scale, lv, torch.exp2(-lv), torch.zeros_like(lv)), -1)
    return Prepared(x.q_scale, x.q_rows, kv, torch.stack((cap, v_max), -1))


def _largest(scale: Tensor) -> Tensor:
    """(B, Hkv) of the blocks that are not NaN, 0 where there is none."""
    if scale.shape[-1] == 0:
        return scale.new_zeros(scale.shape[:-1])
    return scale.nan_to_num(nan=0.0, posinf=math.inf).amax(-1)
