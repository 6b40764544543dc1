"""flash_attn_varlen_func on pages of K and V: on the CPU, and what is wrong with a call."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa3
from fa3.heuristics import ROWS, ragged_config_for
from fa3.kernels.forward.config import Spec
from fa3.variant import Variant
from tests import paged, ragged

attend = fa3.flash_attn_varlen_func
lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    lengths, st.integers(1, 20), st.booleans(), st.booleans(), st.sampled_from(["apart", "interleaved", "heads first"])
)
def test_pages_are_the_sequences_that_they_hold(sizes, page_size, causal, has_room, layout):
    of_q, of_k = [n for n, _ in sizes], [n for _, n in sizes]
    room = [n + 2 for n in of_q] if has_room else None
    x = paged.make(of_q, of_k, page_size, room_q=room, heads_kv=2, ratio=2, head_dim=8, head_dim_v=16, layout=layout,
                   dtype="float64")  # fmt: skip
    out, lse = x.call(attend, 0.3, causal)
    k, v = (torch.cat([one[i] for one in x.dense] or [x.q.new_empty(0, 2, 8 + 8 * i)]) for i in (0, 1))
    cu_k = torch.tensor([0, *of_k]).cumsum(0).int()
    wanted = attend(x.q, k, v, x.cu_q, cu_k, 40, 60, x.used_q, None, 0.3, causal, return_lse=True)
    for got, want in zip((out, lse), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    again = x.call(attend, 0.3, causal, page_table=None, block_table=x.table)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    into = torch.full_like(out, 7.0)
    given_out, given_lse = x.call(attend, 0.3, causal, out=into)
    assert given_out is into and torch.equal(into[x.is_query], out[x.is_query]) and torch.equal(given_lse, lse)
    assert (into[~x.is_query] == 7.0).all()


def test_with_a_window_and_sinks():
    x = paged.make([30, 1, 7], [50, 20, 0], 6, heads_kv=1, ratio=2)
    sink = torch.tensor([0.3, -1.0])
    got = x.call(attend, None, True, window_size=(9, -1), learnable_sink=sink, softcap=3.0)
    x.assert_right(got, Variant(True, 9, -1, 0, 3.0), sink=sink)
    assert torch.equal(got[1][:, 31:], sink[:, None].expand(2, 7))


X = paged.make([3, 5], [20, 33], 16, heads_kv=2, ratio=2)
INVALID = X.table.clone()
INVALID[1, 2] = 99
ERRORS = [
    (dict(k=X.k[0]), ValueError, "k must have 4 dimensions .pages, page_size"),
    (dict(v=X.v[:, :8]), ValueError, "k and v must have the same pages"),
    (dict(v=X.v[:, :, :1]), ValueError, "same number of heads"),
    (dict(k=X.k.half()), TypeError, "one dtype"),
    (dict(q=X.q[None]), ValueError, "q must have 3 dimensions"),
    (dict(cu_seqlens_k=X.cu_q), ValueError, "cu_seqlens_k must be None with a page_table"),
    (dict(seqused_k=None), ValueError, "seqused_k must be given with a page_table"),
    (dict(seqused_k=X.used_k[:1]), ValueError, "seqused_k must have one element a sequence, 2"),
    (dict(seqused_k=X.used_k.long()), TypeError, "seqused_k has dtype torch.int64"),
    (dict(seqused_k=X.used_k + 100), ValueError, r"seqused_k\[0\] is 120; allowed: 0 to 80"),
    (dict(page_table=X.table[:1]), ValueError, "page_table must have one row a sequence, 2"),
    (dict(page_table=X.table[0]), ValueError, "page_table must have 2 dimension"),
    (dict(page_table=X.table.long()), TypeError, "page_table has dtype torch.int64"),
    (dict(page_table=X.table.to("meta")), ValueError, "page_table must be on the device of q"),
    (dict(page_table=INVALID), ValueError, r"page_table\[1, 2\] is 99; allowed: 0 to 7"),
    (dict(page_table=[[0]]), TypeError, "page_table must be a torch.Tensor, got list"),
    (dict(block_table=X.table), ValueError, "two names of one argument"),
    (dict(page_table=None), TypeError, "cu_seqlens_k must be a torch.Tensor, got NoneType"),
    (dict(out=torch.zeros(8, 4, 32)), ValueError, "out must have shape"),
]


@pytest.mark.parametrize(
    ("changes", "error", "words"), ERRORS, ids=lambda x: "-".join(x) if isinstance(x, dict) else ""
)
def test_errors_name_the_argument_its_value_and_what_is_allowed(changes, error, words):
    arguments = dict(
        q=X.q, k=X.k, v=X.v, cu_seqlens_q=X.cu_q, cu_seqlens_k=None, max_seqlen_q=5, max_seqlen_k=33,
        seqused_k=X.used_k, page_table=X.table,
    )  # fmt: skip
    attend(**arguments)
    with pytest.raises(error, match=words):
        attend(**(arguments | changes))


def test_fp8_and_gradients_come_later():
    x = replace(X, q=X.q.to(torch.float8_e4m3fn), k=X.k.to(torch.float8_e4m3fn), v=X.v.to(torch.float8_e4m3fn))
    with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
        x.call(attend)
    with pytest.raises(NotImplementedError, match="gradient"):
        replace(X, k=X.k.clone().requires_grad_()).call(attend)


def test_under_compile():
    def call(q, k, v, used_k, table):
        return attend(q, k, v, X.cu_q, None, 5, 33, None, used_k, causal=True, return_lse=True, page_table=table)

    inputs = X.q, X.k, X.v, X.used_k, X.table
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(*inputs), call(*inputs), strict=True))


def test_what_is_unused_may_be_anything():
    wanted = X.call(attend)
    for empty in (0.0, math.inf):
        x = paged.make([3, 5], [20, 33], 16, heads_kv=2, ratio=2, empty=empty)
        assert all(torch.equal(a, b) for a, b in zip(x.call(attend), wanted, strict=True))
    dense = ragged.make([3, 5], [20, 33], heads_kv=2, ratio=2)
    assert dense.k.shape[0] == 53 and not torch.equal(dense.call(attend)[0], wanted[0])


@given(st.sampled_from(list(ROWS)), st.booleans(), st.integers(1, 40), st.integers(0, 9000))
def test_boxes_lie_in_one_page_and_fill_a_block(tile, causal, sixteens, bound):
    page_size = 16 * sixteens
    config = ragged_config_for(Spec("bfloat16", *tile, causal, ragged=True, paged=True), bound, bound, page_size)
    assert page_size % config.box == config.tile_n % config.box == config.box % 16 == 0
    plain = ragged_config_for(Spec("bfloat16", *tile, causal, ragged=True), bound, bound)
    assert plain == replace(config, box=0)
    if page_size % config.tile_n == 0:
        assert config.box == config.tile_n
