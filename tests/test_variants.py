"""Windows, chunks, soft caps and sinks: the reference and the public functions on the CPU against the formula."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa3
import fa3.ops_variant  # registers the operators
from fa3.heuristics import variant_configs
from fa3.kernels.algo.seqlen import Lengths
from fa3.kernels.algo.window import Chunk, Window
from fa3.kernels.forward.config import SHARED_BYTES
from fa3.problem_variant import FARTHEST, numbers_of, simplified
from fa3.reference import attention, split_attention, tiled_attention
from fa3.testing.inputs import Case, make
from fa3.variant import Variant
from tests import paged, ragged
from tests.variants import formula, variants, visible

ROUNDING = dict(rtol=1e-11, atol=1e-12)
lengths = st.tuples(st.integers(0, 40), st.integers(0, 40))
small_sides = st.integers(-1, 45)
small = st.builds(
    Variant, st.booleans(), small_sides, small_sides, st.integers(0, 50), st.sampled_from([0.0, 0.0, 0.7, 30.0])
)
sinks = st.sampled_from([None, 0.0, -3.0, 400.0, -math.inf])


def numbers(seqlen_q, seqlen_k, seed=0, heads_kv=2, ratio=2):
    normal = np.random.default_rng(seed).standard_normal
    return (
        3.0 * normal((1, seqlen_q, heads_kv * ratio, 5)),
        normal((1, seqlen_k, heads_kv, 5)),
        normal((1, seqlen_k, heads_kv, 7)),
    )


def sink_of(value, heads=4):
    return None if value is None else np.array([value, 1.0, -0.5, 2.0][:heads])


def assert_same(got, want, **tolerance):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), **(tolerance or ROUNDING))


@settings(max_examples=150, deadline=None)
@given(lengths, small, sinks, st.integers(1, 30), st.integers(1, 30), st.integers(1, 4))
def test_the_references_are_the_formula(sizes, variant, sink, tile_m, tile_n, num_splits):
    x, sink = numbers(*sizes), sink_of(sink)
    want = formula(*x, 0.6, variant, sink)
    options = dict(variant=variant, sink=sink)
    assert_same(attention(*x, 0.6, **options), want)
    assert_same(tiled_attention(*x, 0.6, tile_m=tile_m, tile_n=tile_n, **options), want)
    assert_same(split_attention(*x, 0.6, num_splits=num_splits, **options), want)
    tensors = [torch.from_numpy(t) for t in x]
    options["sink"] = None if sink is None else torch.from_numpy(sink)
    assert_same(tiled_attention(*tensors, 0.6, tile_m=tile_m, tile_n=tile_n, **options), want)
    assert_same(attention(*tensors, 0.6, **options), want)


def test_an_endless_sink_takes_all():
    x, sink = numbers(5, 9), np.array([math.inf, 0.0, 0.0, 0.0])
    out, lse = tiled_attention(*x, 0.6, variant=Variant(True), sink=sink)
    assert (out[:, :, 0] == 0).all() and (lse[:, 0] == math.inf).all()
    assert np.isfinite(out).all() and np.isfinite(lse[:, 1:]).all()


@settings(max_examples=60, deadline=None)
@given(lengths, small, sinks)
def test_flash_attn_func_is_the_formula(sizes, variant, sink):
    x = [torch.from_numpy(t) for t in numbers(*sizes)]
    x = [torch.nn.functional.pad(t, (0, 8 - t.shape[3])) for t in x]
    sink = sink_of(sink)
    want = formula(*(t.numpy() for t in x), 0.6, variant, sink)
    causal, left, right, chunk, cap = variant
    options = dict(window_size=(left, right), attention_chunk=chunk, softcap=cap, return_lse=True)
    for name in ("learnable_sink", "s_aux"):
        if sink is not None:
            options[name] = torch.from_numpy(sink)
        assert_same(fa3.flash_attn_func(*x, 0.6, causal, **options), want)
        options.pop(name, None)


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, max_size=4), small, sinks, st.booleans())
def test_flash_attn_varlen_func_is_the_formula_of_each_sequence(sizes, variant, sink, into):
    of_q, of_k = [n for n, _ in sizes], [n for _, n in sizes]
    x = ragged.make(of_q, of_k, room_q=[n + 3 for n in of_q], before=2, heads_kv=2, ratio=2, head_dim=8, head_dim_v=8,
                    dtype="float64")  # fmt: skip
    sink = sink_of(sink)
    causal, left, right, chunk, cap = variant
    options = dict(window_size=(left, right), attention_chunk=chunk, softcap=cap)
    if sink is not None:
        options["learnable_sink"] = torch.from_numpy(sink)
    if into:
        options["out"] = torch.full_like(x.q, 7.0)
    out, lse = x.call(fa3.flash_attn_varlen_func, 0.6, causal, **options)
    for queries, keys in zip(x.queries, x.keys, strict=True):
        at, seen = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        one = (x.q[None, at].numpy(), x.k[None, seen].numpy(), x.v[None, seen].numpy())
        assert_same((out[None, at], lse[None, :, at]), formula(*one, 0.6, variant, sink))
    padding = ~x.is_query
    assert (out[padding] == (7.0 if into else 0.0)).all() and (lse[:, padding] == -math.inf).all()


@given(st.integers(1, 400), st.integers(1, 400), variants)
def test_what_is_simplified_sees_the_same(seqlen_q, seqlen_k, variant):
    seen = visible(variant, seqlen_q, seqlen_k)
    for found in (simplified(variant), simplified(variant, seqlen_q, seqlen_k)):
        assert (visible(found, seqlen_q, seqlen_k) == seen).all()
        assert not found.causal or found[1:4] == (-1, -1, 0)
        assert simplified(found, seqlen_q, seqlen_k) == simplified(variant, seqlen_q, seqlen_k)


def test_windows_that_hide_nothing_are_none():
    assert simplified(Variant(False, -1, 0)) == Variant(True)
    assert simplified(Variant(True, 4096, -1, 0, 30.0), 128, 4096) == Variant(True, softcap=30.0)
    assert simplified(Variant(False, 99, 99), 100, 100) == Variant()
    assert simplified(Variant(False, 98, 99), 100, 100) == Variant(False, 98, -1)
    assert simplified(Variant(True, 500), 1, 501) == Variant(True)
    assert simplified(Variant(True, -1, -1, 100), 100, 100) == Variant(True)
    assert simplified(Variant(False, -1, -1, 100), 120, 100) == Variant(False, -1, -1, 100)


def keys_of(variant: Variant) -> Window | Chunk:
    found = simplified(variant)
    (left, right, chunk, _, _), _ = numbers_of(found, 1.0, None)
    window = Window(left, 0 if found.causal else right)
    return Chunk(window, chunk) if variant.attention_chunk else window


tiles = st.sampled_from([64, 128, 192]), st.sampled_from([64, 80, 112, 128])


@settings(max_examples=400)
@given(st.integers(1, 700), st.integers(0, 700), variants, *tiles)
def test_device_blocks_hold_what_is_seen_and_nothing_else(seqlen_q, seqlen_k, variant, tile_m, tile_n):
    seen, keys, at = visible(variant, seqlen_q, seqlen_k), keys_of(variant), Lengths(seqlen_q, seqlen_k)
    for row in range(0, seqlen_q, tile_m):
        rows = seen[row : row + tile_m]
        for i, one in enumerate(rows):
            first, end = keys.interval(row + i, at)
            assert end <= seqlen_k and 0 <= first
            assert (np.flatnonzero(one) == np.arange(first, max(first, end))).all()
        blocks = keys.blocks(row, at, tile_m, tile_n)
        assert 1 <= blocks.masked <= blocks.unmasked <= blocks.count and blocks.leftmost >= 0
        taken = [blocks.n_block(i) for i in range(blocks.count)]
        assert taken == list(range(taken[0], blocks.leftmost - 1, -1))
        columns = [rows[:, n * tile_n : (n + 1) * tile_n] for n in taken]
        assert sum(c.sum() for c in columns) == rows.sum(), "a visible key lies outside of the blocks"
        assert len(taken) == 1 or all(c.any() for c in (columns[0], columns[-1])), "a block is seen by no row"
        for c in columns[blocks.masked : blocks.unmasked]:
            assert c.shape[1] == tile_n and c.all()
        needless = [c.shape[1] == tile_n and c.all() for c in columns[1 : blocks.masked] + columns[blocks.unmasked :]]
        assert not any(needless), "a mask that hides nothing"


def test_a_narrow_window_takes_as_many_blocks_at_any_length():
    counts = {
        Window(511, 0).blocks(row, Lengths(n, n), 128, 128).count for n in (4096, 2**20) for row in (2048, n - 128)
    }
    assert counts == {5}


def test_the_farthest_sides_do_not_overflow():
    """On the device sums are of 32 bits: no step of `interval` may pass 2^31."""
    seen = []

    def noted(value):
        seen.append(value)
        return Int(value)

    class Int(int):
        def __add__(self, other):
            return noted(int(self) + int(other))

        def __sub__(self, other):
            return noted(int(self) - int(other))

        def __mod__(self, other):
            return noted(int(self) % int(other))

    largest = Int(2**30)
    for q, k in ((largest, largest), (largest, Int(1)), (Int(1), largest)):
        for side in (Int(0), Int(FARTHEST)):
            for row in (Int(0), Int(q - 1)):
                Chunk(Window(side, side), Int(FARTHEST)).interval(row, Lengths(q, k))
    assert 2**30 < max(map(abs, seen)) < 2**31


ERRORS = [
    (dict(window_size=5), TypeError, "window_size must be a pair"),
    (dict(window_size=(1, 2, 3)), TypeError, "window_size must be a pair"),
    (dict(window_size=(1.5, 0)), TypeError, "window_size left must be an int"),
    (dict(attention_chunk=-1), ValueError, "attention_chunk is -1"),
    (dict(attention_chunk=1.0), TypeError, "attention_chunk must be an int"),
    (dict(softcap=-1.0), ValueError, "softcap is -1.0"),
    (dict(softcap=math.nan), ValueError, "softcap is nan"),
    (dict(softcap=1e300), ValueError, "softcap is 1e"),
    (dict(learnable_sink=torch.zeros(3)), ValueError, r"learnable_sink must have shape \(heads,\), \(2,\), got \(3,\)"),
    (dict(learnable_sink=torch.zeros(2, 1)), ValueError, "learnable_sink must have shape"),
    (dict(learnable_sink=torch.zeros(2, dtype=torch.int32)), TypeError, "learnable_sink has dtype torch.int32"),
    (dict(learnable_sink=torch.zeros(2, device="meta")), ValueError, "learnable_sink must be on the device of q"),
    (dict(s_aux=[0.0, 0.0]), TypeError, "s_aux must be a torch.Tensor, got list"),
    (dict(s_aux=torch.zeros(2), learnable_sink=torch.zeros(2)), ValueError, "two names of one argument"),
    (dict(learnable_sink=torch.zeros(2, requires_grad=True)), NotImplementedError, "requires a gradient"),
    (dict(window_size=(3, 0), k_descale=torch.ones(1, 1)), NotImplementedError, "k_descale is for"),
]


@pytest.mark.parametrize(
    ("options", "error", "words"), ERRORS, ids=lambda x: "-".join(x) if isinstance(x, dict) else ""
)
def test_errors_name_the_argument_its_value_and_what_is_allowed(options, error, words):
    q, k, v = make(Case(seqlen_q=3, seqlen_k=4, ratio=2), "cpu")
    with pytest.raises(error, match=words):
        fa3.flash_attn_func(q, k, v, **options)
    x = ragged.make([3], [4], ratio=2)
    with pytest.raises(error, match=words):
        x.call(fa3.flash_attn_varlen_func, **options)


def test_fp8_comes_later():
    x = [t.to(torch.float8_e4m3fn) for t in make(Case(), "cpu")]
    for options in (dict(window_size=(5, 0)), dict(softcap=1.0), dict(s_aux=torch.zeros(1))):
        with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
            fa3.flash_attn_func(*x, **options)


def test_defaults_in_other_words_are_the_plain_call():
    q, k, v = make(Case(seqlen_q=9, seqlen_k=20), "cpu")
    for options in ({"window_size": (None, -1)}, {"window_size": [-7, None]}, {"softcap": 0}, {"attention_chunk": 0}):
        assert torch.equal(fa3.flash_attn_func(q, k, v, **options), fa3.flash_attn_func(q, k, v))
    wanted = fa3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(fa3.flash_attn_func(q, k, v, window_size=(-1, 0)), wanted)
    assert torch.equal(fa3.flash_attn_func(q, k, v, causal=True, window_size=(19, 19)), wanted)
    assert not torch.equal(fa3.flash_attn_func(q, k, v, causal=True, window_size=(3, 19)), wanted)


def test_under_compile_shapes_are_known_and_values_are_those_of_eager():
    q, k, v = make(Case(seqlen_q=40, seqlen_k=70, ratio=2), "cpu")
    sink = torch.tensor([0.5, -1.0])

    def call(q, k, v):
        return fa3.flash_attn_func(q, k, v, causal=True, window_size=(9, -1), softcap=5.0, s_aux=sink, return_lse=True)

    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(q, k, v), call(q, k, v), strict=True))
    x = ragged.make([3, 0, 9], [4, 5, 20], ratio=2)
    out = torch.zeros_like(x.q)

    def varlen(q, k, v, cu_q, cu_k):
        options = dict(window_size=(3, 0), learnable_sink=sink, return_lse=True, out=out)
        return fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 20, **options)[1]

    compiled = torch.compile(varlen, backend="eager", fullgraph=True)
    inputs = x.q, x.k, x.v, x.cu_q, x.cu_k
    assert torch.equal(compiled(*inputs), varlen(*inputs)) and out.abs().sum() > 0


@pytest.mark.parametrize("name", ["forward_variant", "forward_varlen_variant", "forward_varlen_variant_out"])
def test_opcheck(name):
    operator = getattr(torch.ops.fa3, name).default
    sink = torch.tensor([0.5, -1.0])
    if name == "forward_variant":
        x = make(Case(seqlen_q=9, seqlen_k=20, ratio=2), "cpu")
        arguments = (*x, 0.1, True, 3, 0, 8, 4.0, sink)
    else:
        r = ragged.make([3, 9], [4, 20], ratio=2)
        arguments = (r.q, r.k, r.v, r.cu_q, r.cu_k, None, None, 9, 20, 0.1, False, 3, 0, 0, 0.0, sink, None, 1)
        if name.endswith("out"):  # in pages
            x = paged.make([3, 9], [4, 20], 8, ratio=2)
            lists = x.cu_q, None, None, x.used_k, 9, 20
            arguments = (x.q, x.k, x.v, *lists, 0.1, False, 3, 0, 0, 0.0, sink, x.table, 1, torch.zeros_like(x.q))
    torch.library.opcheck(operator, arguments)


def test_configs_of_variants_fit_the_chip_and_are_distinct():
    pairs = list(variant_configs())
    assert len(set(pairs)) == len(pairs) and all(s.is_variant and not s.is_fp8 for s, _ in pairs)
    assert all(c.shared_bytes(s) <= SHARED_BYTES for s, c in pairs)
    assert not any(s.local and (s.causal or c.warpgroups > 2) for s, c in pairs)
