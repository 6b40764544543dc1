"""The way from a cache to the compiled function, with a recorder in its place and CPU tensors in the GPU's."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fa3 import launch, launch_decode
from fa3.device import ASSUMED, named
from fa3.heuristics_decode import config_for, shares_for
from fa3.kernels.decode.config import GATHER, ROWS, Spec
from fa3.serving import Serving
from fa3.variant import Variant
from tests.kvcache import ints, make
from tests.launch_recorder import takeable
from tests.test_varlen_launch import Reads

FAR = 2**30
LOG2_E = math.log2(math.e)
PLAIN = Variant()
NO_LISTS = Serving(None, 0, None, None, None, None, None, None, 1)
LISTS = ("lengths", "cu_seqlens_k_new", "leftpad", "batch_idx", "indptr", "cu_seqlens_q")  # in the kernel's order


class Call(NamedTuple):
    """What the compiled function is given but the stream."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    parts: tuple[Tensor, Tensor] | None
    table: Tensor | None
    sink: Tensor | None
    lists: tuple
    window: tuple  # (left, right), or ((left, right), chunk)
    granule: int | None
    splits: int | None
    scale_log2: float
    cap: float | None
    tiles: int
    shares: int


class Recorder:
    def __init__(self) -> None:
        self.loaded: list[tuple[Spec, Any]] = []
        self.calls: list[Call] = []

    def load(self, spec, config):
        self.loaded.append((spec, config))

        def run(*arguments):
            call = Call(*arguments)
            if not self.takes(spec, call):
                raise ValueError("as the compiled function does")
            self.calls.append(call)

        return run

    def takes(self, spec: Spec, call: Call) -> bool:
        """Types, sizes, strides: of out, which the kernel writes word by word, even strides are enough."""
        q, k, v, out, lse = call[:5]
        (batch, seqlen_q, heads, head_dim), (pages, rows, heads_kv, head_dim_v) = q.shape, v.shape
        shapes = [(batch, seqlen_q, heads, head_dim), (pages, rows, heads_kv, head_dim), tuple(v.shape)]
        shapes += [(batch, seqlen_q, heads, head_dim_v), (batch, heads, seqlen_q)]
        fits = [tuple(x.shape) for x in call[:5]] == shapes and all(map(takeable, (q, k, v)))
        fits &= all(x.dtype == getattr(torch, spec.dtype) for x in call[:4]) and lse.dtype == torch.float32
        fits &= out.data_ptr() % 4 == 0 and out.stride(-1) == 1 and not any(x % 2 for x in out.stride()[:-1])
        fits &= all(x.dtype == torch.int32 and x.stride() == (1,) and len(x) > 0 for x in call.lists[:6])
        assert (call.parts is not None) == spec.splits and (call.table is not None) == (spec.pages > 0)
        assert (call.sink is not None) == bool(spec.sink) and (call.cap is not None) == spec.softcap
        assert (call.granule is not None) == (call.splits is not None) == spec.granules
        assert isinstance(call.window[0], tuple) == spec.chunk
        fits &= call.sink is None or (
            call.sink.dtype == getattr(torch, spec.sink) and tuple(call.sink.shape) == (heads,)
        )
        fits &= call.table is None or (call.table.dtype == torch.int32 and call.table.dim() == 2)
        return bool(fits) and len({x.device for x in (*call[:5], *call[6:8], *call.lists[:6]) if x is not None}) == 1


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setattr(launch_decode, "load", found.load)
    monkeypatch.setattr(launch_decode, "chip", lambda index: ASSUMED)
    monkeypatch.setattr(launch_decode, "_plans", {})
    return found


def cache(lengths=(5, 0, 9), queries=None, **options):
    """Sequences that lie in one cache."""
    options = dict(heads_kv=2, ratio=3, head_dim=80, head_dim_v=40, dtype=torch.bfloat16, ragged=False) | options
    return make(queries or [1] * len(lengths), lengths, **options)


def serving(x, **changes) -> Serving:
    """As flash_attn_with_kvcache makes it of x's lists."""
    given = x.lists
    s = NO_LISTS._replace(
        lengths=given.get("cache_seqlens"), leftpad=given.get("cache_leftpad"), batch_idx=given.get("cache_batch_idx"),
        page_table=given.get("page_table", given.get("kv_indices")), indptr=given.get("kv_indptr"),
        cu_seqlens_q=given.get("cu_seqlens_q"), max_seqlen_q=given.get("max_seqlen_q", x.q.shape[1]),
    )  # fmt: skip
    return s._replace(**changes)


def forward(x, variant=PLAIN, scale=0.25, sink=None, num_splits=0, split_size=0, out=None, **changes):
    s = serving(x, **changes)
    return launch_decode.forward(x.q, x.k_cache, x.v_cache, s, scale, variant, sink, num_splits, split_size, out)


# What the kernel is called with


def test_a_dense_cache(recorder):
    x = cache()
    out, lse = forward(x)
    (call,) = recorder.calls
    ((spec, config),) = recorder.loaded
    assert spec == Spec("bfloat16", 96, 96) and config == config_for(spec)
    assert call[:5] == (x.q, x.k_cache, x.v_cache, out, lse)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((3, 1, 6, 40), torch.bfloat16, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((3, 6, 1), torch.float32, True)
    lengths = x.lists["cache_seqlens"]
    assert [y is lengths for y in call.lists[:6]] == [True] * 6  # the only one stands for those that are not given
    capacity = x.k_cache.shape[1]
    assert call.lists[6:] == (1, 0, 0, 0, 0, 0, 0, 1, capacity, 3)
    assert call.window == (FAR, FAR) and call[-2:] == (1, shares_for(2, 3, 132))
    assert call.scale_log2 == pytest.approx(0.25 * LOG2_E, rel=1e-12) and call.table is call.sink is call.cap is None
    part_o, part_lse = call.parts
    assert part_o.shape == (2 * call.shares * 2, 3, 96) and part_lse.shape == (2 * call.shares * 2, 3)
    assert part_o.dtype == part_lse.dtype == torch.float32 and part_o.is_contiguous() and part_lse.is_contiguous()


def test_each_list_has_its_place_and_its_flag(recorder):
    edges = ints([0, 1, 1, 3])
    given = dict(lengths=ints([5, 0, 9]), cu_seqlens_k_new=edges, leftpad=ints([1, 0, 2]), batch_idx=ints([2, 0, 1]))
    x = cache()
    for names in ([], *[[name] for name in given], ["leftpad", "batch_idx"], list(given)):
        chosen = {name: given[name] if name in names else None for name in given}
        forward(x, added=0 if "cu_seqlens_k_new" in names else 7, **chosen)
        lists, *numbers = recorder.calls[-1].lists[:6], *recorder.calls[-1].lists[6:]
        assert numbers[:6] == [int(name in names) for name in LISTS]
        assert numbers[6] == (0 if "cu_seqlens_k_new" in names else 7)
        for name, got in zip(LISTS, lists, strict=True):
            assert (got is given[name]) if name in names else (not names or any(got is given[n] for n in names))
    # Without any list something of the call's own is read and dropped.
    lists, lse = recorder.calls[0].lists, recorder.calls[0].lse
    assert all(y.data_ptr() == lse.data_ptr() and y.numel() == 1 for y in lists[:6])
    assert len(recorder.loaded) == 7  # a plan for each set of lists


@pytest.mark.parametrize(
    ("page_size", "pages"), [(64, 64), (128, 64), (16, 16), (48, 16), (80, 16), (1, GATHER), (24, 1)]
)
@pytest.mark.parametrize("csr", [False, True])
def test_pages(recorder, page_size, pages, csr):
    x = cache(page_size=page_size, csr=csr)
    forward(x, **({"lengths": ints([5, 0, 9])} if csr else {}))
    (call,), ((spec, _),) = recorder.calls, recorder.loaded
    assert spec.pages == pages and call.k is x.k_cache
    table = x.lists["kv_indices"] if csr else x.lists["page_table"]
    assert call.table.data_ptr() == table.data_ptr() and call.table.shape == (table[None] if csr else table).shape
    assert csr or call.table is table
    assert call.lists[14] == table.shape[-1] * page_size and call.lists[10] == csr
    assert not csr or call.lists[4] is x.lists["kv_indptr"]


def test_ragged_queries(recorder):
    x = cache(queries=[2, 0, 30], ragged=True, ratio=4)
    out, lse = forward(x)
    (call,) = recorder.calls
    assert out.shape == (32, 8, 40) and lse.shape == (8, 32)
    for got, wanted in zip(call[:5], (x.q[None], x.k_cache, x.v_cache, out[None], lse[None]), strict=True):
        assert got.data_ptr() == wanted.data_ptr() and got.shape == wanted.shape
    assert call.lists[5] is x.lists["cu_seqlens_q"] and call.lists[11] == 1 and call.lists[15] == 3
    assert call.tiles == 2 and call.parts[0].shape[1] == ROWS  # 30 queries of 4 heads
    forward(x, max_seqlen_q=1000)
    assert recorder.calls[1].tiles == 2  # no more than there are rows


@pytest.mark.parametrize("seqlen_q, ratio, tiles, rows", [(1, 1, 1, 1), (4, 16, 1, 64), (5, 13, 2, 64), (9, 16, 3, 64)])
def test_tiles_and_rows(recorder, seqlen_q, ratio, tiles, rows):
    x = cache(queries=[seqlen_q] * 3, ratio=ratio)
    forward(x)
    (call,) = recorder.calls
    assert call.tiles == tiles and call.lists[13] == seqlen_q
    assert call.parts[0].shape[:2] == call.parts[1].shape == (2 * call.shares * 2 * tiles, rows)


def test_windows(recorder):
    x = cache()
    for variant, wanted in (
        (Variant(True), (FAR, 0)),
        (Variant(False, 5, 3), (5, 3)),
        (Variant(True, 5, 3), (5, 0)),
        (Variant(False, 2**40, 0), (FAR, 0)),
        (Variant(False, -1, 2**40), (FAR, FAR)),
        (Variant(False, 0, -1, 7), ((0, FAR), 7)),
    ):
        forward(x, variant)
        assert recorder.calls[-1].window == wanted
        assert recorder.loaded[-1][0].chunk == (variant.attention_chunk > 0)


def test_scale_and_softcap(recorder):
    x = cache()
    for scale in (0.25, 0.5, 0.0):
        forward(x, scale=scale)
    of = [call.scale_log2 / LOG2_E for call in recorder.calls]
    assert of[:2] == pytest.approx([0.25, 0.5], rel=1e-12) and 0 < of[2] < 2e-38 and len(recorder.loaded) == 1
    for softcap in (30.0, 50.0):
        forward(x, Variant(softcap=softcap))
        call = recorder.calls[-1]
        assert call.scale_log2 == pytest.approx(softcap * LOG2_E) and call.cap == pytest.approx(0.5 * LOG2_E / softcap)
    assert len(recorder.loaded) == 3 and recorder.loaded[1] == recorder.loaded[2] and recorder.loaded[1][0].softcap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sinks_are_handed_on(recorder, dtype):
    sink = torch.arange(6).to(dtype)
    forward(cache(), sink=sink)
    (call,), ((spec, _),) = recorder.calls, recorder.loaded
    assert getattr(torch, spec.sink) == dtype and call.sink is sink


def test_splits_that_are_given(recorder):
    x = cache((1000, 3), spare=24)  # room for 1024 rows
    units = 2
    blocks = 1024 // config_for(Spec("bfloat16", 96, 96)).tile_n
    for options, granule, slots in (
        (dict(num_splits=4), (0, 4), 2 * 4),
        (dict(num_splits=100), (0, 100), 2 * blocks),
        (dict(num_splits=1), (0, 1), 0),
        (dict(split_size=64), (64, 1), 2 * 16),
        (dict(split_size=192), (192, 1), 2 * 6),
        (dict(split_size=4096), (4096, 1), 2 * 1),
    ):
        forward(x, **options)
        call, (spec, config) = recorder.calls[-1], recorder.loaded[-1]
        assert (call.granule, call.splits) == granule and spec.granules and spec.splits == (slots > 0)
        assert call.parts is None if slots == 0 else call.parts[0].shape == (slots * units, 3, 96)
        assert not options.get("split_size") or options["split_size"] % config.tile_n == 0
    forward(x)
    assert recorder.calls[-1].granule is recorder.calls[-1].splits is None and not recorder.loaded[-1][0].granules


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("split_size", [64, 128, 192, 256])
def test_a_split_is_whole_blocks(recorder, batch, split_size):
    forward(cache((300,) * batch, head_dim=128, head_dim_v=128), split_size=split_size)
    ((_, config),) = recorder.loaded
    assert split_size % config.tile_n == 0


def test_more_heads_than_multiprocessors_are_not_split(recorder):
    x = cache((40,) * 2, heads_kv=150, ratio=1, head_dim=64, head_dim_v=64)
    forward(x)
    (call,), ((spec, _),) = recorder.calls, recorder.loaded
    assert call.shares == shares_for(150, 2, 132) and spec.splits == (call.shares > 1)
    x = cache((40,), heads_kv=132, ratio=1, head_dim=64, head_dim_v=64)
    forward(x)
    assert recorder.calls[1].shares == 1 and not recorder.loaded[1][0].splits and recorder.calls[1].parts is None


# Plans


def test_a_step_of_decoding_plans_and_loads_nothing_new(recorder):
    x = cache((5, 0, 9), page_size=16)
    for lengths in ([5, 0, 9], [6, 1, 10], [100, 0, 3]):
        forward(x, lengths=ints(lengths), page_table=torch.randint(9, x.lists["page_table"].shape, dtype=torch.int32))
    y = cache((5, 0, 9))
    for count in (1, 9, 12):
        forward(y, lengths=None, added=count)
    assert len(recorder.loaded) == len(launch_decode._plans) == 2 and len(recorder.calls) == 6
    assert [call.lists[12] for call in recorder.calls] == [0, 0, 0, 1, 9, 12]


def test_each_thing_that_matters_is_planned_apart(recorder):
    x = cache()
    calls = [
        dict(), dict(variant=Variant(True)), dict(variant=Variant(False, 4)), dict(variant=Variant(False, -1, 4)),
        dict(variant=Variant(attention_chunk=8)), dict(variant=Variant(softcap=1.0)), dict(sink=torch.zeros(6)),
        dict(num_splits=2), dict(num_splits=3), dict(split_size=64), dict(leftpad=ints([0, 0, 0])),
    ]  # fmt: skip
    for options in calls * 2:
        forward(x, **options)
    assert len(recorder.loaded) == len(launch_decode._plans) == len(calls)
    told = [(call.window, call.granule, call.splits, call.tiles, call.shares) for call in recorder.calls]
    assert told[: len(calls)] == told[len(calls) :]


def test_plans_do_not_pile_up(recorder, monkeypatch):
    monkeypatch.setattr(launch, "PLANS_MAX", 4)
    for batch in range(1, 12):
        forward(cache((3,) * batch))
        assert len(launch_decode._plans) <= 4
    assert len(recorder.calls) == 11


def test_another_chip_is_refused(recorder, monkeypatch):
    monkeypatch.setattr(launch_decode, "chip", lambda index: named("NVIDIA A100-SXM4-40GB", 108, (8, 0)))
    with pytest.raises(ValueError, match="A100.*sm_80.*sm_90"):
        forward(cache())


# What is refused


def test_a_wrong_call_like_a_valid_one_is_refused(recorder):
    """One valid call must not let through an invalid one that differs in any single property."""
    x = cache(page_size=16, ragged=True)
    forward(x)
    s = serving(x)
    valid = dict(q=x.q, k_cache=x.k_cache, v_cache=x.v_cache, **s._asdict())
    wrong: list[dict] = []
    for name in ("q", "k_cache", "v_cache"):
        t = valid[name]
        wrong += [{name: t.half()}, {name: t.to("meta")}, {name: t[None]}]
        wrong += [{name: t.repeat_interleave(2, -1)[..., ::2]}]
    wrong += [dict(q=x.q[..., :56]), dict(v_cache=x.v_cache[:, :, :1]), dict(k_cache=x.k_cache[1:]), dict(q=x.q[:, :5])]
    for name in ("lengths", "page_table", "cu_seqlens_q"):
        t = valid[name]
        wrong += [{name: new} for new in (t.long(), t.to("meta"), t[:-1], t[None])]
    for change in wrong:
        tensors = {**valid, **change}
        given = [tensors.pop(name) for name in ("q", "k_cache", "v_cache")]
        with pytest.raises((ValueError, TypeError)):
            launch_decode.forward(*given, Serving(**tensors), 0.1, Variant(), None, 0, 0)
    for options in (dict(split_size=65), dict(num_splits=-1), dict(num_splits=2, split_size=64)):
        with pytest.raises(ValueError, match="num_splits|split_size"):
            forward(x, **options)
    with pytest.raises(ValueError, match="learnable_sink must have shape"):
        forward(x, sink=torch.zeros(5))
    assert len(recorder.calls) == 1


def test_more_queries_than_a_grid_has_room_for(recorder):
    """Not where a bound says that no sequence has so many."""
    x = cache(queries=[1, 1, 1], ragged=True, ratio=128, heads_kv=1, head_dim=8, head_dim_v=8)
    x.q = x.q[:1].expand(32768, 128, 8)
    with pytest.raises(ValueError, match="32768 queries of 128 heads.*at most 4194240"):
        forward(x, max_seqlen_q=32768)
    forward(x, max_seqlen_q=32767)
    assert [call.tiles for call in recorder.calls] == [65534]


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("page_size", [0, 16, 1])
def test_a_cache_that_cannot_be_read_is_named_and_not_copied(recorder, name, page_size):
    x = cache(page_size=page_size)
    good = getattr(x, name)
    odd_stride = torch.nn.functional.pad(good, (0, 1))[..., :-1]
    odd_start = torch.nn.functional.pad(good, (1, 7))[..., 1:-7]
    for bad, why in ((odd_stride, "stride .* is not a multiple of 8"), (odd_start, "data pointer is 2 bytes past")):
        setattr(x, name, bad)
        with pytest.raises(ValueError, match=f"^{name} cannot be read by TMA: its {why}.*a cache is not copied"):
            forward(x)
    assert recorder.calls == []


def test_a_cache_of_one_row_or_head_may_have_any_stride_there(recorder):
    x = cache((1,), spare=0, heads_kv=1)
    for name in ("k_cache", "v_cache"):
        t = getattr(x, name)
        setattr(x, name, t.as_strided(t.shape, (t.stride(0), 3, 5, 1)))
    forward(x)
    (call,) = recorder.calls
    assert call.k.data_ptr() == x.k_cache.data_ptr() and call.v.data_ptr() == x.v_cache.data_ptr()
    assert torch.equal(call.k[0, 0, 0], x.k_cache[0, 0, 0])


def test_queries_and_lists_that_do_not_fit_are_copied(recorder):
    x = cache(leftpad=[0, 0, 1])
    q = torch.nn.functional.pad(x.q, (1, 0))[..., 1:]
    s = serving(x)
    assert s.lengths is not None and s.leftpad is not None
    strided = {name: torch.stack([y, y], -1)[:, 0] for name, y in (("lengths", s.lengths), ("leftpad", s.leftpad))}
    launch_decode.forward(q, x.k_cache, x.v_cache, s._replace(**strided), 0.1, Variant(), None, 0, 0)
    (call,) = recorder.calls
    assert torch.equal(call.q, x.q) and takeable(call.q) and call.k is x.k_cache
    assert [y.tolist() for y in call.lists[:6]] == [s.lengths.tolist()] * 2 + [s.leftpad.tolist()] + [
        s.lengths.tolist()
    ] * 3


def test_out_is_written_where_it_lies(recorder):
    x = cache()
    given = torch.full((3, 1, 6, 42), 7.0, dtype=torch.bfloat16)[..., :40]
    out, _ = forward(x, out=given)
    assert out is given and recorder.calls[0].out is given


def test_an_out_of_odd_strides_is_written_by_way_of_a_copy(recorder, monkeypatch):
    """What the kernel leaves as it is stays as it was."""
    x = cache(queries=[1, 2, 1], ragged=True)
    odd = torch.full((4, 6, 41), 7.0, dtype=torch.bfloat16)[..., 1:]
    load = recorder.load

    def loaded(spec, config):
        run = load(spec, config)
        return lambda *arguments: (run(*arguments), arguments[3][:, 1:3].fill_(1.0))

    monkeypatch.setattr(launch_decode, "load", loaded)
    out, _ = forward(x, out=odd)
    assert out is odd and (odd[1:3] == 1.0).all() and (odd[0] == 7.0).all() and (odd[3] == 7.0).all()


@pytest.mark.parametrize(
    "change", [lambda o: o[:2], lambda o: o.float(), lambda o: o.to("meta"), lambda o: o[..., ::2]]
)
def test_a_wrong_out_is_refused(recorder, change):
    x = cache()
    forward(x)
    with pytest.raises((ValueError, TypeError), match="out "):
        forward(x, out=change(torch.zeros(3, 1, 6, 40, dtype=torch.bfloat16)))
    assert len(recorder.calls) == 1


# Nothing to do, nothing to wait for


@pytest.mark.parametrize("sink", [None, torch.arange(6.0), torch.arange(6.0).bfloat16()])
def test_without_a_key_or_a_query_nothing_is_launched(recorder, sink):
    x = cache()
    x.k_cache, x.v_cache = x.k_cache[:, :0], x.v_cache[:, :0]
    out, lse = forward(x, sink=sink, lengths=ints([0, 0, 0]))
    assert out.shape == (3, 1, 6, 40) and not out.any()
    wanted = torch.full((6,), -math.inf) if sink is None else torch.arange(6.0)
    assert torch.equal(lse, wanted[None, :, None].expand(3, 6, 1))
    y = cache()
    y.q, y.k_cache, y.v_cache = y.q[:0], y.k_cache[:0], y.v_cache[:0]
    out, lse = forward(y, sink=sink, lengths=ints([]))
    assert out.shape == (0, 1, 6, 40) and lse.shape == (0, 6, 1)
    assert recorder.loaded == [] and recorder.calls == []


def ragged_without(what):
    """Ragged queries of which there are none, or without a key; and which rows of q are queries."""
    x = cache((4, 2), [2, 1], ragged=True)
    x.q = torch.nn.functional.pad(x.q, (0, 0, 0, 0, 0, 2))  # two rows of nobody behind
    if what == "keys":
        x.k_cache, x.v_cache = x.k_cache[:, :0], x.v_cache[:, :0]
        return x, dict(lengths=ints([0, 0])), [True] * 3 + [False] * 2
    if what == "sequences":
        x.k_cache, x.v_cache = x.k_cache[:0], x.v_cache[:0]
        return x, dict(lengths=ints([]), cu_seqlens_q=ints([0]), max_seqlen_q=2), [False] * 5
    return x, dict(cu_seqlens_q=ints([0, 0, 0]), max_seqlen_q=0), [False] * 5


@pytest.mark.parametrize("sink", [None, torch.arange(6.0)])
@pytest.mark.parametrize("what", ["keys", "sequences", "queries"])
def test_rows_of_nobody_keep_what_they_hold(recorder, what, sink):
    x, changes, are_queries = ragged_without(what)
    rows = torch.tensor(are_queries)
    canary = torch.full((5, 6, 40), 7.0, dtype=torch.bfloat16)
    out, lse = forward(x, sink=sink, out=canary, **changes)
    assert out is canary and not out[rows].any() and (out[~rows] == 7.0).all()
    wanted = torch.full((6,), -math.inf) if sink is None else sink
    assert torch.equal(lse[:, rows], wanted[:, None].expand(6, int(rows.sum()))) and recorder.calls == []
    made, _ = forward(x, sink=sink, **changes)
    assert made.shape == (5, 6, 40) and not made[rows].any()


@pytest.mark.parametrize("kind", [dict(), dict(page_size=16), dict(ragged=True), dict(page_size=1, ragged=True)])
def test_nothing_is_read_from_the_device(recorder, kind):
    x = cache(**kind)
    sink = torch.zeros(6)
    with Reads():
        forward(x, sink=sink)
        forward(x, Variant(True, 3, 3, 8, 2.0), num_splits=3)
    for what in ("keys", "sequences", "queries"):
        y, changes, _ = ragged_without(what)
        with Reads():
            forward(y, sink=sink, out=torch.zeros(5, 6, 40, dtype=torch.bfloat16), **changes)
