"""Partial attention with everything drawn, some parts empty and NaN, and its merge in float64."""

import math

import torch


def partials(count, batch=2, seqlen=5, heads=3, head_dim=40, dtype="bfloat16", empty=0.3, seed=0, spread=4.0):
    """o (n, b, s, h, d), lse (n, b, s, h) in float32 (float64 of such). O of an empty part is NaN."""
    g = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    o = torch.randn(count, batch, seqlen, heads, head_dim, generator=g).to(kind)
    lse = spread * torch.randn(count, batch, seqlen, heads, generator=g, dtype=torch.float64)
    is_empty = torch.rand(lse.shape, generator=g) < empty
    o[is_empty], lse[is_empty] = torch.nan, -torch.inf
    return o, lse.to(torch.float64 if kind == torch.float64 else torch.float32)


def expected(o, lse):
    """O and LSE of the merge in float64, row by row."""
    out = torch.zeros(o[0].numel() // o.shape[-1], o.shape[-1], dtype=torch.float64)
    sums = torch.full(out.shape[:1], -math.inf, dtype=torch.float64)
    o_rows, lse_rows = o.flatten(1, -2).double(), lse.flatten(1).double()
    for row in range(len(out)):
        parts = [i for i, x in enumerate(lse_rows[:, row].tolist()) if x > -math.inf]
        if parts:
            largest = max(float(lse_rows[i, row]) for i in parts)
            weights = [math.exp(float(lse_rows[i, row]) - largest) for i in parts]
            sums[row] = largest + math.log(sum(weights))
            out[row] = sum(w * o_rows[i, row] for i, w in zip(parts, weights)) / sum(weights)
    return out.view(o.shape[1:]), sums.view(lse.shape[1:])


def assert_right(got, o, lse):
    """To the rounding of O's type, and of float32 in between."""
    (out, sums), (wanted, wanted_sums) = got, expected(o, lse)
    assert not out.isnan().any() and not sums.isnan().any()
    step = max(torch.finfo(out.dtype).eps, 2.0**-23 if sums.dtype == torch.float32 else 0.0)
    size = wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(out.double(), wanted, rtol=step, atol=8 * 2.0**-23 * size)
    torch.testing.assert_close(sums.double(), wanted_sums, rtol=1e-6, atol=1e-6)
