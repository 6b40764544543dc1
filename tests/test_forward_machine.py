"""The forward kernels' own instructions, run on the PTX machine: schedules, masks, places of O, FP8 parts.

What a GPU test would find first (a wrong layout, a missing wait, a barrier that nobody fills, an access outside a
tensor) shows here without a GPU. The shapes are small: a warp is interpreted instruction by instruction.
"""

import math
import re

import pytest
import torch

from fa3.kernels.forward.config import Config, Spec, tile_for
from fa3.quant.prepare import prepare
from fa3.quant.reference import quantize_qkv
from fa3.reference_fp8 import dequantized_attention, fp8_attention
from fa3.testing.inputs import Case, Inputs, make
from fa3.testing.tolerance import expected
from tests.forward_machine import forward
from tests.ptx_program import SHARED_BEGIN, Trace

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
    "two places of Q, O apart": (
        Case("bfloat16", 1, 300, 200, 1, 2, 64, 64, True),
        Config(2, 64, q_stages=2, **DYNAMIC),
    ),
    "two places of Q, O over V": (
        Case("float16", 1, 390, 97, 1, 1, 192, 128, False),
        Config(2, 80, q_stages=2, persistent=True),
    ),
    "O over Q": (Case("float16", 1, 129, 97, 1, 1, 192, 128, True), Config(2, 128)),
}
# Exponentials against an older max: with a softmax scale of 1 scores outgrow it, in some warps.
OPTIMISTIC = {
    "swizzle of 128 bytes": (
        Case("float16", 1, 130, 700, 1, 1, 64, 64, False, 1.0, values="outliers"),
        Config(2, 64, optimistic=True),
    ),
    "swizzle of 64 bytes": (
        Case("float16", 1, 130, 500, 1, 1, 96, 96, False, 1.0),
        Config(2, 128, optimistic=True, persistent=True),
    ),
    "80 keys, O over V": (
        Case("bfloat16", 1, 200, 500, 1, 1, 256, 256, True, 1.0),
        Config(2, 80, optimistic=True, **DYNAMIC),
    ),
    "no turns, three stages": (
        Case("bfloat16", 1, 130, 600, 1, 2, 104, 120, False, 1.0),
        Config(2, 64, 3, optimistic=True, pingpong=False, **DYNAMIC),
    ),
    "two places of Q, three warpgroups": (
        Case("bfloat16", 1, 390, 600, 1, 2, 64, 64, False, 1.0),
        Config(3, 128, q_stages=2, optimistic=True, **DYNAMIC),
    ),
    "two places of Q, O over V": (
        Case("float16", 1, 300, 400, 1, 2, 192, 128, False, 1.0),
        Config(2, 80, q_stages=2, optimistic=True, persistent=True),
    ),
    # A row that sees 64 n keys has none in the masked blocks: its first max is -inf.
    "no key before": (
        Case("bfloat16", 1, 400, 335, 1, 2, 64, 64, True),
        Config(3, 64, optimistic=True, **DYNAMIC),
    ),
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
    "alternating, two places of Q": (
        *(1, 390, 300, 1, 2, 128, True),
        Config(2, 128, 3, q_stages=2, promotion=1, alternate=True, **DYNAMIC),
    ),
    "alternating, 64 columns": (2, 70, 140, 1, 1, 64, True, Config(2, 128, promotion=1, alternate=True, **DYNAMIC)),
    "two chunks": (1, 200, 300, 1, 2, 64, True, Config(3, 128, promotion=1, chunk=32, prefetch=True, **DYNAMIC)),
    "four chunks": (1, 130, 200, 1, 1, 256, True, Config(2, 64, promotion=1, chunk=64, **DYNAMIC)),
    "chunks in turn": (1, 70, 200, 1, 1, 256, False, Config(2, 128, promotion=1, chunk=64, overlap=False)),
}


def spec_of(dtype, head_dim, head_dim_v, causal, dtype_o=""):
    return Spec(dtype, *tile_for(head_dim, head_dim_v), causal, dtype_o)


def run_16_bit(x, config, scale=1.0, causal=False, **others):
    dtype = str(x.q.dtype).removeprefix("torch.")
    return forward(spec_of(dtype, x.q.shape[3], x.v.shape[3], causal), config, *x, scale, **others)


def check_16_bit(case, config, **others):
    x = make(case, "cpu")
    out, lse = run_16_bit(x, config, case.softmax_scale, case.causal, **others)
    want = expected(*x, case.scale, case.causal)
    want.assert_out(out)
    want.assert_lse(lse)


@pytest.mark.parametrize(("case", "config"), SIXTEEN_BIT.values(), ids=SIXTEEN_BIT)
def test_16_bit(case, config):
    check_16_bit(case, config)


# Exponentials against an older max. A warp that computes scores anew does so with mma.sync, and it alone loads Q.


def anew(trace, config, head_dim):
    """(times that a warp computed the scores of a block anew, blocks that warps guessed)."""
    return trace.executed["mma"] / (config.tile_n // 8 * head_dim // 16), trace.executed["vote"]


def places_of_q(trace, config, head_dim):
    """The shared memory of Q that was loaded: (place, 64-byte pieces)."""
    size = config.q_stages * config.tile_m * head_dim * 2
    return trace.loaded[SHARED_BEGIN:][:size].reshape(config.q_stages, -1, 64).all(-1)


@pytest.mark.parametrize(("case", "config"), OPTIMISTIC.values(), ids=OPTIMISTIC)
def test_scores_anew_where_they_outgrow_the_max(case, config):
    check_16_bit(case, config, trace=(trace := Trace()))
    head_dim = tile_for(case.head_dim, case.head_dim_v)[0]
    times, guessed = anew(trace, config, head_dim)
    assert 0 < times < guessed and times == int(times)
    assert places_of_q(trace, config, head_dim).any(1).all()


def test_no_scores_anew_where_the_max_stands():
    config = Config(2, 64, optimistic=True)
    check_16_bit(Case("float16", 1, 130, 700, 1, 1, 64, 64, False), config, trace=(trace := Trace()))
    assert anew(trace, config, 64) == (0, 4 * 4 * 10)  # 2 tiles of 8 warps, 11 blocks of which the first is masked


@pytest.mark.parametrize("row", [0, 72, 127])
@pytest.mark.parametrize(("growth", "times"), [(14.5, 0), (15.5, 1)])
def test_a_row_that_outgrows_its_max_concerns_its_warp(row, growth, times):
    """One key of a block in the middle has a score, base 2, and all others 0; of one row. In FP16."""
    config = Config(2, 64, optimistic=True)
    q, k = torch.zeros(1, 128, 1, 64, dtype=torch.float16), torch.zeros(1, 320, 1, 64, dtype=torch.float16)
    q[:, row, :, 3], k[:, 150, :, 3] = 1, growth
    x = Inputs(q, k, torch.randn(k.shape, generator=torch.Generator().manual_seed(row)).half())
    out, lse = run_16_bit(x, config, math.log(2), trace=(trace := Trace()))
    want = expected(*x, math.log(2))
    want.assert_out(out)
    want.assert_lse(lse)
    assert anew(trace, config, 64) == (times, 8 * 4)
    of_warps = places_of_q(trace, config, 64).reshape(8, -1)
    assert of_warps.any(1).tolist() == of_warps.all(1).tolist() == [bool(times) and w == row // 16 for w in range(8)]


@pytest.mark.parametrize("name", ["no turns, three stages", "two places of Q, three warpgroups"])
def test_the_order_of_the_warps_changes_no_score_anew(name):
    case, config = OPTIMISTIC[name]
    x = make(case, "cpu")
    first, *others = (run_16_bit(x, config, seed=seed) for seed in (None, 1, 2))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("order", ["rising", "falling", "repeated"])
def test_huge_scores_beside_small_ones(order):
    """Rows of 2^6 to 2^40 times the numbers of the keys, in both signs: the largest scores have all of P, on both sides
    of 2^28 and across it. Blocks come right to left. Beside them in every warp a row whose scores are all 0.
    """
    row, key, generator = torch.arange(128), torch.arange(256), torch.Generator().manual_seed(0)
    number = {"rising": 256 - key, "falling": 1 + key, "repeated": 3 + key % 125}[order]
    factor = torch.where(row % 16 == 5, 0.0, 2.0 ** (6 + row % 35) * (1 - 2 * (row // 2 % 2)))
    q, k = torch.zeros(1, 128, 1, 64), torch.zeros(1, 256, 1, 64)
    q[0, :, 0, 7], k[0, :, 0, 7] = factor, number
    v = torch.randn(k.shape, generator=generator).bfloat16()
    config = Config(2, 64, optimistic=True)
    out, lse = run_16_bit(Inputs(q.bfloat16(), k.bfloat16(), v), config, trace=(trace := Trace()))
    scores = factor[:, None].double() * number
    share = (scores == scores.amax(1, keepdim=True)).double()
    count = share.sum(1, keepdim=True)
    torch.testing.assert_close(out[0, :, 0].double(), share @ v[0, :, 0].double() / count, rtol=2.0**-7, atol=2.0**-8)
    torch.testing.assert_close(lse[0, 0].double(), scores.amax(1) + count[:, 0].log(), rtol=1e-6, atol=0)
    assert 0 < anew(trace, config, 64)[0]


@pytest.mark.parametrize("wrong", ["row", "key"])
def test_what_is_not_finite_stays_in_its_rows(wrong):
    """A row of NaN; or a key whose scores are -inf in the even rows, which do not see it then, and inf in the odd."""
    case, config = Case("bfloat16", 1, 130, 330, 1, 1, 64, 64, False, 1.0), Config(2, 64, optimistic=True)
    x, row, key = make(case, "cpu"), torch.arange(130), torch.arange(330)
    if wrong == "row":
        right, seen = row != 37, key >= 0
        x.q[:, ~right] = math.nan
    else:
        right, seen = row % 2 == 0, key != 170
        x.q[..., 0] = x.q[..., 0].abs() * torch.where(right, -1, 1)[None, :, None]
        x.k[:, ~seen, :, 0] = math.inf
    out, lse = run_16_bit(x, config, trace=(trace := Trace()))
    want = expected(x.q[:, right], x.k[:, seen], x.v[:, seen], 1.0)
    want.assert_out(out[:, right])
    want.assert_lse(lse[..., right])
    assert out[:, ~right].isnan().all() and lse[..., ~right].isnan().all()
    assert 0 < anew(trace, config, 64)[0]


@pytest.mark.parametrize(
    ("instead", "error"),
    [
        (r"setp.ne.b32 \1, 0, 0", AssertionError),  # nobody outgrows
        (r"mov.pred \1, \2", RuntimeError),  # every lane decides for itself
    ],
)
def test_without_the_vote_scores_are_wrong(instead, error):
    def edit(ptx):
        return re.sub(r"vote\.sync\.any\.pred\s+(%p\d+), (%p\d+), -1", instead, ptx)

    with pytest.raises(error):
        check_16_bit(*OPTIMISTIC["swizzle of 128 bytes"], edit=edit)


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
