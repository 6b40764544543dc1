"""The way from tensors to the compiled function, with a recorder in the kernel's place and CPU tensors in the GPU's."""

import math
import statistics
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fa3 import interface, launch, ops, tma
from fa3.device import ASSUMED, HOPPER, chip, named
from fa3.kernels.forward.config import Config, Spec
from fa3.testing.inputs import LAYOUTS, Case, make
from tests.launch_recorder import Recorder, takeable

HOST_US = {"operator": 60.0, "short way": 20.0}  # all but the launch takes 15 and 3.5; the rest is for busy hosts


@pytest.fixture
def recorder(monkeypatch):
    return Recorder().replace(monkeypatch, launch)


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def test_what_the_kernel_is_called_with(recorder):
    q, k, v = make(Case(batch=2, seqlen_q=5, seqlen_k=7, heads_kv=2, ratio=3, head_dim=80, head_dim_v=40), "cpu")
    out, lse = launch.forward(q, k, v, 0.25, True)
    (call,) = recorder.calls
    assert call.q is q and call.k is k and call.v is v and call.out is out and call.lse is lse
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 5, 6, 40), torch.bfloat16, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 6, 5), torch.float32, True)
    assert call.scale_log2 == pytest.approx(0.25 * math.log2(math.e), rel=1e-12)
    assert call.num_sms == ASSUMED.num_sms and call.scales is call.v_channel is call.ragged is call.tickets is None
    ((spec, config),) = recorder.loaded
    assert spec == Spec("bfloat16", 96, 96, True) and isinstance(config, Config)


def test_a_dynamic_grid_gets_a_counter_of_its_own_in_every_call(recorder):
    q, k, v = make(Case(batch=1, seqlen_q=384, seqlen_k=1100, heads_kv=264, head_dim=64, head_dim_v=64), "cpu")
    for _ in range(2):
        launch.forward(q, k, v, None, False)
    ((_, config),) = recorder.loaded
    first, second = (call.tickets for call in recorder.calls)
    assert config.dynamic and storage(first) != storage(second)
    assert all(t.tolist() == [0] and t.dtype == torch.int32 for t in (first, second))


def test_outputs_are_new_in_every_call(recorder):
    """A plan holds no memory of them, and makes them as they should be in whatever mode it was made."""
    q, k, v = make(Case(seqlen_q=9, seqlen_k=7, head_dim=64, head_dim_v=40), "cpu")
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # its strides are not those of O
    with torch.inference_mode():
        launch.forward(q, k, v, None, False)
    (plan,) = launch._plans.values()
    assert all(t.untyped_storage().nbytes() == 0 for t in (plan.out, plan.lse)) and plan.tickets is None
    results = [launch.forward(q, k, v, None, False) for _ in range(2)]
    assert len({storage(x) for result in results for x in result}) == 4
    for out, lse in results:
        assert (out.shape, out.dtype, out.is_contiguous()) == ((1, 9, 1, 40), torch.bfloat16, True)
        assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((1, 1, 9), torch.float32, True)
        assert out.untyped_storage().nbytes() == 9 * 40 * 2 and not out.is_inference() and not out.requires_grad


def test_an_lse_that_nobody_asked_for_goes_where_all_calls_write_it(recorder):
    q, k, v = make(Case(batch=2, seqlen_q=9, seqlen_k=7), "cpu")
    longer = make(Case(seqlen_q=300, seqlen_k=7), "cpu")
    for tensors in ((q, k, v), (q, k, v), longer):
        launch.forward(*tensors, None, False, False)
    wanted = [launch.forward(q, k, v, None, False)[1], launch.forward(q, k, v, None, False, True)[1]]
    spares = [call.lse for call in recorder.calls[:3]]
    (whole,) = launch._spares.values()
    assert {storage(x) for x in spares} == {storage(whole)} and whole.nbytes == launch.SPARE_BYTES
    assert [x.shape for x in spares] == [(2, 1, 9), (2, 1, 9), (1, 1, 300)] and all(x.is_contiguous() for x in spares)
    assert len({storage(x) for x in (*spares, *wanted)}) == 3


def test_calls_that_keep_their_lse_plan_no_memory_for_one(recorder):
    """Among them those of the operator, which may be the first during the warm-up of a graph."""
    launch.forward(*make(Case(), "cpu"), None, False)
    assert launch._spares == {}


def test_the_place_that_calls_share_is_made_outside_of_what_this_thread_is_in(recorder):
    made_in = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made_in.append(func)
            return func(*args, **(kwargs or {}))

    tensors = make(Case(), "cpu")
    launch.forward(*tensors, None, False)  # so that nothing but the place is new
    launch._plans.clear()
    with torch.inference_mode(), Watch():
        launch.forward(*tensors, None, False, False)
    (whole,) = launch._spares.values()
    assert not whole.is_inference()
    assert torch.ops.aten.new_empty.default in made_in and torch.ops.aten.empty.memory_format not in made_in


def test_a_large_lse_and_one_planned_during_a_capture_are_of_the_call(recorder, monkeypatch):
    rows = launch.SPARE_BYTES // 4
    fits = make(Case(seqlen_q=rows, seqlen_k=1, head_dim=8, head_dim_v=8), "cpu")
    large = make(Case(seqlen_q=rows + 1, seqlen_k=1, head_dim=8, head_dim_v=8), "cpu")
    monkeypatch.setattr(launch, "is_current_stream_capturing", lambda: True)
    for tensors in (large, large, fits, fits):
        launch.forward(*tensors, None, False, False)
    assert launch._spares == {} and len({storage(call.lse) for call in recorder.calls}) == 4
    monkeypatch.setattr(launch, "is_current_stream_capturing", lambda: False)
    launch._plans.clear()
    launch.forward(*fits, None, False, False)
    (whole,) = launch._spares.values()
    assert storage(recorder.calls[-1].lse) == storage(whole)


def test_a_repeated_call_plans_once_and_checks_its_scale(recorder):
    q, k, v = make(Case(), "cpu")
    for scale in (0.1, 0.2, 0.3):
        launch.forward(q, k, v, scale, False)
    assert len(recorder.loaded) == 1
    assert [round(call.scale_log2 / launch.LOG2_E, 6) for call in recorder.calls] == [0.1, 0.2, 0.3]
    for scale in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="softmax_scale"):
            launch.forward(q, k, v, scale, False)
    assert len(recorder.calls) == 3
    launch.forward(q, k, v, 0.1, True)
    launch.forward(q[:, :64], k, v, 0.1, False)
    assert len(recorder.loaded) == 3


def test_each_thing_that_matters_is_planned_apart(recorder):
    """One valid call must not let through an invalid one that differs in any single property."""
    q, k, v = make(Case(heads_kv=2, batch=2), "cpu")
    launch.forward(q, k, v, 0.1, False)
    wrong = [
        (q.half(), k, v),
        (q, k.half(), v),
        (q, k, v.half()),
        (q[..., :56], k, v),
        (q, k[:, :64], v),
        (q, k, v[:1]),
        (q, k[:1], v),
        (q, k[:, :, :1], v),
        (q, k[..., :56], v),
        (q, k.flatten(0, 1), v),
        (q, k.repeat_interleave(2, -1)[..., ::2], v),
        (q, k.to("meta"), v),
        (q, k, v.to("meta")),
    ]
    for arguments in wrong:
        with pytest.raises((ValueError, TypeError)):
            launch.forward(*arguments, 0.1, False)
    assert len(recorder.calls) == 1


def test_plans_do_not_pile_up(recorder, monkeypatch):
    monkeypatch.setattr(launch, "PLANS_MAX", 4)
    for seqlen in range(1, 20):
        launch.forward(*make(Case(seqlen_q=seqlen, seqlen_k=seqlen), "cpu"), 0.1, False)
        assert len(launch._plans) <= 4
    assert [c.q.shape[1] for c in recorder.calls] == list(range(1, 20))


def test_scale_zero_is_passed_as_the_smallest_normal_number(recorder):
    launch.forward(*make(Case(), "cpu"), 0.0, False)
    scale = recorder.calls[0].scale_log2
    assert 0 < torch.finfo(torch.float32).smallest_normal <= scale < 2e-38


@pytest.mark.parametrize(
    "sizes", [dict(batch=0), dict(seqlen_q=0), dict(ratio=0), dict(seqlen_k=0), dict(seqlen_k=0, seqlen_q=0)]
)
def test_empty_problems_launch_nothing(recorder, sizes):
    case = Case(**{**dict(batch=2, seqlen_q=3, seqlen_k=4, heads_kv=2), **sizes})
    out, lse = launch.forward(*make(case, "cpu"), 0.1, False)
    assert out.shape == (case.batch, case.seqlen_q, case.heads, 64) and torch.equal(out, torch.zeros_like(out))
    assert lse.shape == (case.batch, case.heads, case.seqlen_q) and torch.equal(lse, torch.full_like(lse, -math.inf))
    assert recorder.loaded == [] and recorder.calls == []


@pytest.mark.parametrize("layout", ["contiguous", "packed", "transposed", "expanded", "padded"])
def test_layouts_that_tma_takes_are_not_copied(recorder, layout):
    q, k, v = make(Case(batch=2, seqlen_q=9, seqlen_k=9, heads_kv=2, layout=layout), "cpu")
    launch.forward(q, k, v, 0.1, False)
    (call,) = recorder.calls
    assert all(got is given_ for got, given_ in zip(call[:3], (q, k, v), strict=True))
    assert all(takeable(x) for x in call[:3])


def test_rows_of_odd_length_are_copied(recorder):
    """An offset of 2 bytes and a stride that is no multiple of 16 bytes."""
    q, k, v = make(Case(batch=2, seqlen_q=9, seqlen_k=9, heads_kv=2), "cpu")
    odd = make(Case(batch=2, seqlen_q=9, seqlen_k=9, heads_kv=2, layout="misaligned"), "cpu").q
    launch.forward(odd, k, v, 0.1, False)
    (call,) = recorder.calls
    assert storage(call.q) != storage(odd) and torch.equal(call.q, odd) and takeable(call.q)
    assert call.k is k and call.v is v
    assert call.out.is_contiguous()


def test_the_same_strides_at_an_odd_address_are_copied(recorder):
    """A plan knows strides, not addresses: these are looked at in every call."""
    q, k, v = make(Case(batch=2, seqlen_q=9, seqlen_k=9), "cpu")
    buffer = torch.empty(k.numel() + 1, dtype=k.dtype)
    shifted = buffer[1:].view(k.shape).copy_(k)
    assert shifted.data_ptr() % 16 == 2 and shifted.stride() == k.stride()
    for given_k in (k, shifted, k):
        launch.forward(q, given_k, v, 0.1, False)
    first, second, third = recorder.calls
    assert len(recorder.loaded) == 1
    assert first.k is k and third.k is k
    assert storage(second.k) != storage(shifted) and torch.equal(second.k, k) and takeable(second.k)
    assert second.q is q and second.v is v


def test_odd_strides_of_single_element_dimensions_are_replaced_without_a_copy(recorder):
    q, k, v = make(Case(batch=1, seqlen_q=9, seqlen_k=9, heads_kv=1), "cpu")
    odd = q.as_strided(q.shape, (q.stride(0) + 3, q.stride(1), 65, 1))
    launch.forward(odd, k, v, 0.1, False)
    (call,) = recorder.calls
    assert call.q.data_ptr() == odd.data_ptr() and torch.equal(call.q, odd) and takeable(call.q)
    assert call.q.stride(1) == q.stride(1)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_strides_reach_the_kernel_in_a_form_that_it_takes(data):
    """Sizes of 1 and 2, any stride, any offset: the kernel gets the same values, copied only where it must be."""
    shape = (*(data.draw(st.integers(1, 2)) for _ in range(3)), 8)
    strides = (*(data.draw(st.sampled_from([0, 1, 8, 9, 16, 24, 65, 128])) for _ in range(3)), 1)
    offset = data.draw(st.sampled_from([0, 1, 4, 8]))
    tensor = torch.arange(1024, dtype=torch.float16).as_strided(shape, strides, offset)
    fitted = tma.fitted(tensor)
    assert takeable(fitted) and torch.equal(fitted, tensor)
    aligned = tensor.data_ptr() % 16 == 0
    fits = aligned and all(stride % 8 == 0 for size, stride in zip(shape, strides, strict=True) if 1 < size < 8)
    assert (fitted.data_ptr() == tensor.data_ptr()) == fits
    assert (tma.why_copied(tensor, tensor.data_ptr()) == "") == fits


def test_another_chip_is_refused_before_anything_is_loaded(recorder, monkeypatch):
    monkeypatch.setattr(launch, "chip", lambda index: named("NVIDIA A100-SXM4-40GB", 108, (8, 0)))
    for case in (Case(), Case(seqlen_k=0)):
        with pytest.raises(ValueError, match="A100.*sm_80.*sm_90"):
            launch.forward(*make(case, "cpu"), 0.1, False)
    assert recorder.loaded == [] and recorder.calls == [] and launch._plans == {}


def test_chip_facts(monkeypatch):
    peaks = {
        "NVIDIA H100 80GB HBM3": (989.5, 3.35),
        "NVIDIA H100 PCIe": (756.0, 2.0),
        "NVIDIA H100 NVL": (835.0, 3.9),
        "NVIDIA H200": (989.5, 4.8),
        "NVIDIA GH200 480GB": (989.5, 4.0),
        "NVIDIA H20": (148.0, 4.0),
        "NVIDIA A100-SXM4-40GB": (None, None),
        "NVIDIA H2000": (None, None),
    }
    for name, (tflops, bandwidth) in peaks.items():
        found = named(name, 132, HOPPER)
        assert (found.peak_tflops, found.bandwidth) == (tflops, bandwidth) and found.is_hopper

    class Properties:
        name, multi_processor_count, major, minor = "NVIDIA L4", 58, 8, 9

    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: asked.append(index) or Properties)
    chip.cache_clear()
    try:
        assert chip(0) == chip(0) == named("NVIDIA L4", 58, (8, 9)) and not chip(0).is_hopper
        assert chip(1).num_sms == 58 and asked == [0, 1]
    finally:
        chip.cache_clear()


def test_every_layout_is_covered_here():
    assert set(LAYOUTS) == {"contiguous", "packed", "transposed", "expanded", "padded", "misaligned"}


@pytest.mark.parametrize("flag", [{}, dict(return_lse=True), dict(return_attn_probs=True)])
def test_only_an_lse_that_is_returned_is_kept(recorder, monkeypatch, flag):
    """By the short way, which CPU tensors do not take."""
    monkeypatch.setattr(interface, "is_plain", lambda q, k, v: True)
    result = interface.flash_attn_func(*make(Case(), "cpu"), **flag)
    (call,) = recorder.calls
    if flag:
        assert result[0] is call.out and result[1] is call.lse and launch._spares == {}
    else:
        (whole,) = launch._spares.values()
        assert result is call.out and storage(call.lse) == storage(whole)


@pytest.mark.parametrize("way", HOST_US)
def test_host_time_of_a_call(recorder, monkeypatch, way):
    """Everything but the launch: interface, dispatcher, autograd check, plan, outputs. The best of several medians."""
    library = torch.library.Library("fa3_host_time", "FRAGMENT")
    calls = 0

    def run(*arguments):
        nonlocal calls
        calls += 1

    monkeypatch.setattr(launch, "load", lambda spec, config: run)
    if way == "operator":
        library.define("forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor, Tensor)")
        library.impl("forward", launch.forward, "CPU")
        library.impl("forward", ops._autograd, "Autograd")
        forward = torch.ops.fa3_host_time.forward.default
        monkeypatch.setattr(ops, "_forward", forward)
        monkeypatch.setattr(interface, "_forward", forward)
    else:
        monkeypatch.setattr(interface, "is_plain", lambda q, k, v: ops.is_plain(q, k, v) or q.device.type == "cpu")
    q, k, v = make(Case(seqlen_q=128, seqlen_k=128, heads_kv=4, head_dim=128, head_dim_v=128), "cpu")

    def median_us(number=300):
        samples = []
        for _ in range(number):
            start = time.perf_counter()
            interface.flash_attn_func(q, k, v, causal=True)
            samples.append((time.perf_counter() - start) * 1e6)
        return statistics.median(samples)

    best = min(median_us() for _ in range(5))
    assert calls == 1500
    assert best <= HOST_US[way], f"{best:.1f} us"
