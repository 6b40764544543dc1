"""The emulated FP8 attention against float64, against its steps spelled out, and against values known without it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fa3.quant.cast import cast, pack_v, unpack_v
from fa3.quant.formats import BLOCK, PER_TENSOR
from fa3.quant.reference import dequantize_qkv, from_descales, quantize_qkv
from fa3.reference import attention, tiled_attention
from fa3.reference_fp8 import dequantized_attention, fp8_attention
from fa3.testing import fp8_conformance as conformance
from fa3.testing.fp8 import Subject
from fa3.testing.inputs import draw
from fa3.testing.tolerance import rmse


def tensors(seqlen_q, seqlen_k, heads=2, heads_kv=1, dim=64, dim_v=None, seed=0, dtype=torch.bfloat16, batch=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = (seqlen_q, heads, dim), (seqlen_k, heads_kv, dim), (seqlen_k, heads_kv, dim_v or dim)
    return [torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes]


def by_steps(x, tile_n, causal=False):
    """One head, one query tile: every step row by row on plain numbers, rounded where the arithmetic says so."""
    f32 = np.float32
    scale_log2 = f32(x.q.shape[3] ** -0.5 * math.log2(math.e))
    q, k, v = x.q[0, :, 0].double(), x.k[0, :, 0].double(), unpack_v(x.v, x.seqlen_k)[0, :, 0].double()
    k_scale, v_scale = x.k_scale[0, 0].numpy(), x.v_scale[0, 0].tolist()
    out = torch.zeros(len(q), v.shape[1], dtype=torch.float64)
    lse = torch.full((len(q),), -math.inf, dtype=torch.float64)
    lv = [f32(math.log2(s / max(v_scale))) for s in v_scale]
    for i, row in enumerate(q):
        q_scale = scale_log2 * x.q_scale[0, 0, i if x.q_rows == 1 else i // 64].numpy()
        seen = i + len(k) - len(q) + 1 if causal else len(k)
        o, total, reference, highest = torch.zeros(v.shape[1], dtype=torch.float64), 0.0, None, -math.inf
        for left in reversed(range(0, seen, tile_n)):
            keys = range(left, min(left + tile_n, seen))
            scores = [(row @ k[j]).item() * float(q_scale * k_scale[j // 64]) for j in keys]
            exact = max(s + float(lv[j // 64]) for j, s in zip(keys, scores))
            up = f32(exact) if float(f32(exact)) >= exact else np.nextafter(f32(exact), f32(math.inf))
            new = max(up, f32(highest - 32))
            offsets = [f32(f32(new - f32(8)) - one) for one in lv]
            e = torch.tensor([2 ** (s - float(offsets[j // 64])) for j, s in zip(keys, scores)], dtype=torch.float64)
            assert e.max() <= 256 * (1 + 1e-5)
            factor = 0.0 if reference is None else 2 ** float(reference - new)
            p = sum(one.item() * 2 ** -float(lv[j // 64]) for j, one in zip(keys, e))
            total, o = total * factor + p, o * factor + cast(e).double() @ v[keys.start : keys.stop]
            reference, highest = new, max(highest, new)
        if reference is not None:
            out[i], lse[i] = o * (max(v_scale) / total), math.log(2) * (float(reference) - 8 + math.log2(total))
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("tile_n", "q_rows"), [(128, 64), (80, 1), (64, 64), (176, 64)])
def test_follows_the_steps(tile_n, q_rows, causal):
    q, k, v = tensors(65, 200, 1, dim=32)
    k[:, 64:128] *= 3
    v[:, :64] *= 1000
    x = replace(quantize_qkv(q, k, v, q_rows=q_rows), dtype=torch.float32)
    want, want_lse = by_steps(x, tile_n, causal)
    out, lse = fp8_attention(x, None, causal, tile_n=tile_n)
    torch.testing.assert_close(lse[0, 0].double(), want_lse, rtol=0, atol=5e-6)
    same = (out[0, :, 0].double() - want).abs() <= 3e-6 * want.abs().amax()
    assert same.double().mean() > 0.97  # a last bit of P where float32 rounds e to the other side
    other, _ = fp8_attention(x, None, causal, tile_n=tile_n + 48)
    assert (out != other).double().mean() > 0.2  # and the order does show


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 300), (130, 257), (300, 65), (64, 64)])
@pytest.mark.parametrize("tile", [(128, 128), (64, 80), (192, 112)])
def test_near_float64_for_any_tile(seqlen_q, seqlen_k, tile, causal):
    x = quantize_qkv(*tensors(seqlen_q, seqlen_k, 6, 2, 64, 48, batch=2))
    want, want_lse = dequantized_attention(x, None, causal)
    plain, plain_lse = attention(*dequantize_qkv(x), None, causal)
    torch.testing.assert_close((want, want_lse), (plain, plain_lse), rtol=1e-11, atol=1e-12)
    out, lse = fp8_attention(x, None, causal, tile_m=tile[0], tile_n=tile[1])
    assert out.dtype == torch.bfloat16 and out.shape == (2, seqlen_q, 6, 48) and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=2e-6)
    assert rmse(out, want) < 0.01 and (out.double() - want).abs().max() < 0.12


def test_tile_m_and_accumulation_change_nothing():
    x = quantize_qkv(*tensors(300, 300))
    want = fp8_attention(x, None, True)
    for options in ({"tile_m": 64}, {"tile_m": 192}, {"accumulation": "fast"}):
        got = fp8_attention(x, None, True, **options)
        assert rmse(got[0], want[0].double()) < 1e-4 and (got[1] - want[1]).abs()[torch.isfinite(want[1])].max() < 1e-5


def test_one_key_is_exact():
    """The largest P is 2^8 to float32, which rounds to 2^8: one key gives that key's value."""
    for seed in range(20):
        x = replace(quantize_qkv(*tensors(5, 1, seed=seed)), dtype=torch.float32)
        want = dequantize_qkv(x)[2].expand(-1, 5, 2, -1)
        torch.testing.assert_close(fp8_attention(x)[0].double(), want, rtol=1e-4, atol=0)


def test_a_block_far_below_the_maximum_keeps_its_precision():
    """P is relative to its own block: keys of e^-16 of the weight, with values e^16 larger, still count."""
    q = torch.ones(1, 1, 1, 64)
    k = torch.zeros(1, 256, 1, 64)
    k[:, 128:] = 16 / 8  # a score of 16 above
    v = torch.ones(1, 256, 1, 64)
    v[:, :128] = math.exp(16)
    x = quantize_qkv(q, k, v, rotate=False)
    want, _ = dequantized_attention(x)
    assert abs(want.mean() - 2) < 0.1
    torch.testing.assert_close(fp8_attention(x)[0].double(), want, rtol=2e-2, atol=0)


@pytest.mark.parametrize("exponent", [2, 10, 14, 20, 23, 26, 40])
@pytest.mark.parametrize("sign", [1, -1])
def test_huge_scores_find_their_largest(exponent, sign):
    """Block scales on both sides of a power of two, blocks of all references: the right key wins, LSE is its score."""
    generator = torch.Generator().manual_seed(exponent)
    q, k, v = (torch.randn(1, n, 1, 64, generator=generator) for n in (40, 512, 512))
    if sign < 0:  # all scores below zero
        q, k = q.abs(), -k.abs()
    blocks = torch.linspace(0.7, 1.6, 8).repeat_interleave(64)[None, :, None, None]
    x = quantize_qkv(q * 2.0**exponent, k * blocks, v * 2.0 ** (torch.arange(512) // 64 % 3)[None, :, None, None])
    want, want_lse = dequantized_attention(x)
    out, lse = fp8_attention(x)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-5)
    right = ((out.double() - want).abs() < 0.06 * want.abs().max()).all(-1)
    assert right.double().mean() >= (1 if exponent <= 20 else 0.95)  # beyond, scores within 2^-22 are as good as equal
    causal, _ = fp8_attention(x, None, True)
    assert torch.isfinite(causal).all()


def test_descales_that_codes_do_not_fill_change_no_score():
    """FlashAttention-3's descales on codes far below 448: scores are moderate, whatever the scales could make."""
    q, k, v = (cast(torch.randn(1, 130, 2, 256, generator=torch.Generator().manual_seed(n))) for n in range(3))
    descale = torch.full((1, 2), 4.0)
    x = from_descales(q, k, v, descale, descale, None, torch.bfloat16)
    want, want_lse = dequantized_attention(x)
    out, lse = fp8_attention(x)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-4)
    assert ((out.double() - want).square().mean() / want.square().mean()).sqrt() < 0.02


def test_equal_huge_scores_give_the_mean():
    """The largest that codes can make, with blocks of V of different scales: no P passes 448."""
    q, k, v = torch.full((1, 3, 1, 64), 1e4), torch.full((1, 256, 1, 64), 1e5), 1 + tensors(1, 256)[2].float()
    for block, by in enumerate((1.0, 0.08, 30.0, 0.3)):
        v[:, 64 * block : 64 * (block + 1)] *= by
    x = quantize_qkv(q, k, v, rotate=False)
    want, want_lse = dequantized_attention(x)
    out, lse = fp8_attention(x)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=0.03 * want.abs().max().item())


def test_zero_blocks_and_zero_scales():
    q, k, v = tensors(130, 300)
    q[:, :64], k[:, 64:128], v[:, 128:192], v[:, 256:] = 0, 0, 0, 0
    for causal in (False, True):
        x = quantize_qkv(q, k, v)
        want, want_lse = dequantized_attention(x, None, causal)
        out, lse = fp8_attention(x, None, causal)
        torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=2e-5)
        assert torch.isfinite(out).all() and rmse(out, want) < 0.01
    nothing = quantize_qkv(*(torch.zeros_like(t) for t in (q, k, v)))
    out, lse = fp8_attention(nothing, None, True)
    assert (out == 0).all()
    seen = torch.arange(171, 301).float().log().expand(1, 2, 130)
    torch.testing.assert_close(lse, seen, rtol=1e-6, atol=1e-6)


def test_channel_scales_multiply_the_columns():
    q, k, v = tensors(70, 200)
    by = 2.0 ** torch.arange(64).remainder(9)
    x, want = (quantize_qkv(q, k, t, v_channel=True) for t in (v * by.bfloat16(), v))
    torch.testing.assert_close(x.v_channel_scale, want.v_channel_scale * by)
    assert torch.equal(fp8_attention(x)[0], fp8_attention(want)[0] * by.bfloat16())


def test_scale_zero_weighs_all_keys_alike():
    x = quantize_qkv(*tensors(6, 6, 1, dtype=torch.float32))
    out, lse = fp8_attention(x, 0.0, True)
    want = dequantize_qkv(x)[2].cumsum(1) / torch.arange(1, 7)[:, None, None]
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse[0, 0], torch.arange(1, 7).float().log())


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(2, 5, 0), (2, 0, 5), (0, 5, 5)])
def test_empty_problems(batch, seqlen_q, seqlen_k):
    x = quantize_qkv(*tensors(seqlen_q, seqlen_k, 4, 2, 16, 32, batch=batch))
    for causal in (False, True):
        out, lse = fp8_attention(x, None, causal)
        assert out.shape == (batch, seqlen_q, 4, 32) and lse.shape == (batch, 4, seqlen_q)
        assert (out == 0).all() and (lse == -math.inf).all()


def test_padding_of_packed_v_is_not_read():
    x = quantize_qkv(*tensors(70, 150))
    v = x.v.view(torch.uint8).clone()
    keys = torch.tensor([144 + (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)[i] for i in range(16)])
    v[..., 144:][..., keys >= 150] = 0x7F  # NaN
    assert torch.equal(fp8_attention(x)[0], fp8_attention(replace(x, v=v.view(x.v.dtype)))[0])
    assert torch.equal(pack_v(unpack_v(x.v, 150)).view(torch.uint8), x.v.view(torch.uint8))


def test_wrong_arguments_are_named():
    x = quantize_qkv(*tensors(4, 4))
    with pytest.raises(ValueError, match="'quick'; allowed: accurate, fast"):
        fp8_attention(x, accumulation="quick")
    with pytest.raises(ValueError, match="tile_n 0"):
        fp8_attention(x, tile_n=0)
    with pytest.raises(ValueError, match="k_scale has shape"):
        fp8_attention(replace(x, k_scale=x.k_scale[:, :0]))


# Accuracy


def test_rotation_and_exact_largest_p_by_the_papers_protocol():
    """FlashAttention-3, arXiv:2407.08608, section 4.3, at a smaller size: the order of the ablation."""
    found: dict[str, float] = {}
    plain = {"rotate": False, "q_rows": BLOCK}
    options = {"both": {}, "no rotation": plain, "neither": {"rotate": False, "granularity": PER_TENSOR}}
    seeds = 3
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (draw((1, 1024, 4, 128), torch.bfloat16, generator, "outliers") for _ in range(3))
        want, _ = tiled_attention(q.double(), k.double(), v.double(), tile_m=256, tile_n=512)
        for name, chosen in options.items():
            out, _ = fp8_attention(quantize_qkv(q, k, v, **chosen), tile_m=512)
            found[name] = found.get(name, 0.0) + rmse(out, want) / seeds
    assert found["both"] < 1e-2 and found["both"] < 0.75 * found["no rotation"] < 0.75 * found["neither"]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen_k", [1024, 8192])
def test_relative_error_does_not_grow_with_length(seqlen_k, head_dim):
    measured = conformance.long_context(Subject(), seqlen_k, head_dim)
    assert measured.figure <= measured.limit == 3e-3


@pytest.mark.parametrize(("seqlen_k", "seqlen_q"), [(4096, 64), (4096, 1), (32768, 1)])
def test_the_mean_of_many_values(seqlen_k, seqlen_q):
    measured = conformance.truncation(Subject(), seqlen_k, seqlen_q)
    assert measured.figure <= measured.limit == 5e-3


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_needle(at):
    measured = conformance.needle(Subject(), 8192, at)
    assert measured.figure <= measured.limit == 1e-2


def test_descales():
    measured = conformance.descales(Subject())
    assert measured.figure <= 1
    for name in ("q_scale", "k_scale", "v_scale"):

        def ignores(x, softmax_scale=None, causal=False, name=name):
            return fp8_attention(replace(x, **{name: torch.ones_like(getattr(x, name))}), softmax_scale, causal)

        assert conformance.descales(Subject(attention=ignores)).figure > 1


def test_scale_of_k_changes_lse_and_scale_of_v_doubles_o():
    q, k = cast(tensors(50, 100)[0].float()), cast(tensors(50, 100)[1].float())
    one = torch.ones(1, 1)
    x = from_descales(q, k, k, one, one, one)
    out, lse = fp8_attention(x)
    twice, _ = fp8_attention(from_descales(q, k, k, one, one, 2 * one))
    assert torch.equal(twice, 2 * out)
    assert (fp8_attention(from_descales(q, k, k, one, 2 * one, one))[1] - lse).abs().min() > 1e-3
