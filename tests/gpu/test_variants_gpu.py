"""Kernels with windows, chunks, soft caps and sinks against float64: dense and ragged, poison around, no waiting."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fa3
from fa3.testing.inputs import Case, make, poison
from fa3.variant import Variant
from tests import ragged
from tests.variants import expected, variants

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
KINDS = {
    "window": Variant(True, 511),
    "both sides": Variant(False, 100, 200),
    "right": Variant(False, -1, 64),
    "own key": Variant(True, 0),
    "chunk": Variant(True, -1, -1, 256),
    "chunk in both directions": Variant(False, -1, -1, 300),
    "window and chunk": Variant(True, 100, -1, 192),
    "soft cap": Variant(True, softcap=30.0),
    "soft cap, full": Variant(False, softcap=5.0),
    "sink alone": Variant(True),
    "everything": Variant(True, 200, -1, 384, 50.0),
}
SIZES = [(1, 1), (1, 700), (64, 64), (129, 129), (300, 700), (700, 300), (1500, 1500)]  # queries, keys


def options_of(variant: Variant, sink) -> dict:
    causal, left, right, chunk, cap = variant
    options = dict(causal=causal, window_size=(left, right), attention_chunk=chunk, softcap=cap, return_lse=True)
    return options if sink is None else options | {"learnable_sink": sink}


def sinks(heads: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (2 * torch.randn(heads, generator=generator, device=DEVICE)).to(dtype)


def verify(case: Case, variant: Variant, sink=None):
    x = make(case, DEVICE)
    poison((case.batch, case.seqlen_q, case.heads, case.head_dim_v), x.q.dtype, DEVICE)
    poison((case.batch, case.heads, case.seqlen_q), torch.float32, DEVICE)
    out, lse = fa3.flash_attn_func(*x, case.scale, **options_of(variant, sink))
    want = expected(*x, case.scale, variant, sink)
    want.assert_out(out, str(variant))
    want.assert_lse(lse, str(variant))
    return out, lse


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), DIMS)
def test_grid(dtype, head_dim, head_dim_v, kind):
    variant = KINDS[kind]
    for i, (seqlen_q, seqlen_k) in enumerate(SIZES):
        heads_kv, ratio = [(2, 1), (1, 5), (3, 2)][i % 3]
        case = Case(dtype, 1 + i % 2, seqlen_q, seqlen_k, heads_kv, ratio, head_dim, head_dim_v, variant.causal)
        sink = sinks(case.heads) if kind in ("sink alone", "everything") else None
        verify(case, variant, sink)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sinks(dtype):
    for value in (None, -1e4, 1e4, -math.inf):
        for variant in (Variant(True), Variant(False), Variant(True, 127)):
            case = Case("bfloat16", 2, 300, 200, 2, 4, 128, 128, variant.causal)
            sink = sinks(8, dtype)
            if value is not None:
                sink[3] = value
            out, lse = verify(case, variant, sink)
            if variant.causal:  # the first 100 queries see no key
                assert not out[:, :100].any()
                assert torch.equal(lse[..., :100], sink.float()[:, None].expand(2, 8, 100))
    out, lse = fa3.flash_attn_func(*make(Case(ratio=2), DEVICE), s_aux=torch.tensor([math.inf, 0.0], device=DEVICE),
                                   return_lse=True)  # fmt: skip
    assert not out[:, :, 0].any() and (lse[:, 0] == math.inf).all() and torch.isfinite(out).all()
    q, k, v = make(Case(seqlen_k=0, ratio=2), DEVICE)
    sink = sinks(2)
    out, lse = fa3.flash_attn_func(q, k, v, learnable_sink=sink, return_lse=True)
    assert not out.any() and torch.equal(lse, sink[None, :, None].expand(lse.shape))


def test_scores_that_outgrow_the_first_block():
    """The guess against an older max is made after masked blocks only, before and behind it."""
    for variant in (Variant(True, 700), Variant(False, 400, 300), Variant(True, softcap=100.0)):
        case = Case("float16", 1, 900, 1900, 1, 2, 64, 64, variant.causal, 1.0, values="outliers")
        verify(case, variant)


@settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))
@given(
    variants, st.integers(1, 900), st.integers(1, 900), st.sampled_from(DIMS), st.booleans(), st.integers(1, 4),
    st.sampled_from(["bfloat16", "float16"]),
)  # fmt: skip
def test_drawn(variant, seqlen_q, seqlen_k, dims, has_sink, heads, dtype):
    if seqlen_q < 32:  # of few rows luck decides, and tanh is approximate
        variant = variant._replace(softcap=0.0)
    case = Case(dtype, 1, seqlen_q, seqlen_k, heads, 2, *dims, variant.causal)
    verify(case, variant, sinks(2 * heads) if has_sink else None)


LENGTHS = {
    "odd": ([5, 77, 129, 301], [9, 77, 257, 113]),
    "zeros": ([0, 0, 130, 0, 1, 64, 0], [0, 1, 0, 300, 1, 64, 0]),
    "long and short": ([2049, 3, 512, 0, 64], [2049, 3, 512, 1, 700]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (256, 256)])
def test_ragged(head_dim, head_dim_v, kind):
    variant = KINDS[kind]
    for i, (of_q, of_k) in enumerate(LENGTHS.values()):
        room_k = [n + 60 for n in of_k]
        x = ragged.make(of_q, of_k, room_k=room_k, before=3, after=70, heads_kv=2, ratio=2, head_dim=head_dim,
                        head_dim_v=head_dim_v, device=DEVICE, seed=i)  # fmt: skip
        sink = sinks(4) if kind in ("sink alone", "everything") else None
        options = options_of(variant, sink)
        causal = options.pop("causal")
        options.pop("return_lse")
        into = torch.full((*x.q.shape[:2], head_dim_v), 7.0, dtype=x.q.dtype, device=DEVICE)
        out, lse = x.call(fa3.flash_attn_varlen_func, None, causal, out=into, **options)
        assert (out[~x.is_query] == 7.0).all()
        for queries, keys in zip(x.queries, x.keys, strict=True):
            one = x.q[None, queries.start : queries.stop], *(t[None, keys.start : keys.stop] for t in (x.k, x.v))
            want = expected(*one, None, variant, sink)
            want.assert_out(out[None, queries.start : queries.stop], str(keys))
            want.assert_lse(lse[None, :, queries.start : queries.stop], str(keys))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_lengths_are_dense_attention_bit_for_bit(kind):
    variant, sink = KINDS[kind], sinks(4) if kind in ("sink alone", "everything") else None
    x = ragged.make([640] * 3, [900] * 3, heads_kv=2, ratio=2, head_dim=128, head_dim_v=128, device=DEVICE)
    options = options_of(variant, sink)
    dense = [t.view(3, -1, *t.shape[1:]) for t in (x.q, x.k, x.v)]
    wanted, wanted_lse = fa3.flash_attn_func(*dense, **options)
    out, lse = fa3.flash_attn_varlen_func(x.q, x.k, x.v, *x.lists, **options)
    assert torch.equal(out, wanted.flatten(0, 1)) and torch.equal(lse, wanted_lse.transpose(0, 1).flatten(1))


def test_windows_that_hide_nothing_are_the_plain_kernels():
    x = make(Case("bfloat16", 1, 300, 500, 2, 2, 128, 128), DEVICE)
    plain = fa3.flash_attn_func(*x, causal=True)
    assert torch.equal(fa3.flash_attn_func(*x, window_size=(-1, 0)), plain)
    assert torch.equal(fa3.flash_attn_func(*x, causal=True, window_size=(499, 499)), plain)
    assert torch.equal(fa3.flash_attn_func(*x, window_size=(2**40, 2**40)), fa3.flash_attn_func(*x))


def test_long_keys_under_a_narrow_window():
    """Of 100,000 keys: a window of them is all that out depends on, whatever the others hold."""
    case = Case("bfloat16", 1, 1000, 100_000, 1, 2, 128, 128)
    x = make(case, DEVICE)
    out, lse = fa3.flash_attn_func(*x, causal=True, window_size=(255, 0), return_lse=True)
    far = 100_000 - 1000 - 255 - 128  # blocks that a tile takes may begin before the window
    x.k[:, :far], x.v[:, :far] = math.nan, math.nan
    again, lse_again = fa3.flash_attn_func(*x, causal=True, window_size=(255, 0), return_lse=True)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    near = [t[:, -1255:] for t in x]
    want = expected(x.q, near[1], near[2], None, Variant(True, 255))
    want.assert_out(out)
    want.assert_lse(lse)


def test_graphs_and_no_waiting():
    x, sink = make(Case("bfloat16", 2, 500, 600, 2, 2, 128, 128), DEVICE), sinks(4, torch.bfloat16)
    options = options_of(Variant(True, 100, -1, 0, 20.0), sink)
    wanted = fa3.flash_attn_func(*x, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fa3.flash_attn_func(*x, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fa3.flash_attn_func(*x, **options)
    for _ in range(2):
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    sink += 1.0
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, fa3.flash_attn_func(*x, **options), strict=True))


def test_operators():
    x, sink = make(Case("bfloat16", 1, 300, 300, 1, 2), DEVICE), sinks(2)
    options = options_of(Variant(True, 100), sink)
    wanted = fa3.flash_attn_func(*x, **options)
    compiled = torch.compile(lambda *x: fa3.flash_attn_func(*x, **options), backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(*x), wanted, strict=True))
