"""Prefill from pages of K and V against float64: page sizes, tables, layouts, poison in all that no sequence holds."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fa3
from fa3.testing.inputs import poison
from fa3.variant import Variant
from tests import paged, ragged

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
CANARY = 7.0
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
SIZES = [16, 48, 64, 96, 128, 256]
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
LENGTHS = {  # of queries, of keys
    "one": ([1], [1]),
    "odd": ([5, 77, 129, 301], [9, 77, 257, 413]),
    "zeros": ([0, 0, 130, 0, 1, 64, 0], [0, 1, 0, 300, 1, 64, 0]),
    "more queries": ([129, 1048, 300], [3, 524, 299]),
    "page edges": ([16, 48, 64, 128, 256], [16, 96, 64, 128, 512]),
    "chunk of a long prompt": ([512, 1], [5000, 3000]),
}
attend = fa3.flash_attn_varlen_func


def run(x: paged.Paged, causal=False, **options):
    """Into new memory and among canaries; both must agree, and nothing else be written."""
    (total, heads, _), dim = x.q.shape, x.v.shape[3]
    before = [t.clone() for t in (x.q, x.k, x.v, x.table)]
    poison((total, heads, dim), x.q.dtype, DEVICE)
    poison((heads, total), torch.float32, DEVICE)
    out, lse = x.call(attend, None, causal, **options)
    around = torch.full((total + 2, heads + 1, dim + 16), CANARY, dtype=x.q.dtype, device=DEVICE)
    into = around[1:-1, :-1, 8:-8]
    _, given_lse = x.call(attend, None, causal, out=into, **options)
    rows = x.is_query
    assert torch.equal(into[rows], out[rows]) and torch.equal(given_lse[:, rows], lse[:, rows])
    into[rows] = CANARY
    assert (around == CANARY).all(), "memory that is no query's was written"
    for t, was in zip((x.q, x.k, x.v, x.table), before, strict=True):
        assert torch.equal(t.nan_to_num(), was.nan_to_num()), "an input was written"
    return out, lse


@MASKS
@pytest.mark.parametrize("page_size", SIZES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), DIMS)
def test_grid(head_dim, head_dim_v, page_size, causal):
    layouts, heads = ["apart", "interleaved", "heads first"], [(2, 1), (1, 5), (2, 4)]
    for i, (of_q, of_k) in enumerate(LENGTHS.values()):
        heads_kv, ratio = heads[i % 3]
        sizes = dict(heads_kv=heads_kv, ratio=ratio, head_dim=head_dim, head_dim_v=head_dim_v)
        dtype, layout = ["bfloat16", "float16"][i % 2], layouts[i // 2 % 3]
        x = paged.make(of_q, of_k, page_size, **sizes, device=DEVICE, seed=i, layout=layout, dtype=dtype)
        x.assert_right(run(x, causal), Variant(causal))


@MASKS
@pytest.mark.parametrize("page_size", [16, 64, 128, 256])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), DIMS)
def test_pages_are_ragged_attention_bit_for_bit(head_dim, head_dim_v, page_size, causal):
    for of_q, of_k in LENGTHS.values():
        heads = dict(heads_kv=2, ratio=3, head_dim=head_dim, head_dim_v=head_dim_v)
        x = paged.make(of_q, of_k, page_size, **heads, device=DEVICE)
        k, v = (torch.cat([one[i] for one in x.dense]) for i in (0, 1))
        cu_k = torch.tensor([0, *of_k], device=DEVICE).cumsum(0).int()
        bounds = max(of_q), max(of_k)
        wanted = attend(x.q, k, v, x.cu_q, cu_k, *bounds, causal=causal, return_lse=True)
        out, lse = x.call(attend, None, causal)
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 700)), max_size=9), st.sampled_from(SIZES), st.booleans(),
    st.booleans(), st.sampled_from(["apart", "interleaved", "heads first"]), st.integers(0, 99),
)  # fmt: skip
def test_drawn(sizes, page_size, causal, has_room, layout, seed):
    of_q, of_k = [n for n, _ in sizes], [n for _, n in sizes]
    room = [n + random.Random(seed).randint(0, 90) for n in of_q] if has_room else None
    x = paged.make(of_q, of_k, page_size, room_q=room, heads_kv=2, ratio=2, head_dim=128, head_dim_v=128,
                   layout=layout, device=DEVICE, seed=seed)  # fmt: skip
    x.assert_right(run(x, causal), Variant(causal))


@pytest.mark.parametrize(
    "variant",
    [Variant(True, 127), Variant(False, 60, 30), Variant(True, -1, -1, 192), Variant(True, softcap=20.0)],
)
def test_variants(variant):
    causal, left, right, chunk, cap = variant
    options = dict(window_size=(left, right), attention_chunk=chunk, softcap=cap)
    sink = torch.randn(4, device=DEVICE)
    for of_q, of_k in LENGTHS.values():
        x = paged.make(of_q, of_k, 32, heads_kv=2, ratio=2, head_dim=128, head_dim_v=128, device=DEVICE)
        x.assert_right(run(x, causal, learnable_sink=sink, **options), variant, sink=sink)


def test_pages_outside_of_a_window_are_not_read():
    """Their numbers may be those of no page: keys before the window's first block."""
    x = paged.make([100], [4000], 16, heads_kv=1, ratio=2, head_dim=128, head_dim_v=128, device=DEVICE)
    wanted = x.call(attend, None, True, window_size=(99, 0))
    x.table[:, : (4000 - 100 - 99 - 128) // 16] = paged.NO_PAGE
    got = x.call(attend, None, True, window_size=(99, 0))
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


def test_what_no_sequence_holds_changes_nothing():
    sizes = dict(heads_kv=2, ratio=2, head_dim=128, head_dim_v=128, device=DEVICE)
    first, *others = (
        paged.make([33, 1, 70], [32, 70, 97], 64, **sizes, empty=x).call(attend, None, True)
        for x in (0.0, math.nan, math.inf, -math.inf)
    )
    assert all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))


def test_a_pool_of_more_than_2_31_elements():
    page_size, heads_kv, dim = 64, 8, 128
    pages = 2**31 // (page_size * heads_kv * dim) + 9
    if torch.cuda.mem_get_info()[0] < 3 * pages * page_size * heads_kv * dim * 2:
        pytest.skip("needs 13 GB")
    small = paged.make([70, 3], [200, 130], page_size, heads_kv=heads_kv, head_dim=dim, head_dim_v=dim, device=DEVICE)
    count = small.k.shape[0]
    k, v = (torch.empty(pages, *t.shape[1:], dtype=t.dtype, device=DEVICE) for t in (small.k, small.v))
    k[-count:], v[-count:] = small.k, small.v
    table = torch.where(small.table == paged.NO_PAGE, small.table, small.table + pages - count).int()
    wanted = small.call(attend, None, True)
    got = attend(small.q, k, v, small.cu_q, None, 70, 200, None, small.used_k, causal=True, page_table=table,
                 return_lse=True)  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_graph_replays_with_other_lengths_and_tables():
    sizes = dict(heads_kv=2, ratio=2, head_dim=128, head_dim_v=128, device=DEVICE, spare=40)
    x = paged.make([64, 64, 64], [10, 20, 30], 16, **sizes)
    table = torch.full((3, 40), paged.NO_PAGE, dtype=torch.int32, device=DEVICE)
    table[:, : x.table.shape[1]] = x.table
    used = x.used_k.clone()

    def call():
        return attend(x.q, x.k, x.v, x.cu_q, None, 64, 640, None, used, causal=True, page_table=table, return_lse=True)

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    x.k.nan_to_num_(0.5), x.v.nan_to_num_(0.5)
    for lengths in ([0, 500, 16], [300, 1, 0], [640, 17, 333]):
        used.copy_(torch.tensor(lengths))
        for b, length in enumerate(lengths):
            row = torch.randint(0, x.k.shape[0], (-(-length // 16),), device=DEVICE)
            table[b] = paged.NO_PAGE
            table[b, : len(row)] = row
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, call(), strict=True))
        dense = [
            tuple(t[table[b, : -(-n // 16)].long()].flatten(0, 1)[:n] for t in (x.k, x.v))
            for b, n in enumerate(lengths)
        ]
        replace(x, dense=dense).assert_right(got, Variant(True))


def test_errors_before_the_launch():
    x = paged.make([5], [40], 20, device=DEVICE)
    with pytest.raises(NotImplementedError, match="pages of 20 keys; allowed for prefill: multiples of 16"):
        x.call(attend)
    x = paged.make([5], [40], 16, head_dim=64, device=DEVICE)
    with pytest.raises(ValueError, match="k: stride 65 of dimension 1"):
        attend(x.q, torch.zeros(9, 16, 1, 65, dtype=x.q.dtype, device=DEVICE)[..., :64], x.v[:1].expand(9, -1, -1, -1),
               x.cu_q, None, 5, 40, None, x.used_k, page_table=x.table)  # fmt: skip


def test_paged_and_ragged_plans_do_not_mix():
    x = paged.make([64], [64], 64, device=DEVICE)
    y = ragged.make([64], [64], device=DEVICE)
    for _ in range(2):
        x.assert_right(x.call(attend), Variant())
        ragged.assert_right(y, y.call(attend))
