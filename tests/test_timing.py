"""The clock with contenders that take no time: what is called, how often and in which order."""

import contextlib
import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch

from fa3.testing import timing


def test_spread_is_the_median_with_quartiles():
    s = timing.spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert dataclasses.astuple(s) == (3.0, 2.0, 4.0, 1.0, 5.0, 5)
    assert dataclasses.astuple(timing.spread([7.0])) == (7.0, 7.0, 7.0, 7.0, 7.0, 1)
    with pytest.raises(ValueError, match="at least one"):
        timing.spread([])


def test_every_round_measures_all_in_a_new_order():
    order = []
    measures = {name: (lambda name=name: order.append(name) or float(len(order))) for name in "abcd"}
    samples = timing.interleave(measures, 20, seed=1)
    rounds = [tuple(order[i : i + 4]) for i in range(0, 80, 4)]
    assert len(order) == 80 and all(sorted(r) == list("abcd") for r in rounds)
    assert len(set(rounds)) > 10  # of 24 orders
    assert {len(v) for v in samples.values()} == {20}
    assert samples["a"] == [float(i + 1) for i, name in enumerate(order) if name == "a"]


def test_after_the_deadline_no_round_begins_but_the_first_ends():
    calls = []
    measures = {name: (lambda name=name: calls.append(name) or 1.0) for name in "ab"}
    assert timing.interleave(measures, 5, deadline=time.monotonic() - 1) == {"a": [1.0], "b": [1.0]}
    with pytest.raises(ValueError, match="rounds"):
        timing.interleave(measures, 0)


@pytest.mark.parametrize("set_mb, sets", [(268, 1), (180, 1), (100, 2), (60, 3), (1, 64)])
def test_inputs_rotate_until_l2_holds_nothing_of_them(set_mb, sets):
    assert timing.num_input_sets(set_mb * 10**6, 60 * 10**6) == sets


def test_calls_fill_the_time_asked_for():
    assert timing.calls_for(3000.0, 0.06, 200) == 20
    assert timing.calls_for(10.0, 0.06, 200) == 200
    assert timing.calls_for(500_000.0, 0.06, 200) == 1


def test_host_time_is_the_mean_of_the_calls_in_rotation():
    used = []
    us = timing.host_sample([lambda: used.append(0), lambda: (used.append(1), time.sleep(0.002))], 10, "cpu")
    assert used == [0, 1] * 5 and us >= 1000


class FakeGraph:
    """Takes 2 us a call; counts what was captured, and refuses calls named so."""

    made: list = []

    def __init__(self, calls, num_calls):
        if calls[0]() == "refuses":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.num_calls, self.replays = num_calls, []
        FakeGraph.made.append(self)

    def sample(self, replays):
        self.replays.append(replays)
        return 2.0


def test_compare_measures_graph_eager_and_host_of_everyone(monkeypatch):
    monkeypatch.setattr(timing, "Graph", FakeGraph)
    monkeypatch.setattr(timing, "eager_sample", lambda calls, n, device: 100.0)
    monkeypatch.setattr(timing, "host_sample", lambda calls, n, device: 30.0)
    FakeGraph.made.clear()
    contenders = {"good": [lambda: "fine"], "bad": [lambda: "refuses"]}
    result = timing.compare(contenders, rounds=3, seconds=0.06, rest=0.0)
    assert result["good"].graph.median == 2.0 and result["good"].graph.count == 3
    assert result["good"].eager.median == 100.0 and result["good"].host.median == 30.0
    assert result["good"].best_known.median == 2.0 and result["good"].note == ""
    assert result["bad"].graph is None and result["bad"].best_known.median == 100.0
    assert result["bad"].note == "not captured: operation not permitted when stream is capturing"
    (graph,) = FakeGraph.made
    assert graph.num_calls == 200 and graph.replays == [3, 3, 3]  # 600 calls of 100 us are the 0.06 s


class FakeCuda:
    """Stands for torch.cuda: a replay fills the tensor `writes`, if there is one, and takes 60 us by the events."""

    clock = 0.0
    writes = None

    def __init__(self, monkeypatch):
        fake, cuda = self, torch.cuda

        class Event:
            def __init__(self, enable_timing):
                self.at = None

            def record(self):
                self.at = fake.clock

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return other.at - self.at

        class Replayable:
            def replay(self):
                fake.clock += 0.06
                if fake.writes is not None:
                    fake.writes.fill_(1.0)

        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "Event": Event,
            "CUDAGraph": Replayable,
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda s: contextlib.nullcontext(),
            "graph": lambda g, stream, capture_error_mode: contextlib.nullcontext(),
            "synchronize": lambda: None,
        }.items():
            monkeypatch.setattr(cuda, name, value)


def test_a_graph_is_captured_after_a_warm_up_and_timed_by_the_call(monkeypatch):
    fake, used = FakeCuda(monkeypatch), []
    fake.writes = torch.zeros(4)
    calls = [lambda: used.append(0) or (fake.writes, "lse"), lambda: used.append(1) or (fake.writes, "lse")]
    graph = timing.Graph(calls, 5)
    assert used == [0, 1, 0, 1, 0, 1, 0]  # two to warm up, five captured
    assert graph.sample(3) == pytest.approx(60.0 / 5)


def test_a_graph_that_holds_nothing_is_refused(monkeypatch):
    FakeCuda(monkeypatch)
    out = torch.zeros(4)
    with pytest.raises(RuntimeError, match="leaves its output unwritten"):
        timing.Graph([lambda: out], 5)
    with pytest.raises(RuntimeError, match="returned no tensor"):
        timing.Graph([lambda: None], 5)


def test_a_call_alone_is_the_median_of_single_replays_of_every_graph(monkeypatch):
    fake, lengths = FakeCuda(monkeypatch), iter([0.06, 0.06, 0.010, 0.030, 0.011, 0.032, 0.012])

    class Replayable:
        def __init__(self):
            made.append(self)

        def replay(self):
            replayed.append(made.index(self))
            fake.clock += next(lengths)
            fake.writes.fill_(1.0)

    made, replayed = [], []
    fake.writes = torch.zeros(4)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayable)
    graph = timing.Alone([lambda: fake.writes, lambda: (fake.writes, "lse")])
    assert graph.num_calls == 1 and replayed == [0, 1]  # each proves that it writes
    assert graph.sample(5) == pytest.approx(12.0) and replayed[2:] == [0, 1, 0, 1, 0]


def test_a_contender_may_be_measured_alone_and_inside_of_a_context(monkeypatch):
    """The context is entered once a sample, not once a call, and outside of the clock."""
    entered, inside = [], []

    @contextlib.contextmanager
    def backend():
        entered.append(1)
        yield
        entered.append(-1)

    def sample(kind, us):
        def measured(calls, n, device="cuda"):
            inside.append((kind, sum(entered)))
            for _ in range(n):
                calls[0]()
            return us

        return measured

    class Single(FakeGraph):
        def __init__(self, calls):
            super().__init__(calls, 1)

    monkeypatch.setattr(timing, "Graph", FakeGraph)
    monkeypatch.setattr(timing, "Alone", Single)
    monkeypatch.setattr(timing, "eager_sample", sample("eager", 100.0))
    monkeypatch.setattr(timing, "host_sample", sample("host", 30.0))
    FakeGraph.made.clear()
    called = []
    contenders = {"peer": [lambda: called.append(sum(entered))], "ours": [lambda: "fine"]}
    result = timing.compare(contenders, rounds=2, rest=0.0, alone=("ours",), around={"peer": backend})
    assert set(called) == {1}  # every call of the peer is inside, at the capture too
    assert (result["peer"].graph_calls, result["ours"].graph_calls) == (200, 1)
    assert inside.count(("eager", 1)) == 3 and inside.count(("host", 1)) == 2  # an estimate and two rounds
    assert inside.count(("eager", 0)) == 3 and inside.count(("host", 0)) == 2
    assert len(entered) / 2 == 6 < len(called) and FakeGraph.made[1].replays == [200, 200]
    monkeypatch.undo()
    cpu = timing.compare({"a": [lambda: None]}, rounds=1, rest=0.0, device="cpu")["a"]
    assert cpu.graph_calls is None and cpu.note == "no CUDA device, no graph"


def test_eager_time_is_the_median_of_single_calls_by_events(monkeypatch):
    fake = FakeCuda(monkeypatch)
    lengths = iter([1.0, 9.0, 2.0])

    def call():
        fake.clock += next(lengths)

    assert timing.eager_sample([call], 3) == 2000.0
