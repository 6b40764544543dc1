"""The specification against itself, against PyTorch and against values known without it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.reference import attention, merge, split_attention, tiled_attention

ROUNDING = dict(rtol=1e-11, atol=1e-12)  # float64, sums of up to 100 terms

sizes = st.tuples(
    st.integers(0, 2),  # batch
    st.integers(0, 40),  # seqlen_q
    st.integers(0, 40),  # seqlen_k
    st.integers(1, 2),  # heads_kv
    st.integers(1, 3),  # ratio
    st.integers(1, 20),  # head_dim
    st.integers(1, 20),  # head_dim_v
)
tiles = st.integers(1, 50)


def numbers(size, seed=0, spread=1.0):
    batch, seqlen_q, seqlen_k, heads_kv, ratio, head_dim, head_dim_v = size
    normal = np.random.default_rng(seed).standard_normal
    q = spread * normal((batch, seqlen_q, heads_kv * ratio, head_dim))
    return q, normal((batch, seqlen_k, heads_kv, head_dim)), normal((batch, seqlen_k, heads_kv, head_dim_v))


def by_loops(q, k, v, scale, causal):
    """Row by row from the definition, sharing nothing with the code under test."""
    out = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    for b, i, h in np.ndindex(*q.shape[:3]):
        seen = i + k.shape[1] - q.shape[1] + 1 if causal else k.shape[1]
        if seen <= 0:
            continue
        kv_head = h // (q.shape[2] // k.shape[2])
        scores = scale * k[b, :seen, kv_head] @ q[b, i, h]
        lse[b, h, i] = np.logaddexp.reduce(scores)
        out[b, i, h] = np.exp(scores - lse[b, h, i]) @ v[b, :seen, kv_head]
    return out, lse


def assert_same(a, b, **tolerance):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), **(tolerance or ROUNDING))


@settings(max_examples=60, deadline=None)
@given(
    sizes, st.booleans(), st.floats(0.05, 3), tiles, tiles, st.lists(st.floats(0, 1), max_size=4), st.integers(0, 99)
)
def test_three_ways_agree_for_any_tile_and_split(size, causal, scale, tile_m, tile_n, cuts, seed):
    q, k, v = numbers(size, seed, spread=4.0)
    boundaries = sorted(int(cut * size[2]) for cut in cuts)
    want = by_loops(q, k, v, scale, causal)
    assert_same(attention(q, k, v, scale, causal), want)
    tile = dict(tile_m=tile_m, tile_n=tile_n)
    assert_same(tiled_attention(q, k, v, scale, causal, **tile), want)
    assert_same(split_attention(q, k, v, scale, causal, boundaries=boundaries, **tile), want)
    assert_same(split_attention(q, k, v, scale, causal, num_splits=len(cuts) + 1), want)


@settings(max_examples=25, deadline=None)
@given(sizes, st.booleans(), tiles, tiles)
def test_torch_runs_the_same_text(size, causal, tile_m, tile_n):
    arrays = numbers(size)
    tensors = [torch.from_numpy(x) for x in arrays]
    for function, options in (
        (attention, {}),
        (tiled_attention, dict(tile_m=tile_m, tile_n=tile_n)),
        (split_attention, dict(num_splits=3, tile_n=tile_n)),
    ):
        out, lse = function(*tensors, None, causal, **options)
        assert out.dtype == lse.dtype == torch.float64
        assert_same((out, lse), function(*arrays, None, causal, **options))


@pytest.mark.parametrize("heads_kv", [1, 3, 6])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "causal"), [(33, 57, False), (57, 33, False), (64, 64, True)])
def test_equals_pytorch_where_conventions_agree(heads_kv, seqlen_q, seqlen_k, causal):
    q, k, v = (torch.from_numpy(x) for x in numbers((2, seqlen_q, seqlen_k, heads_kv, 6 // heads_kv, 24, 40)))
    transposed = (x.transpose(1, 2) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*transposed, is_causal=causal, enable_gqa=True)
    for function in (attention, tiled_attention, split_attention):
        torch.testing.assert_close(function(q, k, v, None, causal)[0].transpose(1, 2), want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("function", [attention, tiled_attention, split_attention])
def test_types_shapes_and_layout_of_the_results(function, dtype):
    q, k, v = (torch.from_numpy(x).to(dtype) for x in numbers((2, 70, 90, 2, 3, 16, 24)))
    out, lse = function(q, k, v)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, (2, 70, 6, 24), True)
    assert (lse.dtype, lse.shape, lse.is_contiguous()) == (torch.float32, (2, 6, 70), True)
    want, want_lse = attention(q.double(), k.double(), v.double())
    size = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(out.double(), want, rtol=0, atol=size)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=size if function is attention else 1e-6)


def test_float32_in_numpy_stays_float32():
    q, k, v = (x.astype(np.float32) for x in numbers((1, 9, 11, 1, 2, 8, 8)))
    for function in (attention, tiled_attention, split_attention):
        out, lse = function(q, k, v)
        assert out.dtype == lse.dtype == np.float32
        assert_same((out, lse), attention(*(x.astype(float) for x in (q, k, v))), rtol=1e-5, atol=1e-6)


def rounded_steps(q, k, v, tile_n):
    """One head, one query tile, no mask: the kernel's steps spelled out on (S, D) float32 tensors of 16-bit values."""
    dtype, scale_log2 = torch.bfloat16, q.shape[1] ** -0.5 * math.log2(math.e)
    row_max, row_sum = torch.full((len(q),), -math.inf), torch.zeros(len(q))
    acc = torch.zeros(len(q), v.shape[1])
    for left in reversed(range(0, len(k), tile_n)):
        scores = q @ k[left : left + tile_n].T
        new_max = torch.maximum(row_max, scores.max(1).values)
        p = torch.exp2((scores - new_max[:, None]) * scale_log2)
        factor = torch.exp2((row_max - new_max) * scale_log2)
        row_sum = row_sum * factor + p.sum(1)
        acc = acc * factor[:, None] + p.to(dtype).float() @ v[left : left + tile_n]
        row_max = new_max
    return (acc / row_sum[:, None]).to(dtype)


@pytest.mark.parametrize("tile_n", [16, 48, 128])
def test_tiles_follow_the_kernels_order_and_roundings(tile_n):
    q, k, v = (torch.from_numpy(x).bfloat16() for x in numbers((1, 32, 117, 1, 1, 32, 32), spread=3))
    want = rounded_steps(*(x[0, :, 0].float() for x in (q, k, v)), tile_n)
    out, _ = tiled_attention(q, k, v, tile_n=tile_n)
    assert (out[0, :, 0] != want).float().mean() < 0.01  # a last bit where a matrix product sums in another order
    other, _ = tiled_attention(q, k, v, tile_n=tile_n + 16)
    if tile_n < 117:
        assert (out != other).float().mean() > 0.01  # and the order does show


def test_tiles_beyond_the_diagonal_are_not_read():
    q, k, v = (torch.from_numpy(x) for x in numbers((1, 64, 64, 1, 1, 8, 8)))
    want = tiled_attention(q, k, v, None, True, tile_m=16, tile_n=16)[0][:, :32]
    k[:, 32:], v[:, 32:] = math.nan, math.nan
    assert torch.equal(tiled_attention(q, k, v, None, True, tile_m=16, tile_n=16)[0][:, :32], want)


# Values that are known


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_k", [1, 17, 255, 257, 4097])
@pytest.mark.parametrize("function", [attention, tiled_attention, split_attention])
def test_zero_scores_give_the_mean_and_the_log_of_the_count(function, seqlen_k, causal):
    _, k, v = (torch.from_numpy(x).bfloat16() for x in numbers((1, 1, seqlen_k, 2, 1, 64, 64)))
    out, lse = function(torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16), k, v, None, causal)
    torch.testing.assert_close(out.float(), v.float().mean(1, keepdim=True), rtol=0, atol=8e-3)
    torch.testing.assert_close(lse, torch.full((1, 2, 1), math.log(seqlen_k)), rtol=1e-6, atol=1e-6)


def test_lse_is_a_natural_logarithm():
    q = torch.zeros(1, 1024, 1, 64, dtype=torch.float16)
    k = torch.randn(1, 1024, 1, 64, generator=torch.Generator().manual_seed(0)).half()
    for function in (attention, tiled_attention, split_attention):
        _, lse = function(q, k, k)
        torch.testing.assert_close(lse, torch.full((1, 1, 1024), 6.931471806), rtol=0, atol=1e-5)


def test_scores_far_from_zero():
    q, k, v = (torch.from_numpy(x).bfloat16() for x in numbers((1, 5, 97, 2, 2, 128, 128)))
    q[..., 0], k[..., 0] = 256, -256
    want, want_lse = attention(q.double(), k.double(), v.double())
    assert -5850 < want_lse.max() < -5750
    for function in (tiled_attention, split_attention):
        out, lse = function(q, k, v)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-2)
        torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=5e-3)
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16)
    for function in (attention, tiled_attention, split_attention):
        out, lse = function(x, x, x)
        assert (out == 133120).all()
        torch.testing.assert_close(lse.item(), 133120.0**2 * 8, rtol=4e-3 if function is attention else 1e-6, atol=0)


@pytest.mark.parametrize("function", [attention, tiled_attention, split_attention])
@pytest.mark.parametrize(("size", "empty"), [((1, 2048, 1024, 4, 1, 64, 64), 1024), ((1, 129, 3, 2, 4, 128, 128), 126)])
def test_queries_before_the_first_key_are_empty(function, size, empty):
    q, k, v = (torch.from_numpy(x).bfloat16() for x in numbers(size))
    out, lse = function(q, k, v, None, True)
    assert (out[:, :empty] == 0).all() and (lse[..., :empty] == -math.inf).all()
    want, want_lse = attention(*(x.double() for x in (q, k, v)), None, True)
    torch.testing.assert_close(out[:, empty:].double(), want[:, empty:], rtol=0, atol=0.03)
    torch.testing.assert_close(lse[..., empty:].double(), want_lse[..., empty:], rtol=0, atol=0.03)


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
@pytest.mark.parametrize("function", [attention, tiled_attention, split_attention])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(2, 5, 0), (2, 0, 5), (0, 5, 5), (2, 0, 0)])
def test_empty_problems(function, make, batch, seqlen_q, seqlen_k):
    q, k, v = make((batch, seqlen_q, 4, 8)), make((batch, seqlen_k, 2, 8)), make((batch, seqlen_k, 2, 16))
    for causal in (False, True):
        out, lse = function(q, k, v, None, causal)
        assert tuple(out.shape) == (batch, seqlen_q, 4, 16) and tuple(lse.shape) == (batch, 4, seqlen_q)
        assert (out == 0).all() and (lse == -math.inf).all()


def test_scale_zero_weighs_all_visible_keys_alike():
    q, k, v = numbers((1, 6, 6, 1, 1, 8, 8))
    want = np.cumsum(v, 1) / np.arange(1, 7)[:, None, None]
    for function in (attention, tiled_attention, split_attention):
        assert_same((function(q, k, v, 0.0, True)[0],), (want,))


# merge


def parts(seed, count=3, shape=(2, 5, 3, 4)):
    normal = np.random.default_rng(seed).standard_normal
    return [(normal(shape), 5 * normal((shape[0], shape[2], shape[1]))) for _ in range(count)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_merge_laws(seed):
    a, b, c = parts(seed)
    a[1][0, 0, 0] = b[1][0, 0, 0] = -np.inf  # one row without a key in two of them
    a[0][0, 0, 0] = b[0][0, 0, 0] = 0

    def join(x, y):
        return merge([x[0], y[0]], [x[1], y[1]])

    together = merge([a[0], b[0], c[0]], [a[1], b[1], c[1]])
    assert_same(join(join(a, b), c), together)
    assert_same(join(a, join(b, c)), together)
    assert_same(join(a, b), join(b, a))
    nothing = np.zeros_like(a[0]), np.full_like(a[1], -np.inf)
    assert_same(join(a, nothing), a)
    assert_same(join(nothing, nothing), nothing)
    assert_same(merge([a[0]], [a[1]]), a)


def test_merge_weighs_by_the_exponential_of_lse():
    out, lse = merge([np.full((1, 1, 1, 1), 1.0), np.full((1, 1, 1, 1), 4.0)], [np.zeros((1, 1, 1))] * 2)
    assert_same((out, lse), (np.full((1, 1, 1, 1), 2.5), np.full((1, 1, 1), math.log(2))))
    big = merge([np.ones((1, 1, 1, 1))] * 2, [np.full((1, 1, 1), 5e4)] * 2)
    assert_same(big, (np.ones((1, 1, 1, 1)), np.full((1, 1, 1), 5e4 + math.log(2))))


def test_errors_name_the_value():
    q, k, v = numbers((1, 4, 4, 2, 1, 8, 8))
    with pytest.raises(ValueError, match="3 heads"):
        attention(np.concatenate([q, q[:, :, :1]], 2), k, v)
    with pytest.raises(ValueError, match=r"\[3, 2\]"):
        split_attention(q, k, v, boundaries=[3, 2])
    with pytest.raises(ValueError, match="0..4"):
        split_attention(q, k, v, boundaries=[5])
    with pytest.raises(ValueError, match="got 1 and 0"):
        merge([q], [])
