"""FP8 attention where the answer is known or the length is what matters: functions of sizes, as fp8.py's of cases."""

import math

import torch

from fa3.quant.cast import cast
from fa3.quant.reference import dequantize_qkv, from_descales
from fa3.testing.fp8 import RMS_ROOM, Case, Subject
from fa3.testing.fp8_bound import largest
from fa3.testing.properties import Measured
from fa3.testing.tolerance import exact, lse_error, rmse


def truncation(subject: Subject, seqlen_k: int, seqlen_q: int = 64, seed: int = 0) -> Measured:
    """Q = 0, V from {1, 1.125}, E4M3 tensors with descales 1: O is the mean, at any length, within half a percent. A
    short accumulator loses more and more."""
    generator = torch.Generator().manual_seed(seed)
    k = cast(torch.randn(1, seqlen_k, 2, 128, generator=generator))
    v = 1 + torch.randint(0, 2, (1, seqlen_k, 2, 128), generator=generator) / 8
    q = cast(torch.zeros(1, seqlen_q, 8, 128))
    q, k, codes = (t.to(subject.device) for t in (q, k, cast(v)))
    out, _ = subject.attention(from_descales(q, k, codes), causal=False)
    want = v.mean(1, keepdim=True).repeat_interleave(4, 2).to(subject.device)
    return Measured(largest(out.double() / want.double() - 1), 5e-3)


def descales(subject: Subject, seqlen_k: int = 100, heads: int = 64, heads_kv: int = 16, seed: int = 0) -> Measured:
    """K / 0.25, V / 0.5 and Q / 2 in E4M3 with these descales: attention to the dequantised tensors."""
    generator = torch.Generator().manual_seed(seed)
    by, codes = (2.0, 0.25, 0.5), []
    for n, one in zip((heads, heads_kv, heads_kv), by):
        codes.append(cast(torch.randn(1, seqlen_k, n, 128, generator=generator) / one).to(subject.device))
    q8, k8, v8 = codes
    by_q, by_k, by_v = (torch.full((1, heads_kv), one, device=subject.device) for one in by)
    x = from_descales(q8, k8, v8, by_q, by_k, by_v)
    case = Case(seqlen_q=seqlen_k, seqlen_k=seqlen_k, heads_kv=heads_kv, ratio=heads // heads_kv, head_dim=128)
    bound = subject.bound(x, case, False)
    out, lse_ = subject.attention(x, causal=False)
    q, k, v = (t.double() * one for t, one in zip(codes, by))
    want, want_lse = exact(q, k, v)
    same = largest(want - bound.out) < 1e-12 and lse_error(lse_, want_lse) <= bound.lse_limit
    return Measured(max(bound.share(out), rmse(out, want) / (RMS_ROOM * bound.rms)) if same else math.inf, 1)


def long_context(subject: Subject, seqlen_k: int, head_dim: int = 128, seqlen_q: int = 64, seed: int = 0) -> Measured:
    """Q, K ~ N(0, 1), V ~ N(1, 1): the relative error (of the norms) against float64 on the same E4M3 tensors."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((seqlen_q, 2, 0.0), (seqlen_k, 2, 0.0), (seqlen_k, 2, 1.0))
    q, k, v = (cast(torch.randn(1, s, h, head_dim, generator=generator) + mean) for s, h, mean in shapes)
    q, k, v = (t.to(subject.device) for t in (q, k, v))
    x = from_descales(q, k, v)
    out, _ = subject.attention(x, causal=False)
    want, _ = exact(*dequantize_qkv(x))
    return Measured(((out.double() - want).norm() / want.norm()).item(), 3e-3)


def needle(subject: Subject, seqlen_k: int, at: float = 0.5, seed: int = 0) -> Measured:
    """One key, at a share `at` of the way, matches all queries strongly and has another value: O is that value, within
    one percent of attention to the same tensors."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(1, seqlen_k, 1, 128, generator=generator) for _ in range(2))
    direction = torch.randn(128, generator=generator)
    where = min(seqlen_k - 1, int(at * seqlen_k))
    k[0, where, 0], v[0, where, 0] = 2 * direction, 5.0
    q = 2 * direction + 0.1 * torch.randn(1, 64, 1, 128, generator=generator)
    x = subject.quantize(*(t.bfloat16().to(subject.device) for t in (q, k, v)))
    out, _ = subject.attention(x, causal=False)
    want, _ = exact(*dequantize_qkv(x))
    found = largest(want - 5.0) < 0.3
    return Measured(largest(out.double() / want - 1) if found else math.inf, 1e-2)
