"""Ragged attention on CPU tensors: numbers, padding, what is returned, and what raises."""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa3
from fa3.heuristics import ragged_config_for
from fa3.kernels.forward.config import Spec
from fa3.problem_varlen import Sequences, existing, rows_of
from fa3.reference import attention, tiled_attention
from tests.ragged import assert_right, make

VARLEN = [
    *["q", "k", "v", "cu_seqlens_q", ("cu_seqlens_k", None), ("max_seqlen_q", None), ("max_seqlen_k", None)],
    ("seqused_q", None),
    *[("seqused_k", None), ("softmax_scale", None), ("causal", False), ("qv", None), ("q_descale", None)],
    *[("k_descale", None), ("v_descale", None), ("window_size", (-1, -1)), ("attention_chunk", 0), ("softcap", 0.0)],
    *[("num_splits", 1), ("pack_gqa", None), ("deterministic", False), ("sm_margin", 0), ("return_attn_probs", False)],
]
attend = fa3.flash_attn_varlen_func
length = st.one_of(st.just(0), st.integers(0, 40), st.sampled_from([64, 127, 128, 129, 193]))


def test_signature_is_flash_attention_3_s():
    parameters = inspect.signature(attend).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name if p.default is p.empty else (p.name, p.default) for p in positional] == VARLEN
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == [
        *("return_lse", "out", "learnable_sink", "s_aux", "page_table", "block_table", "scheduler_metadata")
    ]


def assert_is_the_formula(x, got, scale, causal):
    """Of float64 inputs: every sequence is attention to it alone, every other row is 0 and -inf."""
    out, lse = got
    assert out.dtype == lse.dtype == torch.float64 and out.is_contiguous() and lse.is_contiguous()
    for queries, keys in zip(x.queries, x.keys, strict=True):
        at, seen = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        wanted, wanted_lse = attention(x.q[None, at], x.k[None, seen], x.v[None, seen], scale, causal)
        torch.testing.assert_close(out[None, at], wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[None, :, at], wanted_lse, rtol=1e-12, atol=1e-12)
        unseeing = len(queries) if not keys else max(0, len(queries) - len(keys)) * causal
        first = slice(queries.start, queries.start + unseeing)
        assert not out[first].any() and torch.isneginf(lse[:, first]).all()
    assert not out[~x.is_query].any() and torch.isneginf(lse[:, ~x.is_query]).all()


@settings(deadline=None, max_examples=60)
@given(data=st.data(), causal=st.booleans(), scale=st.sampled_from([None, 0.0, 0.3]))
def test_float64_is_the_formula_for_every_sequence(data, causal, scale):
    """Lengths of 0 anywhere, more queries than keys, rows that belong to nobody: these are NaN and stay unread."""
    batch = data.draw(st.integers(0, 5))
    of_q, of_k = (data.draw(st.lists(length, min_size=batch, max_size=batch)) for _ in "qk")
    rooms = [data.draw(st.none() | st.lists(st.integers(0, 9), min_size=batch, max_size=batch)) for _ in "qk"]
    room_q, room_k = (
        None if room is None else [n + more for n, more in zip(lengths, room, strict=True)]
        for lengths, room in zip((of_q, of_k), rooms, strict=True)
    )
    ends = dict(before=data.draw(st.integers(0, 3)), after=data.draw(st.integers(0, 3)))
    heads = dict(heads_kv=data.draw(st.integers(1, 2)), ratio=data.draw(st.integers(1, 3)))
    dims = dict(head_dim=8, head_dim_v=data.draw(st.sampled_from([8, 24])), dtype="float64")
    x = make(of_q, of_k, room_q=room_q, room_k=room_k, **ends, **heads, **dims)
    got = x.call(attend, scale, causal)
    assert_is_the_formula(x, got, scale, causal)
    sequences = Sequences(x.cu_q, x.cu_k, x.used_q, x.used_k, *x.bounds)
    assert rows_of(sequences, len(x.q), len(x.k)) == list(zip(x.queries, x.keys, strict=True))
    assert torch.equal(existing(sequences, len(x.q)), x.is_query)
    into = torch.full_like(got[0], 7.0)
    assert x.call(attend, scale, causal, out=into)[0] is into
    assert torch.equal(into[x.is_query], got[0][x.is_query]) and (into[~x.is_query] == 7.0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_sequence_runs_the_tiles_of_the_kernel(dtype, causal):
    of_q, of_k = [150, 0, 1, 200], [300, 20, 1, 130]
    x = make(of_q, of_k, heads_kv=2, ratio=2, head_dim=80, head_dim_v=40, dtype=dtype)
    out, lse = x.call(attend, 0.1, causal)
    spec = Spec("bfloat16", 96, 96, causal, ragged=True)
    config = ragged_config_for(spec, 200, 300)
    for queries, keys in zip(x.queries, x.keys, strict=True):
        at, seen = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        dense = x.q[None, at], x.k[None, seen], x.v[None, seen]
        wanted, wanted_lse = tiled_attention(*dense, 0.1, causal, tile_m=config.tile_m, tile_n=config.tile_n)
        assert torch.equal(out[None, at], wanted) and torch.equal(lse[None, :, at], wanted_lse)
    assert lse.dtype == torch.float32 and out.dtype == x.q.dtype
    assert_right(x, (out, lse), 0.1, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 70), (129, 300), (200, 130), (3, 0)])
def test_equal_lengths_are_dense_attention(seqlen_q, seqlen_k, causal):
    """Bit by bit of one sequence at a time: a CPU's matrix products may order sums by the batch."""
    batch, heads = 3, dict(heads_kv=2, ratio=2, head_dim_v=40)
    x = make([seqlen_q] * batch, [seqlen_k] * batch, **heads)
    out, lse = x.call(attend, None, causal)
    dense = x.q.view(batch, seqlen_q, 4, 64), *(t.view(batch, seqlen_k, 2, t.shape[-1]) for t in (x.k, x.v))
    for b in range(batch):
        alone = (t[b : b + 1] for t in dense)
        wanted, wanted_lse = fa3.flash_attn_func(*alone, causal=causal, return_lse=True)
        rows = slice(b * seqlen_q, (b + 1) * seqlen_q)
        assert torch.equal(out[rows], wanted[0]) and torch.equal(lse[:, rows], wanted_lse[0])


def test_padding_between_sequences():
    """Sequences of 3 and 5 tokens in rooms of 4 and 8 of a buffer of 16 rows."""
    x = make([3, 5], [3, 5], room_q=[4, 8], room_k=[4, 8], after=4, heads_kv=2, ratio=2)
    assert x.cu_q.tolist() == [0, 4, 12] and len(x.q) == 16
    assert [i for i, real in enumerate(x.is_query) if not real] == [3, 9, 10, 11, 12, 13, 14, 15]
    out, lse = x.call(attend, None, True)
    assert_right(x, (out, lse), causal=True)
    assert not out[~x.is_query].any() and torch.isneginf(lse[:, ~x.is_query]).all()
    # Lengths cannot be given apart: the offsets say them, and NaN is behind the last.
    packed = make([3, 5], [3, 5], after=8, heads_kv=2, ratio=2)
    assert packed.cu_k.tolist() == [0, 3, 8] and packed.q[8:].isnan().all()
    assert_right(packed, packed.call(attend, None, True), causal=True)


@pytest.mark.parametrize(
    ("of_q", "of_k", "sizes"),
    [
        ([2048], [1024], dict(heads_kv=1)),
        ([129], [3], dict(heads_kv=2, ratio=4, head_dim=128, head_dim_v=128)),
        ([0, 0, 1023], [0, 1, 2045], dict(heads_kv=1, head_dim=128, head_dim_v=128)),
        (range(0, 257, 8), range(0, 257, 8), dict(heads_kv=1, ratio=2)),
    ],
)
def test_causal_sequences_of_other_libraries_issues(of_q, of_k, sizes):
    x = make(of_q, of_k, **sizes)
    out, lse = x.call(attend, None, True)
    assert_right(x, (out, lse), causal=True)
    for queries, keys in zip(x.queries, x.keys, strict=True):
        unseeing = slice(queries.start, queries.start + max(0, len(queries) - len(keys)))
        assert not out[unseeing].any() and torch.isneginf(lse[:, unseeing]).all()


def test_scores_far_from_zero():
    x = make([5, 2], [97, 3], heads_kv=2, ratio=2, head_dim=128)
    x.q[..., 0], x.k[..., 0] = 256, -256
    out, lse = x.call(attend)
    assert_right(x, (out, lse))
    assert torch.isfinite(lse).all() and (lse < -5000).all()
    one = torch.full((1, 1, 64), 133120.0, dtype=torch.bfloat16)
    cu = torch.tensor([0, 1], dtype=torch.int32)
    out, lse = attend(one, one, one, cu, cu, 1, 1, return_lse=True)
    assert (out == 133120).all() and lse.item() == pytest.approx(1.41767e11, rel=1e-4)


@pytest.mark.parametrize(
    "of",
    [([], []), ([0, 0], [3, 4]), ([3, 4], [0, 0]), ([0], [0])],
    ids=["batch 0", "no queries", "no keys", "nothing"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_calls(of, causal):
    x = make(*of, after=2 * (of == ([], [])))
    out, lse = x.call(attend, None, causal)
    assert out.shape == x.q.shape and torch.equal(out, torch.zeros_like(out))
    assert lse.shape == (1, len(x.q)) and torch.equal(lse, torch.full_like(lse, -math.inf))


def test_what_is_returned():
    x = make([3, 5], [4, 6])
    out = attend(x.q, x.k, x.v, *x.lists)
    pair = attend(x.q, x.k, x.v, *x.lists, return_attn_probs=True)
    assert isinstance(out, torch.Tensor) and isinstance(pair, tuple) and len(pair) == 2
    assert torch.equal(out, pair[0]) and torch.equal(x.call(attend)[1], pair[1])
    into = torch.full((8, 2, 80), 7.0, dtype=torch.bfloat16)
    view = into[:, 1:, 8:72]  # strides of its own
    assert attend(x.q, x.k, x.v, *x.lists, out=view) is view and torch.equal(view, out)
    assert (into[:, 0] == 7).all() and (into[..., :8] == 7).all() and (into[..., 72:] == 7).all()


def test_a_tensor_that_was_kept_for_a_gradient_knows_that_it_was_written():
    x = make([3], [4], dtype="float32")
    into, weight = torch.ones(3, 1, 64), torch.ones(3, 1, 64, requires_grad=True)
    loss = (into * weight).sum()
    attend(x.q, x.k, x.v, *x.lists, out=into)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", [int, np.int32, np.int64, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32)])
def test_kinds_of_bounds(kind):
    x = make([150, 3], [300, 2], heads_kv=2)
    wanted = x.call(attend)
    got = attend(x.q, x.k, x.v, x.cu_q, x.cu_k, kind(150), kind(300), return_lse=True)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("bound", [None, 0, 1, 151, 2**40])
def test_a_bound_that_is_wrong_changes_nothing_but_tiles(bound):
    x = make([150, 3], [300, 2])
    assert_right(x, attend(x.q, x.k, x.v, x.cu_q, x.cu_k, bound, bound, return_lse=True))
    for wrong, error in ((-1, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="max_seqlen_k"):
            attend(x.q, x.k, x.v, x.cu_q, x.cu_k, bound, wrong)
    with pytest.raises(TypeError, match=r"max_seqlen_q.*\(2,\)"):
        attend(x.q, x.k, x.v, x.cu_q, x.cu_k, torch.tensor([1, 2]), bound)


def changed(x, **changes):
    arguments = dict(q=x.q, k=x.k, v=x.v, cu_seqlens_q=x.cu_q, cu_seqlens_k=x.cu_k, max_seqlen_q=9, max_seqlen_k=9)
    return attend(**{**arguments, **changes})


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


X = make([3, 5], [4, 6], heads_kv=2)
BF16 = dict(dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (dict(cu_seqlens_q=ints(0, 3, 8, dtype=torch.int64)), TypeError, "cu_seqlens_q.*int64.*torch.int32"),
        (dict(cu_seqlens_k=ints(0, 4, 10).float()), TypeError, "cu_seqlens_k.*float32.*torch.int32"),
        (dict(cu_seqlens_q=[0, 3, 8]), TypeError, "cu_seqlens_q must be a torch.Tensor, got list"),
        (dict(cu_seqlens_k=None), TypeError, "cu_seqlens_k must be a torch.Tensor, got NoneType"),
        (dict(seqused_q=[3, 5]), TypeError, "seqused_q must be a torch.Tensor, got list"),
        (dict(cu_seqlens_q=ints(0, 8)), ValueError, r"batch \+ 1, got 2 and 3"),
        (dict(cu_seqlens_q=ints(), cu_seqlens_k=ints()), ValueError, "at least 1, got 0"),
        (dict(cu_seqlens_q=ints(0, 3, 8)[None]), ValueError, "1 dimension, got 2"),
        (
            dict(cu_seqlens_q=ints(0, 3, 8).to("meta")),
            ValueError,
            "cu_seqlens_q must be on the device of q, cpu, got m",
        ),
        (dict(seqused_k=ints(1, 1).to("meta")), ValueError, "seqused_k must be on the device of q"),
        (dict(seqused_k=ints(1, 1, 1)), ValueError, "seqused_k.* 2 as cu_seqlens_q has 3, got 3"),
        (dict(seqused_q=ints(1, 1, dtype=torch.int64)), TypeError, "seqused_q.*int64.*torch.int32"),
        (dict(cu_seqlens_q=ints(0, 5, 3)), ValueError, "cu_seqlens_q holds 3 after 5"),
        (dict(cu_seqlens_k=ints(-1, 4, 10)), ValueError, "cu_seqlens_k holds -1 after 0"),
        (dict(cu_seqlens_k=ints(0, 4, 11)), ValueError, "cu_seqlens_k ends at 11.*total_k, 10"),
        (dict(seqused_q=ints(3, 6)), ValueError, r"seqused_q\[1\] is 6; allowed: 0 to 5"),
        (dict(seqused_k=ints(-1, 6)), ValueError, r"seqused_k\[0\] is -1; allowed: 0 to 4"),
        (dict(q=X.q[None]), ValueError, r"q must have 3 dimensions \(total, heads, head_dim\).*got 4"),
        (dict(v=X.v[:9]), ValueError, "one total length, got k 10, v 9"),
        (dict(q=X.q.half()), TypeError, "one dtype"),
        (dict(q=X.q.int(), k=X.k.int(), v=X.v.int()), TypeError, "int32 on cpu"),
        (dict(k=X.k.to("meta")), ValueError, "one device.*k on meta"),
        (dict(k=X.k[..., :56]), ValueError, "head_dim of q, 64, got 56"),
        (dict(v=X.v[..., :60]), ValueError, "v has head_dim 60"),
        (dict(k=X.k[:, :1]), ValueError, "k 1, v 2"),
        (dict(q=X.q[:, :1]), ValueError, "got q 1 and k, v 2"),
        (dict(q=X.q.repeat_interleave(2, -1)[..., ::2]), ValueError, "q has stride 2"),
        (dict(q=None), TypeError, "q must be a torch.Tensor, got NoneType"),
        (dict(softmax_scale=-1.0), ValueError, "softmax_scale is -1"),
        (dict(softmax_scale="1"), TypeError, "softmax_scale"),
        (dict(causal=1), TypeError, "causal must be True or False"),
        (dict(return_lse=None), TypeError, "return_lse must be True or False"),
        (dict(out=torch.empty(8, 2, 56, **BF16)), ValueError, r"out must have shape .*\(8, 2, 64\), got \(8, 2, 56\)"),
        (dict(out=torch.empty(8, 2, 64)), TypeError, "out must have the dtype of q, torch.bfloat16, got torch.float32"),
        (dict(out=torch.empty(8, 2, 64, device="meta", **BF16)), ValueError, "out must be on the device of q"),
        (dict(out=torch.empty(8, 2, 128, **BF16)[..., ::2]), ValueError, "out has stride 2"),
        (dict(out=torch.empty(8, 1, 64, **BF16).expand(8, 2, 64)), ValueError, "a place of its own"),
        (dict(out=5), TypeError, "out must be a torch.Tensor, got int"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_errors_name_the_argument_its_value_and_what_is_allowed(changes, error, words):
    with pytest.raises(error, match=words):
        changed(X, **changes)
    changed(X)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *[(name, torch.ones(1), "None") for name in ("qv", "q_descale", "k_descale", "v_descale")],
        *[("num_splits", 2, "1"), ("pack_gqa", True, "None")],
        ("sm_margin", 4, "0"),
    ],
)
def test_arguments_whose_work_comes_later_raise_by_name(name, value, allowed):
    with pytest.raises(NotImplementedError, match=f"{name}.*allowed: {allowed}"):
        changed(X, **{name: value})
    with pytest.raises(TypeError, match="dropout_p"):
        changed(X, dropout_p=0.0)


def test_fp8_comes_later():
    x = [t.to(torch.float8_e4m3fn) for t in (X.q, X.k, X.v)]
    for descale in (None, torch.ones(2, 2)):
        with pytest.raises(NotImplementedError, match="ragged.*float8_e4m3fn"):
            attend(*x, *X.lists, q_descale=descale)


@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
def test_a_call_that_needs_gradients_raises(which):
    inputs = dict(q=X.q.clone(), k=X.k.clone(), v=X.v.clone(), out=torch.zeros_like(X.q))
    wanted = changed(X)
    inputs[which].requires_grad_(True)
    with pytest.raises(NotImplementedError, match="gradient.*no_grad"):
        changed(X, **inputs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(changed(X, **inputs), wanted)
