"""A quantised Q, K and V's scales as the FP8 forward reads them: a few small torch operations that wait for nothing.

The kernel multiplies scores with the scales of Q and K, and carries V's on the exponent of P (kernels/algo/
softmax_fp8.py). So V's scales are given as log2 of their ratio to the largest of their head, v_max, which multiplies O
at the end: V times a number moves v_max alone, and so O by exactly that number.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fa3.kernels.quantize.config import BEYOND, RATIO_LOG2_MIN, SCALE_MIN

from .formats import QuantizedQKV


@dataclass(frozen=True)
class Prepared:
    """Of a head: (batch, head) for Q, (batch, KV head) for the rest. nb = ceil(Sk / 64)."""

    q_scale: Tensor  # (B, H, ceil(Sq / q_rows)) as it came
    q_rows: int  # rows that share a scale of Q
    kv: Tensor  # (B, Hkv, nb + BEYOND, 4) float32: k_scale, at least SCALE_MIN; lv = log2(v_scale / v_max); 2^-lv; 1
    v_max: Tensor  # (B, Hkv) float32


def prepare(x: QuantizedQKV) -> Prepared:
    """The record's scales for the forward.

    - A block of V of scale 0, whatever its lv, adds nothing to O; the smallest lv of its head leaves the range of P to
      the others. A head of zeros has lv = 0 and v_max = 0.
    - NaN stays with its block and does not enter v_max: rows whose tile visits the block become NaN.
    """
    k_scale = x.k_scale.clamp_min(SCALE_MIN)
    v_max = _largest(x.v_scale)
    ratio = torch.log2(x.v_scale / v_max[..., None]).clamp_min(RATIO_LOG2_MIN)
    smallest = torch.where(x.v_scale > 0, ratio, 0.0).nan_to_num(0.0).amin(-1, keepdim=True) if ratio.shape[-1] else 0.0
    lv = torch.where(x.v_scale == 0, smallest, ratio)
    kv = torch.stack((k_scale, lv, torch.exp2(-lv), torch.ones_like(lv)), -1)
    return Prepared(x.q_scale, x.q_rows, pad(kv, (0, 0, 0, BEYOND), value=1.0), v_max)


def _largest(scale: Tensor) -> Tensor:
    """(B, Hkv) of the blocks that are not NaN, 0 where there is none."""
    if scale.shape[-1] == 0:
        return scale.new_zeros(scale.shape[:-1])
    return scale.nan_to_num(nan=0.0, posinf=math.inf).amax(-1)
