"""Every user error: argument, value and what is allowed are in the message, and the next valid call works."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import fa3
from fa3 import problem
from fa3.device import HOPPER, named
from fa3.kernels.forward.config import Config
from fa3.problem import problem_of
from fa3.testing.inputs import LAYOUTS, Case, make


def tensors(q=(2, 5, 4, 64), k=(2, 7, 2, 64), v=(2, 7, 2, 64), dtype=torch.bfloat16, device="cpu"):
    return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in (q, k, v))


def assert_a_valid_call_works():
    q, k, v = make(Case(seqlen_q=1, seqlen_k=1), "cpu")
    assert torch.equal(fa3.flash_attn_func(q, k, v), v)  # one key: its value, whatever the score


def fails(error: type[Exception], *words: str):
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{word})" for word in words))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (dict(q=(1, 128, 33, 64), k=(1, 128, 2, 64), v=(1, 128, 2, 64)), ["33", " 2"]),
        (dict(q=(1, 128, 3, 64), k=(1, 128, 2, 64), v=(1, 128, 2, 64)), ["q 3", " 2"]),
        (dict(q=(1, 128, 4, 64), k=(1, 128, 8, 64), v=(1, 128, 8, 64)), ["q 4", " 8"]),
        (dict(q=(1, 128, 8, 64), k=(1, 128, 0, 64), v=(1, 128, 0, 64)), ["q 8", " 0"]),
        (dict(q=(1, 128, 4, 64), k=(1, 128, 4, 64), v=(1, 128, 2, 64)), ["k 4", "v 2"]),
        (dict(q=(1, 128, 4, 128), k=(1, 128, 4, 64), v=(1, 128, 4, 64)), ["k must", "128", "64"]),
        (dict(q=(2, 5, 4, 60), k=(2, 7, 2, 60)), ["q has head_dim 60", "multiples of 8", "256"]),
        (dict(q=(2, 5, 4, 264), k=(2, 7, 2, 264)), ["q has head_dim 264", "256"]),
        (dict(q=(2, 5, 4, 0), k=(2, 7, 2, 0)), ["q has head_dim 0", "from 8"]),
        (dict(v=(2, 7, 2, 4)), ["v has head_dim 4", "from 8"]),
        (dict(v=(2, 7, 2, 300)), ["v has head_dim 300"]),
        (dict(k=(3, 7, 2, 64)), ["batch", "q 2", "k 3", "v 2"]),
        (dict(v=(2, 8, 2, 64)), ["seqlen", "k 7", "v 8"]),
        (dict(q=(2, 5, 64)), ["q must have 4 dimensions", "3", r"\(2, 5, 64\)"]),
        (dict(v=(2, 7, 2, 64, 1)), ["v must have 4 dimensions", "5"]),
        (dict(q=()), ["q must have 4 dimensions", "0"]),
    ],
)
def test_shapes(shapes, words):
    q, k, v = tensors(**shapes)
    with fails(ValueError, *words):
        problem_of(q, k, v, 0.1, False)
    with pytest.raises(ValueError):
        fa3.flash_attn_func(q, k, v)
    assert_a_valid_call_works()


def test_dtypes():
    q, k, v = tensors()
    with fails(TypeError, "one dtype", "q torch.bfloat16", "k torch.float16"):
        fa3.flash_attn_func(q, k.half(), v)
    for dtype in (torch.int32, torch.float8_e5m2, torch.complex64, torch.bool):
        with fails(TypeError, str(dtype), "torch.bfloat16", "torch.float16"):
            fa3.flash_attn_func(*tensors(dtype=dtype))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert fa3.flash_attn_func(*tensors(dtype=dtype)).abs().sum() == 0
    assert_a_valid_call_works()


def test_devices_are_named():
    q, k, v = tensors()
    with fails(ValueError, "one device", "q on meta", "k on cpu"):
        problem_of(q.to("meta"), k, v, 0.1, False)


def test_not_a_tensor_and_not_a_dense_one():
    q, k, v = tensors()
    for name in "qkv":
        with fails(TypeError, f"{name} must be a torch.Tensor", "list"):
            fa3.flash_attn_func(**{**dict(q=q, k=k, v=v), name: [1.0]})
        with fails(TypeError, f"{name} must be a torch.Tensor", "NoneType"):
            fa3.flash_attn_func(**{**dict(q=q, k=k, v=v), name: None})
    with fails(TypeError, "q must be a dense", "sparse"):
        fa3.flash_attn_func(q.to_sparse(), k, v, softmax_scale=1.0)
    assert_a_valid_call_works()


@pytest.mark.parametrize("name", "qkv")
def test_the_last_dimension_must_be_contiguous(name):
    arguments = dict(zip("qkv", tensors(), strict=True))
    arguments[name] = torch.zeros(*arguments[name].shape[:-1], 128, dtype=torch.bfloat16)[..., ::2]
    with fails(ValueError, f"{name} has stride 2", f"{name}.contiguous"):
        fa3.flash_attn_func(**arguments)
    arguments[name] = arguments[name].contiguous()
    assert fa3.flash_attn_func(**arguments).shape == (2, 5, 4, 64)


@pytest.mark.parametrize("scale", [-1.0, -1e-30, float("nan"), float("inf"), float("-inf"), 1e39])
def test_scale_out_of_range(scale):
    with fails(ValueError, "softmax_scale is", "finite", ">= 0"):
        fa3.flash_attn_func(*tensors(), softmax_scale=scale)
    assert_a_valid_call_works()


@pytest.mark.parametrize("scale", ["1", torch.tensor(1.0), [0.1], True, 1j])
def test_scale_of_a_wrong_type(scale):
    with fails(TypeError, "softmax_scale must be a float", type(scale).__name__):
        fa3.flash_attn_func(*tensors(), softmax_scale=scale)


def test_a_negative_scale_comes_with_its_cure():
    q, k, v = make(Case(dtype="float64", seqlen_q=3, seqlen_k=9), "cpu")
    with fails(ValueError, "-0.5", "Negate q"):
        fa3.flash_attn_func(q, k, v, softmax_scale=-0.5)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * -0.5
    wanted = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    torch.testing.assert_close(fa3.flash_attn_func(-q, k, v, softmax_scale=0.5), wanted)


@pytest.mark.parametrize("value", [1, None, "yes", torch.tensor(True), np.True_])
@pytest.mark.parametrize("name", ["causal", "return_lse", "return_attn_probs"])
def test_flags_must_be_bools(name, value):
    kind = f"{type(value).__module__}.{type(value).__name__}"
    with fails(TypeError, f"{name} must be True or False", kind):
        fa3.flash_attn_func(*tensors(), **{name: value})


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        (dict(num_splits=torch.tensor(1)), NotImplementedError),
        (dict(window_size=np.zeros((2, 2))), TypeError),
        (dict(softcap=np.zeros(2)), TypeError),
    ],
)
def test_arguments_are_not_compared_element_by_element(argument, error):
    with fails(error, next(iter(argument))):
        fa3.flash_attn_func(*tensors(), **argument)


def test_numbers_of_numpy_are_numbers():
    q, k, v = make(Case(seqlen_q=9, seqlen_k=9), "cpu")
    wanted = fa3.flash_attn_func(q, k, v, 0.5)
    for scale in (np.float32(0.5), np.float64(0.5), np.float16(0.5)):
        assert torch.equal(fa3.flash_attn_func(q, k, v, scale), wanted)
    packed = torch.cat([q, k, v], 2)
    for heads in (q.shape[2], np.int64(q.shape[2])):
        assert torch.equal(fa3.flash_attn_qkvpacked_func(packed, 0.5, num_heads_q=heads), wanted)


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.zeros(3, 2, 64), torch.zeros(4, 2, 64)])
    with fails(TypeError, "q must be a dense", "nested"):
        fa3.flash_attn_func(nested, nested, nested)


def test_other_chips_are_refused_with_what_was_found():
    with fails(ValueError, "NVIDIA A100-SXM4-40GB", "sm_80", "sm_90"):
        problem.check_chip(named("NVIDIA A100-SXM4-40GB", 108, (8, 0)))
    with fails(ValueError, "sm_100", "sm_90"):
        problem.check_chip(named("NVIDIA B200", 148, (10, 0)))
    problem.check_chip(named("NVIDIA H200", 132, HOPPER))


def test_sizes_that_the_device_cannot_count():
    config = Config(warpgroups=2, tile_n=128)
    most = 2**31 - 2**16

    def sized(**sizes):
        q = torch.empty(1, device="meta", dtype=torch.bfloat16).expand(
            sizes.get("batch", 1), sizes.get("seqlen_q", 1), sizes.get("heads", 1), 8
        )
        k = torch.empty(1, device="meta", dtype=torch.bfloat16).expand(
            sizes.get("batch", 1), sizes.get("seqlen_k", 1), 1, 8
        )
        q, k = (x.as_strided(x.shape, (0, 0, 0, 1)) for x in (q, k))
        return problem_of(q, k, k, 0.1, False)

    problem.check_sizes(sized(batch=most), config)
    problem.check_sizes(sized(batch=1024, seqlen_q=128 * 2**10, heads=2047), config)
    with fails(ValueError, str(2**31), "work tiles", str(most)):
        problem.check_sizes(sized(batch=1024, seqlen_q=128 * 2**10, heads=2048), config)
    with fails(ValueError, f"seqlen_k is {2**31}", str(most)):
        problem.check_sizes(sized(seqlen_k=2**31), config)


def test_packed():
    with fails(ValueError, "3, heads", r"\(1, 4, 2, 2, 64\)"):
        fa3.flash_attn_qkvpacked_func(torch.zeros(1, 4, 2, 2, 64))
    with fails(ValueError, "num_heads_q is needed", "None"):
        fa3.flash_attn_qkvpacked_func(torch.zeros(1, 4, 6, 64))
    with fails(ValueError, "num_heads_q is 3", "6 heads"):
        fa3.flash_attn_qkvpacked_func(torch.zeros(1, 4, 6, 64), num_heads_q=3)
    for wrong in (8, -2):
        with fails(ValueError, f"num_heads_q is {wrong}", "6 heads"):
            fa3.flash_attn_qkvpacked_func(torch.zeros(1, 4, 6, 64), num_heads_q=wrong)
    with fails(ValueError, "num_heads_q is 1", "2 heads"):
        fa3.flash_attn_qkvpacked_func(torch.zeros(1, 4, 3, 2, 64), num_heads_q=1)
    with fails(ValueError, "qkv must be", r"\(6, 64\)"):
        fa3.flash_attn_qkvpacked_func(torch.zeros(6, 64), num_heads_q=2)
    with fails(TypeError, "num_heads_q must be an int", "float"):
        fa3.flash_attn_qkvpacked_func(torch.zeros(1, 4, 6, 64), num_heads_q=2.0)
    with fails(TypeError, "qkv must be a torch.Tensor", "tuple"):
        fa3.flash_attn_qkvpacked_func(tensors())
    assert_a_valid_call_works()


VALID = st.builds(
    Case,
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
    batch=st.integers(0, 2),
    seqlen_q=st.integers(0, 5),
    seqlen_k=st.integers(0, 5),
    heads_kv=st.integers(1, 2),
    ratio=st.integers(0, 3),
    head_dim=st.integers(1, 32).map(lambda x: 8 * x),
    head_dim_v=st.integers(1, 32).map(lambda x: 8 * x),
    causal=st.booleans(),
    layout=st.sampled_from([layout for layout in LAYOUTS if layout != "expanded"]),
)


@settings(deadline=None, max_examples=60)
@given(VALID)
def test_any_valid_problem_validates(case):
    found = problem_of(*make(case, "cpu"), case.softmax_scale, case.causal)
    assert found.out_shape == (case.batch, case.seqlen_q, case.heads, case.head_dim_v)
    assert found.lse_shape == (case.batch, case.heads, case.seqlen_q)
    assert (found.head_dim, found.heads_kv, found.seqlen_k) == (case.head_dim, case.heads_kv, case.seqlen_k)
    assert case.head_dim <= found.spec.head_dim and case.head_dim_v <= found.spec.head_dim_v
    assert found.spec.causal == case.causal
    assert found.is_empty == (0 in (case.batch, case.seqlen_q, case.seqlen_k, case.heads))
    for tile_m in (64, 128, 192):
        assert found.num_tiles(tile_m) == case.batch * case.heads * math.ceil(case.seqlen_q / tile_m)


SIZES = st.tuples(
    st.sampled_from([0, 1, 2]),  # batch
    st.sampled_from([0, 1, 3]),  # seqlen of q
    st.sampled_from([0, 1, 4]),  # of k and v
    st.sampled_from([1, 2]),  # heads of k and v
    st.sampled_from([0, 1, 3]),  # heads of q over them
    st.sampled_from([8, 16, 256]),  # head dim
    st.sampled_from([8, 24]),  # of v
)
CHANGE = st.tuples(st.sampled_from("qkv"), st.integers(0, 3), st.sampled_from([0, 1, 2, 3, 4, 8, 12, 264]))
DTYPE = st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float16, torch.int8])
SCALE = st.sampled_from([None, None, 0.0, 0, 1, 0.5, -1.0, math.nan, math.inf, "1"])


def is_valid(q, k, v, scale) -> bool:
    """The rules again, in one expression."""
    return (
        q.dim() == k.dim() == v.dim() == 4
        and q.dtype == k.dtype == v.dtype in (torch.bfloat16, torch.float16)
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1:3] == v.shape[1:3]
        and q.shape[3] == k.shape[3]
        and {q.shape[3], v.shape[3]} <= set(range(8, 257, 8))
        and k.shape[2] > 0
        and q.shape[2] % k.shape[2] == 0
        and all(x.stride(3) == 1 for x in (q, k, v))
        and (scale is None or (not isinstance(scale, str) and 0 <= scale < math.inf))
    )


@settings(deadline=None, max_examples=300)
@given(SIZES, st.lists(CHANGE, max_size=2), st.sampled_from([(), (), (0,), (1,), (2,)]), DTYPE, DTYPE, SCALE)
def test_any_combination_is_right_or_refused(sizes, changes, odd_ones, dtype, other, scale):
    batch, seqlen_q, seqlen_k, heads_kv, ratio, head_dim, head_dim_v = sizes
    shapes = {
        "q": [batch, seqlen_q, heads_kv * ratio, head_dim],
        "k": [batch, seqlen_k, heads_kv, head_dim],
        "v": [batch, seqlen_k, heads_kv, head_dim_v],
    }
    for name, dim, size in changes:
        shapes[name][dim] = size
    dtypes = [other if i in odd_ones else dtype for i in range(3)]
    q, k, v = (torch.ones(shape, dtype=d) for shape, d in zip(shapes.values(), dtypes, strict=True))
    if is_valid(q, k, v, scale):
        out, lse = fa3.flash_attn_func(q, k, v, scale, return_lse=True)
        seen = float(k.shape[1] > 0)
        assert torch.equal(out, torch.full((*q.shape[:3], v.shape[3]), seen, dtype=q.dtype))  # V is all ones
        factor = q.shape[3] ** -0.5 if scale is None else scale
        wanted = torch.full(lse.shape, q.shape[3] * factor + math.log(k.shape[1]) if seen else -math.inf)
        torch.testing.assert_close(lse, wanted)
    else:
        with pytest.raises((ValueError, TypeError)):
            fa3.flash_attn_func(q, k, v, scale)
        assert_a_valid_call_works()
