"""Timing that compares: kernel time by CUDA graph, eager time by events, host time by the wall clock.

Contenders take turns in a new random order every round, so that clocks, heat and whatever else drifts falls on all of
them alike, and a number is the median of its rounds with the quartiles as spread. A contender is a list of calls
without arguments, one for every set of inputs: they are used in rotation, so that small inputs do not sit in L2 from
one call to the next (`num_input_sets` says how many that takes). All times are microseconds a call. Without a CUDA
device only the wall clock is there: no kernel time, and eager time is host time.

A graph holds many calls, which buries the gap between replays. Where the kernels of a call could begin under those of
the one before it (programmatic dependent launch), a graph of one call, replayed alone, keeps them apart.
"""

import random
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)
Calls = Sequence[Callable[[], Any]]
Around = Callable[[], AbstractContextManager]  # entered around a sample, so that no call in it pays for it
MAX_GRAPH_CALLS = 200  # of one graph: enough to bury the gap between replays
MAX_HOST_CALLS = 100  # far below the 1024 launches that the driver queues before it makes the host wait
LONG_US = 10_000  # a call over this is timed once a sample: repeating it would only cost time
L2_FACTOR = 3  # input sets together are this many times the L2: none of a set is left when its turn comes again


@dataclass(frozen=True)
class Spread:
    """Median of the samples, quartiles around it, extremes around those. Microseconds."""

    median: float
    lower: float
    upper: float
    least: float
    most: float
    count: int


@dataclass(frozen=True)
class Timing:
    """What one contender took. `graph` is None where it could not be captured: `note` says why. `graph_calls`: how many
    calls a graph held; 1 is a call alone between two events.
    """

    graph: Spread | None
    eager: Spread
    host: Spread
    note: str = ""
    graph_calls: int | None = None

    @property
    def best_known(self) -> Spread:
        """Kernel time, or eager time where there is no kernel time: what contenders are compared by."""
        return self.graph or self.eager


def spread(samples: Sequence[float]) -> Spread:
    """Raises ValueError without samples. One sample is its own median and quartiles."""
    if not samples:
        raise ValueError("spread() needs at least one sample")
    ordered = sorted(samples)
    lower, median, upper = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return Spread(median, lower, upper, ordered[0], ordered[-1], len(ordered))


def num_input_sets(set_bytes: int, l2_bytes: int, limit: int = 64) -> int:
    """How many sets of inputs a call must rotate through so that L2 holds nothing of the next one."""
    return max(1, min(limit, -(-L2_FACTOR * l2_bytes // set_bytes)))


def calls_for(call_us: float, seconds: float, at_most: int) -> int:
    """How many calls of `call_us` fill `seconds`: at least one."""
    return max(1, min(at_most, round(seconds * 1e6 / max(call_us, 1e-3))))


def interleave(
    measures: Mapping[Name, Callable[[], float]],
    rounds: int,
    *,
    seed: int = 0,
    rest: float = 0.0,
    deadline: float | None = None,
) -> dict[Name, list[float]]:
    """Samples of every measure: one a round, in an order drawn anew each round.

    `rest` seconds pass before each, so that all start from the same clocks. Past `deadline` (of time.monotonic) no
    round is begun, but the first always runs whole: every contender has the same number of samples, and at least one.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    draw = random.Random(seed)
    samples: dict[Name, list[float]] = {name: [] for name in measures}
    for turn in range(rounds):
        if turn and deadline is not None and time.monotonic() >= deadline:
            break
        for name in draw.sample(list(measures), len(measures)):
            if rest:
                time.sleep(rest)
            samples[name].append(measures[name]())
    return samples


class Graph:
    """`num_calls` calls captured once, after a warm-up on the stream of the capture; replays are timed by events.

    Raises RuntimeError where the calls cannot be captured, or where a replay does not write the output (work that
    went to another stream than the current one would leave an empty graph, and an empty graph is fast).
    """

    def __init__(self, calls: Calls, num_calls: int) -> None:
        import torch

        self.num_calls = num_calls
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(num_calls):
                self.output = None  # let go before the next call takes its memory again: room for one output, not all
                self.output = first_tensor(calls[i % len(calls)]())
        self._check_that_a_replay_writes()

    def _check_that_a_replay_writes(self) -> None:
        import torch

        if self.output is None:
            raise RuntimeError("the captured call returned no tensor")
        self.output.fill_(float("nan"))
        self.graph.replay()
        torch.cuda.synchronize()
        if self.output.isnan().any().item():
            raise RuntimeError("a replay of the captured graph leaves its output unwritten")

    def sample(self, replays: int = 1) -> float:
        """Microseconds a call."""
        return _event_us(self.graph.replay, replays) / self.num_calls


class Alone:
    """Each call in a graph of its own; a sample is the median of single replays, each between two events."""

    num_calls = 1

    def __init__(self, calls: Calls) -> None:
        self.replays = [Graph([call], 1).graph.replay for call in calls]

    def sample(self, replays: int = 1) -> float:
        """Microseconds a call. Every graph is replayed once at least."""
        return eager_sample(self.replays, max(replays, len(self.replays)))


def first_tensor(result: Any) -> Any:
    """The output of a call that returns (out, lse, ...) as of one that returns out."""
    return result[0] if isinstance(result, (tuple, list)) else result


def eager_sample(calls: Calls, num_calls: int, device: str = "cuda") -> float:
    """Median of single calls, each between two events: host cost shows wherever it is longer than the kernel."""
    if device != "cuda":
        return statistics.median(_wall_us(calls[i % len(calls)]) for i in range(num_calls))
    import torch

    def event() -> Any:
        return torch.cuda.Event(enable_timing=True)

    pairs = [(event(), event()) for _ in range(num_calls)]
    for i, (start, stop) in enumerate(pairs):
        start.record()
        calls[i % len(calls)]()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) * 1e3 for start, stop in pairs)


def host_sample(calls: Calls, num_calls: int, device: str = "cuda") -> float:
    """Wall time of `num_calls` calls over their number, without waiting for the device in between."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(num_calls):
        calls[i % len(calls)]()
    total = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.synchronize()
    return total * 1e6 / num_calls


def compare(
    contenders: Mapping[str, Calls],
    *,
    rounds: int = 4,
    seconds: float = 0.06,
    rest: float = 0.03,
    seed: int = 0,
    deadline: float | None = None,
    device: str = "cuda",
    alone: Collection[str] = (),
    around: Mapping[str, Around] | None = None,
) -> dict[str, Timing]:
    """Times every contender by graph, eager and host clock, `seconds` to a graph sample, about a quarter of that to
    an eager one. Of those in `alone` a graph holds one call; what `around` has of a contender is entered outside of the
    clock, around its capture and each sample.
    """
    if not contenders:
        return {}

    def within(name: str, work: Callable[..., Any], *given: Any) -> Callable[[], Any]:
        def run() -> Any:
            with (around or {}).get(name, nullcontext)():
                return work(*given)

        return run

    estimates = {name: within(name, _estimate_us, calls, device)() for name, calls in contenders.items()}
    graphs: dict[str, Graph | Alone] = {}
    notes: dict[str, str] = {}
    for name, calls in contenders.items():
        if device != "cuda":
            notes[name] = "no CUDA device, no graph"
            continue
        count_of = max(len(calls), calls_for(estimates[name], seconds, MAX_GRAPH_CALLS))
        try:
            made = within(name, Alone, calls) if name in alone else within(name, Graph, calls, count_of)
            graphs[name] = made()
        except Exception as error:  # CUDA's, or the contender's own about a stream that is being captured
            notes[name] = f"not captured: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    replays = {
        name: calls_for(estimates[name] * graph.num_calls, seconds, MAX_GRAPH_CALLS) for name, graph in graphs.items()
    }

    def count(name: str, least: int) -> int:
        return max(least if estimates[name] < LONG_US else 1, calls_for(estimates[name], seconds / 4, MAX_HOST_CALLS))

    by_graph = interleave(
        {name: partial(graph.sample, replays[name]) for name, graph in graphs.items()},
        rounds, seed=seed, rest=rest, deadline=deadline,
    )  # fmt: skip
    by_events = interleave(
        {name: within(name, eager_sample, calls, count(name, 3), device) for name, calls in contenders.items()},
        rounds, seed=seed, deadline=deadline,
    )  # fmt: skip
    by_clock = interleave(
        {name: within(name, host_sample, calls, count(name, 10), device) for name, calls in contenders.items()},
        min(rounds, 3), seed=seed, deadline=deadline,
    )  # fmt: skip
    return {
        name: Timing(
            graph=spread(by_graph[name]) if name in by_graph else None,
            eager=spread(by_events[name]),
            host=spread(by_clock[name]),
            note=notes.get(name, ""),
            graph_calls=graphs[name].num_calls if name in graphs else None,
        )
        for name in contenders
    }


def _estimate_us(calls: Calls, device: str) -> float:
    """A call's time after a warm-up: good enough to choose numbers of calls by."""
    for call in calls:
        call()
    return eager_sample(calls, 3, device)


def _wall_us(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _event_us(work: Callable[[], Any], repeats: int) -> float:
    """Microseconds of one `work` on the device, mean over `repeats` enqueued together."""
    import torch

    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / repeats
