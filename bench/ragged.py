"""Attention over sequences of many lengths, beside equal sequences of the same FLOPs: python -m fa3 bench ragged

Of each case the same function runs on the ragged sequences (ours) and on equal ones (ours_equal), the dense function on
the equal ones (ours_dense), and the peers on the ragged ones, in turns. Every output is checked before it is timed;
every timing is a line in bench/results/<gpu>/ragged.jsonl; what must be shown (bench/goals.py) is met or missed. Exit
status 1 if ours failed anywhere, or with --check is slower than its records; 2 without a GPU.
"""

import argparse
import inspect
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from bench import goals
from bench.check import Check
from bench.machine import Machine, open_machine, run_command
from bench.measure import Contender, Outcome, Pace, timed, tried
from bench.options import add_pace, add_shapes, pace_of, shapes_of
from bench.peers import around, load_of, reason
from bench.ragged_cases import DEFAULT, GROUPS, NAMED, Case
from bench.regression import Run, add_check
from bench.serving_peers import EQUAL, VARLEN, RaggedBind, Tensors
from bench.shapes import Shape
from fa3.testing.timing import first_tensor

SUITE = "ragged"
DTYPE = "bfloat16"
OURS = ("ours", *EQUAL)
ALL = (*OURS, "fa3", "fa4")


# Inputs and their check


def make_tensors(lengths: Sequence[int], shape: Shape, machine: Machine) -> Tensors:
    """Sequences of such queries and keys, N(0, 1)."""
    import torch

    generator = torch.Generator(machine.device).manual_seed(0)

    def tensor(heads: int) -> Any:
        size = sum(lengths), heads, shape.head_dim
        return torch.randn(size, generator=generator, dtype=getattr(torch, DTYPE), device=machine.device)

    starts = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=machine.device)
    return Tensors(tensor(shape.heads), tensor(shape.heads_kv), tensor(shape.heads_kv), starts, max(lengths))


class Checks:
    """Parts of the first, the longest and the last sequence that is not empty, each as bench.check does."""

    def __init__(self, lengths: Sequence[int], shape: Shape, x: Tensors) -> None:
        starts = list(accumulate(lengths, initial=0))
        there = [b for b, length in enumerate(lengths) if length]
        chosen = sorted({there[0], max(there, key=lambda b: lengths[b]), there[-1]})
        self.rows = [slice(starts[b], starts[b + 1]) for b in chosen]
        self.checks = []
        for b, rows in zip(chosen, self.rows, strict=True):
            sizes = 1, lengths[b], lengths[b], shape.heads, shape.heads_kv, shape.head_dim, shape.head_dim_v
            self.checks.append(
                Check(Shape("", *sizes, shape.causal), x.q[None, rows], x.k[None, rows], x.v[None, rows])
            )

    def ratio(self, result: Any) -> float:
        """Largest error over PyTorch's; infinity is what is not finite, anywhere."""
        out = first_tensor(result)
        if not out.isfinite().all().item():
            return math.inf
        return max(check.ratio(out[None, rows]) for check, rows in zip(self.checks, self.rows, strict=True))


# Measuring


@dataclass(frozen=True)
class Ragged:
    """Of one implementation."""

    case: Case
    outcome: Outcome

    def record(self, machine: Machine) -> dict[str, Any]:
        config = {"case": self.case.name, "tokens": sum(self.case.lengths), "longest": max(self.case.lengths)}
        made = self.outcome.record(machine, SUITE)
        return made | {"config": config, "page_size": self.case.page_size, "mode": None}


def measure(
    binds: Mapping[str, RaggedBind], case: Case, machine: Machine, pace: Pace, is_alone: bool = False
) -> list[Ragged]:
    """One for each implementation, in their order. What fails or is wrong is not timed, and stops nobody else."""
    equal = (case.shape.seqlen_q,) * case.shape.batch
    inputs = {}
    for is_equal in {name in EQUAL for name in binds}:
        lengths = equal if is_equal else case.lengths
        tensors = make_tensors(lengths, case.shape, machine)
        inputs[is_equal] = tensors, Checks(lengths, case.shape, tensors)
    calls: dict[str, list[Any]] = {}
    errors: dict[str, float] = {}
    problems: dict[str, str] = {}
    for name, bind in binds.items():
        tensors, checks = inputs[name in EQUAL]
        errors[name] = math.nan
        try:
            call = bind(tensors, case)
        except Exception as error:  # one that does not take the case
            problems[name] = reason(error)
            continue
        errors[name], problem = tried(call, around(bind), checks.ratio)
        if problem:
            problems[name] = problem
        else:
            calls[name] = [call]
    timings, cublas = timed(calls, machine, pace, alone=set(calls) if is_alone else ())
    return [
        Ragged(
            case,
            Outcome(
                Contender(name, DTYPE, bind, None, is_alone), case.shape, timings.get(name), errors[name],
                problems.get(name, ""), cublas,
            ),
        )
        for name, bind in binds.items()
    ]  # fmt: skip


# The command


def takes_pages() -> bool:
    """Whether our function has the argument."""
    import fa3

    return "page_table" in inspect.signature(fa3.flash_attn_varlen_func).parameters


def table_of(points: list[list[Ragged]], names: list[str]) -> Any:
    from bench import report

    result = report.table(
        "TFLOP/s by kernel time (* eager time), ± half the quartile distance; ours over equal sequences'",
        "case", *names, "over equal", "over dense",
    )  # fmt: skip
    for point in points:
        by_name = {ragged.outcome.contender.impl: ragged.outcome for ragged in point}
        shares = (_over(by_name, name) for name in EQUAL)
        speeds = (report.speed(by_name[name]) if name in by_name else "-" for name in names)
        result.add_row(point[0].case.name, *speeds, *shares)
    return result


def _over(by_name: Mapping[str, Outcome], beside: str) -> str:
    """Our TFLOP/s over those of one that has as many FLOPs."""
    here = [by_name[name].us for name in ("ours", beside) if name in by_name and by_name[name].timing]
    return f"{here[1] / here[0]:.3f}" if len(here) == 2 else "-"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m fa3 bench ragged", description=__doc__.splitlines()[0])
    add_shapes(result, DEFAULT, GROUPS, NAMED)
    add_pace(result, tuple(VARLEN), ALL)
    add_check(result, is_of_speed=True)
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
    binds, missing = load_of(VARLEN, args.impl)
    for name, why in missing.items():
        out.print(f"{name} is not here: {why}", markup=False)
    if any(case.page_size for case in cases) and not takes_pages():
        not_there = ", ".join(case.name for case in cases if case.page_size)
        out.print(f"Not there yet, flash_attn_varlen_func takes no page_table: {not_there}", markup=False)
        cases = tuple(case for case in cases if not case.page_size)
    out.print(report.heading(machine.origin))
    pace = pace_of(args, began)
    points: list[list[Ragged]] = []
    left: list[str] = []
    with torch.no_grad():
        for case in report.in_turn(out, cases if binds else (), pace, left):
            here = {name: bind for name, bind in binds.items() if name in OURS or not case.page_size}
            points.append(measure(here, case, machine, pace, args.one_call))
            for ragged in points[-1]:
                if ragged.outcome.timing:
                    kept.add(ragged.record(machine))
            cells = "  ".join(f"{r.outcome.contender.impl} {report.speed(r.outcome)}" for r in points[-1])
            out.print(f"{case.name}: {cells}  ({time.monotonic() - began:.0f} s)")
    out.print(table_of(points, list(binds)))
    everything = [ragged.outcome for point in points for ragged in point]
    for line in (
        *report.problems(everything), *report.product(everything), *goals.lines(SUITE, kept.points(DTYPE)),
        *report.not_measured(left),
    ):  # fmt: skip
        out.print(line)
    failed = any(name in missing for name in OURS) or any(
        o.contender.impl in OURS and o.timing is None for o in everything
    )
    return int(not kept.holds(out) or failed)


if __name__ == "__main__":
    run_command(SUITE, main)
