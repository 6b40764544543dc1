"""The way from ragged tensors to the compiled function, with a recorder in its place and CPU tensors in the GPU's."""

import math
import statistics
import time
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fa3 import interface_varlen, launch, launch_varlen, ops_varlen
from fa3.device import ASSUMED, named
from fa3.heuristics import LONG, ragged_config_for
from fa3.kernels.forward.config import Spec
from fa3.problem_varlen import Sequences, bound_of
from tests.launch_recorder import Recorder, takeable
from tests.ragged import make

HOST_US = 60.0  # the Python part alone takes 18; the rest is for slow and busy hosts
SIZES = dict(heads_kv=2, ratio=3, head_dim=80, head_dim_v=40)
MANY = dict(heads_kv=8, ratio=4)  # heads, so that a few sequences make more tiles than there are multiprocessors


@pytest.fixture
def recorder(monkeypatch):
    return Recorder().replace(monkeypatch, launch_varlen)


def sequences(x, **changes):
    return Sequences(x.cu_q, x.cu_k, x.used_q, x.used_k, *x.bounds)._replace(**changes)


def forward(x, scale=0.1, causal=False, out=None, **changes):
    return launch_varlen.forward(x.q, x.k, x.v, sequences(x, **changes), scale, causal, out)


def is_view(got, of):
    return got.data_ptr() == of.data_ptr() and got.shape == (1, *of.shape) and got.stride()[1:] == of.stride()


def test_what_the_kernel_is_called_with(recorder):
    x = make([5, 0, 9], [7, 3, 0], **SIZES)
    out, lse = forward(x, 0.25, True)
    (call,) = recorder.calls
    assert all(map(is_view, call[:5], (x.q, x.k, x.v, out, lse)))
    assert (out.shape, out.dtype, out.is_contiguous()) == ((14, 6, 40), torch.bfloat16, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((6, 14), torch.float32, True)
    assert [a is b for a, b in zip(call.ragged[:4], (x.cu_q, x.cu_k, x.cu_q, x.cu_q), strict=True)] == [True] * 4
    assert call.scale_log2 == pytest.approx(0.25 * math.log2(math.e), rel=1e-12)
    assert call.num_sms == ASSUMED.num_sms and call.scales is call.v_channel is None
    ((spec, config),) = recorder.loaded
    assert spec == Spec("bfloat16", 96, 96, True, ragged=True)
    assert config == ragged_config_for(spec, 9, 7) and config.dynamic


@pytest.mark.parametrize("used_q", [False, True])
@pytest.mark.parametrize("used_k", [False, True])
def test_lengths_that_are_given_apart(recorder, used_q, used_k):
    x = make([5, 9], [7, 3], room_q=[6, 9] if used_q else None, room_k=[7, 30] if used_k else None, **SIZES)
    out, lse = forward(x)
    (call,) = recorder.calls
    assert call.ragged[4:] == (used_q, used_k)
    stand_in = x.used_q if used_q else x.used_k if used_k else x.cu_q  # of the size of the other, and not read
    wanted = x.cu_q, x.cu_k, x.used_q if used_q else stand_in, x.used_k if used_k else stand_in
    assert [a is b for a, b in zip(call.ragged[:4], wanted, strict=True)] == [True] * 4
    if used_q:  # rows that the kernel does not write
        assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, torch.full_like(lse, -math.inf))
    canary = torch.full_like(out, 7.0)
    given, lse = forward(x, out=canary)
    assert given is canary and is_view(recorder.calls[1].out, canary) and (canary == 7.0).all()
    assert not used_q or torch.isneginf(lse).all()


def test_new_lengths_plan_and_load_nothing_new(recorder):
    """Totals, numbers of tiles and what the lists hold are no part of a plan, nor are bounds up to a multiple of 16."""
    for lengths in ([300] * 4, [1, 900, 0, 33], [511, 2, 500, 512], [1000] * 4):
        forward(make(lengths, lengths, **MANY), max_seqlen_q=1000, max_seqlen_k=1000)
        forward(make(lengths, lengths, **MANY), max_seqlen_q=1008, max_seqlen_k=993)
    assert len(recorder.loaded) == len(launch_varlen._plans) == 1 and len(recorder.calls) == 8
    x = make([1] * 4, [5] * 4, **MANY)
    forward(x, max_seqlen_q=1000, max_seqlen_k=1000)
    assert len(recorder.loaded) == len(launch_varlen._plans) == 1
    # Where no CTA has a second tile nothing is drawn, and no counter is made.
    assert recorder.calls[-1].tickets.data_ptr() == x.cu_q.data_ptr() != recorder.calls[0].tickets.data_ptr()
    for bound in range(1, 4000, 50):
        forward(make([300] * 4, [300] * 4, **MANY), max_seqlen_q=bound, max_seqlen_k=bound)
    assert len({c for _, c in recorder.loaded}) <= 8


def test_a_drawn_grid_gets_a_counter_of_its_own_in_every_call(recorder):
    x = make([300] * 4, [300] * 4, **MANY)
    for _ in range(2):
        forward(x)
    ((_, config),) = recorder.loaded
    first, second = (call.tickets for call in recorder.calls)
    assert config.dynamic and config.persistent and first is not second
    assert all(t.tolist() == [0] and t.dtype == torch.int32 for t in (first, second))


def test_each_thing_that_matters_is_planned_apart(recorder):
    """One valid call must not let through an invalid one that differs in any single property."""
    x = make([5, 9], [7, 3], room_q=[6, 9], room_k=[7, 30], **SIZES)
    forward(x)
    valid = dict(q=x.q, k=x.k, v=x.v, **sequences(x)._asdict())
    wrong = [
        *[{name: valid[name].half()} for name in "qkv"],
        *[{name: valid[name].to("meta")} for name in "qkv"],
        *[{name: valid[name].repeat_interleave(2, -1)[..., ::2]} for name in "qkv"],
        *[{name: valid[name][None]} for name in "qkv"],
        *[dict(q=x.q[..., :56]), dict(k=x.k[:20]), dict(v=x.v[:20]), dict(v=x.v[:, :1]), dict(q=x.q[:, :5])],
    ]
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        values = valid[name]
        wrong += [{name: new} for new in (values.long(), values.to("meta"), values[:-1], values[None])]
    for change in wrong:
        q, k, v, *lists = {**valid, **change}.values()
        with pytest.raises((ValueError, TypeError)):
            launch_varlen.forward(q, k, v, Sequences(*lists), 0.1, False)
    assert len(recorder.calls) == 1


def test_a_repeated_call_plans_once_and_checks_its_scale(recorder):
    x = make([5, 9], [7, 3], **SIZES)
    for scale in (0.1, 0.2, None, 0.0):
        forward(x, scale)
    assert len(recorder.loaded) == 1
    of = [call.scale_log2 / math.log2(math.e) for call in recorder.calls]
    assert of[:3] == pytest.approx([0.1, 0.2, 80**-0.5]) and 0 < of[3] < 2e-38
    for scale in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="softmax_scale"):
            forward(x, scale)
    assert len(recorder.calls) == 4


def test_plans_do_not_pile_up(recorder, monkeypatch):
    monkeypatch.setattr(launch, "PLANS_MAX", 4)
    for batch in range(1, 20):
        forward(make([2] * batch, [3] * batch))
        assert len(launch_varlen._plans) <= 4
    assert len(recorder.calls) == 19


@pytest.mark.parametrize("lengths", [([], []), ([0, 0], [3, 4]), ([3, 4], [0, 0]), ([0], [0])])
def test_empty_problems_launch_nothing(recorder, lengths):
    x = make(*lengths, heads_kv=2)
    out, lse = forward(x)
    assert out.shape == x.q.shape and torch.equal(out, torch.zeros_like(out))
    assert lse.shape == (2, len(x.q)) and torch.equal(lse, torch.full_like(lse, -math.inf))
    assert recorder.loaded == [] and recorder.calls == []


def test_without_keys_only_the_rows_of_queries_are_written(recorder):
    x = make([3, 0, 4], [0, 0, 0], room_q=[5, 2, 4], before=1, heads_kv=2)
    x = replace(x, k=x.k[:0], v=x.v[:0])
    canary = torch.full_like(x.q, 7.0)
    out, lse = forward(x, out=canary)
    assert out is canary and recorder.calls == []
    assert not canary[x.is_query].any() and (canary[~x.is_query] == 7.0).all() and torch.isneginf(lse).all()


def test_heads_of_zero_and_another_chip(recorder, monkeypatch):
    x = make([3], [4], ratio=0)
    assert forward(x)[0].shape == (3, 0, 64) and recorder.calls == []
    monkeypatch.setattr(launch_varlen, "chip", lambda index: named("NVIDIA A100-SXM4-40GB", 108, (8, 0)))
    launch_varlen._plans.clear()
    with pytest.raises(ValueError, match="A100.*sm_80.*sm_90"):
        forward(make([3], [4]))


def test_strides_that_tma_takes_are_not_copied_and_others_are(recorder):
    x = make([5, 9], [7, 3], heads_kv=2)
    packed = torch.cat([x.q, x.q, x.q], -1)
    q = packed[..., 64:128]
    odd = torch.nn.functional.pad(x.k, (1, 0))[..., 1:]
    launch_varlen.forward(q, odd, x.v, sequences(x), 0.1, False)
    (call,) = recorder.calls
    assert is_view(call.q, q) and is_view(call.v, x.v)
    assert call.k.data_ptr() != odd.data_ptr() and torch.equal(call.k[0], x.k) and takeable(call.k)


def test_lists_that_are_not_contiguous_are_copied(recorder):
    x = make([5, 9, 2], [7, 3, 1], room_k=[8, 8, 8], heads_kv=2)
    strided = {name: torch.stack([t, t], -1)[:, 0] for name, t in sequences(x)._asdict().items() if hasattr(t, "shape")}
    forward(x, **strided)
    (call,) = recorder.calls
    for got, wanted in zip(call.ragged[:4], (x.cu_q, x.cu_k, x.used_k, x.used_k), strict=True):
        assert torch.equal(got, wanted) and got.stride() == (1,)


def test_an_out_that_tma_cannot_take_is_written_by_way_of_a_copy(recorder, monkeypatch):
    """What the kernel leaves as it is stays as it was."""
    x = make([5, 9], [7, 3], heads_kv=2)
    odd = torch.full((14, 2, 65), 7.0, dtype=torch.bfloat16)[..., 1:]

    def write(*arguments):
        if not takeable(arguments[3]):
            raise ValueError("as the compiled function does")
        arguments[3][:, 3:5] = 1.0

    monkeypatch.setattr(launch_varlen, "load", lambda spec, config: write)
    out, _ = forward(x, out=odd)
    assert out is odd and (odd[3:5] == 1.0).all() and (odd[:3] == 7.0).all() and (odd[5:] == 7.0).all()


@pytest.mark.parametrize(
    "change", [lambda o: o[:3], lambda o: o.float(), lambda o: o.to("meta"), lambda o: o[..., ::2]]
)
def test_a_wrong_out_is_refused_before_anything_is_launched(recorder, change):
    x = make([5, 9], [7, 3], heads_kv=2)
    with pytest.raises((ValueError, TypeError), match="out "):
        forward(x, out=change(torch.zeros_like(x.q)))
    assert recorder.calls == []


class Reads(TorchDispatchMode):
    """Raises where a value would have to come from the device."""

    WAITING = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_to_copy")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.WAITING, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [([5, 0, 9], [7, 3, 0]), ([3, 4], [0, 0])])
@pytest.mark.parametrize("used", [False, True])
def test_nothing_is_read_from_the_device(recorder, lengths, used):
    room = [[n + 1 for n in side] for side in lengths] if used else (None, None)
    x = make(*lengths, room_q=room[0], heads_kv=2)
    into = torch.zeros_like(x.q)
    with Reads():
        forward(x)
        forward(x, out=into)
        assert bound_of("max_seqlen_q", torch.empty((), dtype=torch.int32, device="meta")) == LONG


def test_host_time_of_a_call(recorder, monkeypatch):
    """Everything but the launch, the short way past the dispatcher. The best of several medians."""
    calls = 0

    def run(*arguments):
        nonlocal calls
        calls += 1

    monkeypatch.setattr(launch_varlen, "load", lambda spec, config: run)
    is_plain = ops_varlen.is_plain
    monkeypatch.setattr(ops_varlen, "is_plain", lambda *tensors: is_plain(*tensors) or True)
    x = make([128] * 4, [128] * 4, heads_kv=4, head_dim=128, head_dim_v=128)

    def median_us(number=300):
        samples = []
        for _ in range(number):
            start = time.perf_counter()
            interface_varlen.flash_attn_varlen_func(x.q, x.k, x.v, x.cu_q, x.cu_k, 128, 128, causal=True)
            samples.append((time.perf_counter() - start) * 1e6)
        return statistics.median(samples)

    best = min(median_us() for _ in range(5))
    assert calls == 1500
    assert best <= HOST_US, f"{best:.1f} us"
