"""The way of variants and of pages to the compiled function, with a recorder in its place."""

import math

import pytest
import torch

from fa3 import launch, launch_variant, launch_varlen
from fa3.device import ASSUMED
from fa3.heuristics import config_for, ragged_config_for
from fa3.kernels.forward.config import Spec
from fa3.problem_variant import FARTHEST, Extras
from fa3.problem_varlen import Sequences
from fa3.testing.inputs import Case, make
from fa3.variant import Variant
from tests import paged, ragged
from tests.launch_recorder import Recorder

LOG2_E = math.log2(math.e)
CASE = Case("bfloat16", 2, 300, 500, 2, 2, 128, 128)
SINK = torch.tensor([0.5, -1.0, 2.0, 0.0])


class PagedRecorder(Recorder):
    """Takes K and V as they lie in their pool."""

    def load(self, spec, config):
        self.loaded.append((spec, config))
        return lambda *arguments: self.calls.append(arguments)


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(launch_variant, "_plans", {})
    return Recorder().replace(monkeypatch, launch, launch_varlen)


def forward(variant, sink=None, scale=0.25, case=CASE, **changes):
    x = make(case, "cpu")._replace(**changes)
    return x, launch_variant.forward(*x, scale, variant, sink)


@pytest.mark.parametrize(
    ("variant", "sink", "fields", "numbers", "base"),
    [
        (Variant(True, 99), None, dict(local="window"), (99, 0, FARTHEST, 1.0), 0.25),
        (Variant(False, -1, 7), None, dict(local="window"), (FARTHEST, 7, FARTHEST, 1.0), 0.25),
        (Variant(True, -1, -1, 64), None, dict(local="chunk"), (FARTHEST, 0, 64, 1.0), 0.25),
        (Variant(True, softcap=50.0), None, dict(causal=True, softcap=True), (FARTHEST,) * 3 + (0.005,), 50.0),
        (Variant(True), SINK, dict(causal=True, sink="float32"), (FARTHEST, FARTHEST, FARTHEST, 1.0), 0.25),
        (Variant(False, 3, 4), SINK.half(), dict(local="window", sink="float16"), (3, 4, FARTHEST, 1.0), 0.25),
    ],
)  # fmt: skip
def test_what_the_kernel_is_called_with(recorder, variant, sink, fields, numbers, base):
    x, (out, lse) = forward(variant, sink)
    (call,) = recorder.calls
    assert [a is b for a, b in zip(call[:5], (*x, out, lse), strict=True)] == [True] * 5
    *values, given = call.variant
    assert values == pytest.approx(numbers) and given is sink and call.ragged is call.scales is None
    assert call.scale_log2 == pytest.approx(base * LOG2_E, rel=1e-12)
    ((spec, config),) = recorder.loaded
    assert spec == Spec("bfloat16", 128, 128, **{"causal": False, **fields})
    assert config == config_for(spec, 300, 500, 4, 2, ASSUMED.num_sms)
    forward(variant, sink)
    assert len(recorder.loaded) == 1, "planned once"


def test_what_hides_nothing_is_the_plain_kernel(recorder):
    for variant, causal in ((Variant(False, -1, 0), True), (Variant(False, 499, 299), False)):
        forward(variant)
        assert recorder.loaded[-1][0] == Spec("bfloat16", 128, 128, causal) and recorder.calls[-1].variant is None


def test_each_thing_that_matters_is_planned_apart(recorder):
    forward(Variant(True, 9), SINK)
    x = make(CASE, "cpu")
    with pytest.raises(ValueError, match="learnable_sink must have shape"):
        forward(Variant(True, 9), SINK[:3])
    with pytest.raises(TypeError, match="learnable_sink has dtype"):
        forward(Variant(True, 9), SINK.int())
    with pytest.raises((ValueError, TypeError)):
        forward(Variant(True, 9), SINK, k=x.k[:, :99])
    with pytest.raises(ValueError, match="softmax_scale"):
        forward(Variant(True, 9), SINK, scale=-1.0)
    forward(Variant(True, 10), SINK)
    assert len(recorder.calls) == len(launch_variant._plans) == 2


def test_without_keys_lse_is_the_sink(recorder):
    for sink in (SINK, None):
        _, (out, lse) = forward(Variant(True, 9), sink, case=Case("bfloat16", 2, 300, 0, 2, 2, 128, 128))
        assert not out.any() and not recorder.calls
        wanted = torch.full((4,), -math.inf) if sink is None else sink
        assert torch.equal(lse, wanted[None, :, None].expand(2, 4, 300))
    x = ragged.make([3, 2], [0, 0], room_q=[4, 2], heads_kv=2, ratio=2)
    lists = Sequences(x.cu_q, x.cu_k, x.used_q, None, 3, 0)
    _, lse = launch_varlen.forward(x.q, x.k, x.v, lists, None, True, None, Extras(Variant(True), SINK))
    assert torch.equal(lse[:, x.is_query], SINK[:, None].expand(4, 5)) and (lse[:, ~x.is_query] == -math.inf).all()


def test_ragged_variants(recorder):
    x = ragged.make([30, 20], [70, 10], heads_kv=2, ratio=2, head_dim=128, head_dim_v=128)
    lists = Sequences(x.cu_q, x.cu_k, None, None, 30, 70)
    launch_varlen.forward(x.q, x.k, x.v, lists, 0.25, False, None, Extras(Variant(False, 5, 0), SINK))
    launch_varlen.forward(x.q, x.k, x.v, lists, 0.25, False)
    variant, plain = recorder.calls
    assert variant.variant == (5, 0, FARTHEST, 1.0, SINK) and plain.variant is None
    assert variant.ragged is not None and plain.ragged is not None
    assert variant.ragged[4:] == plain.ragged[4:] == (0, 0)
    specs = [spec for spec, _ in recorder.loaded]
    assert specs[0] == Spec("bfloat16", 128, 128, False, ragged=True, local="window", sink="float32")
    assert specs[1] == Spec("bfloat16", 128, 128, False, ragged=True)


def test_pages(monkeypatch):
    recorder = PagedRecorder().replace(monkeypatch, launch_varlen)
    taken: list = recorder.calls
    for page_size, room in ((48, None), (128, [40, 20])):
        x = paged.make([30, 20], [70, 300], page_size, room_q=room, heads_kv=2, ratio=2, layout="interleaved")
        lists = Sequences(x.cu_q, None, x.used_q, x.used_k, 30, 300)
        extras = Extras(Variant(True), None, x.table)
        out, lse = launch_varlen.forward(x.q, x.k, x.v, lists, 0.25, True, None, extras)
        q, k, v, o, of_lse, scales, v_channel, given, variant, tickets, scale_log2, num_sms = taken[-1]
        assert k is x.k and v is x.v and q.shape == (1, *x.q.shape) and variant is scales is v_channel is None
        assert o.data_ptr() == out.data_ptr() and of_lse.data_ptr() == lse.data_ptr()
        used_q = x.used_k if room is None else x.used_q  # a stand-in of its size
        assert [a is b for a, b in zip(given[:4], (x.cu_q, x.table, used_q, x.used_k), strict=True)] == [True] * 4
        assert given[4] == (room is not None) and scale_log2 == pytest.approx(0.25 * LOG2_E)
        spec, config = recorder.loaded[-1]
        assert spec == Spec("bfloat16", 64, 64, True, ragged=True, paged=True)
        assert config == ragged_config_for(spec, 30, 300, page_size) and config.box == {48: 16, 128: 128}[page_size]
    assert len(recorder.loaded) == 2
    with pytest.raises(ValueError, match="cu_seqlens_k must be None"):
        launch_varlen.forward(x.q, x.k, x.v, lists._replace(cu_seqlens_k=x.cu_q), 0.25, True, None, extras)
    x = paged.make([3], [7], 20)
    lists, extras = Sequences(x.cu_q, None, None, x.used_k, 3, 7), Extras(Variant(), None, x.table)
    with pytest.raises(NotImplementedError, match="pages of 20 keys"):
        launch_varlen.forward(x.q, x.k, x.v, lists, 0.25, False, None, extras)
