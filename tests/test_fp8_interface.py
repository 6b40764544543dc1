"""The public FP8 functions on CPU tensors: the emulation and float64, FlashAttention-3's descales, every error."""

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fa3
from fa3.device import ASSUMED
from fa3.heuristics import config_of
from fa3.problem_fp8 import quantized_problem
from fa3.quant import QuantizedQKV, dequantize_qkv, from_descales, pack_v, quantize_qkv
from fa3.reference import attention
from fa3.reference_fp8 import fp8_attention
from fa3.testing.inputs import Case, make
from fa3.testing.tolerance import exact, rmse

E4M3 = torch.float8_e4m3fn


def tensors(dtype="bfloat16", **changes):
    sizes = dict(batch=2, seqlen_q=70, seqlen_k=200, heads_kv=2, ratio=2, head_dim=64, head_dim_v=48)
    return make(Case(**{"dtype": dtype, **sizes, **changes}), "cpu")


def row_major(**changes):
    return [x.to(E4M3) for x in tensors(**changes)]


def emulated(x, scale=None, causal=False, accumulation="accurate"):
    factor = x.q.shape[3] ** -0.5 if scale is None else scale
    config = config_of(quantized_problem(x, factor, causal, accumulation), ASSUMED.num_sms)
    return fp8_attention(x, scale, causal, tile_m=config.tile_m, tile_n=config.tile_n, accumulation=accumulation)


def assert_same(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(x, y) and torch.isfinite(x).all()


def fails(error: type[Exception], *words: str):
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{word})" for word in words))


# 16-bit tensors


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.02), ("float16", 0.02), ("float32", 0.02)])
def test_whole_call_is_quantise_and_attend(dtype, limit, causal):
    q, k, v = tensors(dtype)
    out, lse = fa3.flash_attn_fp8_func(q, k, v, causal=causal, return_lse=True)
    x = quantize_qkv(q, k, v)
    assert isinstance(x, QuantizedQKV) and x.rotated and x.dtype == q.dtype
    assert_same((out, lse), emulated(x, None, causal))
    assert_same((out, lse), fa3.flash_attn_quantized_func(x, causal=causal, return_lse=True))
    assert out.dtype == q.dtype and lse.dtype == torch.float32 and out.is_contiguous() and lse.is_contiguous()
    want, want_lse = exact(q, k, v, None, causal)
    assert rmse(out, want) < limit and (lse - want_lse).abs().max() < 0.1


def test_options_reach_the_quantisation():
    q, k, v = tensors()
    cos, sin = torch.rand(300, 16), torch.rand(300, 16)
    told = dict(seed=3, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=True, rotary_q_offset=130)
    assert_same([fa3.flash_attn_fp8_func(q, k, v, **told)], [emulated(quantize_qkv(q, k, v, **told))[0]])
    plain = fa3.flash_attn_fp8_func(q, k, v)
    for change in (dict(rotate=False), dict(seed=1), told, dict(softmax_scale=0.3), dict(accumulation="fast")):
        same = change == dict(accumulation="fast")  # the emulation does not model the tensor core's accumulator
        assert torch.equal(fa3.flash_attn_fp8_func(q, k, v, **change), plain) == same


def test_what_is_returned():
    q, k, v = tensors()
    out, lse = fa3.flash_attn_fp8_func(q, k, v, return_lse=True)
    assert torch.equal(fa3.flash_attn_fp8_func(q, k, v), out)
    assert_same(fa3.flash_attn_fp8_func(q, k, v, return_attn_probs=True, deterministic=True), (out, lse))
    x = quantize_qkv(q, k, v)
    assert torch.equal(fa3.flash_attn_quantized_func(x), out)
    assert torch.equal(fa3.flash_attn_quantized_func(x, 64**-0.5, False, accumulation="accurate"), out)
    assert torch.equal(fa3.flash_attn_quantized_func(x, np.float64(0.125)), out)


@pytest.mark.parametrize("layout", ["packed", "transposed", "misaligned", "padded"])
def test_layouts_of_the_inputs_do_not_matter(layout):
    wanted = fa3.flash_attn_fp8_func(*tensors(), causal=True)
    assert torch.equal(fa3.flash_attn_fp8_func(*tensors(layout=layout), causal=True), wanted)


@pytest.mark.parametrize("sizes", [dict(batch=0), dict(seqlen_q=0), dict(seqlen_k=0)])
def test_empty_problems(sizes):
    q, k, v = tensors(**sizes)
    out, lse = fa3.flash_attn_fp8_func(q, k, v, causal=True, return_lse=True)
    assert out.shape == (*q.shape[:3], 48) and (out == 0).all() and (lse == -math.inf).all()
    assert lse.shape == (q.shape[0], 4, q.shape[1])


def test_scale_per_row_and_per_channel():
    q, k, v = tensors()
    by_row = quantize_qkv(q, k, v, q_rows=1)
    assert_same(fa3.flash_attn_quantized_func(by_row, return_lse=True), emulated(by_row))
    twice = replace(by_row, v_channel_scale=torch.full((2, 2, 48), 2.0))
    assert torch.equal(fa3.flash_attn_quantized_func(twice), 2 * fa3.flash_attn_quantized_func(by_row))


def test_signatures():
    names = list(inspect.signature(fa3.flash_attn_fp8_func).parameters)
    assert names[:9] == ["q", "k", "v", "softmax_scale", "causal", "rotate", "seed", "accumulation", "rotary_cos"]
    assert set(inspect.signature(fa3.flash_attn_func).parameters) - set(names) == {
        *("qv", "q_descale", "k_descale", "v_descale", "learnable_sink", "s_aux")
    }
    record = inspect.signature(fa3.flash_attn_quantized_func).parameters
    assert list(record) == ["x", "softmax_scale", "causal", "accumulation", "return_lse"]
    assert record["accumulation"].default == "accurate" and record["causal"].default is False


# FP8 tensors


@pytest.mark.parametrize("causal", [False, True])
def test_fp8_tensors_without_descales(causal):
    q, k, v = row_major()
    out, lse = fa3.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    assert_same((out, lse), emulated(from_descales(q, k, v), None, causal))
    want, want_lse = attention(q.double(), k.double(), v.double(), causal=causal)
    assert out.dtype == torch.bfloat16 and rmse(out, want) < 0.01 and (lse - want_lse).abs().max() < 1e-4
    assert_same(fa3.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True), (out, lse))


def test_descales_are_flash_attention_3_s():
    """(B, Hkv), each optional, also of stride 0; q's counts for all query heads of a KV head."""
    q, k, v = row_major()
    by_q, by_k, by_v = (torch.tensor([[0.5, 2.0], [1.0, 1.5]]) * n for n in (0.5, 0.25, 4))
    out, lse = fa3.flash_attn_func(q, k, v, q_descale=by_q, k_descale=by_k, v_descale=by_v, return_lse=True)
    q64 = q.double() * by_q.repeat_interleave(2, 1)[:, None, :, None]
    want, want_lse = exact(q64, *(x.double() * by[:, None, :, None] for x, by in ((k, by_k), (v, by_v))))
    assert rmse(out, want) / want.pow(2).mean().sqrt() < 0.03 and (lse - want_lse).abs().max() < 1e-4
    two = torch.full((1, 1), 2.0).expand(2, 2)
    plain = fa3.flash_attn_func(q, k, v)
    assert torch.equal(fa3.flash_attn_func(q, k, v, v_descale=two), 2 * plain)
    doubled = fa3.flash_attn_func(q, k, v, 0.25)
    assert torch.equal(fa3.flash_attn_func(q, k, v, 0.125, q_descale=two), doubled)
    assert torch.equal(fa3.flash_attn_func(q, k, v, 0.125, k_descale=two), doubled)
    ones = torch.ones(2, 2)
    assert torch.equal(fa3.flash_attn_func(q, k, v, q_descale=ones, k_descale=ones, v_descale=ones), plain)


def test_packed_fp8():
    qkv = torch.randn(2, 40, 3, 4, 64).to(E4M3)
    out = fa3.flash_attn_qkvpacked_func(qkv, causal=True, v_descale=torch.full((2, 4), 0.5))
    assert torch.equal(out, fa3.flash_attn_func(*qkv.unbind(2), causal=True) / 2)


def test_record_from_descales():
    q, k, v = row_major()
    x = from_descales(q, k, v, v_descale=torch.full((2, 2), 3.0), dtype=torch.float16)
    x.validate()
    assert x.q is q and x.k is k and torch.equal(x.v.view(torch.uint8), pack_v(v).view(torch.uint8))
    assert x.q_scale.shape == (2, 4, 2) and x.k_scale.shape == (2, 2, 4) and (x.v_scale == 3).all()
    assert torch.equal(dequantize_qkv(x)[2], 3 * v.double()) and x.dtype == torch.float16
    assert fa3.flash_attn_quantized_func(x).dtype == torch.float16


# explain


def test_explain_of_fp8():
    q, k, v = (x.to("meta") for x in row_major(seqlen_q=1000, head_dim=144, head_dim_v=144))
    found = fa3.explain(q, k, v, causal=True)
    assert found.runs == "kernel" and found.spec.dtype == "float8_e4m3fn" and found.spec.dtype_o == "bfloat16"
    assert found.config.promotion == 1 and found.problem.accumulation == "accurate"
    assert found.copies == ("v: FP8 is packed head_dim-major first",)
    text = str(found)
    assert "float8_e4m3fn" in text and "accurate" in text and "O in bfloat16" in text
    fast = fa3.explain(q, k, v, accumulation="fast")
    assert fast.config.promotion == 0 and "fast" in str(fast)
    assert fa3.explain(*row_major()).runs == "reference (CPU)"
    with fails(ValueError, "accumulation is 'quick'", "'accurate', 'fast'"):
        fa3.explain(q, k, v, accumulation="quick")
    with fails(ValueError, "'fast' for torch.bfloat16"):
        fa3.explain(*tensors(), accumulation="fast")


# Errors


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_16_bit_tensors_have_no_descales(name):
    with fails(NotImplementedError, f"{name} is for torch.float8_e4m3fn", "q has dtype torch.bfloat16", "None"):
        fa3.flash_attn_func(*tensors(), **{name: torch.ones(2, 2)})


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (0.5, TypeError, ["must be a torch.Tensor or None", "float"]),
        (torch.ones(2, 4), ValueError, [r"shape \(2, 4\)", r"allowed: \(batch, heads of k and v\), \(2, 2\)"]),
        (torch.ones(()), ValueError, [r"shape \(\)"]),
        (torch.ones(2, 2).double(), TypeError, ["dtype torch.float64", "torch.float32"]),
        (torch.ones(2, 2, device="meta"), ValueError, ["on meta", "q on cpu"]),
    ],
)
@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_descales_that_are_wrong(name, value, error, words):
    with fails(error, name, *words):
        fa3.flash_attn_func(*row_major(), **{name: value})


@pytest.mark.parametrize("descales", [{}, {"v_descale": torch.ones(2, 2)}])
def test_fp8_tensors_that_are_wrong(descales):
    q, k, v = row_major()
    wrong = [
        ((q, k, v.half()), TypeError, ["one dtype", "v torch.float16"]),
        ((q[..., :40], k[..., :40], v), ValueError, ["q has head_dim 40", "multiples of 16 from 16 to 256"]),
        ((q, k, v[..., :8]), ValueError, ["v has head_dim 8"]),
        ((q, k[..., :32], v), ValueError, ["k must have the head_dim of q, 64, got 32"]),
        ((q[:, :, :3], k, v), ValueError, ["q 3 and k, v 2"]),
        ((q, k, v[:, :7]), ValueError, ["one seqlen", "v 7"]),
        ((q.transpose(1, 3).contiguous().transpose(1, 3), k, v), ValueError, ["q has stride", "q.contiguous"]),
        ((q, k, None), TypeError, ["v must be a torch.Tensor, got NoneType"]),
        ((q.to(torch.float8_e5m2), k, v), (TypeError, NotImplementedError), ["float8_e5m2"]),
    ]
    for arguments, error, words in wrong:
        with fails(error, *words):
            fa3.flash_attn_func(*arguments, **descales)
    for scale in (-1.0, math.nan):
        with fails(ValueError, "softmax_scale is"):
            fa3.flash_attn_func(q, k, v, scale, **descales)
    with fails(TypeError, "causal must be True or False"):
        fa3.flash_attn_func(q, k, v, causal=1, **descales)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(accumulation="quick"), ValueError, ["accumulation is 'quick'", "'accurate', 'fast'"]),
        (dict(accumulation=None), ValueError, ["accumulation is None"]),
        (dict(rotate=1), TypeError, ["rotate must be True or False, got 1"]),
        (dict(seed=2**63), ValueError, ["seed is"]),
        (dict(rotary_cos=torch.ones(300, 16)), TypeError, ["rotary_sin must be a torch.Tensor"]),
        (dict(rotary_cos=1, rotary_sin=1), TypeError, ["rotary_cos must be a torch.Tensor, got int"]),
        (dict(rotary_interleaved=1), TypeError, ["rotary_interleaved must be True or False"]),
        (dict(rotary_q_offset=0.5), TypeError, ["rotary_q_offset must be an int, got 0.5"]),
        (dict(softmax_scale=-0.5), ValueError, ["softmax_scale is -0.5", "Negate q"]),
        (dict(softmax_scale="1"), TypeError, ["softmax_scale must be a float or None, got str"]),
        (dict(causal=None), TypeError, ["causal must be True or False"]),
        (dict(return_lse=1), TypeError, ["return_lse must be True or False"]),
        (dict(deterministic=0), TypeError, ["deterministic must be True or False"]),
        (dict(window_size=(16, 0)), NotImplementedError, ["window_size"]),
        (dict(softcap=30.0), NotImplementedError, ["softcap"]),
        (dict(attention_chunk=1), NotImplementedError, ["attention_chunk"]),
        (dict(num_splits=2), NotImplementedError, ["num_splits"]),
        (dict(pack_gqa=True), NotImplementedError, ["pack_gqa"]),
        (dict(sm_margin=1), NotImplementedError, ["sm_margin"]),
        (dict(qv=None), TypeError, ["qv"]),
    ],
)
def test_options_that_are_wrong(arguments, error, words):
    q, k, v = tensors()
    with fails(error, *words):
        fa3.flash_attn_fp8_func(q, k, v, **arguments)
    assert torch.isfinite(fa3.flash_attn_fp8_func(q, k, v)).all()


def test_tensors_that_are_wrong():
    q, k, v = tensors()
    with fails(TypeError, "q has dtype torch.float8_e4m3fn", "torch.bfloat16"):
        fa3.flash_attn_fp8_func(*row_major())
    with fails(ValueError, "q has head_dim 40", "multiples of 16"):
        fa3.flash_attn_fp8_func(q[..., :40], k[..., :40], v)
    with fails(TypeError, "q must be a torch.Tensor, got list"):
        fa3.flash_attn_fp8_func([1.0], k, v)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(q=None), TypeError, ["q must be a torch.Tensor"]),
        (dict(k_scale=1.0), TypeError, ["k_scale must be a torch.Tensor"]),
        (dict(v_channel_scale=torch.ones(2, 2, 47)), ValueError, ["v_channel_scale has shape"]),
        (dict(v_scale=torch.ones(2, 2, 3)), ValueError, ["v_scale has shape", r"\(2, 2, 4\)"]),
        (dict(q_scale=torch.ones(2, 4, 2).half()), TypeError, ["q_scale has dtype torch.float16"]),
        (dict(v=torch.zeros(2, 2, 48, 200, dtype=E4M3)), ValueError, ["v has shape", r"\(2, 2, 48, 208\)"]),
        (dict(k=torch.zeros(2, 200, 2, 64, device="meta", dtype=E4M3)), ValueError, ["k is on meta"]),
        (dict(k=torch.zeros(2, 200, 64, 2, dtype=E4M3).mT), ValueError, ["k has stride 2", "k.contiguous"]),
        (dict(dtype=torch.int32), TypeError, ["dtype is torch.int32"]),
    ],
)
def test_records_that_are_wrong(change, error, words):
    x = quantize_qkv(*tensors())
    with fails(error, *words):
        fa3.flash_attn_quantized_func(replace(x, **change))
    with fails(TypeError, "x must be a fa3.quant.QuantizedQKV, got Tensor"):
        fa3.flash_attn_quantized_func(x.q)
    with fails(ValueError, "accumulation is 1"):
        fa3.flash_attn_quantized_func(x, accumulation=1)
