"""The FP8 properties hold for the specification on CPU, and broken quantisation and attention do not pass them."""

import math
from dataclasses import replace

import pytest
import torch

from fa3.quant import hadamard
from fa3.quant.cast import dequantize, quantize
from fa3.quant.formats import E4M3, PER_BLOCK, PER_TENSOR
from fa3.quant.reference import dequantize_qkv, quantize_qkv
from fa3.reference_fp8 import fp8_attention
from fa3.testing import fp8
from fa3.testing.fp8 import PROPERTIES, Case, Subject, cases
from fa3.testing.properties import check


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
def test_holds_on_cpu(prop):
    record = check(prop, Subject(), cases("cpu"), examples=10)
    assert record.passed, record.failure
    assert record.examples >= 10 and record.worst <= record.limit


# Broken quantisation


def with_codes(change):
    def broken(q, k, v, **options):
        x = quantize_qkv(q, k, v, **options)
        return replace(x, q=change(x.q), k=change(x.k))

    return broken


def one_code_off(q, k, v, **options):
    """Every code next to the right one, away from zero."""
    return with_codes(lambda t: (t.view(torch.uint8) + (t.float().abs() < 400)).view(t.dtype))(q, k, v, **options)


def towards_zero(q, k, v, **options):
    """Truncated instead of rounded."""
    x = quantize_qkv(q, k, v, **options)

    def down(tensor, codes, scale):
        up = codes.float().abs() * fp8.stored(x)[0].step.float().new_ones(()) > (tensor.float() / scale).abs()
        return (codes.view(torch.uint8) - up.to(torch.uint8)).view(codes.dtype)

    if options.get("rotate", True):
        return x
    q_step, k_step, _ = (s.step for s in fp8.stored(x))
    return replace(x, q=down(q, x.q, q_step), k=down(k, x.k, k_step))


def scale_of_the_tensor(q, k, v, **options):
    return quantize_qkv(q, k, v, **options, granularity=PER_TENSOR)


def scales_of_240(q, k, v, **options):
    """As for the other E4M3, which ends at 240."""
    x = quantize_qkv(*(t.float() * (448 / 240) for t in (q, k, v)), **options)
    by = 240 / 448
    scales = dict(q_scale=x.q_scale * by, k_scale=x.k_scale * by, v_scale=x.v_scale * by)
    return replace(x, **scales, dtype=q.dtype)


def nan_becomes_zero(q, k, v, **options):
    return quantize_qkv(*(torch.nan_to_num(t) for t in (q, k, v)), **options)


def not_normalised(q, k, v, *, rotate=True, seed=0, **options):
    if rotate:
        signs = hadamard.random_signs(q.shape[-1], seed)
        q, k = (hadamard.rotate(t, signs) * 2 for t in (q, k))
    return replace(quantize_qkv(q, k, v, rotate=False, **options), dtype=v.dtype)


def only_q_rotated(q, k, v, **options):
    x, plain = quantize_qkv(q, k, v, **options), quantize_qkv(q, k, v, **options | {"rotate": False})
    return replace(x, k=plain.k, k_scale=plain.k_scale)


def no_rotation(q, k, v, **options):
    return quantize_qkv(q, k, v, **options | {"rotate": False})


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        (one_code_off, {"rounding", "idempotent", "unbiased", "zero_block"}),
        (towards_zero, {"rounding", "unbiased"}),
        (scale_of_the_tensor, {"scales", "idempotent", "zero_block", "block_scales"}),
        (scales_of_240, {"scales"}),
        (nan_becomes_zero, {"not_finite"}),
        (not_normalised, {"from_the_inputs"}),
        (only_q_rotated, {"from_the_inputs", "rotation_helps"}),
        (no_rotation, {"one_hot", "rotation_helps"}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_broken_quantisation_is_caught(broken, caught_by):
    assert {p.name for p in PROPERTIES if p.name in caught_by and not holds(p, Subject(quantize=broken))} == caught_by


# Broken attention


def changed(**fields):
    """Attention to a record of which fields were changed by functions of it."""

    def broken(x, softmax_scale=None, causal=False):
        return fp8_attention(replace(x, **{n: f(x) for n, f in fields.items()}), softmax_scale, causal)

    return broken


v_scale_ignored = changed(v_scale=lambda x: torch.ones_like(x.v_scale))
v_scale_of_the_first_block = changed(v_scale=lambda x: x.v_scale[..., :1].expand_as(x.v_scale))
k_scale_of_the_next_block = changed(k_scale=lambda x: x.k_scale.roll(1, -1))
keys_not_permuted = changed(
    v=lambda x: x.v.view(torch.uint8).unflatten(-1, (-1, 4)).flip(-1).flatten(-2).view(x.v.dtype)
)


def p_too_small(x, softmax_scale=None, causal=False):
    """As if P had been rounded towards zero, twice; its sum is right."""
    out, lse = fp8_attention(x, softmax_scale, causal)
    return (out.float() * (1 - 2.0**-3.5)).to(out.dtype), lse


def lse_in_base_two(x, softmax_scale=None, causal=False):
    out, lse = fp8_attention(x, softmax_scale, causal)
    return out, lse / math.log(2)


def lse_off_by_the_scale_of_p(x, softmax_scale=None, causal=False):
    out, lse = fp8_attention(x, softmax_scale, causal)
    return out, lse + 8 * math.log(2)


def mask_one_key_long(x, softmax_scale=None, causal=False):
    return fp8_attention(x, softmax_scale, causal and x.q.shape[1] < 2)


def reads_the_neighbours(x, softmax_scale=None, causal=False):
    out, lse = fp8_attention(x, softmax_scale, causal)
    return out + 0 * out.mean((0, 2), keepdim=True), lse


def empty_rows_are_nan(x, softmax_scale=None, causal=False):
    out, lse = fp8_attention(x, softmax_scale, causal)
    return out + 0 * lse.transpose(1, 2)[..., None], lse


def softmax_scale_ignored(x, softmax_scale=None, causal=False):
    return fp8_attention(x, None, causal)


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        (v_scale_ignored, {"error", "v_descale", "from_the_inputs"}),
        (v_scale_of_the_first_block, {"error"}),
        (k_scale_of_the_next_block, {"lse"}),
        (keys_not_permuted, {"error", "from_the_inputs"}),
        (p_too_small, {"error", "ones"}),
        (lse_in_base_two, {"lse"}),
        (lse_off_by_the_scale_of_p, {"lse"}),
        (mask_one_key_long, {"error", "lse", "future", "empty_rows"}),
        (reads_the_neighbours, {"neighbours"}),
        (empty_rows_are_nan, {"empty_rows"}),
        (softmax_scale_ignored, {"qk_descale"}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_broken_attention_is_caught(broken, caught_by):
    found = {p.name for p in PROPERTIES if p.name in caught_by and not holds(p, Subject(attention=broken))}
    assert found == caught_by


def holds(prop, subject) -> bool:
    return check(prop, subject, cases("cpu", longest=200), examples=15, shrink=False).passed


# The model behind the bounds


def test_properties_take_a_case_of_ones_own():
    case = Case(
        seqlen_q=70, seqlen_k=200, heads_kv=2, ratio=2, head_dim=96, causal=True, pattern="loud_row", spread=1e-3
    )
    for prop in PROPERTIES:
        measured = prop.measure(Subject(), case)
        assert measured.figure <= measured.limit, prop.name


@pytest.mark.parametrize("rotate", [False, True])
def test_predicted_errors_are_near_the_measured(rotate):
    """Neither bound is so wide that nothing could break it."""
    case = Case(batch=2, seqlen_q=256, seqlen_k=256, heads_kv=4, head_dim=128, head_dim_v=128, rotate=rotate)
    assert 0.5 < fp8.from_the_inputs(Subject(), case).figure < 1.2
    assert 0.3 < fp8.rms_error(Subject(), case).figure < 1.0
    assert 0.1 < fp8.error(Subject(), case).figure < 0.9


def test_a_loud_block_needs_scales_of_its_own_only_beyond_the_formats_range():
    """E4M3 is a float: a block 100 times larger costs the others nothing, one 2^16 times larger nearly everything."""
    errors = {}
    for loud in (100.0, 2.0**16):
        x = torch.randn(1, 128, 1, 64, generator=torch.Generator().manual_seed(0))
        x[:, 64:] *= loud
        for granularity in (PER_BLOCK, PER_TENSOR):
            back = dequantize(*quantize(x, granularity), granularity)
            errors[loud, granularity] = (back - x)[:, :64].square().mean().sqrt().item()
    assert 0.9 < errors[100.0, PER_TENSOR] / errors[100.0, PER_BLOCK] < 1.1
    assert errors[2.0**16, PER_TENSOR] > 5 * errors[2.0**16, PER_BLOCK]


def test_patterns_and_spreads_reach_the_tensors():
    plain = fp8.make(Case(seqlen_q=128, seqlen_k=128), "cpu")
    loud = fp8.make(Case(seqlen_q=128, seqlen_k=128, pattern="loud_row", spread=1e3, spread_v=1e-3), "cpu")
    assert loud.q.float().norm() > 2e3 * plain.q.float().norm()
    assert 2 < loud.v.float().norm() / (plain.v.float().norm() * 1e-3) < 20
    zero = quantize_qkv(*fp8.make(Case(seqlen_q=128, seqlen_k=128, pattern="zero_block"), "cpu"))
    assert all((t[:, :64] == 0).all() and (t[:, 64:] != 0).any() for t in dequantize_qkv(zero))
    assert E4M3.half_ulp(torch.tensor(1.0)) == 2.0**-4
