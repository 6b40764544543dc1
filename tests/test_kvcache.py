"""Attention to a cache on CPU tensors: numbers against the formula, NaN in all that no query may see."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa3
from fa3.reference import attention
from fa3.reference_kvcache import kvcache_attention, sequences_of
from fa3.serving import Serving
from fa3.variant import variant_of
from tests.kvcache import NO_PAGE, assert_is, formula, ints, make, with_append

FA3 = [
    *["q", "k_cache", "v_cache", ("k", None), ("v", None), ("qv", None), ("rotary_cos", None), ("rotary_sin", None)],
    *[("cache_seqlens", None), ("cache_batch_idx", None), ("cache_leftpad", None), ("page_table", None)],
    *[("cu_seqlens_q", None), ("cu_seqlens_k_new", None), ("max_seqlen_q", None), ("rotary_seqlens", None)],
    *[("q_descale", None), ("k_descale", None), ("v_descale", None), ("softmax_scale", None), ("causal", False)],
    *[("window_size", (-1, -1)), ("attention_chunk", 0), ("softcap", 0.0), ("rotary_interleaved", True)],
    *[("scheduler_metadata", None), ("num_splits", 0), ("pack_gqa", None), ("sm_margin", 0)],
    ("return_softmax_lse", False),
]
attend = fa3.flash_attn_with_kvcache
length = st.integers(0, 40)
side = st.sampled_from([-1, None, 0, 1, 5, 17])


def test_signature_is_flash_attention_3_s():
    parameters = inspect.signature(attend).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name if p.default is p.empty else (p.name, p.default) for p in positional] == FA3
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == {
        **dict.fromkeys(["out", "learnable_sink", "s_aux", "block_table"]),
        **dict.fromkeys(["kv_indptr", "kv_indices", "kv_last_page_len"]),
        "split_size": 0,
    }


@st.composite
def layouts(draw, batch):
    kind = draw(st.sampled_from(["dense", "permuted", "paged", "csr"]))
    if kind in ("paged", "csr"):
        return dict(page_size=draw(st.sampled_from([1, 2, 3, 7, 16, 64])), csr=kind == "csr")
    pads = draw(st.none() | st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    return dict(permuted=kind == "permuted", leftpad=pads)


@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_float64_is_the_formula(data):
    """Lengths of 0 anywhere, more queries than keys, any mask and sink, wherever the rows lie."""
    batch = data.draw(st.integers(1, 4))
    of_k = data.draw(st.lists(length, min_size=batch, max_size=batch))
    is_ragged = data.draw(st.booleans())
    count = st.integers(0, 6)
    of_q = data.draw(st.lists(count, min_size=batch, max_size=batch)) if is_ragged else [data.draw(count)] * batch
    heads = dict(heads_kv=data.draw(st.integers(1, 2)), ratio=data.draw(st.integers(1, 3)))
    x = make(of_q, of_k, ragged=is_ragged, **data.draw(layouts(batch)), **heads, seed=data.draw(st.integers(0, 99)))
    sinks = torch.tensor([-math.inf, 40.0, -3.0, 0.0, 1.0, 2.0])[: x.q.shape[-2]]
    options = dict(
        causal=data.draw(st.booleans()),
        window_size=(data.draw(side), data.draw(side)),
        attention_chunk=data.draw(st.sampled_from([0, 1, 4, 11])),
        softcap=data.draw(st.sampled_from([0.0, 0.7, 20.0])),
        softmax_scale=data.draw(st.sampled_from([None, 0.0, 0.3, 3.0])),
        learnable_sink=data.draw(st.sampled_from([None, sinks])),
    )
    got = x.call(attend, **options)
    assert_is(x, got, formula(x, **options))
    into = torch.full_like(got[0], 7.0)
    assert x.call(attend, **options, out=into)[0] is into and torch.equal(into, got[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page_size", [0, 16])
def test_other_types_are_near_the_formula(page_size, dtype):
    sizes = dict(page_size=page_size, heads_kv=2, ratio=4, head_dim=64, head_dim_v=64)
    x = make([1, 3, 0, 2], [100, 3, 17, 0], **sizes, dtype=dtype)
    options = dict(causal=True, learnable_sink=torch.linspace(-1, 1, 8, dtype=torch.bfloat16))
    error = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    assert_is(x, x.call(attend, **options), formula(x, **options), error)


def test_layouts_of_one_cache_agree_bit_by_bit():
    """Dense, permuted, padded on the left, paged, in CSR form, cut in rows or ragged."""
    one = dict(heads_kv=2, ratio=2, dtype=torch.bfloat16, seed=3)
    wanted = None
    for layout in (
        dict(),
        dict(ragged=False),
        dict(permuted=True),
        dict(leftpad=[4, 0, 9]),
        dict(page_size=1),
        dict(page_size=5),
        dict(page_size=64, csr=True),
    ):
        x = make([2, 2, 2], [30, 1, 64], **one, **layout)
        out, lse = x.call(attend, causal=True)
        got = out.reshape(6, 4, 24), lse if lse.dim() == 2 else lse.transpose(0, 1).reshape(4, 6)
        wanted = got if wanted is None else wanted
        assert got[0].isfinite().all() and all(map(torch.equal, got, wanted)), layout


@pytest.mark.parametrize("layout", [dict(), dict(page_size=4), dict(page_size=4, csr=True)])
def test_what_a_window_leaves_out_is_never_read(layout):
    """Rows, and with pages their numbers too: an engine may have given them to others."""
    x = make([2, 1], [41, 9], **layout)
    options = dict(causal=True, window_size=(6, 0))
    wanted = formula(x, **options)
    if layout:
        pages = x.lists["kv_indices"] if "csr" in layout else x.lists["page_table"][0]
        for at in range((41 - 2 - 6) // 4):
            x.k_cache[pages[at]] = x.v_cache[pages[at]] = math.nan
            pages[at] = NO_PAGE
    else:
        x.k_cache[0, : 41 - 2 - 6] = x.v_cache[0, : 41 - 2 - 6] = math.nan
    assert_is(x, x.call(attend, **options), wanted)


@pytest.mark.parametrize("layout", [dict(permuted=True, leftpad=[3, 0, 1]), dict(page_size=7)])
@settings(deadline=None, max_examples=25)
@given(boundaries=st.lists(st.integers(0, 50), max_size=5), size=st.sampled_from([0, 1, 8, 64]), sink=st.booleans())
def test_parts_join_to_the_whole_and_a_sink_counts_once(layout, boundaries, size, sink):
    x = make([3, 0, 2], [50, 9, 1], heads_kv=2, ratio=2, **layout)
    of_head = torch.tensor([1.0, -2.0, 3.0, 0.5]) if sink else None
    serving = serving_of(x)
    for mask in (dict(causal=True), dict(window_size=(4, 2)), dict(attention_chunk=8)):
        variant = variant_of(*({"causal": False, "window_size": (-1, -1), "attention_chunk": 0} | mask).values(), 5.0)
        splits = size if size else [min(b, n) for b, n in zip(sorted(boundaries), [50] * 5)]
        got = kvcache_attention(x.q, x.k_cache, x.v_cache, serving, variant, None, of_head, splits)
        assert_is(x, got, formula(x, softcap=5.0, learnable_sink=of_head, **mask))


def serving_of(x):
    found = x.lists
    names = "cache_seqlens", "cu_seqlens_k_new", "cache_leftpad", "cache_batch_idx", "page_table", "kv_indptr"
    lengths, *others = (found.get(name) for name in names)
    return Serving(lengths, 0, *others, found.get("cu_seqlens_q"), found.get("max_seqlen_q", x.q.shape[1]))


def test_split_size_and_num_splits_change_nothing_but_the_rounding():
    """B31: any number of splits, more than there are keys too, and a cache with much room behind its rows."""
    x = make([1], [4096], heads_kv=8, ratio=2, head_dim=128, head_dim_v=128, dtype=torch.bfloat16)
    whole, lse = x.call(attend)
    for options in (dict(num_splits=1), dict(num_splits=128), dict(split_size=64), dict(split_size=8192)):
        out, found = x.call(attend, **options)
        torch.testing.assert_close(out, whole, rtol=1e-2, atol=5e-4)
        torch.testing.assert_close(found, lse, rtol=0, atol=1e-4)
    serving = serving_of(x)
    for parts in (2, 3, 7, 16, 32, 64, 128):
        splits = [i * 4096 // parts for i in range(1, parts)]
        out, found = kvcache_attention(x.q, x.k_cache, x.v_cache, serving, splits=splits)
        torch.testing.assert_close(out, whole, rtol=1e-2, atol=5e-4)
        torch.testing.assert_close(found, lse, rtol=0, atol=1e-4)
    roomy = make([1], [4096], spare=9000, heads_kv=8, ratio=2, head_dim=128, head_dim_v=128, dtype=torch.bfloat16)
    assert torch.equal(roomy.call(attend)[0], whole)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("keys", [1, 17, 255, 257, 4097])
def test_keys_past_the_end_weigh_nothing(keys, page_size, causal):
    """B06: q = 0 gives the mean of V and ln of the number of keys."""
    x = make([1], [keys], page_size=page_size, spare=8192 if not page_size else 3, head_dim=128, dtype=torch.bfloat16)
    for cache in (x.k_cache, x.v_cache):
        cache.nan_to_num_(7.0)
    x.q.zero_()
    out, lse = x.call(attend, causal=causal)
    mean = x.values[0].double().mean(0)
    torch.testing.assert_close(out[0].double(), mean, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse[0, 0], torch.tensor(math.log(keys)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [0, 16])
@pytest.mark.parametrize("page_size", [0, 16])
def test_scores_far_from_zero(page_size, splits):
    """B07: no finite number stands for minus infinity, and nothing overflows."""
    x = make([5], [97], page_size=page_size, heads_kv=2, ratio=2, head_dim=128, dtype=torch.bfloat16)
    for tensor, value in ((x.q, 256), (x.queries[0], 256), (x.k_cache, -256), (x.keys[0], -256)):
        tensor[..., 0] = torch.where(tensor[..., 0].isnan(), math.nan, value)
    got = kvcache_attention(x.q, x.k_cache, x.v_cache, serving_of(x), splits=splits)
    assert_is(x, got, formula(x), 2e-2)
    assert (got[1] < -5700).all() and got[1].isfinite().all()
    large = make([1], [1], page_size=page_size, head_dim=64, head_dim_v=64, dtype=torch.bfloat16)
    for tensor in (large.q, large.k_cache, large.v_cache):
        tensor[~tensor.isnan()] = 133120
    out, lse = kvcache_attention(large.q, large.k_cache, large.v_cache, serving_of(large), splits=splits)
    assert (out == 133120).all()
    torch.testing.assert_close(lse, torch.full_like(lse, 133120.0**2 * 8), rtol=1e-6, atol=0)


@pytest.mark.parametrize("splits", [0, 1024])
def test_lse_of_an_empty_sequence_among_others(splits):
    """B33: one query a sequence, GQA 32/8, lengths 4096, 0 and 513."""
    x = make([1, 1, 1], [4096, 0, 513], heads_kv=8, ratio=4, head_dim=128, dtype=torch.bfloat16)
    out, lse = kvcache_attention(x.q, x.k_cache, x.v_cache, serving_of(x), splits=splits)
    assert lse.shape == (32, 3) and torch.isneginf(lse[:, 1]).all() and not out[1].any()
    assert_is(x, (out, lse), formula(x), 2e-2)
    sink = torch.linspace(-4, 4, 32)
    out, lse = x.call(attend, s_aux=sink, num_splits=4)
    assert torch.equal(lse[:, 1], sink) and not out[1].any()


def test_one_row_is_plain_attention_rounded_as_the_tiles_are():
    """P is rounded to the inputs' type, the row sum is not."""
    x = make([4], [60], ragged=False, heads_kv=2, ratio=2, head_dim_v=16, dtype=torch.bfloat16)
    wanted, lse = attention(*(t[None].float() for t in (x.queries[0], x.keys[0], x.values[0])))
    out, found = x.call(attend)
    torch.testing.assert_close(found, lse)
    assert 0 < (out.float() - wanted).abs().max() < 2e-2
    assert not torch.equal(out, wanted.bfloat16())  # float32 all the way would give that


def test_the_length_as_an_int_or_not_at_all():
    x = make([2, 2], [33, 33], ragged=False, heads_kv=2)
    wanted = formula(x, causal=True)
    del x.lists["cache_seqlens"]
    assert_is(x, x.call(attend, cache_seqlens=33, causal=True), wanted)
    x.k_cache, x.v_cache = x.k_cache[:, :33], x.v_cache[:, :33]
    assert_is(x, x.call(attend, causal=True), wanted)


def test_rows_that_are_no_queries():
    """In front of the first sequence and behind the last; a given out keeps what it holds there."""
    x = make([2, 1], [9, 5], heads_kv=1, ratio=2)
    x.lists["cu_seqlens_q"] += 3
    x.q = torch.cat([torch.full((3, 2, 16), math.nan), x.q, torch.full((4, 2, 16), math.nan)]).double()
    sink = torch.ones(2)
    got = x.call(attend, s_aux=sink)
    assert_is(x, got, formula(x, learnable_sink=sink))
    rows = [0, 1, 2, 6, 7, 8, 9]
    assert not got[0][rows].any() and torch.isneginf(got[1][:, rows]).all()
    out = torch.full_like(got[0], 7.0)
    x.call(attend, out=out, s_aux=sink)
    assert (out[rows] == 7.0).all() and torch.equal(out[3:6], got[0][3:6])


@pytest.mark.parametrize("layout", [dict(), dict(permuted=True), dict(page_size=4), dict(page_size=4, csr=True)])
@pytest.mark.parametrize("way", ["tensor", "int", "ragged", "ragged int"])
def test_new_rows_are_written_and_attended_to(monkeypatch, layout, way):
    """The sequences without their last rows, which the call appends: nothing differs from having had them."""
    with_append(monkeypatch)
    is_csr, is_int, is_ragged = "csr" in layout, "int" in way, "ragged" in way
    new = [3, 0] if is_ragged else [2, 2]
    lengths = [10 + n for n in new] if is_int else [13, 2]
    x = make([2, 1], lengths, **layout, heads_kv=2)
    whole = [cache.clone() for cache in (x.k_cache, x.v_cache)]
    tails = [[t[len(t) - n :] for t, n in zip(sequences, new)] for sequences in (x.keys, x.values)]
    join = torch.cat if is_ragged else torch.stack
    k, v = (join(tail) for tail in tails)
    for cache, tail in zip((x.k_cache, x.v_cache), tails):
        for rows in tail:
            for row in rows:  # the cache does not have them yet
                cache[(cache == row).all(-1).all(-1)] = math.nan
    if not is_csr:
        x.lists["cache_seqlens"] = 10 if is_int else ints([n - m for n, m in zip(lengths, new)])
    more = dict(cu_seqlens_k_new=ints([0, new[0], sum(new)])) if is_ragged else {}
    got = x.call(attend, k=k, v=v, causal=True, **more)
    assert_is(x, got, formula(x, causal=True))
    for cache, wanted in zip((x.k_cache, x.v_cache), whole):
        torch.testing.assert_close(cache, wanted, rtol=0, atol=0, equal_nan=True)


def test_what_append_is_given(monkeypatch):
    """Where a query stands is told apart only where a mask makes a difference; q comes back rotated."""
    calls = []

    def spy(q, k_cache, v_cache, k, v, serving, cos, sin, rotary_seqlens, interleaved, own, start=0):
        calls.append((serving.added, rotary_seqlens, interleaved, own, start))
        return q * 2

    import sys
    import types

    module = types.ModuleType("fa3.append")
    module.append = spy
    monkeypatch.setitem(sys.modules, "fa3.append", module)
    x = make([1], [8], ragged=False)
    twice = formula(make([1], [8], ragged=False), softmax_scale=2 * 16**-0.5)
    table, k, v = torch.ones(99, 8, dtype=torch.float64), x.keys[0][None, 6:], x.values[0][None, 6:]
    rotary = dict(rotary_cos=table, rotary_sin=table)
    x.lists["cache_seqlens"] = ints([6])
    assert_is(x, x.call(attend, k=k, v=v, **rotary), twice)
    x.call(attend, k=k, v=v, causal=True, rotary_interleaved=False, **rotary)
    x.call(attend, k=k, v=v, window_size=(-1, 3))
    x.call(attend, k=k, v=v, window_size=(-1, None))
    x.call(attend, k=k, v=v, attention_chunk=3, cache_seqlens=6)
    where = ints([5])
    x.lists["cache_seqlens"] = ints([8])
    assert_is(x, x.call(attend, rotary_seqlens=where, **rotary), twice)
    assert calls == [
        (2, None, True, False, 0),
        (2, None, False, True, 0),
        (2, None, True, True, 0),
        (2, None, True, False, 0),
        (8, None, True, True, 6),
        (0, where, True, False, 0),
    ]


def test_metadata_is_empty_and_taken():
    x = make([1, 1], [5, 9], ragged=False, heads_kv=2)
    lengths = x.lists["cache_seqlens"]
    metadata = fa3.get_scheduler_metadata(2, 1, 9, 2, 2, 16, lengths, causal=True, page_size=16, num_splits=3)
    assert metadata.shape == (0,) and metadata.dtype == torch.int32 and metadata.device == lengths.device
    names = ["batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "cache_seqlens"]
    assert list(inspect.signature(fa3.get_scheduler_metadata).parameters)[:7] == names
    got = x.call(attend, scheduler_metadata=metadata, pack_gqa=False)
    assert_is(x, got, formula(x))
    with pytest.raises(TypeError, match="cache_seqlens.*int"):
        fa3.get_scheduler_metadata(2, 1, 9, 2, 2, 16, 9)


def test_other_names_of_arguments():
    x = make([1, 1], [5, 9], page_size=4, ragged=False, heads_kv=2)
    sink = torch.tensor([0.5, 2.0])
    wanted = formula(x, learnable_sink=sink)
    x.lists["block_table"] = x.lists.pop("page_table")
    assert_is(x, x.call(attend, s_aux=sink), wanted)


def test_where_sequences_are():
    x = make([2, 1], [9, 5], page_size=4)
    first, second = sequences_of(x.q, x.k_cache, serving_of(x))
    assert (first.queries, first.keys) == (range(0, 2), range(0, 9)) and second.queries == range(2, 3)
    variant = variant_of(True, (3, 0), 0, 0.0)
    assert first.intervals(variant) == [(4, 8), (5, 9)] and first.rows_seen(variant) == range(4, 9)
    assert second.rows_seen(variant_of(False, (-1, -1), 0, 0.0)) == range(0, 5)
