"""Variants of attention written out, and what a kernel may miss of them."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from fa3 import reference
from fa3.testing.tolerance import SCORE_EPS, Errors, Expected
from fa3.variant import Variant

TANH_EPS = 2.0**-11  # relative, of the approximate instruction

sides = st.one_of(st.just(-1), st.just(0), st.integers(1, 70), st.integers(1, 600))
caps = st.sampled_from([0.0, 0.0, 0.5, 15.0, 50.0])
variants = st.builds(Variant, st.booleans(), sides, sides, st.one_of(st.just(0), st.integers(1, 300)), caps)


def visible(variant: Variant, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """(seqlen_q, seqlen_k) booleans, from the definition."""
    at = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = np.arange(seqlen_k)[None]
    seen = np.ones((seqlen_q, seqlen_k), dtype=bool)
    if variant.causal:
        seen &= key <= at
    if variant.window_left >= 0:
        seen &= key >= at - variant.window_left
    if variant.window_right >= 0:
        seen &= key <= at + variant.window_right
    if variant.attention_chunk:
        seen &= np.floor_divide(key, variant.attention_chunk) == np.floor_divide(at, variant.attention_chunk)
    return seen


def formula(q, k, v, scale: float, variant: Variant, sink=None) -> tuple[np.ndarray, np.ndarray]:
    """Row by row in float64, sharing nothing with the code under test: NumPy arrays (B, S, H, D)."""
    out = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    seen = visible(variant, q.shape[1], k.shape[1])
    for b, i, h in np.ndindex(*q.shape[:3]):
        kv_head = h // (q.shape[2] // k.shape[2])
        scores = scale * k[b, seen[i], kv_head] @ q[b, i, h]
        if variant.softcap:
            scores = variant.softcap * np.tanh(scores / variant.softcap)
        if sink is not None:
            scores = np.append(scores, sink[h])
        if len(scores) == 0:
            continue
        lse[b, h, i] = np.logaddexp.reduce(scores)
        p = np.exp(scores - lse[b, h, i])[: seen[i].sum()]
        out[b, i, h] = p @ v[b, seen[i], kv_head]
    return out, lse


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, variant: Variant,
    sink: torch.Tensor | None = None,
) -> Expected:  # fmt: skip
    """What tolerance.expected is for plain attention."""
    options = dict(variant=variant, sink=None if sink is None else sink.double())
    out, lse = reference.attention(q.double(), k.double(), v.double(), scale, **options)
    plain, _ = reference.attention(q, k, v, scale, **options)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    longest = [t.double().norm(dim=-1).max().item() if t.numel() else 0.0 for t in (q, k)]
    found = Expected(out, lse, Errors.of(plain, out), scale * longest[0] * longest[1])
    if variant.softcap:
        largest = min(found.largest_score, variant.softcap)
        found = replace(found, largest_score=found.largest_score + largest * (TANH_EPS / SCORE_EPS))
    return found
