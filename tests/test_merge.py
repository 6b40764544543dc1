"""fa3.merge_states and flash_attn_combine on CPU tensors: against float64, the laws of a merge, errors, compilers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa3
from fa3 import ops_merge
from fa3.reference import attention
from tests.merge_case import assert_right, partials

DTYPES = ("bfloat16", "float16", "float32", "float64")


def pair(dtype="bfloat16", ragged=False, seed=0, **options):
    """The arguments of merge_states."""
    o, lse = partials(2, dtype=dtype, seed=seed, **options)
    if ragged:
        o, lse = o.flatten(1, 2), lse.flatten(1, 2)
    lse = lse.transpose(-1, -2).contiguous()
    return o[0], lse[0], o[1], lse[1]


def same(got, wanted):
    return all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_states(dtype, ragged):
    o_a, lse_a, o_b, lse_b = arguments = pair(dtype, ragged)
    out, lse = fa3.merge_states(*arguments)
    assert out.dtype == o_a.dtype and out.shape == o_a.shape and out.is_contiguous()
    assert lse.dtype == lse_a.dtype and lse.shape == lse_a.shape and lse.is_contiguous()
    stacked = torch.stack([o_a, o_b]), torch.stack([lse_a, lse_b]).transpose(-1, -2)
    assert_right((out, lse.transpose(-1, -2)), *stacked)
    assert same(fa3.flash_attn_combine(*stacked), (out, lse.transpose(-1, -2))), "two ways, one result"


@pytest.mark.parametrize("count", [1, 2, 3, 17])
@pytest.mark.parametrize("ragged", [False, True])
def test_combine(count, ragged):
    for dtype in DTYPES:
        o, lse = partials(count, dtype=dtype, seed=count)
        if ragged:
            o, lse = o.flatten(1, 2), lse.flatten(1, 2)
        for out_dtype in (torch.float64,) if dtype == "float64" else (None, torch.bfloat16, torch.float32):
            out, sums = fa3.flash_attn_combine(o, lse, out_dtype=out_dtype)
            assert out.dtype == (out_dtype or o.dtype) and out.is_contiguous() and sums.stride(-2) == 1
            assert_right((out, sums), o, lse)
        assert fa3.flash_attn_combine(o, lse, return_lse=False)[1] is None


def test_attention_in_parts_is_attention():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, 16, generator=g, dtype=torch.float64) for n in (5, 11, 11))
    parts = [attention(q.numpy(), k[:, s].numpy(), v[:, s].numpy()) for s in (slice(0, 4), slice(4, 11))]
    (o_a, lse_a), (o_b, lse_b) = [[torch.from_numpy(x) for x in part] for part in parts]
    whole = attention(q.numpy(), k.numpy(), v.numpy())
    for x, y in zip(fa3.merge_states(o_a, lse_a, o_b, lse_b), whole, strict=True):
        torch.testing.assert_close(x, torch.from_numpy(y), rtol=1e-12, atol=1e-12)


# The laws of a merge


draws = dict(
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**16), empty=st.sampled_from([0.0, 0.3, 1.0]),
    spread=st.sampled_from([0.0, 1.0, 30.0, 1e30]), ragged=st.booleans(),
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(**draws)
def test_commutative_bit_for_bit(**options):
    a, b = (x := pair(**options))[:2], x[2:]
    assert same(fa3.merge_states(*a, *b), fa3.merge_states(*b, *a))


@settings(deadline=None, max_examples=60)
@given(junk=st.sampled_from([0.0, math.nan, math.inf]), **draws)
def test_empty_is_the_identity(junk, **options):
    o, lse, *_ = pair(**options)
    o[..., :3] = -0.0
    nothing = torch.full_like(o, junk), torch.full_like(lse, -math.inf)
    o = torch.where((lse.transpose(-1, -2) == -math.inf)[..., None], torch.zeros_like(o), o)
    for got in (fa3.merge_states(o, lse, *nothing), fa3.merge_states(*nothing, o, lse)):
        assert same(got, (o, lse)) and torch.equal(got[0].signbit(), o.signbit())


def test_nothing_and_nothing():
    nothing = torch.full((2, 3, 4, 8), math.nan), torch.full((2, 4, 3), -math.inf)
    out, lse = fa3.merge_states(*nothing, *nothing)
    assert not out.any() and not out.signbit().any() and (lse == -math.inf).all()


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**16), empty=st.sampled_from([0.0, 0.5]))
def test_associative_but_for_rounding(seed, empty):
    o, lse = partials(3, dtype="float32", seed=seed, empty=empty)
    lse = lse.transpose(-1, -2)
    (a, b, c) = zip(o, lse)
    left = fa3.merge_states(*fa3.merge_states(*a, *b), *c)
    right = fa3.merge_states(*a, *fa3.merge_states(*b, *c))
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_infinite_and_nan():
    """+inf outweighs what is finite, two of them give the mean; NaN gives NaN."""
    o_a, lse_a, o_b, lse_b = pair("float32", empty=0.0)
    top = torch.full_like(lse_a, math.inf)
    assert same(fa3.merge_states(o_a, top, o_b, lse_b), (o_a, top))
    assert same(fa3.merge_states(o_a, top, o_b, torch.full_like(lse_b, -math.inf)), (o_a, top))
    out, lse = fa3.merge_states(o_a, top, o_b, top)
    torch.testing.assert_close(out, (o_a + o_b) / 2)
    assert (lse == math.inf).all()
    out, lse = fa3.merge_states(o_a, torch.full_like(lse_a, math.nan), o_b, torch.full_like(lse_b, -math.inf))
    assert out.isnan().all() and lse.isnan().all()


def test_far_apart():
    o_a, lse_a, o_b, lse_b = pair("float32", empty=0.0)
    out, lse = fa3.merge_states(o_a, lse_a - 1e4, o_b, lse_b + 1e30)
    assert same((out, lse), (o_b, lse_b + 1e30))


# Into tensors that are given


def test_into_given_tensors():
    for ragged in (False, True):
        arguments = pair(ragged=ragged)
        wanted = fa3.merge_states(*arguments)
        around = [torch.full((*x.shape[:-1], x.shape[-1] + 5), 7.0, dtype=x.dtype) for x in wanted]
        out, lse = (x[..., 2:-3] for x in around)
        before = out._version
        got = fa3.merge_states(*arguments, out=out, lse_out=lse)
        assert got[0] is out and got[1] is lse and same(got, wanted) and out._version > before
        for x in around:
            x[..., 2:-3] = 7.0
            assert (x == 7.0).all()
        assert same(fa3.merge_states(*arguments, out=torch.empty_like(wanted[0])), wanted)
        assert same(fa3.merge_states(*arguments, lse_out=torch.empty_like(wanted[1])), wanted)
        o_a, lse_a, o_b, lse_b = arguments
        assert same(fa3.merge_states(*arguments, out=o_a, lse_out=lse_a), wanted) and same((o_a, lse_a), wanted)


def test_combine_into():
    for ragged in (False, True):
        o, lse = partials(4)
        if ragged:
            o, lse = o.flatten(1, 2), lse.flatten(1, 2)
        wanted = fa3.flash_attn_combine(o, lse, out_dtype=torch.float32)
        out = torch.empty(o.shape[1:])
        got = fa3.flash_attn_combine(o, lse, out)
        assert got[0] is out and same(got, wanted) and got[1].stride() == wanted[1].stride()


def test_no_rows():
    for shape in ((0, 5, 3), (2, 0, 3), (2, 5, 0)):
        o, lse = torch.empty(*shape, 8), torch.empty(shape[0], shape[2], shape[1])
        out, sums = fa3.merge_states(o, lse, o, lse)
        assert out.shape == o.shape and sums.shape == lse.shape


# Errors


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda a, l, b, m: (None, l, b, m), TypeError, "o_a must be a torch.Tensor, got NoneType"),
        (lambda a, l, b, m: (a[0, 0], l, b, m), ValueError, "o_a must be"),
        (lambda a, l, b, m: (a.int(), l, b, m), TypeError, "o_a has dtype torch.int32 on cpu; allowed"),
        (lambda a, l, b, m: (a[..., :36], l, b, m), ValueError, "o_a has head_dim 36; allowed: multiples of 8"),
        (lambda a, l, b, m: (a.transpose(2, 3)[..., :0], l, b, m), ValueError, "o_a has head_dim 0"),
        (lambda a, l, b, m: (a[..., ::5], l, b, m), ValueError, "o_a has stride 5"),
        (lambda a, l, b, m: (a, l, b[:1], m), ValueError, "o_b must have shape .*, got"),
        (lambda a, l, b, m: (a, l, b.float(), m), TypeError, "o_b must have dtype torch.bfloat16, got torch.float32"),
        (lambda a, l, b, m: (a, l, b.to("meta"), m), ValueError, "o_b must be on cpu"),
        (lambda a, l, b, m: (a, l.transpose(1, 2), b, m), ValueError, r"lse_a must have shape \(2, 3, 5\)"),
        (lambda a, l, b, m: (a, l, b, m.double()), TypeError, "lse_b must have dtype torch.float32"),
        (lambda a, l, b, m: (a, l, b, m, a[:1]), ValueError, "out must have shape"),
        (lambda a, l, b, m: (a, l, b, m, a[:1].expand_as(a)), ValueError, "none may be 0"),
        (lambda a, l, b, m: (a, l, b, m, None, l.half()), TypeError, "lse_out must have dtype torch.float32"),
    ],
)
def test_wrong_arguments(edit, error, message):
    with pytest.raises(error, match=message):
        fa3.merge_states(*edit(*pair()))


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda o, l: (o[0, 0], l), ValueError, "out_partial must be"),
        (lambda o, l: (o[:0], l[:0]), ValueError, "out_partial has 0 splits"),
        (lambda o, l: (o, l.transpose(2, 3)), ValueError, "lse_partial must have shape"),
        (lambda o, l: (o, l, None, torch.int32), TypeError, "out_dtype is torch.int32"),
        (lambda o, l: (o, l, o[0].float(), torch.bfloat16), TypeError, "out must have dtype torch.bfloat16"),
        (lambda o, l: (o, l, o), ValueError, "out must have shape"),
        (lambda o, l: (o, l, None, None, 1), TypeError, "return_lse must be True or False"),
    ],
)
def test_wrong_arguments_of_combine(edit, error, message):
    with pytest.raises(error, match=message):
        fa3.flash_attn_combine(*edit(*partials(3)))


def test_gradients_are_refused():
    o_a, *others = pair("float32")
    with pytest.raises(NotImplementedError, match="requires a gradient"):
        fa3.merge_states(o_a.requires_grad_(), *others)
    with torch.no_grad():
        assert not fa3.merge_states(o_a, *others)[0].requires_grad


# Compilers


def test_opcheck():
    o, lse = partials(2)
    places = torch.zeros_like(o[0]), torch.zeros_like(lse[0])
    for given_ in ((o[0], lse[0], o[1], lse[1]), (o, lse, None, None)):
        assert set(torch.library.opcheck(ops_merge.merge, (*given_, torch.float16)).values()) == {"SUCCESS"}
        assert set(torch.library.opcheck(ops_merge.merge_into, (*given_, *places)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("ragged", [False, True])
def test_compiled_as_one_graph(ragged):
    torch._dynamo.reset()
    compiled = torch.compile(fa3.merge_states, backend="aot_eager", fullgraph=True)
    arguments = pair(ragged=ragged)
    wanted = fa3.merge_states(*arguments)
    assert same(compiled(*arguments), wanted)
    out, lse = (torch.empty_like(x) for x in wanted)
    assert same(compiled(*arguments, out=out, lse_out=lse), wanted) and same((out, lse), wanted)
    combine = torch.compile(fa3.flash_attn_combine, backend="aot_eager", fullgraph=True)
    assert same(combine(*partials(3)), fa3.flash_attn_combine(*partials(3)))
