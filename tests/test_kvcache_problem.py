"""What flash_attn_with_kvcache refuses, and in which words. Each wrong call is a right one with one thing changed."""

import numpy as np
import pytest
import torch

import fa3
from fa3 import interface_kvcache
from fa3.arguments_kvcache import Given
from fa3.problem_kvcache import cache_problem
from tests.kvcache import assert_is, formula, ints, make, with_append
from tests.test_kvcache import serving_of

attend = fa3.flash_attn_with_kvcache
DENSE = dict(ragged=False, permuted=True, leftpad=[1, 0])
PAGED = dict(page_size=4)
CSR = dict(page_size=4, csr=True)


def case(heads_kv=2, ratio=2, **layout):
    lengths = [2, 2] if layout.get("ragged") is False else [2, 1]
    return make(lengths, [9, 5], heads_kv=heads_kv, ratio=ratio, **layout)


def refuses(x, error, match, **options):
    """The call raises, and the right one after it works."""
    with pytest.raises(error, match=match):
        attend(**{**dict(q=x.q, k_cache=x.k_cache, v_cache=x.v_cache), **x.lists, **options})
    assert_is(x, x.call(attend), formula(x))


half, ones = torch.ones(2, 1, 2, 16).double(), torch.ones
FP8 = torch.float8_e4m3fn

TENSORS = [
    (DENSE, TypeError, r"q must be a torch.Tensor, got list", lambda x: dict(q=[1])),
    (DENSE, TypeError, r"k_cache must be a torch.Tensor, got NoneType", lambda x: dict(k_cache=None)),
    (DENSE, TypeError, r"v_cache must be a dense", lambda x: dict(v_cache=x.v_cache.to_sparse())),
    (DENSE, TypeError, r"k_cache must have the dtype of q, .*float64, got .*float32",
     lambda x: dict(k_cache=x.k_cache.float())),
    (DENSE, TypeError, r"q has dtype torch.int32 on cpu; allowed",
     lambda x: {n: getattr(x, n).int() for n in ("q", "k_cache", "v_cache")}),
    (DENSE, NotImplementedError, r"cache of torch.float8_e4m3fn.*k_cache torch.float8",
     lambda x: dict(k_cache=x.k_cache.to(FP8))),
    (DENSE, ValueError, r"v_cache must be on the device of q, cpu, got meta",
     lambda x: dict(v_cache=x.v_cache.to("meta"))),
    (DENSE, ValueError, r"q must have 4 dimensions \(batch, seqlen_q.*got 3: \(4, 4, 16\)",
     lambda x: dict(q=x.q.flatten(0, 1))),
    (PAGED, ValueError, r"q must have 3 dimensions \(total_q.*got 4", lambda x: dict(q=x.q[None])),
    (PAGED, ValueError, r"k_cache must have 4 dimensions \(pages, page_size", lambda x: dict(k_cache=x.k_cache[0])),
    (DENSE, ValueError, r"v_cache must have 4 dimensions \(batch, seqlen,", lambda x: dict(v_cache=x.v_cache[0])),
    (DENSE, ValueError, r"one shape but for the last.*\(4, 13, 2, 16\) and \(4, 12, 2, 24\)",
     lambda x: dict(v_cache=x.v_cache[:, 1:])),
    (DENSE, ValueError, r"k_cache must have the head_dim of q, 8, got 16", lambda x: dict(q=x.q[..., :8])),
    (DENSE, ValueError, r"q has head_dim 12; allowed: multiples of 8 from 8 to 256", lambda x: dict(q=x.q[..., :12])),
    (DENSE, ValueError, r"v_cache has head_dim 20", lambda x: dict(v_cache=x.v_cache[..., :20])),
    (DENSE, ValueError, r"v_cache has head_dim 264", lambda x: dict(v_cache=ones(4, 13, 2, 264).double())),
    (DENSE, ValueError, r"q has stride 4 in its last",
     lambda x: dict(q=x.q.transpose(2, 3).contiguous().transpose(2, 3))),
    (PAGED, ValueError, r"k_cache has stride 2 in its last",
     lambda x: dict(k_cache=ones(9, 4, 2, 32).double()[..., ::2], v_cache=ones(9, 4, 2, 24).double())),
    (PAGED, ValueError, r"pages of 0 rows", lambda x: dict(k_cache=x.k_cache[:, :0], v_cache=x.v_cache[:, :0])),
    (DENSE, ValueError, r"batch size of q, 2, got 4; .*cache_batch_idx", lambda x: dict(cache_batch_idx=None)),
]  # fmt: skip
LISTS = [
    (DENSE, TypeError, r"cache_seqlens must be an int, a torch.Tensor or None, got float",
     lambda x: dict(cache_seqlens=3.0)),
    (DENSE, TypeError, r"cache_seqlens must be an int.*got bool", lambda x: dict(cache_seqlens=True)),
    (DENSE, ValueError, r"cache_seqlens is -1; allowed: 0", lambda x: dict(cache_seqlens=-1)),
    (DENSE, ValueError, r"are 14 together, but there is room for 13 rows", lambda x: dict(cache_seqlens=14)),
    (PAGED, ValueError, r"are 21 together, but there is room for 20 rows", lambda x: dict(cache_seqlens=21)),
    (DENSE, TypeError, r"cache_seqlens has dtype torch.int64; allowed: torch.int32",
     lambda x: dict(cache_seqlens=torch.tensor([1, 2]))),
    (DENSE, ValueError, r"cache_seqlens must have one element a sequence, 2, got 3",
     lambda x: dict(cache_seqlens=ints([1, 2, 3]))),
    (DENSE, ValueError, r"cache_seqlens must have 1 dimension, got 0", lambda x: dict(cache_seqlens=ints([1])[0])),
    (DENSE, ValueError, r"cache_seqlens\[1\] is -2; allowed: 0", lambda x: dict(cache_seqlens=ints([3, -2]))),
    (DENSE, ValueError, r"cache_seqlens\[1\].* 14 together, but there is room for 13 rows",
     lambda x: dict(cache_seqlens=ints([3, 14]))),
    (PAGED, ValueError, r"cache_seqlens\[0\].* 21 together, but there is room for 20 rows",
     lambda x: dict(cache_seqlens=ints([21, 4]))),
    (DENSE, ValueError, r"cache_leftpad\[0\] is 3; allowed: 0 to the sequence's length, 2",
     lambda x: dict(cache_seqlens=ints([2, 4]), cache_leftpad=ints([3, 0]))),
    (DENSE, ValueError, r"cache_leftpad\[1\] is -1", lambda x: dict(cache_leftpad=ints([0, -1]))),
    (DENSE, TypeError, r"cache_leftpad must be a torch.Tensor, got list", lambda x: dict(cache_leftpad=[1, 2])),
    (DENSE, ValueError, r"cache_batch_idx\[1\] is 4; allowed: 0 to 3", lambda x: dict(cache_batch_idx=ints([0, 4]))),
    (DENSE, ValueError, r"cache_batch_idx must be on the device of q",
     lambda x: dict(cache_batch_idx=ints([0, 1]).to("meta"))),
    (DENSE, TypeError, r"cache_batch_idx has dtype torch.bool",
     lambda x: dict(cache_batch_idx=torch.tensor([True, False]))),
    (PAGED, ValueError, r"page_table needs cache_seqlens, got None", lambda x: dict(cache_seqlens=None)),
    (PAGED, ValueError, r"page_table must have one row a sequence, 2, got 1",
     lambda x: dict(page_table=x.lists["page_table"][:1])),
    (PAGED, ValueError, r"page_table must have 2 dimensions, got 1", lambda x: dict(page_table=ints([1, 2]))),
    (PAGED, TypeError, r"page_table has dtype torch.int64", lambda x: dict(page_table=x.lists["page_table"].long())),
    (PAGED, ValueError, r"page_table\[0, 1\] is 99; allowed: 0 to 7",
     lambda x: dict(page_table=ints([0, 99, 1, 0, 1, 9]).view(2, 3))),
    (PAGED, ValueError, r"page_table\[1, 0\] is -1; allowed: 0 to 7",
     lambda x: dict(page_table=ints([0, 1, 1, -1, 1, 9]).view(2, 3))),
    (PAGED, ValueError, r"page_table and block_table are both given",
     lambda x: dict(block_table=x.lists["page_table"])),
    (PAGED, ValueError, r"cache_batch_idx\[1\] is 2; allowed: 0 to 1, the rows of page_table",
     lambda x: dict(cache_batch_idx=ints([0, 2]))),
    (PAGED, TypeError, r"cache_batch_idx has dtype torch.int64", lambda x: dict(cache_batch_idx=torch.tensor([0, 1]))),
    (CSR, ValueError, r"cache_batch_idx and kv_indices are both given.*permute",
     lambda x: dict(cache_batch_idx=ints([0, 1]))),
    (PAGED, ValueError, r"cu_seqlens_q must have batch \+ 1 elements, at least 1, got 0",
     lambda x: dict(cu_seqlens_q=ints([]))),
    (PAGED, TypeError, r"cu_seqlens_q has dtype torch.int64", lambda x: dict(cu_seqlens_q=torch.tensor([0, 2, 3]))),
    (PAGED, ValueError, r"cu_seqlens_q holds 1 after 2", lambda x: dict(cu_seqlens_q=ints([0, 2, 1]))),
    (PAGED, ValueError, r"cu_seqlens_q ends at 4, past total_q", lambda x: dict(cu_seqlens_q=ints([0, 2, 4]))),
    (PAGED, ValueError, r"max_seqlen_q is 1, but sequence 0 has 2 queries", lambda x: dict(max_seqlen_q=1)),
    (PAGED, ValueError, r"max_seqlen_q is -1; allowed: 0", lambda x: dict(max_seqlen_q=-1)),
    (PAGED, TypeError, r"max_seqlen_q must be an int", lambda x: dict(max_seqlen_q=2.0)),
]  # fmt: skip
PAGES = [
    (CSR, ValueError, r"kv_indptr and kv_last_page_len given without kv_indices", lambda x: dict(kv_indices=None)),
    (CSR, ValueError, r"kv_indptr and kv_indices given without kv_last_page_len",
     lambda x: dict(kv_last_page_len=None)),
    (CSR, ValueError, r"kv_indices and kv_last_page_len given without kv_indptr", lambda x: dict(kv_indptr=None)),
    (CSR, ValueError, r"page_table and kv_indptr are both given", lambda x: dict(page_table=ints([1, 2]).view(2, 1))),
    (CSR, ValueError, r"cache_seqlens and kv_indptr are both given", lambda x: dict(cache_seqlens=3)),
    (CSR, TypeError, r"kv_indptr has dtype torch.int64", lambda x: dict(kv_indptr=torch.tensor([0, 3, 5]))),
    (CSR, TypeError, r"kv_indices has dtype torch.int64", lambda x: dict(kv_indices=x.lists["kv_indices"].long())),
    (CSR, ValueError, r"kv_indices must have 1 dimension, got 2",
     lambda x: dict(kv_indices=x.lists["kv_indices"][None])),
    (CSR, ValueError, r"kv_indptr must have batch \+ 1 elements, 3, got 2", lambda x: dict(kv_indptr=ints([0, 3]))),
    (CSR, ValueError, r"kv_last_page_len must have one element a sequence, 2, got 1",
     lambda x: dict(kv_last_page_len=ints([1]))),
    (CSR, ValueError, r"kv_last_page_len\[1\] is 5; allowed: 1 to the page size, 4",
     lambda x: dict(kv_last_page_len=ints([1, 5]))),
    (CSR, ValueError, r"kv_last_page_len\[0\] is 0; allowed: 1", lambda x: dict(kv_last_page_len=ints([0, 1]))),
    (CSR, ValueError, r"kv_indptr holds 2 after 3", lambda x: dict(kv_indptr=ints([0, 3, 2]))),
    (CSR, ValueError, r"kv_indptr ends at 7, but kv_indices has 6 pages", lambda x: dict(kv_indptr=ints([0, 3, 7]))),
    (CSR, ValueError, r"kv_indices of sequence 1 at 2 is 2147483647; allowed: 0 to 7",
     lambda x: dict(kv_indptr=ints([0, 3, 6]))),
]  # fmt: skip
OPTIONS = [
    (DENSE, TypeError, r"causal must be True or False, got 1", lambda x: dict(causal=1)),
    (DENSE, TypeError, r"rotary_interleaved must be True or False", lambda x: dict(rotary_interleaved=None)),
    (DENSE, TypeError, r"return_softmax_lse must be True or False", lambda x: dict(return_softmax_lse="no")),
    (DENSE, TypeError, r"window_size must be a pair", lambda x: dict(window_size=3)),
    (DENSE, TypeError, r"window_size right must be an int or None, got float", lambda x: dict(window_size=(1, 2.0))),
    (DENSE, ValueError, r"attention_chunk is -1", lambda x: dict(attention_chunk=-1)),
    (DENSE, ValueError, r"softcap is -1.0", lambda x: dict(softcap=-1.0)),
    (DENSE, ValueError, r"softcap is nan", lambda x: dict(softcap=float("nan"))),
    (DENSE, ValueError, r"softmax_scale is -0.5", lambda x: dict(softmax_scale=-0.5)),
    (DENSE, TypeError, r"softmax_scale must be a float or None, got str", lambda x: dict(softmax_scale="1")),
    (DENSE, ValueError, r"num_splits is -1; allowed: 0", lambda x: dict(num_splits=-1)),
    (DENSE, TypeError, r"num_splits must be an int, got float", lambda x: dict(num_splits=2.0)),
    (DENSE, TypeError, r"num_splits must be an int, got bool", lambda x: dict(num_splits=True)),
    (DENSE, ValueError, r"split_size is 100; allowed: 0 .* multiples of 64", lambda x: dict(split_size=100)),
    (DENSE, ValueError, r"split_size is -64", lambda x: dict(split_size=-64)),
    (DENSE, ValueError, r"num_splits is 2 and split_size is 64; allowed: one",
     lambda x: dict(num_splits=2, split_size=64)),
    (DENSE, NotImplementedError, r"qv is not supported yet", lambda x: dict(qv=x.q)),
    (DENSE, NotImplementedError, r"k_descale is not supported yet", lambda x: dict(k_descale=ones(2, 2))),
    (DENSE, NotImplementedError, r"sm_margin=2 is not supported", lambda x: dict(sm_margin=2)),
    (DENSE, ValueError, r"sm_margin is -2", lambda x: dict(sm_margin=-2)),
    (DENSE, TypeError, r"sm_margin must be an int, got NoneType", lambda x: dict(sm_margin=None)),
    (DENSE, TypeError, r"pack_gqa must be True, False or None, got int", lambda x: dict(pack_gqa=1)),
    (DENSE, TypeError, r"scheduler_metadata must be a torch.Tensor or None, got int",
     lambda x: dict(scheduler_metadata=1)),
    (DENSE, ValueError, r"learnable_sink must have shape \(heads,\), \(4,\), got \(2,\)",
     lambda x: dict(s_aux=ones(2))),
    (DENSE, TypeError, r"learnable_sink has dtype torch.int64", lambda x: dict(s_aux=ones(4).long())),
    (DENSE, TypeError, r"learnable_sink must be a torch.Tensor, got float", lambda x: dict(learnable_sink=1.0)),
    (DENSE, ValueError, r"learnable_sink must be on the device of q",
     lambda x: dict(learnable_sink=ones(4, device="meta"))),
    (DENSE, ValueError, r"learnable_sink and s_aux are both given",
     lambda x: dict(learnable_sink=ones(4), s_aux=ones(4))),
    (DENSE, ValueError, r"out must have shape \(2, 2, 4, 24\), got \(2, 2, 4, 16\)", lambda x: dict(out=x.q)),
    (PAGED, ValueError, r"out must have shape \(3, 4, 24\), got \(2, 2, 4, 24\)",
     lambda x: dict(out=ones(2, 2, 4, 24).double())),
    (DENSE, TypeError, r"out must have the dtype of q", lambda x: dict(out=ones(2, 2, 4, 24))),
    (DENSE, ValueError, r"out must be on the device of q",
     lambda x: dict(out=ones(2, 2, 4, 24, device="meta").double())),
    (DENSE, ValueError, r"out has stride 2 in its last", lambda x: dict(out=ones(2, 2, 4, 48).double()[..., ::2])),
    (DENSE, ValueError, r"out has strides .*none may be 0",
     lambda x: dict(out=ones(2, 1, 4, 24).double().expand(2, 2, 4, 24))),
    (DENSE, TypeError, r"out must be a torch.Tensor", lambda x: dict(out=[])),
    (DENSE, NotImplementedError, r"gradient", lambda x: dict(q=x.q.clone().requires_grad_())),
    (DENSE, NotImplementedError, r"gradient", lambda x: dict(s_aux=ones(4, requires_grad=True))),
]  # fmt: skip
NEW = dict(k=half, v=ones(2, 1, 2, 24).double())
TABLE = ones(20, 8).double()
APPEND = [
    (DENSE, ValueError, r"k and v must be given together, got None for v", lambda x: dict(k=half)),
    (DENSE, ValueError, r"k and v must be given together, got None for k", lambda x: dict(v=half)),
    (DENSE, ValueError, r"k and v need cache_seqlens.*got None", lambda x: dict(**NEW, cache_seqlens=None)),
    (DENSE, ValueError, r"k must have shape \(2, 1, 2, 16\).*got \(1, 1, 2, 16\)",
     lambda x: dict(k=half[:1], v=NEW["v"])),
    (DENSE, ValueError, r"v must have shape \(2, 1, 2, 24\).*got \(2, 1, 2, 16\)", lambda x: dict(k=half, v=half)),
    (DENSE, ValueError, r"k must have 4 dimensions", lambda x: dict(k=half[0], v=NEW["v"])),
    (DENSE, ValueError, r"k must have 3 dimensions", lambda x: dict(**NEW, cu_seqlens_k_new=ints([0, 1, 2]))),
    (DENSE, ValueError, r"cu_seqlens_k_new must have batch \+ 1 elements, 3, got 2",
     lambda x: dict(**NEW, cu_seqlens_k_new=ints([0, 1]))),
    (DENSE, TypeError, r"k must have the dtype of q", lambda x: dict(k=half.float(), v=NEW["v"])),
    (DENSE, ValueError, r"k has stride 2 in its last",
     lambda x: dict(k=ones(2, 1, 2, 32).double()[..., ::2], v=NEW["v"])),
    (DENSE, ValueError, r"are 14 together, but there is room for 13", lambda x: dict(**NEW, cache_seqlens=13)),
    (DENSE, ValueError, r"cache_seqlens\[1\] and the new rows are 14 together",
     lambda x: dict(**NEW, cache_seqlens=ints([3, 13]))),
    (PAGED, ValueError, r"cache_seqlens\[0\] and the new rows are 21 together, but there is room for 20",
     lambda x: dict(**NEW, cache_seqlens=ints([20, 3]))),
    (CSR, ValueError, r"pages of sequence 0 hold 1 rows less than k",
     lambda x: dict(**NEW, kv_indptr=ints([0, 0, 2]))),
    (DENSE, ValueError, r"rotary_cos and rotary_sin must be given together, got None for rotary_sin",
     lambda x: dict(**NEW, rotary_cos=TABLE)),
    (DENSE, ValueError, r"rotary_cos and rotary_sin must be given together, got None for rotary_cos",
     lambda x: dict(**NEW, rotary_sin=TABLE)),
    (DENSE, ValueError, r"without k and v need rotary_seqlens", lambda x: dict(rotary_cos=TABLE, rotary_sin=TABLE)),
    (DENSE, ValueError, r"rotary_seqlens is given without", lambda x: dict(**NEW, rotary_seqlens=ints([1, 2]))),
    (DENSE, ValueError, r"one shape and dtype, .*\(20, 8\) and .*\(19, 8\)",
     lambda x: dict(**NEW, rotary_cos=TABLE, rotary_sin=TABLE[1:])),
    (DENSE, ValueError, r"rotary_cos has 4 columns.*8 dims; allowed: multiples of 16",
     lambda x: dict(**NEW, rotary_cos=TABLE[:, :4], rotary_sin=TABLE[:, :4])),
    (DENSE, ValueError, r"rotary_cos has 16 columns.*32 dims; .* of q, 16",
     lambda x: dict(**NEW, rotary_cos=ones(9, 16).double(), rotary_sin=ones(9, 16).double())),
    (DENSE, TypeError, r"rotary_cos has dtype torch.float16",
     lambda x: dict(**NEW, rotary_cos=TABLE.half(), rotary_sin=TABLE.half())),
    (DENSE, ValueError, r"rotary_cos must have 2 dimensions",
     lambda x: dict(**NEW, rotary_cos=TABLE[0], rotary_sin=TABLE)),
    (DENSE, ValueError, r"rotary_sin must be on the device of q",
     lambda x: dict(**NEW, rotary_cos=TABLE, rotary_sin=TABLE.to("meta"))),
    (DENSE, TypeError, r"rotary_seqlens has dtype torch.int64",
     lambda x: dict(**NEW, rotary_cos=TABLE, rotary_sin=TABLE, rotary_seqlens=torch.tensor([1, 2]))),
    (DENSE, NotImplementedError, r"gradient", lambda x: dict(k=half.clone().requires_grad_(), v=NEW["v"])),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "error", "match", "change"), [*TENSORS, *LISTS, *PAGES, *OPTIONS, *APPEND])
def test_a_wrong_argument_is_named(monkeypatch, layout, error, match, change):
    """Before the cache is written: the right call after it finds what it had."""
    with_append(monkeypatch)
    x = case(**layout)
    caches = x.k_cache.clone(), x.v_cache.clone()
    refuses(x, error, match, **change(x))
    for cache, before in zip((x.k_cache, x.v_cache), caches):
        torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", [dict(ragged=False), dict(page_size=4), dict(page_size=4, csr=True)])
@pytest.mark.parametrize(("heads", "heads_kv"), [(33, 2), (3, 2), (4, 8), (8, 0)])
def test_heads_that_do_not_divide(layout, heads, heads_kv):
    """B44: both numbers are in the message, and the next right call works."""
    x = case(**layout)
    q = ones(*x.q.shape[:-2], heads, 16).double()
    caches = [ones(*cache.shape[:2], heads_kv, cache.shape[3]).double() for cache in (x.k_cache, x.v_cache)]
    numbers = rf"q {heads} and .*{heads_kv}"
    refuses(x, ValueError, numbers, q=q, k_cache=caches[0], v_cache=caches[1])
    refuses(x, ValueError, r"k_cache and v_cache must have one shape", k_cache=x.k_cache[:, :, :1])


def test_what_is_right_passes():
    """NumPy's numbers, lists of any stride, caches without sequences, queries without heads."""
    x = case(**DENSE)
    spaced = torch.full((2, 3), 77, dtype=torch.int32)
    spaced[:, 1] = x.lists["cache_seqlens"]
    options = dict(num_splits=np.int64(2), sm_margin=np.int32(0), pack_gqa=True, softmax_scale=np.float32(0.25))
    got = x.call(attend, cache_seqlens=spaced[:, 1], window_size=[np.int64(-1), None], **options)
    assert_is(x, got, formula(x, softmax_scale=0.25))
    assert attend(x.q[:0], x.k_cache[:0], x.v_cache[:0]).shape == (0, 2, 4, 24)
    assert attend(x.q[:, :, :0], x.k_cache[:2], x.v_cache[:2], cache_seqlens=9).shape == (2, 2, 0, 24)
    assert attend(x.q[:, :0], x.k_cache[:2], x.v_cache[:2]).shape == (2, 0, 4, 24)
    paged = case(**PAGED)
    assert_is(paged, paged.call(attend, max_seqlen_q=torch.tensor(2)), formula(paged))
    assert_is(paged, paged.call(attend, max_seqlen_q=None), formula(paged))


def test_sizes_of_a_call():
    problem = cache_problem(*(lambda x: (x.q, x.k_cache, x.v_cache, serving_of(x)))(case(**PAGED)))
    assert (problem.batch, problem.seqlen_q, problem.total_q, problem.heads, problem.heads_kv) == (2, None, 3, 4, 2)
    assert (problem.head_dim, problem.head_dim_v, problem.page_size, problem.capacity) == (16, 24, 4, 20)
    assert (problem.out_shape, problem.lse_shape) == ((3, 4, 24), (4, 3))
    problem = cache_problem(*(lambda x: (x.q, x.k_cache, x.v_cache, serving_of(x)))(case(**DENSE)))
    assert (problem.page_size, problem.capacity, problem.seqlen_q, problem.total_q) == (None, 13, 2, 4)
    assert (problem.out_shape, problem.lse_shape) == ((2, 2, 4, 24), (2, 4, 2))


def test_looks_that_were_right_are_not_looked_at_again(monkeypatch):
    """As CUDA tensors are checked: anything that looks otherwise is."""
    seen = []
    monkeypatch.setattr(interface_kvcache, "_valid", {})
    real = interface_kvcache.check_given
    monkeypatch.setattr(interface_kvcache, "check_given", lambda *x: (seen.append(x), real(*x)))
    x = case(**DENSE)
    none = dict.fromkeys(Given._fields)
    right = Given(**{**none, "q": x.q, "k_cache": x.k_cache, "v_cache": x.v_cache, **x.lists})
    for _ in range(3):
        interface_kvcache._check(right, True, True)
    interface_kvcache._check(right._replace(q=x.q.clone(), cache_seqlens=ints([1, 1])), True, True)
    assert len(seen) == 1
    for change, match in (
        (dict(cache_seqlens=torch.tensor([1, 2])), "cache_seqlens has dtype"),
        (dict(q=x.q.transpose(2, 3).contiguous().transpose(2, 3)), "q has stride"),
        (dict(k_cache=x.k_cache.float()), "k_cache must have the dtype"),
        (dict(cache_leftpad=ints([1])), "cache_leftpad must have one element"),
        (dict(page_table=ints([1, 2]).view(2, 1)), "cache_batch_idx and page_table"),
    ):
        for _ in range(2):  # what is wrong is not remembered
            with pytest.raises((TypeError, ValueError), match=match):
                interface_kvcache._check(right._replace(**change), True, True)
