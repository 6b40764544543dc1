"""A few queries of each sequence against its KV cache, dense and paged: python -m fa3 bench decode

Every output is checked before it is timed. The implementations of a case take turns on the same caches, and so do a
read and a copy of 1 GiB, which say what the memory gives. Kernel time is that of many calls in a CUDA graph: on one
cache, which L2 may hold, and on as many in turn as L2 cannot hold (cold). Every timing is a line in
bench/results/<gpu>/decode.jsonl; what must be shown (bench/goals.py) is met or missed. Exit status 1 if ours failed
anywhere, or with --check is slower than its records; 2 without a GPU.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from bench import goals, serving_plots
from bench.decode_cases import DEFAULT, GROUPS, NAMED, Case
from bench.machine import Machine, open_machine, run_command
from bench.measure import Contender, Outcome, Pace, tried
from bench.options import add_pace, add_plot, add_shapes, pace_of, shapes_of
from bench.peers import PEERS, around, load_of, reason
from bench.regression import Run, add_check
from bench.serving_peers import DECODERS, Bind, Cache, keys_of, refuse_unless
from fa3.device import HOPPER, named
from fa3.testing.timing import Around, Graph, Timing, compare, first_tensor, num_input_sets
from fa3.testing.tolerance import FLOOR, MAX_FACTOR

SUITE = "decode"
DTYPE = "bfloat16"
PACE = Pace(seconds=0.015, rest=0.005)
READ, COPY = "read", "copy"
MEMORY_BYTES = 2**30  # that each of both moves
COLD = "cold"  # after the name of an implementation


@dataclass(frozen=True)
class Decoded:
    """Of one implementation. `cold` is None where nothing was timed, and where one cache fills L2 several times it is
    the same as the other.
    """

    case: Case
    outcome: Outcome
    cold: Timing | None
    bandwidths: Mapping[str, float]  # TB/s of the read and the copy in the same run

    def record(self, machine: Machine) -> dict[str, Any]:
        made = self.outcome.record(machine, SUITE) | {"page_size": self.case.page_size, "mode": None}
        if self.case.window is not None:  # the shape counts all keys
            made |= dict.fromkeys(("tflops", "peak_fraction"))
        if self.case.captured_at is not None:  # only the graph saw all keys
            made["eager_us"] = None
        return made | {"config": self.config(machine)}

    def config(self, machine: Machine) -> dict[str, Any]:
        """What the keys of a record have no room for."""
        us, cold_us = (of.graph.median if of and of.graph else None for of in (self.outcome.timing, self.cold))
        speed = us and self.case.tb_per_s(us)
        datasheet = named(machine.origin.gpu, machine.num_sms, HOPPER).bandwidth
        measured = max(self.bandwidths.values(), default=None)
        return {
            "case": self.case.name,
            "kv_bytes": self.case.kv_bytes,
            "tb_per_s": speed and round(speed, 4),
            "of_measured": speed and measured and round(speed / measured, 4),
            "of_datasheet": speed and datasheet and round(speed / datasheet, 4),
            "cold_us": cold_us and round(cold_us, 3),
            "cold_tb_per_s": cold_us and round(self.case.tb_per_s(cold_us), 4),
            **{f"{name}_tb_per_s": round(value, 4) for name, value in self.bandwidths.items()},
        }


# Inputs and their check


def make_caches(case: Case, machine: Machine) -> list[Cache]:
    """As many as it takes to keep them out of L2; lengths and page table are the same in all."""
    import torch

    shape = case.shape
    generator = torch.Generator(machine.device).manual_seed(0)
    lengths = torch.tensor(case.keys, dtype=torch.int32, device=machine.device)
    table = _page_table(case, generator, machine)
    most = max(case.keys)
    rows = (shape.batch, most) if table is None else (table.numel(), case.page_size)

    def tensor(*size: int) -> Any:
        return torch.randn(size, generator=generator, dtype=getattr(torch, DTYPE), device=machine.device)

    def cached(head_dim: int) -> Any:
        if table is not None or not case.lengths:
            return tensor(*rows, shape.heads_kv, head_dim)
        made = torch.zeros(*rows, shape.heads_kv, head_dim, dtype=getattr(torch, DTYPE), device=machine.device)
        for sequence, keys in enumerate(case.keys):
            made[sequence, :keys] = tensor(keys, shape.heads_kv, head_dim)
        return made

    def made() -> Cache:
        q = tensor(shape.batch, shape.seqlen_q, shape.heads, shape.head_dim)
        return Cache(q, cached(shape.head_dim), cached(shape.head_dim_v), lengths, table)

    return [made() for _ in range(num_input_sets(case.kv_bytes, machine.l2_bytes))]


def _page_table(case: Case, generator: Any, machine: Machine) -> Any:
    """(B, width) int32, each page once and in no order; None for a contiguous cache."""
    import torch

    if case.page_size is None:
        return None
    width = -(-max(case.keys) // case.page_size)
    order = torch.randperm(case.shape.batch * width, generator=generator, device=machine.device)
    return order.view(case.shape.batch, width).int()


class Check:
    """The first, a middle and the last sequence against float32, held to twice the error that plain PyTorch makes."""

    def __init__(self, case: Case, inputs: Cache) -> None:
        from fa3.reference import attention

        last = case.shape.batch - 1
        self.sequences = sorted({0, last // 2, last})
        self.exact, self.yardstick = [], 0.0
        for b in self.sequences:
            q, (k, v) = inputs.q[b : b + 1], keys_of(inputs, case, b)
            exact = attention(q.float(), k.float(), v.float(), causal=True)[0]
            plain = attention(q, k, v, causal=True)[0]
            self.exact.append(exact[0])
            self.yardstick = max(self.yardstick, (plain.float() - exact).abs().max().item())

    def ratio(self, result: Any) -> float:
        """Largest error over PyTorch's; infinity is what is not finite, anywhere."""
        out = first_tensor(result)
        if not out.isfinite().all().item():
            return math.inf
        pairs = zip(self.sequences, self.exact, strict=True)
        worst = max((out[b].float() - exact).abs().max().item() for b, exact in pairs)
        return worst / (self.yardstick + FLOOR / MAX_FACTOR)


# Measuring


def measure(
    binds: Mapping[str, Bind], case: Case, machine: Machine, pace: Pace, is_alone: bool = False
) -> list[Decoded]:
    """One for each implementation, in their order. What fails or is wrong is not timed, and stops nobody else."""
    caches = make_caches(case, machine)
    check = Check(case, caches[0])
    calls: dict[str, list[Callable[[], Any]]] = {}
    entered: dict[str, Around] = {}
    errors: dict[str, float] = {}
    problems: dict[str, str] = {}
    for name, bind in binds.items():
        errors[name] = math.nan
        try:
            bound = [bind(inputs, case) for inputs in caches]
            around_it = _around(bind, case, caches[0].lengths)
        except Exception as error:  # a peer that does not take the case
            problems[name] = reason(error)
            continue
        first = bound[0] if case.captured_at is None else partial(_replayed, bound[0], around_it)
        errors[name], problem = tried(first, around(bind), check.ratio)
        if problem:
            problems[name] = problem
            continue
        calls[name], entered[name] = bound[:1], around_it
        if len(bound) > 1:
            calls[f"{name} {COLD}"], entered[f"{name} {COLD}"] = bound, around_it
    alone = set(calls) if is_alone else set()
    timings, bandwidths = _timed(calls, machine, pace, alone, entered)
    made = []
    for name, bind in binds.items():
        contender = Contender(name, DTYPE, bind, None, is_alone)
        outcome = Outcome(contender, case.shape, timings.get(name), errors[name], problems.get(name, ""))
        made.append(Decoded(case, outcome, timings.get(f"{name} {COLD}", timings.get(name)), bandwidths))
    return made


def _timed(
    calls: Mapping[str, list[Callable[[], Any]]], machine: Machine, pace: Pace, alone: set[str],
    entered: Mapping[str, Around],
) -> tuple[dict[str, Timing], dict[str, float]]:  # fmt: skip
    """(by name, TB/s of the read and the copy among them; none without a GPU)."""
    memory = memory_calls() if calls and machine.device == "cuda" else {}
    found = compare(
        {**calls, **memory}, rounds=pace.rounds, seconds=pace.seconds, rest=pace.rest, deadline=pace.deadline,
        device=machine.device, alone=alone, around=entered,
    )  # fmt: skip
    return found, {name: MEMORY_BYTES / found.pop(name).best_known.median / 1e6 for name in memory}


@cache
def memory_calls() -> dict[str, list[Callable[[], Any]]]:
    """A read of MEMORY_BYTES, and a copy that reads and writes half as much each; kept for the rest of the process."""
    import torch

    x = torch.randn(MEMORY_BYTES // 4, device="cuda")
    source, target = x.clone().chunk(2)
    return {READ: [x.sum], COPY: [partial(target.copy_, source)]}


def _around(bind: Bind, case: Case, lengths: Any) -> Around:
    """What the bind needs around its calls. Where a graph is to follow the lengths, they are short in it: `compare`
    captures within it, and replays its graphs outside.
    """
    if case.captured_at is None:
        return around(bind)
    refuse_unless(getattr(bind, "reads_lengths", False), "its graph is of the lengths that it was captured with")
    refuse_unless(lengths.is_cuda, "needs a CUDA graph")
    full, short = lengths.clone(), case.captured_at

    @contextmanager
    def shortened() -> Iterator[None]:
        lengths.fill_(short)
        try:
            with around(bind)():
                yield
        finally:
            lengths.copy_(full)

    return shortened


def _replayed(call: Callable[[], Any], shortened: Around) -> Any:
    """The output of a graph that was captured with short lengths. Raises RuntimeError where it is not, bit by bit, that
    of a call with all keys.
    """
    import torch

    with shortened():
        graph = Graph([call], 1)
    graph.graph.replay()
    out = first_tensor(call())
    if not torch.equal(graph.output, out):  # type: ignore[arg-type]
        raise RuntimeError("a graph captured with few keys and replayed with all differs from a call with all")
    return graph.output


# What is printed


def table_of(points: list[list[Decoded]], names: list[str], machine: Machine) -> Any:
    from bench import report

    result = report.table(
        "us of kernel and TB/s of K and V read, on one cache (* eager time); ours also on caches that L2 does not hold",
        "case", *names, "ours of read or copy", "of datasheet", "ours cold",
    )  # fmt: skip
    for point in points:
        by_name = {decoded.outcome.contender.impl: decoded for decoded in point}
        config = by_name["ours"].config(machine) if "ours" in by_name and by_name["ours"].outcome.timing else {}
        cold = config.get("cold_us")
        result.add_row(
            point[0].case.name, *(cell(by_name[name]) for name in names), _share(config.get("of_measured")),
            _share(config.get("of_datasheet")), f"{cold:.1f}, {config['cold_tb_per_s']:.2f}" if cold else "-",
        )  # fmt: skip
    return result


def cell(decoded: Decoded) -> str:
    """Microseconds and TB/s; a dash, or wrong, where there are none."""
    outcome = decoded.outcome
    if outcome.timing is None:
        return "[red]wrong[/red]" if outcome.problem.startswith("wrong") else "-"
    return f"{outcome.us:.1f}{'' if outcome.timing.graph else '*'}, {decoded.case.tb_per_s(outcome.us):.2f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def bandwidth_lines(points: list[list[Decoded]]) -> list[str]:
    """The read and the copy, from the least to the most."""
    made = []
    for name in (READ, COPY):
        found = sorted(point[0].bandwidths[name] for point in points if name in point[0].bandwidths)
        if found:
            moved = f"{name} of 1 GiB, in turn with the others"
            made.append(f"{moved}: {found[len(found) // 2]:.2f} TB/s ({found[0]:.2f} to {found[-1]:.2f} by case)")
    return made


# The command


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m fa3 bench decode", description=__doc__.splitlines()[0])
    add_shapes(result, DEFAULT, GROUPS, NAMED)
    add_pace(result, tuple(DECODERS), ("ours", *PEERS))
    add_check(result)
    add_plot(result)
    return result


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    options = parser()
    args = options.parse_args(argv)
    return run(args, shapes_of(options, args, GROUPS, NAMED), open_machine(args.device, args.commit), began)


def run(args: argparse.Namespace, cases: tuple[Case, ...], machine: Machine, began: float) -> int:
    import torch

    from bench import report

    out = report.console()
    kept = Run(SUITE, machine, args)
    binds, missing = load_of(DECODERS, args.impl)
    for name, why in missing.items():
        out.print(f"{name} is not here: {why}", markup=False)
    out.print(report.heading(machine.origin))
    pace = pace_of(args, began, PACE)
    points: list[list[Decoded]] = []
    left: list[str] = []
    with torch.no_grad():
        for case in report.in_turn(out, cases if binds else (), pace, left):
            points.append(measure(binds, case, machine, pace, args.one_call))
            for decoded in points[-1]:
                if decoded.outcome.timing:
                    kept.add(decoded.record(machine))
            cells = "  ".join(f"{decoded.outcome.contender.impl} {cell(decoded)}" for decoded in points[-1])
            out.print(f"{case.name}: {cells}  ({time.monotonic() - began:.0f} s)")
    out.print(table_of(points, list(binds), machine))
    everything = [decoded.outcome for point in points for decoded in point]
    of_run = kept.points(DTYPE)
    for line in (
        *report.problems(everything), *bandwidth_lines(points), *goals.lines(SUITE, of_run), *report.not_measured(left),
    ):  # fmt: skip
        out.print(line)
    report.draw(out, args.plot, lambda: serving_plots.of_run(of_run))
    failed = "ours" in args.impl and (
        "ours" in missing or any(o.contender.impl == "ours" and o.timing is None for o in everything)
    )
    return int(not kept.holds(out) or failed)


if __name__ == "__main__":
    run_command(SUITE, main)
