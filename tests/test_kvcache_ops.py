"""torch.ops.fa3.decode and decode_out on CPU: opcheck, fake = real, torch.compile; and the way to the kernel."""

import sys
import types

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

import fa3
from fa3 import ops_kvcache
from fa3.serving import Serving
from fa3.variant import Variant
from tests.kvcache import assert_is, formula, ints, make, plain_append, with_append
from tests.test_kvcache import serving_of

NEW, INTO = ops_kvcache._decode, ops_kvcache._decode_out
SIZES = dict(heads_kv=2, ratio=2)
LAYOUTS = [
    dict(ragged=False),
    dict(ragged=False, permuted=True, leftpad=[2, 0]),
    dict(page_size=4),
    dict(ragged=False, page_size=4),
]
VARIANT = Variant(True, 7, -1, 0, 5.0)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def case(**options):
    return make([2, 2], [13, 5], **{**SIZES, **options})


def arguments(x, sink=True):
    of_head = torch.linspace(-1, 1, 4) if sink else None
    return (x.q, x.k_cache, x.v_cache, *serving_of(x), 0.1, *VARIANT, of_head, 0, 64)


def place(x):
    return torch.full((*x.q.shape[:-1], x.v_cache.shape[3]), 7.0, dtype=x.q.dtype)


def looks(tensors):
    return [(x.shape, x.dtype, x.stride()) for x in tensors]


def assert_same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_opcheck(dtype, layout):
    x = case(dtype=dtype, **layout)
    for cache in (x.k_cache, x.v_cache):
        cache.nan_to_num_(0.0)  # opcheck compares its arguments before and after
    assert set(torch.library.opcheck(NEW, arguments(x)).values()) == {"SUCCESS"}
    assert set(torch.library.opcheck(INTO, (*arguments(x, sink=False), place(x))).values()) == {"SUCCESS"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fake_looks_like_real(dtype, layout):
    x = case(dtype=dtype, **layout)
    given = arguments(x)
    real = NEW(*given)
    assert real[0].isfinite().all()
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in given]
    assert looks(NEW(*fakes)) == looks(real)
    meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in given]
    assert [look[:2] for look in looks(NEW(*meta))] == [look[:2] for look in looks(real)]
    out = place(x)
    assert_same([INTO(*given, out), out], [real[1], real[0]])


def test_fake_cuda_tensors_need_no_gpu():
    with FakeTensorMode():
        q = torch.empty(3, 1, 8, 128, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(50, 16, 2, width, dtype=torch.bfloat16, device="cuda") for width in (128, 72))
        table, lengths = (torch.empty(*shape, dtype=torch.int32, device="cuda") for shape in ((3, 9), (3,)))
        call = dict(page_table=table, cache_seqlens=lengths, return_softmax_lse=True)
        out, lse = fa3.flash_attn_with_kvcache(q, k, v, **call)
        assert looks((out, lse)) == [((3, 1, 8, 72), q.dtype, (576, 576, 72, 1)), ((3, 8, 1), torch.float32, (8, 1, 1))]
        edges = torch.empty(4, dtype=torch.int32, device="cuda")
        ragged = torch.empty(5, 8, 128, dtype=torch.bfloat16, device="cuda")
        out = fa3.flash_attn_with_kvcache(ragged, k, v, cu_seqlens_q=edges, **{**call, "cache_seqlens": 100})[0]
        assert out.shape == (5, 8, 72) and out.device.type == "cuda"
        with pytest.raises(TypeError, match=r"page_table.*int64.*torch.int32"):
            fa3.flash_attn_with_kvcache(q, k, v, **{**call, "page_table": table.long()})
        with pytest.raises(TypeError, match="float32 on cuda"):
            fa3.flash_attn_with_kvcache(q.float(), k.float(), v.float(), **call)


def attend(q, k_cache, v_cache, options, sink):
    """Work around the operator, so that there is a graph to break."""
    out, lse = fa3.flash_attn_with_kvcache(
        q * 2, k_cache, v_cache, causal=True, window_size=(9, 0), s_aux=sink, return_softmax_lse=True, **options
    )
    return out + 1, lse.exp()


@pytest.mark.parametrize("layout", [*LAYOUTS, dict(page_size=4, csr=True)])
def test_compiled_is_eager_and_new_sizes_compile_at_most_twice(layout):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ([14, 5], [29, 40], [7, 3], [1, 60]):
        x = make([2, 2], lengths, **SIZES, dtype=torch.float32, **layout)
        given = x.q, x.k_cache, x.v_cache, x.lists, torch.linspace(-1, 1, 4)
        assert_same(compiled(*given), attend(*given))
    assert counter.frame_count <= 2
    assert "fa3.decode" in counter.graphs[-1].code


def test_a_length_that_is_an_int_compiles_at_most_twice():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    x = make([1, 1], [40, 40], ragged=False, **SIZES)
    for length in (7, 8, 21, 40):
        given = x.q, x.k_cache, x.v_cache, {"cache_seqlens": length}, None
        assert_same(compiled(*given), attend(*given))
    assert counter.frame_count <= 2


def test_a_given_out_is_written_in_the_compiled_function_too():
    def into(q, k_cache, v_cache, lists, out):
        made = fa3.flash_attn_with_kvcache(q * 2, k_cache, v_cache, **lists, out=out)
        return made + 1, out * 2

    x = case(page_size=4)
    compiled = torch.compile(into, backend="aot_eager", fullgraph=True)
    places = [place(x) for _ in range(2)]
    given = x.q, x.k_cache, x.v_cache, x.lists
    assert_same(compiled(*given, places[0]), into(*given, places[1]))
    assert_same(places[:1], places[1:])


@torch.library.custom_op("fa3_tests::plain_append", mutates_args=("k_cache", "v_cache"))
def append_operator(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor
) -> None:
    serving = Serving(lengths, 1, *[None] * 6, 1)
    plain_append(k, k_cache, v_cache, k, v, serving, None, None, None, True, True)


@append_operator.register_fake
def _(k_cache, v_cache, k, v, lengths):
    return None


def test_the_cache_is_changed_in_the_compiled_function_too(monkeypatch):
    """Two steps of decoding in one graph."""

    def append(q, k_cache, v_cache, k, v, serving, *_):
        append_operator(k_cache, v_cache, k, v, serving.lengths)
        return q

    with_append(monkeypatch, append)
    x = make([1, 1], [10, 4], ragged=False, heads_kv=2)
    k, v = (torch.stack([t[-1:] for t in rows]) for rows in (x.keys, x.values))

    def step(q, k_cache, v_cache, k, v, lengths):
        first = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
        return first, fa3.flash_attn_with_kvcache(q, k_cache, v_cache, k * 2, v, cache_seqlens=lengths + 1)

    found = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        caches = [cache.clone() for cache in (x.k_cache, x.v_cache)]
        for cache, lengths in zip(caches, (x.keys, x.values)):
            for place, rows in zip(cache, lengths):
                place[len(rows) - 1] = torch.nan
        found.append([*run(x.q, *caches, k, v, x.lists["cache_seqlens"] - 1), *caches])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, equal_nan=True)
    out, _, k_cache, _ = found[1]
    for got, (wanted, _) in zip(out, formula(x)):
        torch.testing.assert_close(got, wanted)
    assert torch.equal(k_cache[0, 10], 2 * x.keys[0][-1])


def test_rotary_and_append_in_a_compiled_function():
    """One step: new rows and queries rotated at their own positions, pairs side by side."""
    pytest.importorskip("fa3.append")
    x = make([2, 2], [10, 4], ragged=False, page_size=4, heads_kv=2, ratio=2)
    k, v = (torch.stack([t[-2:] for t in rows]) for rows in (x.keys, x.values))
    before = x.lists["cache_seqlens"] - 2
    angles = torch.linspace(0, 3, 12 * 8, dtype=torch.float64).view(12, 8)

    def rotated(rows, first):
        turn = torch.polar(torch.ones_like(angles), angles)[first : first + len(rows), None]
        return torch.view_as_real(torch.view_as_complex(rows.unflatten(-1, (8, 2)).contiguous()) * turn).flatten(-2)

    def step(q, k_cache, v_cache, k, v, lists):
        rotary = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin())
        return fa3.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **rotary, causal=True, **lists)

    lists = {**x.lists, "cache_seqlens": before}
    caches = [[cache.clone() for cache in (x.k_cache, x.v_cache)] for _ in range(2)]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(x.q, *caches[0], k, v, lists)
    assert_same([compiled], [step(x.q, *caches[1], k, v, lists)])
    for got, wanted in zip(*caches):
        torch.testing.assert_close(got, wanted, equal_nan=True)
    for b, first in enumerate(before.tolist()):
        x.queries[b] = rotated(x.queries[b], first)
        x.keys[b] = torch.cat([x.keys[b][:first], rotated(x.keys[b][first:], first)])
    for got, (wanted, _) in zip(compiled, formula(x, causal=True)):
        torch.testing.assert_close(got, wanted)


def test_errors_keep_their_words_under_compile():
    x = case(page_size=4)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    wrong = {**x.lists, "page_table": x.lists["page_table"].long()}
    with pytest.raises(Exception, match=r"page_table.*int64.*torch.int32"):
        compiled(x.q, x.k_cache, x.v_cache, wrong, None)
    given = x.q, x.k_cache, x.v_cache, x.lists, None
    assert_same(compiled(*given), attend(*given))


@pytest.mark.parametrize("which", [0, 1, 2, 18])
def test_the_operators_themselves_refuse_derivatives(which):
    x = case(dtype=torch.float32, ragged=False)
    given = list(arguments(x))
    out, wanted = place(x), NEW(*given)
    tracked = [*given]
    tracked[which] = given[which].clone().requires_grad_(True)
    for call in (lambda: NEW(*tracked), lambda: INTO(*tracked, out)):
        with pytest.raises(NotImplementedError, match="gradient"):
            call()
        with torch.no_grad():
            call()
    assert (out != 7.0).all()
    assert_same(NEW(*given), wanted)

    def of_one(value):
        return NEW(*given[:which], value, *given[which + 1 :])

    with pytest.raises(NotImplementedError, match="gradient"):
        torch.func.grad(lambda value: of_one(value)[0].sum())(given[which])
    with pytest.raises(NotImplementedError, match="tangent"):
        torch.func.jvp(of_one, (given[which],), (torch.ones_like(given[which]),))


def test_the_operators_check_what_they_are_given():
    x = case(ragged=False)
    given = list(arguments(x))
    for which, value, match in (
        (1, x.k_cache[:1], "one shape but for the last"),
        (3, ints([1]), "cache_seqlens must have one element"),
        (3, ints([1, 99]), r"cache_seqlens\[1\] and the new rows are 99"),
        (12, -1.0, "softmax_scale is -1"),
        (18, torch.ones(3), "learnable_sink must have shape"),
        (20, 63, "split_size is 63"),
    ):
        for run in (lambda *a: NEW(*a), lambda *a: INTO(*a, place(x))):
            with pytest.raises((TypeError, ValueError), match=match):
                run(*given[:which], value, *given[which + 1 :])
    with pytest.raises(ValueError, match="out must have shape"):
        INTO(*given, x.q)
    with pytest.raises(TypeError, match="k_cache must be a dense"):
        NEW(x.q, x.k_cache.nan_to_num().to_sparse(), *given[2:])


@pytest.fixture
def launches(monkeypatch):
    """What calls on CUDA tensors in eager code hand to the launch, seen with CPU ones."""
    calls = []

    def forward(*arguments):
        calls.append(arguments)
        made, lse = ops_kvcache.attend(ops_kvcache.Call(*arguments)._replace(out=None))
        out = arguments[-1]
        return made if out is None else out.data.copy_(made), lse  # which no version counts, as of a kernel

    module = types.ModuleType("fa3.launch_decode")
    module.forward = forward
    monkeypatch.setitem(sys.modules, "fa3.launch_decode", module)
    monkeypatch.setattr(fa3, "launch_decode", module, raising=False)
    monkeypatch.setattr(ops_kvcache, "is_plain", lambda *x: True)
    return calls


@pytest.mark.parametrize("given_out", [False, True])
def test_a_plain_call_goes_to_the_launch_itself(launches, given_out):
    x = case(page_size=4)
    sink, out = torch.ones(4), place(x) if given_out else None
    version = out._version if given_out else None
    got = x.call(fa3.flash_attn_with_kvcache, causal=True, num_splits=3, softcap=2.0, s_aux=sink, out=out)
    assert_is(x, got, formula(x, causal=True, softcap=2.0, learnable_sink=sink))
    ((q, k_cache, v_cache, serving, *others),) = launches
    assert q is x.q and k_cache is x.k_cache and v_cache is x.v_cache
    lists = x.lists["cache_seqlens"], x.lists["page_table"], x.lists["cu_seqlens_q"]
    assert all(map(lambda a, b: a is b, (serving.lengths, serving.page_table, serving.cu_seqlens_q), lists))
    assert (serving.added, serving.max_seqlen_q, serving.indptr, serving.leftpad) == (0, 2, None, None)
    assert others == [0.25, Variant(True, -1, -1, 0, 2.0), sink, 3, 0, out]
    if given_out:
        assert got[1].isfinite().all() and out._version > version


def test_a_plain_call_that_is_wrong_is_not_launched(launches):
    """Also one that looks like a right one before it."""
    x = case(ragged=False)
    attend = fa3.flash_attn_with_kvcache
    x.call(attend, cache_seqlens=5)
    for wrong, match in (
        (dict(cache_seqlens=17), "17 together, but there is room for 16"),
        (dict(cache_seqlens=-1), "cache_seqlens is -1"),
        (dict(softmax_scale=-1.0), "softmax_scale is -1"),
        (dict(split_size=1), "split_size is 1"),
    ):
        with pytest.raises(ValueError, match=match):
            x.call(attend, **{"cache_seqlens": 5, **wrong})
    assert len(launches) == 1


def test_lengths_of_pages_in_csr_form(monkeypatch):
    calls, attend = [], ops_kvcache.attend
    monkeypatch.setattr(ops_kvcache, "attend", lambda call: (calls.append(call.serving), attend(call))[1])
    x = make([1, 1, 1], [9, 0, 5], page_size=4, csr=True)
    x.call(fa3.flash_attn_with_kvcache)
    assert calls[0].lengths.tolist() == [9, 0, 5] and calls[0].lengths.dtype == torch.int32
    assert calls[0].page_table is x.lists["kv_indices"] and calls[0].indptr is x.lists["kv_indptr"]
