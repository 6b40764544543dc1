"""Formats, casts, packing, rotation and the quantisation of Q, K and V, against values known without them."""

import math
from dataclasses import replace

import pytest
import torch

from fa3.quant import hadamard
from fa3.quant.cast import (
    FIT_MAX,
    SMALLEST_SCALE,
    cast,
    dequantize,
    divide,
    pack_v,
    quantize,
    scale_of,
    spread,
    unpack_v,
)
from fa3.quant.formats import (
    BLOCK,
    E4M3,
    KEY_ORDER,
    PER_BLOCK,
    PER_CHANNEL,
    PER_HEAD,
    PER_ROW,
    PER_TENSOR,
    Granularity,
    QuantizedQKV,
)
from fa3.quant.prepare import BEYOND, SCALE_MIN, prepare
from fa3.quant.reference import Rotary, dequantize_qkv, from_descales, quantize_qkv

GRANULARITIES = (PER_TENSOR, PER_HEAD, PER_BLOCK, PER_ROW, PER_CHANNEL, Granularity("block", 48))


def normal(*shape, seed=0, dtype=torch.float32, spread_of=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread_of).to(dtype)


def grid() -> torch.Tensor:
    """All magnitudes of E4M3 from its definition, ascending."""
    values = [m * 2.0**-9 for m in range(8)]
    values += [(8 + m) * 2.0 ** (e - 3) for e in range(-6, 9) for m in range(8)]
    return torch.tensor(values[:-1])  # the last code is NaN


# The cast


def test_format_facts_are_those_of_the_grid():
    values = grid()
    assert values[-1] == E4M3.max == 448 and values[1] == E4M3.smallest and len(values) == 127
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3.dtype).float()
    assert torch.equal(codes, values)
    gaps = values.diff()
    assert torch.equal(E4M3.half_ulp(values[:-1]).float(), gaps / 2)  # towards the next larger
    assert E4M3.half_ulp(torch.tensor(-300.0)) == 16 and E4M3.half_ulp(torch.tensor(0.0)) == 2.0**-10


def test_cast_takes_the_nearest_and_even_between_two():
    values = grid()
    between = (values[1:] + values[:-1]) / 2
    even = torch.where(torch.arange(126) % 2 == 0, values[:-1], values[1:])
    for sign in (1, -1):
        assert torch.equal(cast(sign * values).float(), sign * values)
        assert torch.equal(cast(sign * between).float(), sign * even)
        assert torch.equal(cast(sign * between * (1 + 2.0**-20)).float(), sign * values[1:])
        assert torch.equal(cast(sign * between * (1 - 2.0**-20)).float(), sign * values[:-1])


def test_cast_saturates_and_keeps_nan():
    x = torch.tensor([448.1, 464.0, 1e30, math.inf, -480.0, -math.inf, math.nan])
    assert cast(x).float()[:-1].tolist() == [448.0] * 4 + [-448.0] * 2 and torch.isnan(cast(x).float()[-1])


# Scales


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 130])
def test_a_scale_covers_what_its_granularity_says(granularity, seqlen):
    x = normal(2, seqlen, 3, 16)
    scale = scale_of(x, granularity)
    assert tuple(scale.shape) == granularity.shape((2, seqlen, 3, 16)) and scale.dtype == torch.float32
    every = spread(scale, x.shape, granularity).expand(x.shape)
    for b, i, h, d in ((0, 0, 0, 0), (1, seqlen - 1, 2, 15), (1, seqlen // 2, 1, 7)):
        start = i // max(1, granularity.rows) * granularity.rows
        covered = {
            "tensor": x,
            "head": x[b, :, h],
            "channel": x[b, :, h, d],
            "block": x[b, start : start + granularity.rows, h],
        }[granularity.kind]
        assert every[b, i, h, d] == covered.abs().max() / 448


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_quantised_and_back(granularity, dtype):
    x = normal(2, 100, 2, 24, dtype=dtype)
    codes, scale = quantize(x, granularity)
    back = dequantize(codes, scale, granularity, torch.float64)
    step = spread(scale, x.shape, granularity).double()
    assert ((back - x.double()).abs() / (E4M3.half_ulp(x.double() / step) * step)).max() <= 1 + 2.0**-18
    assert (back - x.double()).abs().max() > 0  # it does round
    again, scale_again = quantize(back, granularity)
    assert torch.equal(again.float(), codes.float())
    assert ((scale_again / scale).double() - 1).abs().max() <= 2.0**-23
    assert torch.equal(dequantize(codes, scale, granularity), back.float())


def test_zero_and_subnormal_blocks():
    x = torch.zeros(1, 192, 1, 8)
    x[0, 64, 0, 0], x[0, 65, 0, 1] = 1e-40, -3e-39
    x[0, 128:] = 5.0
    codes, scale = quantize(x)
    assert scale[0, 0].tolist() == [0.0, SMALLEST_SCALE, torch.tensor(5.0).div(torch.tensor(448.0)).item()]
    assert (codes[0, :64].float() == 0).all() and (codes[0, 128:].float() == 448).all()
    back = dequantize(codes, scale, PER_BLOCK, torch.float64)
    assert (back[0, :64] == 0).all()
    assert (back - x.double()).abs()[0, 64:128].max() <= 2.0**-6 * SMALLEST_SCALE  # 3e-39 is a quarter of the scale
    tiny, scale = quantize(torch.full((1, 1, 1, 1), 448 * 2.0**-126))
    assert scale.item() == SMALLEST_SCALE and tiny.float().item() == 448


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_what_is_not_finite_makes_nan_of_its_block_and_of_nothing_else(bad):
    x = normal(1, 192, 2, 8, dtype=torch.float64)
    x[0, 70, 1, 3] = bad
    codes, scale = quantize(x)
    back = dequantize(codes, scale)
    assert torch.isnan(scale[0, 1, 1]) and torch.isnan(back[0, 64:128, 1]).all()
    back[0, 64:128, 1] = 0
    assert torch.isfinite(back).all() and torch.isfinite(scale).sum() == 5


def test_division_is_exact_and_not_by_a_reciprocal():
    x = normal(1, 64, 1, 4096)
    scale = scale_of(x)
    want = (x.double() / scale.double()[..., None]).float()
    assert torch.equal(divide(x, scale, PER_BLOCK), want)
    assert not torch.equal(x * (1 / scale), want)  # the difference would show


@pytest.mark.parametrize("rows", [1, 64])
def test_fitted_scales_keep_the_length_of_rows(rows):
    """Along itself a row is what it was; in a block of many that holds of their sum, weighted by length^4."""
    x, granularity = normal(2, 130, 3, 128), Granularity("block", rows)
    x[:, ::7] *= 3
    (codes, plain), (same_codes, scale) = (quantize(x, granularity, fitted) for fitted in (False, True))
    assert torch.equal(codes.float(), same_codes.float()) and scale.is_contiguous()
    assert 1e-4 < (scale / plain - 1).abs().max() <= FIT_MAX
    off = []
    for one in (scale, plain):
        along = (dequantize(codes, one, granularity, torch.float64) * x.double()).sum(-1) / x.double().square().sum(-1)
        weighted = (along - 1) * x.double().square().sum(-1) ** 3
        off.append(torch.stack([part.sum(1) / part.abs().sum(1) for part in weighted.split(rows, 1)]).abs())
    if rows == 1:  # the share of a single row is 1 either way: its size is what counts
        along = (dequantize(codes, scale, granularity, torch.float64) * x.double()).sum(-1)
        torch.testing.assert_close(along, x.double().square().sum(-1), rtol=1e-6, atol=0)
    else:
        assert off[0].max() < 1e-4 < 1e-2 < off[1].max()
    twice = quantize(4 * x, granularity, True)
    assert torch.equal(twice[1], 4 * scale) and torch.equal(twice[0].float(), codes.float())


def test_fitted_scales_of_zeros_denormals_and_nan():
    x = torch.zeros(1, 320, 1, 8)
    x[0, 64:128] = normal(64, 1, 8) * 1e-42
    x[0, 130, 0, 3], x[0, 192:256] = math.nan, 5.0
    x[0, 256:] = 2.0**-126  # with codes that are nearly 0 by a scale that is larger than the largest / 448
    scale = quantize(x, PER_BLOCK, True)[1][0, 0]
    assert scale[0] == 0 and scale[1] >= SMALLEST_SCALE and torch.isnan(scale[2])
    assert scale[3] == torch.tensor(5.0) / 448 and scale[4] >= SMALLEST_SCALE


def test_what_is_fitted():
    q, k, v = normal(1, 130, 2, 64), normal(1, 200, 1, 64), normal(1, 200, 1, 64)
    for options, fits in (({}, True), ({"q_rows": 1}, True), ({"rotate": False}, False),
                          ({"granularity": PER_HEAD}, False)):  # fmt: skip
        x, plain = quantize_qkv(q, k, v, **options), quantize_qkv(q, k, v, **options, fit=False)
        assert torch.equal(x.q_scale, plain.q_scale) != fits and torch.equal(x.k_scale, plain.k_scale) != fits
        assert torch.equal(x.v_scale, plain.v_scale) and torch.equal(x.k.float(), plain.k.float())


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (1, 0, 2, 8), (1, 5, 0, 8)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_empty_tensors(shape, granularity):
    codes, scale = quantize(torch.zeros(shape), granularity)
    assert codes.shape == shape and tuple(scale.shape) == granularity.shape(shape)
    assert dequantize(codes, scale, granularity).shape == shape


# Packing


def test_key_order_is_the_accumulators():
    """Thread j of a quad owns columns 2j, 2j + 1 of every 8 of a row of S, and rows 4j .. 4j + 3 of every 16 of A."""
    for j in range(4):
        assert KEY_ORDER[4 * j : 4 * j + 4] == (2 * j, 2 * j + 1, 2 * j + 8, 2 * j + 9)
    assert sorted(KEY_ORDER) == list(range(16))


@pytest.mark.parametrize("seqlen", [0, 1, 15, 16, 17, 100])
def test_packed_v(seqlen):
    codes = torch.randint(1, 120, (2, seqlen, 3, 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packed = pack_v(codes.view(E4M3.dtype))
    assert packed.shape == (2, 3, 5, -(-seqlen // 16) * 16) and packed.is_contiguous()
    for at in range(packed.shape[-1]):
        key = at // 16 * 16 + KEY_ORDER[at % 16]
        want = codes[:, key] if key < seqlen else torch.zeros(2, 3, 5, dtype=torch.uint8)
        assert torch.equal(packed.view(torch.uint8)[..., at], want)
    assert torch.equal(unpack_v(packed, seqlen).view(torch.uint8), codes)


# Rotation

DIMS = (1, 2, 8, 16, 40, 64, 80, 96, 112, 128, 192, 240, 256)


@pytest.mark.parametrize("dim", DIMS)
def test_fast_transform_is_the_matrix_and_orthogonal(dim):
    signs = hadamard.random_signs(dim, 3)
    dense = hadamard.matrix(dim, signs)
    torch.testing.assert_close(dense @ dense.T, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-14)
    x = normal(3, 5, dim, dtype=torch.float64)
    torch.testing.assert_close(hadamard.rotate(x, signs), x @ dense, rtol=0, atol=1e-13)
    torch.testing.assert_close(hadamard.unrotate(x, signs), x @ dense.T, rtol=0, atol=1e-13)
    single = hadamard.rotate(x.bfloat16(), signs)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), x.bfloat16().double() @ dense, rtol=0, atol=4e-6)


def test_known_matrices():
    plus = torch.ones(6)
    half = 0.5 * torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], dtype=torch.float64)
    pair = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64) / math.sqrt(2)
    torch.testing.assert_close(hadamard.matrix(6, plus), torch.block_diag(half, pair))
    plus[2] = -1
    assert (hadamard.matrix(6, plus)[2, :4] == -half[2]).all()
    assert [hadamard.parts(dim) for dim in (96, 80, 192, 128)] == [(64, 32), (64, 16), (128, 64), (128,)]


def test_signs_are_reproducible_and_even():
    assert torch.equal(hadamard.random_signs(256, 7), hadamard.random_signs(256, 7))
    assert not torch.equal(hadamard.random_signs(256, 7), hadamard.random_signs(256, 8))
    assert hadamard.random_signs(16, 0).tolist() == [-1, 1, 1, -1, 1, 1, 1, 1, 1, 1, 1, -1, -1, 1, -1, -1]
    assert abs(hadamard.random_signs(1 << 16, 0).mean()) < 5 / 256


def test_dense_orthogonal():
    a, b = hadamard.orthogonal(96, 1), hadamard.orthogonal(96, 1)
    assert torch.equal(a, b) and (a @ a.T - torch.eye(96)).abs().max() < 1e-13
    assert abs(torch.stack([hadamard.orthogonal(3, s).trace() for s in range(400)]).mean()) < 0.3  # no bias to I


# Q, K and V


def by_hand(x, rows, rotary=None, offset=0, rotate=True, seed=0):
    """Codes and scales from float64 matrices, head by head."""
    x = x.double()
    if rotary is not None:
        half = rotary.cos.shape[1]
        x = x.clone()
        for i in range(x.shape[1]):
            cos, sin = rotary.cos[i + offset].double(), rotary.sin[i + offset].double()
            first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
            if not rotary.interleaved:
                first, second = slice(0, half), slice(half, 2 * half)
            a, b = x[:, i, :, first].clone(), x[:, i, :, second].clone()
            x[:, i, :, first], x[:, i, :, second] = a * cos - b * sin, b * cos + a * sin
    if rotate:
        x = x @ hadamard.matrix(x.shape[-1], hadamard.random_signs(x.shape[-1], seed))
    blocks = [block.abs().amax((1, 3)) / 448 for block in x.split(rows, 1)]
    return x, torch.stack(blocks, -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("rotate", "q_rows", "rotary_dim"), [(True, 64, 64), (True, 1, 32), (False, 64, 16), (True, 64, 0)]
)
def test_quantize_qkv_is_rotary_then_rotation_then_scales(rotate, q_rows, rotary_dim, interleaved):
    q, k, v = (normal(2, s, h, 64, seed=s, dtype=torch.bfloat16) for s, h in ((70, 4), (150, 2), (150, 2)))
    angles = torch.arange(200)[:, None] * 0.7 ** torch.arange(max(1, rotary_dim // 2))
    rotary = Rotary(angles.cos(), angles.sin(), interleaved, q_offset=80) if rotary_dim else None
    x = quantize_qkv(q, k, v, rotate=rotate, seed=5, rotary=rotary, q_rows=q_rows, fit=False)
    assert (x.rotated, x.dtype, x.seqlen_k, x.q_rows, x.v_channel_scale) == (rotate, torch.bfloat16, 150, q_rows, None)
    parts = zip((q, k, v), dequantize_qkv(x), (x.q_scale, x.k_scale, x.v_scale), (q_rows, 64, 64), (80, 0, 0))
    for which, (tensor, back, scale, rows, offset) in enumerate(parts):
        turned = {"rotary": rotary, "rotate": rotate} if which < 2 else {"rotate": False}
        want, want_scale = by_hand(tensor, rows, offset=offset, seed=5, **turned)
        torch.testing.assert_close(scale.double(), want_scale, rtol=1e-6, atol=0)
        error = (back - want).abs() / (2.0**-4 * want.abs() + spread(scale, want.shape, Granularity("block", rows)))
        assert error.max() <= 1.001


def test_channel_scales_come_before_block_scales():
    q, v = normal(1, 130, 1, 64), normal(1, 130, 1, 64)
    v[..., 3] *= 1e6
    v[..., 4] = 0
    x = quantize_qkv(q, q, v, v_channel=True)
    assert x.v_channel_scale is not None
    assert torch.equal(x.v_channel_scale[0, 0], v[0, :, 0].abs().amax(0) / torch.tensor(448.0))
    back = dequantize_qkv(x)[2]
    assert ((back - v).abs() <= 2.0**-4 * v.abs() + 2.0**-9 * v.abs().amax(1, keepdim=True) / 448 * 1.001).all()
    assert (back[..., 4] == 0).all()


@pytest.mark.parametrize("granularity", [PER_TENSOR, PER_HEAD])
def test_coarser_scales_are_repeated(granularity):
    q, k, v = normal(2, 70, 4, 16), normal(2, 130, 2, 16), normal(2, 130, 2, 8)
    x = quantize_qkv(q, k, v, rotate=False, granularity=granularity)
    for tensor, scale in ((q, x.q_scale), (k, x.k_scale), (v, x.v_scale)):
        over = tensor.abs().amax((1, 3)) if granularity == PER_HEAD else tensor.abs().amax().expand(2, tensor.shape[2])
        assert torch.equal(scale, (over / torch.tensor(448.0))[..., None].expand(scale.shape)) and scale.stride(-1) == 0


def test_descales_of_a_head_count_for_its_queries():
    q, k = cast(normal(2, 70, 4, 16)), cast(normal(2, 130, 2, 16))
    descale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    x = from_descales(q, k, k, descale, descale * 8, dtype=torch.float16)
    assert x.q_scale[..., 1].tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]] and x.q_scale.stride(-1) == 0
    assert x.k_scale[..., 2].tolist() == [[8, 16], [24, 32]] and (x.v_scale == 1).all() and x.dtype == torch.float16
    want = k.double() * (descale * 8)[:, None, :, None]
    assert torch.equal(dequantize_qkv(x)[1], want) and torch.equal(dequantize_qkv(x)[2], k.double())


def test_empty_problems_are_quantised():
    for batch, seqlen_q, seqlen_k in ((0, 5, 5), (1, 0, 5), (1, 5, 0)):
        q, k = torch.zeros(batch, seqlen_q, 2, 16), torch.zeros(batch, seqlen_k, 1, 16)
        x = quantize_qkv(q, k, k)
        assert [t.shape for t in dequantize_qkv(x)] == [q.shape, k.shape, k.shape]


# What the forward is given of the scales


def record(k_scale, v_scale, heads=4, dim=16, **changes) -> QuantizedQKV:
    """Of one batch, 130 keys, with scales (Hkv, 3) of K and V."""
    k_scale, v_scale = (torch.tensor(scale)[None] for scale in (k_scale, v_scale))
    q, k = cast(normal(1, 70, heads, dim)), cast(normal(1, 130, k_scale.shape[1], dim))
    return QuantizedQKV(q, k, pack_v(k), scale_of(normal(1, 70, heads, dim)), k_scale, v_scale, None, 130,
                        torch.bfloat16, **changes)  # fmt: skip


def test_prepared_scales():
    x = record([[1.0, 0.25, 0.5], [3.0, 3.0, 3.0]], [[1.0, 4.0, 0.5], [6.0, 3.0, 1.5]])
    x.validate()
    found = prepare(x)
    assert (
        found.q_scale is x.q_scale and found.q_rows == 64 and found.kv.is_contiguous() and found.v_max.is_contiguous()
    )
    assert found.kv[0, 0, :3].tolist() == [[1, -2, 4, 1], [0.25, 0, 1, 1], [0.5, -3, 8, 1]]
    assert found.kv[0, 1, :3].tolist() == [[3, 0, 1, 1], [3, -1, 2, 1], [3, -2, 4, 1]]
    assert found.kv.shape[2] == 3 + BEYOND and (found.kv[:, :, 3:] == 1).all()
    assert found.v_max[0].tolist() == [4, 6]
    assert prepare(replace(x, q_scale=torch.ones(1, 4, 70))).q_rows == 1


def test_prepared_scales_of_zeros():
    x = record([[0.0, 2.0, 0.0], [0.0] * 3], [[0.0, 4.0, 1.0], [0.0] * 3])
    found = prepare(x)
    assert found.kv[0, 0, :3, 0].tolist() == [SCALE_MIN, 2, SCALE_MIN] and (found.kv[0, 1, :3, 0] == SCALE_MIN).all()
    assert found.kv[0, 0, :3, 1].tolist() == [-2, 0, -2] and (found.kv[0, 1, :3, 1] == 0).all()
    assert found.v_max[0].tolist() == [4, 0]
    assert torch.isfinite(found.kv).all()
    nothing = prepare(quantize_qkv(normal(1, 5, 2, 16), normal(1, 0, 1, 16), normal(1, 0, 1, 16)))
    assert nothing.kv.shape == (1, 1, BEYOND, 4) and nothing.v_max[0].tolist() == [0]


def test_prepared_scales_that_differ_by_more_than_float32_takes():
    found = prepare(record([[1e-30, 1.0, 1.0]], [[1e-30, 1e30, 1.0]])).kv
    assert torch.isfinite(found).all() and found[0, 0, 0].tolist() == [SCALE_MIN, -64, 2.0**64, 1]


def test_nan_stays_with_its_block():
    x = record([[1.0, math.nan, 2.0], [1.0] * 3], [[math.nan, 4.0, 0.0], [math.nan] * 3])
    found = prepare(x)
    assert found.kv[0, 0, :3, 0].isnan().tolist() == [False, True, False]
    assert found.kv[0, :, :3, 1].isnan().tolist() == [[True, False, False], [True] * 3]
    assert found.kv[0, 0, 1:3, 1].tolist() == [0, 0] and found.v_max[0].tolist() == [4, 0]


def test_prepared_scales_of_descales():
    """Stride 0 in, contiguous out; a number times V's scale moves v_max alone; nothing is read on the host."""
    q, k = cast(normal(2, 70, 4, 16)), cast(normal(2, 130, 2, 16))
    one = torch.tensor([[0.3, 0.5], [0.7, 1.1]])
    x, twice = (from_descales(q, k, k, one, one, by * one) for by in (1, 2))
    assert x.k_scale.stride(-1) == 0
    found, moved = prepare(x), prepare(twice)
    assert found.kv.is_contiguous() and torch.equal(found.kv, moved.kv) and (found.kv[:, :, :3, 1] == 0).all()
    assert torch.equal(found.kv[:, :, :3, 0], x.k_scale) and torch.equal(found.q_scale, x.q_scale)
    assert torch.equal(found.v_max, one) and torch.equal(moved.v_max, 2 * one)
    on_no_device = {name: value.to("meta") for name, value in vars(x).items() if isinstance(value, torch.Tensor)}
    assert prepare(replace(x, **on_no_device)).kv.shape == (2, 2, 3 + BEYOND, 4)


# Errors


def quantised(**changes) -> QuantizedQKV:
    q, k = normal(1, 70, 4, 16), normal(1, 130, 2, 16)
    return replace(quantize_qkv(q, k, k, v_channel=True), **changes)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"q": torch.zeros(1, 70, 4, 16)}, TypeError, "q has dtype torch.float32"),
        ({"k_scale": torch.zeros(1, 2, 3, dtype=torch.float64)}, TypeError, "k_scale has dtype torch.float64"),
        ({"v": torch.zeros(1, 2, 16, 144, device="meta").to(E4M3.dtype)}, ValueError, "v is on meta"),
        ({"k": cast(torch.zeros(1, 129, 2, 16))}, ValueError, r"k has shape \(1, 129, 2, 16\)"),
        ({"k": cast(torch.zeros(1, 130, 3, 16))}, ValueError, "q has 4 heads, which k's 3"),
        ({"v": cast(torch.zeros(1, 2, 16, 130))}, ValueError, r"allowed: \(1, 2, 16, 144\)"),
        ({"q": cast(torch.zeros(70, 4, 16))}, ValueError, "q must have 4 dimensions, got 3"),
        ({"q_scale": torch.zeros(1, 4, 3)}, ValueError, r"allowed: \(1, 4, 2\) or \(1, 4, 70\)"),
        ({"v_scale": torch.zeros(1, 2, 1)}, ValueError, r"v_scale has shape \(1, 2, 1\)"),
        ({"v_channel_scale": torch.zeros(1, 2, 8)}, ValueError, "v_channel_scale"),
        ({"dtype": torch.int32}, TypeError, "dtype is torch.int32"),
        ({"dtype": E4M3.dtype}, TypeError, "float8"),
    ],
)
def test_a_wrong_record_is_named(changes, error, named):
    quantised().validate()
    with pytest.raises(error, match=named):
        quantised(**changes).validate()


def test_wrong_arguments_are_named():
    x = normal(1, 70, 2, 16)
    with pytest.raises(ValueError, match="q_rows is 2; allowed: 1 and 64"):
        quantize_qkv(x, x, x, q_rows=2)
    for rotary, named in (
        (Rotary(torch.zeros(69, 4), torch.zeros(69, 4)), "cos has 69 rows"),
        (Rotary(torch.zeros(70, 4), torch.zeros(70, 4), q_offset=1), "q_offset is 1"),
        (Rotary(torch.zeros(70, 9), torch.zeros(70, 9)), "up to head_dim 16"),
        (Rotary(torch.zeros(70, 4), torch.zeros(70, 5)), "one 2-d shape"),
    ):
        with pytest.raises(ValueError, match=named):
            quantize_qkv(x, x, x, rotary=rotary)
    with pytest.raises(TypeError, match="k has dtype torch.float32"):
        from_descales(cast(x), x, cast(x))
    with pytest.raises(ValueError, match="v_descale"):
        from_descales(cast(x), cast(x), cast(x), v_descale=torch.ones(2))
    assert BLOCK == 64
