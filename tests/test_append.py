"""fa3.append on CPU tensors against loops over single rows: caches, pages, lists, rotary, errors, compilers."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3 import ops_append
from fa3.append import append
from tests.append_case import CACHES, LAYOUTS, Case, expected, make, whole

ROTARY = ("none", "interleaved", "neox")


def verify(case: Case, call=append) -> None:
    """Bit for bit, and of all memory around the caches."""
    before, (q, k_memory, v_memory) = case.q.clone(), expected(case)
    got = call(*case)
    assert torch.equal(got, q) and torch.equal(case.q, before)
    assert (got is case.q) == (case.cos is None) or call is not append
    assert torch.equal(whole(case.k_cache), k_memory) and torch.equal(whole(case.v_cache), v_memory)


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", CACHES)
def test_grid(cache, layout, rotary):
    for i, (ragged_q, ragged_k) in enumerate(itertools.product((False, True), repeat=2)):
        options = dict(ragged_q=ragged_q, ragged_k=ragged_k, own=i % 2 == 0, has_rotary_seqlens=i > 1, seed=i)
        verify(make(cache, layout, rotary, **options))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("table", [None, "float32"])
def test_types(dtype, table):
    for rotary, rotary_dim in (("interleaved", 32), ("neox", 32), ("neox", 16)):
        verify(make("pages", rotary=rotary, rotary_dim=rotary_dim, dtype=dtype, table_dtype=table))


def test_a_length_for_all():
    verify(make(has_lengths=False))
    verify(make("csr", has_lengths=False, rotary="interleaved", ragged_k=True))


def test_q_alone():
    case = make(has_new=False)
    verify(case)
    assert (whole(case.k_cache) == 7).all()
    case = make(has_new=False, rotary="none")
    assert append(*case) is case.q


def test_padding_of_ragged_tensors():
    """Rows of k that belong to no sequence are not written anywhere; those of q are copied."""
    case = make("pages", ragged_q=True, ragged_k=True)
    first, end = int(case.serving.cu_seqlens_q[0]), int(case.serving.cu_seqlens_q[-1])
    got = append(*case)
    assert first == 2 and len(got) > end
    assert torch.equal(got[:first], case.q[:first]) and torch.equal(got[end:], case.q[end:])
    assert not torch.equal(got[first:end], case.q[first:end])


def test_nothing():
    for options in (dict(lengths=()), dict(new=0), dict(queries=0), dict(lengths=(), ragged_q=True, ragged_k=True)):
        verify(make("pages", **options))


@settings(deadline=None, max_examples=60)
@given(
    cache=st.sampled_from(CACHES), layout=st.sampled_from(LAYOUTS), rotary=st.sampled_from(ROTARY),
    lengths=st.lists(st.integers(0, 20), max_size=5), new=st.integers(0, 9), queries=st.integers(0, 4),
    page_size=st.integers(1, 7), ragged_q=st.booleans(), ragged_k=st.booleans(), own=st.booleans(),
    has_lengths=st.booleans(), has_rotary_seqlens=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_drawn(**options):
    verify(make(options.pop("cache"), options.pop("layout"), options.pop("rotary"), **options))


# What lists on the CPU may not say


def assert_untouched(case: Case, message: str) -> None:
    before = whole(case.k_cache).clone(), whole(case.v_cache).clone()
    with pytest.raises(ValueError, match=message):
        append(*case)
    assert torch.equal(whole(case.k_cache), before[0]) and torch.equal(whole(case.v_cache), before[1])


def test_past_the_cache():
    assert_untouched(
        make(lengths=(3, 8), room=-1), r"sequence 1 has 8 rows in the cache and 2 new ones; .* most 9 rows"
    )
    case = make("pages", lengths=(1, 8), page_size=3)
    table = case.serving.page_table[:, :3]
    assert_untouched(case._replace(serving=case.serving._replace(page_table=table)), "sequence 1 .* at most 9 rows")
    case.serving.lengths[0] = -1
    assert_untouched(case, "sequence 0 has -1 rows")


def test_places_that_do_not_exist():
    case = make("pages", lengths=(1, 8))
    case.serving.page_table[1, 2] = case.k_cache.shape[0]
    assert_untouched(case, r"page_table of sequence 1 holds .*; allowed: 0 to")
    case = make("batch_idx")
    case.serving.batch_idx[2] = -1
    assert_untouched(case, r"cache_batch_idx of sequence 2 holds \[-1\]")
    case = make("csr")
    case.serving.indptr[-1] += 1
    assert_untouched(case, "indptr of sequence 2 says pages")
    case = make(ragged_k=True)
    case.serving.cu_seqlens_k_new[-1] = 99
    assert_untouched(case, "cu_seqlens_k_new is .*ascending from 0 or more")


def test_positions_that_the_tables_do_not_have():
    case = make(lengths=(3, 8))
    assert_untouched(case._replace(cos=case.cos[:9], sin=case.sin[:9]), r"positions 8 to 9; allowed: 0 to 8")
    assert_untouched(case._replace(rotary_seqlens=torch.tensor([0, -1], dtype=torch.int32)), "positions -1 to")


# Wrong arguments


def lists(**fields):
    return lambda c: c._replace(serving=c.serving._replace(**fields))


INT = torch.zeros(3, dtype=torch.int32)
WRONG = [
    (lambda c: c._replace(k=None), ValueError, "k is None and v is not"),
    (lambda c: c._replace(sin=None), ValueError, "rotary_sin is None and the other table is not"),
    (lambda c: c._replace(cos=None, sin=None, rotary_seqlens=INT), ValueError, "without rotary_cos"),
    (lambda c: c._replace(k=c.k[:2]), ValueError, "k and v must have one shape"),
    (lambda c: c._replace(k=c.k[:2], v=c.v[:2]), ValueError, "as many sequences as q, 3, got 2"),
    (lambda c: c._replace(k=c.k[..., :16]), ValueError, r"k must have the heads and head_dim of k_cache, \(2, 32\)"),
    (lambda c: c._replace(v=c.v.float()), TypeError, "v must have the dtype of q"),
    (lambda c: c._replace(v=c.v.to("meta")), ValueError, "v must be on the device of q"),
    (lambda c: c._replace(k=c.k[0]), ValueError, r"k must be \(batch, seqlen, heads, head_dim\) without"),
    (lambda c: c._replace(q=c.q.transpose(2, 3)), ValueError, "q has stride 32 in its last dimension"),
    (lambda c: c._replace(q=c.q.int()), TypeError, "q has dtype torch.int32 on cpu"),
    (lambda c: c._replace(q="q"), TypeError, "q must be a torch.Tensor"),
    (lambda c: c._replace(k_cache=c.k_cache[0]), ValueError, "k_cache must have 4 dimensions"),
    (lambda c: c._replace(v_cache=c.v_cache[1:]), ValueError, "k_cache and v_cache must have one shape"),
    (lambda c: c._replace(k_cache=c.k_cache[..., :24]), ValueError, "k_cache must have the head_dim of q, 32, got 24"),
    (lambda c: c._replace(cos=c.cos[:, :7], sin=c.sin[:, :7]), ValueError, "rotary_cos has shape .* multiple of 16"),
    (lambda c: c._replace(cos=torch.ones(50, 24), sin=torch.ones(50, 24)), ValueError, "rotary_dim 48; allowed: up to"),
    (lambda c: c._replace(sin=c.sin.float()), ValueError, "must be alike"),
    (lambda c: c._replace(cos=c.cos.half()), TypeError, "rotary_cos has dtype torch.float16"),
    (lambda c: c._replace(rotary_seqlens=INT[:2]), ValueError, r"rotary_seqlens must have shape \(3\), got \(2,\)"),
    (lambda c: c._replace(start=-1), ValueError, "start is -1"),
    (lambda c: c._replace(start=True), TypeError, "start must be an int"),
    (lists(lengths=INT.long()), TypeError, "cache_seqlens has dtype torch.int64; allowed: torch.int32"),
    (lists(lengths=INT[:2]), ValueError, r"cache_seqlens must have shape \(3\), got \(2,\)"),
    (lists(batch_idx=INT), ValueError, "cache_batch_idx is given with a page_table"),
    (lists(page_table=None, indptr=INT), ValueError, "indptr is given without a page_table"),
    (lists(indptr=INT), ValueError, r"indptr must have shape \(4\)"),
    (lists(page_table=INT), ValueError, r"page_table must have shape \(3, any\), got \(3,\)"),
    (lists(cu_seqlens_q=INT), ValueError, r"q must be \(total, heads, head_dim\) with cu_seqlens_q"),
]


@pytest.mark.parametrize(("edit", "error", "message"), WRONG, ids=[message[:40] for *_, message in WRONG])
def test_wrong_arguments(edit, error, message):
    case = edit(make("pages"))
    before = whole(make("pages").k_cache)
    with pytest.raises(error, match=message):
        append(*case)
    assert (before == 7).all()


def test_gradients_are_refused():
    case = make()
    with pytest.raises(NotImplementedError, match="requires a gradient"):
        append(*case._replace(q=case.q.requires_grad_()))
    with torch.no_grad():
        verify(case)


# Compilers


def flat(case: Case):
    s = case.serving
    given = s.lengths, s.cu_seqlens_k_new, s.batch_idx, s.page_table, s.indptr, s.cu_seqlens_q
    return (*case[:5], *given, *case[6:])


@pytest.mark.parametrize("cache", CACHES)
def test_opcheck(cache):
    case = make(cache, ragged_q=cache == "pages", has_rotary_seqlens=True)
    assert set(torch.library.opcheck(ops_append._append_rotary, flat(case)).values()) == {"SUCCESS"}
    q_alone = flat(make(cache, has_new=False))
    assert set(torch.library.opcheck(ops_append._append_rotary, q_alone).values()) == {"SUCCESS"}
    plain = flat(make(cache, rotary="none"))
    assert set(torch.library.opcheck(ops_append._append, (*plain[:11], plain[-1])).values()) == {"SUCCESS"}


@pytest.mark.parametrize("rotary", ROTARY)
def test_compiled_as_one_graph(rotary):
    torch._dynamo.reset()
    compiled = torch.compile(append, backend="aot_eager", fullgraph=True)
    for i, cache in enumerate(CACHES):
        verify(make(cache, "one pool" if i % 2 else "contiguous", rotary), compiled)


def test_a_new_length_compiles_nothing_new():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(append, backend=counter, fullgraph=True)
    for lengths in ((3, 0, 7), (7, 1, 6), (0, 7, 7)):
        verify(make("batch_idx", lengths=lengths), compiled)
    assert counter.frame_count == 1


def test_versions_are_counted():
    case = make()
    before = case.k_cache._version, case.v_cache._version, case.q._version
    append(*case)
    assert case.k_cache._version > before[0] and case.v_cache._version > before[1] and case.q._version == before[2]
