"""The forward kernels' own instructions, run on the PTX machine: schedules, masks, places of O, FP8 parts.

What a GPU test would find first (a wrong layout, a missing wait, a barrier that nobody fills, an access outside a
tensor) shows here without a GPU. The shapes are small: a warp is interpreted instruction by instruction.
"""

import re

import pytest
import torch

from fa3.kernels.forward.config import Config, Spec
from fa3.quant.prepare import prepare
from fa3.quant.reference import quantize_qkv
from fa3.reference_fp8 import dequantized_attention, fp8_attention
from fa3.testing.inputs import Case, make
from fa3.testing.tolerance import expected
from tests.forward_machine import forward

FP8 = "float8_e4m3fn"
DYNAMIC = {"persistent": True, "dynamic": True}
ROUNDING = 2.0**-8  # of O in bfloat16

SIXTEEN_BIT = {
    "in turn": (Case("bfloat16", 1, 70, 100, 1, 1, 64, 64, False), Config(2, 64, overlap=False)),
    "rows without a key, three warpgroups, dynamic": (
        Case("float16", 1, 200, 150, 1, 2, 64, 64, True),
        Config(3, 128, **DYNAMIC),
    ),
    "O apart, ping-pong, filled head dims": (
        Case("bfloat16", 2, 130, 200, 1, 1, 104, 120, False),
        Config(2, 128, persistent=True),
    ),
    "O over V, rescaled early": (
        Case("bfloat16", 1, 300, 200, 1, 1, 256, 256, True),
        Config(2, 80, rescale_early=True, **DYNAMIC),
    ),
    "O over Q": (Case("float16", 1, 129, 97, 1, 1, 192, 128, True), Config(2, 128)),
}
EIGHT_BIT = {
    "promoted": (1, 70, 200, 1, 1, 128, False, Config(2, 128, promotion=1)),
    "in place": (1, 70, 300, 1, 1, 128, False, Config(2, 192, pingpong=False)),
    "rows without a key, dynamic": (1, 200, 150, 1, 2, 128, True, Config(2, 128, promotion=1, **DYNAMIC)),
    "groups of 32 keys": (2, 100, 200, 1, 1, 64, True, Config(3, 96, promotion=1, persistent=True)),
    "prefetching": (1, 200, 250, 1, 2, 128, True, Config(2, 128, promotion=1, prefetch=True, **DYNAMIC)),
    "prefetching, in place": (1, 70, 300, 1, 1, 64, False, Config(3, 128, prefetch=True)),
    "halved, two chunks": (1, 200, 300, 1, 2, 64, True, Config(3, 128, promotion=1, chunk=32, **DYNAMIC)),
    "alternating, groups of 32 keys": (1, 130, 400, 1, 1, 96, True, Config(2, 96, promotion=1, alternate=True)),
    "alternating": (1, 130, 700, 1, 2, 128, False, Config(2, 128, promotion=1, alternate=True, **DYNAMIC)),
    "alternating, causal": (1, 200, 650, 1, 2, 128, True, Config(2, 128, 3, promotion=1, alternate=True)),
    "alternating, 64 columns": (2, 70, 140, 1, 1, 64, True, Config(2, 128, promotion=1, alternate=True, **DYNAMIC)),
    "two chunks": (1, 200, 300, 1, 2, 64, True, Config(3, 128, promotion=1, chunk=32, prefetch=True, **DYNAMIC)),
    "four chunks": (1, 130, 200, 1, 1, 256, True, Config(2, 64, promotion=1, chunk=64, **DYNAMIC)),
    "chunks in turn": (1, 70, 200, 1, 1, 256, False, Config(2, 128, promotion=1, chunk=64, overlap=False)),
}


def spec_of(dtype, head_dim, head_dim_v, causal, dtype_o=""):
    tile = next(t for t in (64, 128, 192, 256) if max(head_dim, head_dim_v) <= t)
    return Spec(dtype, tile, 128 if (tile, head_dim_v) == (192, 128) else tile, causal, dtype_o)


@pytest.mark.parametrize(("case", "config"), SIXTEEN_BIT.values(), ids=SIXTEEN_BIT)
def test_16_bit(case, config):
    x = make(case, "cpu")
    spec = spec_of(case.dtype, case.head_dim, case.head_dim_v, case.causal)
    out, lse = forward(spec, config, *x, case.head_dim**-0.5)
    want = expected(*x, None, case.causal)
    want.assert_out(out)
    want.assert_lse(lse)


def fp8_inputs(batch, seqlen_q, seqlen_k, heads_kv, ratio, head_dim):
    """Blocks of K and V differ in size; one block of V is zero."""
    generator = torch.Generator().manual_seed(seqlen_k)
    shapes = [
        (batch, s, h, head_dim) for s, h in ((seqlen_q, heads_kv * ratio), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    ]
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    k[:, :64] *= 3
    v[:, 64:128] *= 30
    v[:, 128:192] = 0
    return quantize_qkv(q, k, v, rotate=True)


def run_fp8(x, config, causal, **others):
    p = prepare(x)
    spec = spec_of(FP8, x.q.shape[3], x.head_dim_v, causal, "bfloat16")
    scales = (p.q_scale, p.kv, p.v_max, p.q_rows)
    return forward(spec, config, x.q, x.k, x.v, x.q.shape[3] ** -0.5, scales=scales, **others)


@pytest.mark.parametrize("case", EIGHT_BIT.values(), ids=EIGHT_BIT)
def test_fp8_is_the_emulation_to_rounding(case):
    *sizes, causal, config = case
    x = fp8_inputs(*sizes)
    out, lse = run_fp8(x, config, causal)
    want, want_lse = fp8_attention(x, causal=causal, tile_m=config.tile_m, tile_n=config.tile_n)
    error = (out.float() - want.float()).abs()
    largest = want.float().abs().amax(-1, keepdim=True)
    # A score off by a rounding may move a P to the next E4M3 number: rarely, and by 2^-4 of one key's share.
    assert (error <= ROUNDING * largest + 1e-6).float().mean() > 0.98
    assert (error <= 2.0**-4 * largest + 1e-6).all()
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=2e-5)
    exact, exact_lse = dequantized_attention(x, causal=causal)
    rms = ((out.double() - exact).square().mean() / exact.square().mean()).sqrt()
    assert rms < 0.03  # P of few keys is rounded to 4 bits
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=2e-5)


def test_rows_without_a_key_beside_small_scores():
    """The scale of a score is far below 1, and the row's reference is -inf: their product must not be 0."""
    q, k, v = (torch.randn(1, n, 1, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (130, 70, 71))
    x = quantize_qkv(q * 1e-9, k * 1e-9, v[:, :70], rotate=False)
    out, lse = run_fp8(x, Config(2, 128, promotion=1), True)
    assert (out[:, :60] == 0).all() and (lse[..., :60] == -torch.inf).all()
    want, want_lse = fp8_attention(x, causal=True, tile_m=128, tile_n=128)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=2e-5)
    torch.testing.assert_close(out.float(), want.float(), rtol=0, atol=2.0**-7)


def test_huge_fp8_scores():
    """Beyond 2^23, base 2: the largest of a row wins, LSE is its score, nothing is NaN; in both signs."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, n, 2, 64, generator=generator) for n in (64, 200, 200))
    q[:, :, 1], k[:, :, 1] = q[:, :, 1].abs(), -k[:, :, 1].abs()
    x = quantize_qkv((q * 2.0**30).bfloat16(), k.bfloat16(), v.bfloat16(), rotate=False)
    out, lse = run_fp8(x, Config(2, 128, promotion=1), False)
    want, want_lse = fp8_attention(x, tile_m=128, tile_n=128)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=0)
    assert want_lse.abs().min() > 2.0**28
    exact, _ = dequantized_attention(x)
    assert ((out.double() - exact).abs() <= 2.0**-4 * exact.abs().amax()).all(-1).double().mean() > 0.95


@pytest.mark.parametrize("name", ["prefetching", "two chunks", "alternating"])
def test_the_order_of_the_warps_changes_no_bit(name):
    *sizes, causal, config = EIGHT_BIT[name]
    x = fp8_inputs(*sizes)
    first, *others = (run_fp8(x, config, causal, seed=seed) for seed in (None, 1, 2))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def without_waits(ptx):
    return re.sub(r"wgmma\.wait_group\.sync\.aligned\s+0;", "", ptx)


def without_the_last_load(ptx):
    head, load, tail = ptx.rpartition("cp.async.bulk.tensor.4d.shared::cta")
    return f"{head}// {load}{tail}"


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (without_waits, "selp"),  # a score that is masked before it is there
        (without_the_last_load, "wait for ever"),
    ],
)
def test_a_fault_is_seen(edit, what):
    """The machine is late where the chip may be."""
    with pytest.raises((AssertionError, RuntimeError), match=what):
        run_fp8(fp8_inputs(1, 64, 200, 1, 1, 128), Config(2, 128, promotion=1), False, edit=edit)
