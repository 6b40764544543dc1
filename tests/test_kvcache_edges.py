"""flash_attn_with_kvcache at its limits, as serving engines call it, and what a step of decoding is not asked twice."""

import pytest
import torch
from torch import Tensor

import fa3
from fa3 import interface_kvcache, launch_decode, ops_kvcache
from fa3.device import ASSUMED
from fa3.problem_kvcache import KEYS_MAX, TILES_MAX, check_decode
from fa3.serving import Serving
from fa3.variant import CHUNK_MAX
from tests.kvcache import NO_PAGE, assert_is, formula, ints, make

attend = fa3.flash_attn_with_kvcache


def test_as_sglang_calls_it():
    """It hands cu_seqlens_k_new over in every call, and new rows in none; FlashAttention-3 reads it for these alone."""
    x = make([2, 1, 4], [9, 5, 4], page_size=4, heads_kv=2, ratio=2)
    for offsets in (ints([0, 9, 14, 18]), ints([3])):
        out, lse, *_ = attend(
            q=x.q, k_cache=x.k_cache, v_cache=x.v_cache, page_table=x.lists["page_table"],
            cache_seqlens=x.lists["cache_seqlens"], cu_seqlens_q=x.lists["cu_seqlens_q"], cu_seqlens_k_new=offsets,
            max_seqlen_q=4, softmax_scale=0.25, causal=True, window_size=(-1, -1), softcap=0.0, k_descale=None,
            v_descale=None, return_softmax_lse=True, num_splits=0,
        )  # fmt: skip
        assert_is(x, (out, lse), formula(x, causal=True))
    csr = make([1, 1], [9, 5], page_size=4, csr=True)
    assert_is(csr, csr.call(attend, cu_seqlens_k_new=ints([0, 3, 5])), formula(csr))


def test_as_vllm_calls_it_into_rows_that_it_keeps():
    """A captured batch has more rows than there are tokens, a table more columns, and out rows for all."""
    x = make([1, 2], [9, 5], page_size=16, heads_kv=2, ratio=2)
    x.q = torch.cat([x.q, x.q.new_full((3, 4, 16), float("nan"))])
    out = x.q.new_full((6, 4, 24), 7.0)
    options = dict(causal=True, window_size=[-1, -1], scheduler_metadata=ints([0] * 9), num_splits=32, out=out)
    got, lse = x.call(attend, **options)
    assert got is out and (out[3:] == 7.0).all()
    for (wanted, wanted_lse), rows in zip(formula(x, causal=True), (slice(0, 1), slice(1, 3))):
        torch.testing.assert_close(out[rows], wanted)
        torch.testing.assert_close(lse[:, rows], wanted_lse)


@pytest.mark.parametrize("ragged", [False, True])
def test_cache_batch_idx_takes_rows_of_a_page_table(ragged):
    """As in FlashAttention-3: new rows go where these say, and other rows of the table are not looked at."""
    x = make([2, 2], [9, 5], page_size=4, heads_kv=2, ratio=2, ragged=ragged)
    table = torch.full((4, x.lists["page_table"].shape[1]), NO_PAGE, dtype=torch.int32)
    table[3], table[1] = x.lists["page_table"]
    x.lists.update(page_table=table, cache_batch_idx=ints([3, 1]))
    assert_is(x, x.call(attend, causal=True), formula(x, causal=True))
    new = [keys[-1:].clone() for keys in x.keys], [values[-1:].clone() for values in x.values]
    for cache, at in ((x.k_cache, 8), (x.v_cache, 8), (x.k_cache, 4), (x.v_cache, 4)):
        cache[table[3 if at == 8 else 1, at // 4], at % 4] = float("nan")
    k, v = (torch.stack(rows) for rows in new)
    assert_is(x, x.call(attend, causal=True, k=k, v=v, cache_seqlens=ints([8, 4])), formula(x, causal=True))


@pytest.mark.parametrize("chunk", [2**30, 2**31 - 1, 2**31, 2**60])
def test_a_chunk_beyond_all_keys_hides_only_what_lies_before_the_first(chunk):
    """It reaches the kernel as a number of 32 bits. Queries before key 0 stand in the chunk before."""
    x = make([5], [3])
    assert_is(x, x.call(attend, attention_chunk=chunk), formula(x, attention_chunk=chunk))
    assert x.call(attend, attention_chunk=chunk)[1][:, :2].isneginf().all()
    assert fa3.variant.variant_of(False, (-1, -1), chunk, 0.0).attention_chunk == CHUNK_MAX


def test_windows_and_splits_beyond_all_keys():
    x = make([2], [70])
    for far in (2**31, 2**60):
        assert_is(x, x.call(attend, window_size=(far, far)), formula(x))
    assert_is(x, x.call(attend, split_size=KEYS_MAX // 64 * 64), formula(x))
    for options in (dict(num_splits=KEYS_MAX + 1), dict(split_size=2**31), dict(split_size=2**40)):
        ((name, value),) = options.items()
        with pytest.raises(ValueError, match=f"{name} is {value}; allowed: at most {KEYS_MAX}"):
            x.call(attend, **options)


def check(q: Tensor, k_cache: Tensor, **lists):
    empty = Serving(None, 0, None, None, None, None, None, None, 0)
    return check_decode(q, k_cache, k_cache, empty._replace(**lists), 1.0, None, 0, 0, None)


def test_more_rows_than_the_device_counts():
    one = torch.zeros(1, 1, 1, 8)
    assert check(one, one.expand(1, KEYS_MAX, 1, 8)).capacity == KEYS_MAX
    with pytest.raises(ValueError, match=f"have {KEYS_MAX + 1} rows a sequence; allowed: at most {KEYS_MAX}"):
        check(one, one.expand(1, KEYS_MAX + 1, 1, 8))


def test_more_query_tiles_than_a_grid_has():
    one, most = torch.zeros(1, 1, 1, 8), TILES_MAX * 64
    assert check(one.expand(1, most // 8, 16, 8), one.expand(1, 9, 2, 8)).seqlen_q == most // 8
    with pytest.raises(ValueError, match=f"{most // 8 + 1} queries of 8 heads for each of k_cache, {most + 8} rows"):
        check(one.expand(1, most // 8 + 1, 16, 8), one.expand(1, 9, 2, 8))
    ragged = one[0].expand(most + 1, 1, 8)
    assert check(ragged, one, cu_seqlens_q=ints([0, 5]), max_seqlen_q=most).total_q == most + 1
    with pytest.raises(ValueError, match=f"up to {most + 1} queries of 1 heads"):
        check(ragged, one, cu_seqlens_q=ints([0, 5]), max_seqlen_q=2**40)


def fits(x: Tensor, dtype: torch.dtype, dims: int, step: int = 8) -> bool:
    strides = [stride for size, stride in zip(x.shape, x.stride()) if size > 1]
    return x.dtype == dtype and x.dim() == dims and x.stride(-1) == 1 and all(s % step == 0 for s in strides[:-1])


@pytest.fixture
def launched(monkeypatch):
    """Calls of the compiled function, which refuses what tests/test_compiled_call.py says that it does."""
    calls = []

    def load(spec, config):
        def run(*arguments):
            q, k, v, out, lse, _, table, sink, lists, *_ = arguments
            right = [fits(x, torch.bfloat16, 4) for x in (q, k, v)] + [fits(out, torch.bfloat16, 4, 2)]
            right += [x.dtype == torch.int32 and x.dim() == 1 and x.stride(0) == 1 for x in lists[:6]]
            right += [table is None or (table.dtype == torch.int32 and table.dim() == 2)]
            right += [q.shape[:3] == out.shape[:3], out.shape[3] == v.shape[3], k.shape[:3] == v.shape[:3]]
            right += [q.shape[3] == k.shape[3], sink is None or sink.shape == q.shape[2:3]]
            if not all(right):
                raise ValueError("as the compiled function does")
            calls.append(arguments)

        return run

    def is_plain(q, k_cache, v_cache, others):
        return all(x is None or type(x) is Tensor for x in (q, k_cache, v_cache, *others))

    monkeypatch.setattr(launch_decode, "load", load)
    monkeypatch.setattr(launch_decode, "chip", lambda index: ASSUMED)
    monkeypatch.setattr(launch_decode, "_plans", {})
    monkeypatch.setattr(interface_kvcache, "_valid", {})
    monkeypatch.setattr(ops_kvcache, "is_plain", is_plain)
    return calls


def right_calls():
    q, cache = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16), torch.zeros(2, 128, 2, 64, dtype=torch.bfloat16)
    lengths, table = ints([5, 9]), ints([0, 1, 2, 3]).view(2, 2)
    pages = dict(k_cache=cache.view(4, 64, 2, 64), v_cache=cache.view(4, 64, 2, 64), page_table=table)
    return {
        "dense": dict(q=q, k_cache=cache, v_cache=cache, cache_seqlens=lengths, causal=True),
        "paged": dict(q=q, **pages, cache_seqlens=lengths, causal=True),
        "ragged": dict(q=q[:, 0], **pages, cache_seqlens=lengths, cu_seqlens_q=ints([0, 1, 2]), max_seqlen_q=1),
        "rich": dict(q=q, **pages, cache_seqlens=lengths, s_aux=torch.zeros(4, dtype=torch.bfloat16), out=q + 1),
    }


WRONG = [
    ("dense", TypeError, "k_cache must have the dtype of q", lambda x: dict(k_cache=x["k_cache"].half())),
    ("dense", TypeError, "cache_seqlens has dtype torch", lambda x: dict(cache_seqlens=x["cache_seqlens"].long())),
    ("dense", ValueError, "cache_seqlens must have one element a sequence", lambda x: dict(cache_seqlens=ints([1]))),
    ("dense", ValueError, "cache_seqlens must have 1 dimension", lambda x: dict(cache_seqlens=ints([1, 2])[:, None])),
    ("dense", ValueError, "q must have 4 dimensions", lambda x: dict(q=x["q"][0])),
    ("dense", ValueError, "q must have 4 dimensions", lambda x: dict(q=x["q"][0, 0, 0])),
    ("dense", ValueError, "k_cache must have 4 dim", lambda x: dict(k_cache=x["k_cache"][0], cache_seqlens=None)),
    ("dense", ValueError, "k_cache must have 4 dim", lambda x: dict(k_cache=x["k_cache"][0, 0, 0], cache_seqlens=None)),
    ("dense", ValueError, "q has head_dim 0", lambda x: dict(q=x["q"][..., :0])),
    ("dense", ValueError, "q has stride 2 in its last", lambda x: dict(q=x["q"].repeat(1, 1, 1, 2)[..., ::2])),
    ("dense", ValueError, "k_cache and v_cache must have one shape", lambda x: dict(v_cache=x["v_cache"][:, :64])),
    ("dense", ValueError, "multiple of that of k_cache", lambda x: dict(q=x["q"][:, :, :3])),
    ("dense", ValueError, "500 together, but there is room for 128", lambda x: dict(cache_seqlens=500)),
    ("paged", ValueError, "page_table needs cache_seqlens", lambda x: dict(cache_seqlens=None)),
    ("paged", ValueError, "page_table must have 2 dimensions", lambda x: dict(page_table=x["page_table"][0])),
    ("paged", TypeError, "page_table has dtype torch.int64", lambda x: dict(page_table=x["page_table"].long())),
    ("paged", ValueError, "page_table must have one row a sequence", lambda x: dict(page_table=x["page_table"][:1])),
    ("paged", ValueError, "cache_batch_idx must have one", lambda x: dict(cache_batch_idx=ints([0, 1, 1]))),
    ("ragged", ValueError, "q must have 3 dimensions", lambda x: dict(q=x["q"][:, None])),
    ("ragged", ValueError, "must have one element a sequence, 1", lambda x: dict(cu_seqlens_q=ints([0, 2]))),
    ("ragged", ValueError, "max_seqlen_q is -1", lambda x: dict(max_seqlen_q=-1)),
    ("ragged", TypeError, "max_seqlen_q must be an int", lambda x: dict(max_seqlen_q=True)),
    ("rich", ValueError, "learnable_sink must have shape", lambda x: dict(s_aux=x["s_aux"][:3])),
    ("rich", TypeError, "learnable_sink has dtype torch.int32", lambda x: dict(s_aux=x["s_aux"].int())),
    ("rich", ValueError, "out must have shape", lambda x: dict(out=x["out"][:1])),
    ("rich", ValueError, "out must have shape", lambda x: dict(out=x["out"][..., :56])),
    ("rich", TypeError, "out must have the dtype of q", lambda x: dict(out=x["out"].half())),
    ("rich", ValueError, "out has strides .*none may be 0", lambda x: dict(out=x["out"][:1].expand(2, 1, 4, 64))),
]  # fmt: skip


@pytest.mark.parametrize("kind, error, match, change", WRONG)
def test_what_a_step_of_decoding_may_not_be_is_refused_by_the_launch(launched, kind, error, match, change):
    """As the first call, and after a right one like it."""
    right = right_calls()[kind]
    for calls in (0, 1):
        with pytest.raises(error, match=match):
            attend(**{**right, **change(right)})
        assert len(launched) == calls
        attend(**right)


@pytest.mark.parametrize("kind", ["dense", "paged", "ragged", "rich"])
def test_a_step_of_decoding_is_looked_at_once(launched, monkeypatch, kind):
    def never(*_):
        raise AssertionError("looked at")

    right = right_calls()[kind]
    attend(**right)
    for name in ("check_given", "check_flags", "check_scale"):
        monkeypatch.setattr(interface_kvcache, name, never)
    monkeypatch.setattr(launch_decode, "check_decode", never)
    attend(**right)
    assert len(launched) == 2 and interface_kvcache._valid == {}


def test_new_rows_are_looked_at_before_they_are_written(launched):
    right = right_calls()["dense"]
    with pytest.raises(ValueError, match="v must have shape"):
        attend(**right, k=right["k_cache"][:, :1], v=right["v_cache"][:, :2])
    assert launched == []
