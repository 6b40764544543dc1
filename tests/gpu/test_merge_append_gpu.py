"""The append and merge kernels on a GPU against loops: types, pages, strides, rotary, canaries, graphs, pools."""

import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fa3
from fa3.append import append
from fa3.serving import Serving
from fa3.testing.inputs import poison
from tests.append_case import CACHES, CANARY, IMPOSSIBLE, LAYOUTS, Case, assert_left_out, expected, make, whole
from tests.merge_case import assert_right, partials

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ROTARY = ("none", "interleaved", "neox")
GIB = 1 << 30


def to_gpu(case: Case) -> Case:
    """With caches that are views of memory like the CPU's, canaries around them included."""

    def moved(x):
        memory = whole(x).to(DEVICE)
        return memory.as_strided(x.shape, x.stride(), x.storage_offset()), memory

    there = case.to(DEVICE)
    k_cache, k_memory = moved(case.k_cache)
    v_cache, _ = moved(case.v_cache)
    if whole(case.k_cache).data_ptr() == whole(case.v_cache).data_ptr():
        v_cache = k_memory.as_strided(case.v_cache.shape, case.v_cache.stride(), case.v_cache.storage_offset())
    return there._replace(k_cache=k_cache, v_cache=v_cache)


def verify(case: Case, call=append) -> None:
    """Bit for bit, and of all memory around the caches."""
    q, k_memory, v_memory = expected(case)
    there = to_gpu(case)
    poison(case.q.shape, case.q.dtype, DEVICE)
    got = call(*there)
    assert torch.equal(got.cpu(), q) and torch.equal(there.q.cpu(), case.q)
    assert torch.equal(whole(there.k_cache).cpu(), k_memory) and torch.equal(whole(there.v_cache).cpu(), v_memory)


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_append_grid(dtype, cache, layout, rotary):
    for i in range(4):
        options = dict(ragged_q=i % 2 == 1, ragged_k=i > 1, own=i % 2 == 0, has_rotary_seqlens=i > 1, seed=i)
        verify(make(cache, layout, rotary, dtype=dtype, table_dtype="float32" if i == 3 else None, **options))


DIMS = [(8, 8, 0), (64, 64, 64), (128, 128, 32), (192, 128, 64), (256, 256, 256), (72, 40, 16)]


@pytest.mark.parametrize(("head_dim", "head_dim_v", "rotary_dim"), DIMS)
def test_append_head_dims(head_dim, head_dim_v, rotary_dim):
    dims = dict(head_dim=head_dim, head_dim_v=head_dim_v, heads=32, heads_kv=8, page_size=16)
    for rotary in ROTARY if rotary_dim else ROTARY[:1]:
        verify(make("pages", rotary=rotary, rotary_dim=rotary_dim, lengths=(100, 0, 17, 400), new=5, **dims))


def test_append_of_many_sequences():
    draw = random.Random(0)
    lengths = tuple(draw.randint(0, 300) for _ in range(1100))
    verify(make("pages", lengths=lengths, ragged_q=True, ragged_k=True, new=3, queries=3, page_size=16, head_dim=64))


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    cache=st.sampled_from(CACHES), layout=st.sampled_from(LAYOUTS), rotary=st.sampled_from(ROTARY),
    lengths=st.lists(st.integers(0, 200), max_size=40), new=st.integers(0, 40), queries=st.integers(0, 40),
    page_size=st.integers(1, 70), ragged_q=st.booleans(), ragged_k=st.booleans(), own=st.booleans(),
    has_lengths=st.booleans(), has_rotary_seqlens=st.booleans(), has_new=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_append_drawn(**options):
    verify(make(options.pop("cache"), options.pop("layout"), options.pop("rotary"), **options))


@pytest.mark.parametrize("number", range(len(IMPOSSIBLE)))
def test_what_lists_do_not_allow_is_not_written(number):
    cache, sequence, edit = IMPOSSIBLE[number]
    case = make(cache, "one pool", "none", lengths=(1, 8, 4), page_size=16)
    there = to_gpu(case)
    edit(there.serving)
    append(*there)
    assert_left_out(case, expected(case)[1], whole(there.k_cache).cpu(), sequence)


def test_positions_outside_the_tables_make_nan():
    case = make(lengths=(3, 8), queries=3)
    there = to_gpu(case)
    got = append(*there._replace(cos=there.cos[:9].clone(), sin=there.sin[:9].clone())).cpu()
    wanted, *_ = expected(case)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1, :1], wanted[1, :1])
    assert got[1, 1:, :, :16].isnan().all() and torch.equal(got[1, 1:, :, 16:], wanted[1, 1:, :, 16:])


def test_append_to_a_pool_beyond_32_bits():
    """Layers inside of tokens: sequences lie 2^30 elements apart, the last far past 2^31."""
    if torch.cuda.mem_get_info()[0] < 14 * GIB:
        pytest.skip("needs 14 GiB of free GPU memory")
    pool = torch.zeros(5, 4096, 32, 2, 32, 128, dtype=torch.float16, device=DEVICE)
    k_cache, v_cache = pool[:, :, 7, 0], pool[:, :, 7, 1]
    assert k_cache.stride(0) == 2**30
    g = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (torch.randn(4, 3, 32, 128, generator=g, device=DEVICE).half() for _ in range(3))
    ints = dict(dtype=torch.int32, device=DEVICE)
    places = torch.tensor([1, 2, 3, 4], **ints)
    append(q, k_cache, v_cache, k, v, Serving(torch.zeros(4, **ints), 3, None, None, places, None, None, None, 3))
    assert torch.equal(k_cache[1:, :3], k) and torch.equal(v_cache[1:, :3], v)
    pool[1:, :3, 7] = 0
    assert not any(part.any() for part in pool)
    del pool, k_cache, v_cache
    pages = torch.zeros(2**15 + 3, 16, 32, 128 + 8, dtype=torch.float16, device=DEVICE)[..., :128]
    table = torch.arange(2**15 - 1, 2**15 + 3, **ints)[:, None]
    lists = Serving(torch.full((4,), 5, **ints), 3, None, None, None, table, None, None, 3)
    assert pages.stride(0) * 2**15 > 2**31
    append(q, pages, pages, k, k, lists)
    assert torch.equal(pages[-4:, 5:8], k)
    pages[-4:, 5:8] = 0
    assert not pages.any()


@pytest.mark.parametrize("cache", ["pages", "batch_idx"])
def test_a_graph_replays_with_other_lengths_and_places(cache):
    case = make(cache, lengths=(30, 1, 17), page_size=16)
    there = to_gpu(case)
    append(*there)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = append(*there)
    for memory in (there.k_cache, there.v_cache):
        whole(memory).fill_(CANARY)
    lists = case.serving._replace(lengths=torch.tensor([3, 30, 0], dtype=torch.int32))
    if cache == "pages":
        table = torch.full_like(case.serving.page_table, -1)
        table[:, :2] = torch.randperm(len(case.k_cache))[:6].int().view(3, 2)
        lists = lists._replace(page_table=table)
    else:
        lists = lists._replace(batch_idx=case.serving.batch_idx.flip(0))
    for held, x in zip(there.serving, lists, strict=True):
        if isinstance(held, torch.Tensor):
            held.copy_(x)
    graph.replay()
    q, k_memory, v_memory = expected(case._replace(serving=lists))
    assert torch.equal(got.cpu(), q)
    assert torch.equal(whole(there.k_cache).cpu(), k_memory) and torch.equal(whole(there.v_cache).cpu(), v_memory)


def test_nothing_waits():
    there, states = to_gpu(make("pages")), [x.to(DEVICE) for x in partials(2)]
    for mode in ("default", "error"):  # the first call loads the kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            append(*there)
            fa3.flash_attn_combine(*states)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_appended_by_a_compiled_graph():
    torch._dynamo.reset()
    compiled = torch.compile(append, backend="aot_eager", fullgraph=True)
    for rotary in ROTARY:
        verify(make("pages", rotary=rotary), compiled)


# Merge


def merge(o, lse, **options):
    """By merge_states where there are two; o and lse as flash_attn_combine takes them."""
    return fa3.flash_attn_combine(o.to(DEVICE), lse.to(DEVICE), **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 128, 192, 256, 264, 512])
def test_merge_states(dtype, head_dim):
    o, lse = partials(2, batch=3, seqlen=7, heads=5, head_dim=head_dim, dtype=dtype, seed=head_dim)
    a, b = ((o[i].to(DEVICE), lse[i].transpose(1, 2).to(DEVICE)) for i in range(2))
    poison(o.shape[1:], o.dtype, DEVICE)
    out, sums = fa3.merge_states(*a, *b)
    assert_right((out.cpu(), sums.transpose(1, 2).cpu()), o, lse)
    for x, y in zip(fa3.merge_states(*b, *a), (out, sums), strict=True):
        assert torch.equal(x, y), "either order"
    many, many_sums = merge(o, lse)
    assert torch.equal(many, out) and torch.equal(many_sums.transpose(1, 2), sums), "two ways, one result"


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17, 133, 256])
def test_combine(count, out_dtype):
    """Rows that are no multiple of a CTA's, canaries around the result."""
    o, lse = partials(count, batch=1, seqlen=5, heads=3, head_dim=64, dtype="float32", seed=count)
    around = torch.full((3, 5, 3, 80), CANARY, dtype=out_dtype, device=DEVICE)
    out = around[1:2, :, :, 8:72]
    got, sums = merge(o, lse, out=out)
    assert got is out and sums.stride(1) == 1
    assert_right((out.cpu(), sums.cpu()), o, lse)
    again = out.clone()
    out.fill_(CANARY)
    assert (around == CANARY).all()
    ragged, ragged_sums = merge(o.flatten(1, 2), lse.flatten(1, 2), out_dtype=out_dtype)
    assert torch.equal(ragged, again[0]) and torch.equal(ragged_sums, sums[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("junk", [math.nan, 0.0])
def test_empty_is_the_identity(dtype, junk):
    o, lse = partials(1, batch=4, seqlen=64, dtype=dtype, empty=0.2, head_dim=128)
    o, lse = o[0].to(DEVICE), lse[0].transpose(1, 2).contiguous().to(DEVICE)
    o[..., :3], o[..., 3] = -0.0, 1e-39
    nothing = torch.full_like(o, junk), torch.full_like(lse, -math.inf)
    kept = torch.where((lse == -math.inf).transpose(1, 2)[..., None], torch.zeros_like(o), o), lse
    for got in (fa3.merge_states(o, lse, *nothing), fa3.merge_states(*nothing, o, lse)):
        for x, y in zip(got, kept, strict=True):
            assert torch.equal(x, y) and torch.equal(x.signbit(), y.signbit())


def test_infinite_and_nan():
    o, lse = (x.to(DEVICE) for x in partials(2, empty=0.0, dtype="float32"))
    lse[:, 0, 0], lse[0, 0, 1] = math.inf, math.inf
    lse[0, 0, 2], lse[1, 0, 2] = math.nan, -math.inf
    out, sums = merge(o, lse)
    torch.testing.assert_close(out[0, 0], o[:, 0, 0].mean(0))
    assert torch.equal(out[0, 1], o[0, 0, 1]) and (sums[0, :2] == math.inf).all()
    assert out[0, 2].isnan().all() and sums[0, 2].isnan().all() and not out[0, 3:].isnan().any()


def test_merge_in_place_and_strided():
    o, lse = (x.to(DEVICE) for x in partials(2, batch=2, seqlen=100, head_dim=128, empty=0.0))
    lse = lse.transpose(2, 3).contiguous()
    wanted = fa3.merge_states(o[0], lse[0], o[1], lse[1])
    odd = torch.zeros(*o.shape[:-1], o.shape[-1] + 3, dtype=o.dtype, device=DEVICE)[..., 1:-2].copy_(o)
    turned = o.transpose(2, 3).contiguous().transpose(2, 3)
    for parts in (odd, turned):
        for x, y in zip(fa3.merge_states(parts[0], lse[0], parts[1], lse[1]), wanted, strict=True):
            assert torch.equal(x, y)
    fa3.merge_states(o[0], lse[0], o[1], lse[1], out=o[0], lse_out=lse[0])
    assert torch.equal(o[0], wanted[0]) and torch.equal(lse[0], wanted[1])


def test_merge_beyond_32_bits():
    if torch.cuda.mem_get_info()[0] < 20 * GIB:
        pytest.skip("needs 20 GiB of free GPU memory")
    rows = 2**31 // 128 + 7
    o = torch.full((2, rows, 1, 128), 1.0, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.zeros(2, rows, 1, device=DEVICE)
    o[1, -3:], lse[1, -3:] = 4.0, math.log(2.0)
    out, sums = fa3.flash_attn_combine(o, lse)
    assert (out[:-3] == 1).all() and (out[-3:] == 3).all()
    torch.testing.assert_close(sums[-3:, 0].cpu(), torch.full((3,), math.log(3.0)))


def test_a_graph_merges_what_is_there_then():
    o, lse = (x.to(DEVICE) for x in partials(2, seed=1))
    merge(o, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fa3.flash_attn_combine(o, lse)
    new = partials(2, seed=2)
    o.copy_(new[0]), lse.copy_(new[1])
    graph.replay()
    assert_right(tuple(x.cpu() for x in got), *new)
