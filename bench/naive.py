"""Attention as three lines of PyTorch, with all scores in memory: what FlashAttention's memory and traffic are set
against. The reference (fa3/reference.py) is another: it keeps more of what it computes, and in FP32.
"""

from typing import Any


def naive(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """q, k (B, S, H, D), v (B, S, H, Dv) -> (B, S, H, Dv). No mask: masking would write the scores once more.

    The scores are written by one product and read by the softmax, P is written by the softmax and read by the other
    product: 4 passes over a matrix of S x S a head, two of which are in memory at a time.
    """
    import torch

    if causal:
        raise ValueError("naive attention is measured without a mask")
    scale = q.shape[-1] ** -0.5
    q, k, v = (x.transpose(1, 2) for x in (q * scale, k, v))
    p = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
    return (p @ v).transpose(1, 2)
