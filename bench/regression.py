"""Whether we became slower: what was just measured against the newest records of the same GPU.

By kernel time, or by the speed relative to the matrix product of the same run, which takes out the clock that power and
heat leave to a GPU, but puts the spread of the product in.
"""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import Machine
from bench.measure import Outcome, Pace
from bench.recorded import Record, accumulation, problem_of, read
from bench.records import RESULTS, short_name

Baseline = Mapping[tuple[Any, ...], Record]  # by what makes two records comparable

TOLERANCE = 0.05
WHY = {
    "time": "kernel time, as users see it; where this GPU's clock is another, --against cublas takes it out",
    "cublas": "the share of the same run's cuBLAS speed, which takes out the clock of this GPU",
}


def share(text: str) -> float:
    """A number of at least 0, as the type of an argument."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # a NaN would let everything pass
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: a number of at least 0, as 0.05 for 5 %")
    return value


def add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with the newest records of this GPU; status 1 where slower",
    )
    parser.add_argument(
        "--tolerance", type=share, default=TOLERANCE, help=f"of --check, as a share (default: {TOLERANCE:g})"
    )
    parser.add_argument("--against", choices=tuple(WHY), default="time", help="of --check: what is compared")
    parser.add_argument("--record", action="store_true", help="of --check: keep this run's records too")


def keeps(args: argparse.Namespace) -> bool:
    """Whether this run's records are written."""
    return args.record or not args.check


@dataclass(frozen=True)
class Verdict:
    """What is printed, and whether every point that could be compared holds and there was one."""

    lines: tuple[str, ...]
    holds: bool


def baseline(machine: Machine, suite: str, args: argparse.Namespace, results: Path = RESULTS) -> Baseline | None:
    """The newest record of the same GPU by problem, type and accumulation, of a run with all rounds; None where nobody
    asked for a check. To be read before a run adds records of its own.
    """
    if not args.check:
        return None
    return {_key(r): r for r in read(short_name(machine.origin.gpu), suite, results) if _counts(r, machine)}


def check(
    outcomes: Iterable[Outcome], recorded: Baseline, machine: Machine, suite: str, args: argparse.Namespace
) -> Verdict:
    """Of every outcome of ours that was timed."""
    slower: list[str] = []
    unknown: list[str] = []
    commits: dict[str, None] = {}
    mine = [o for o in outcomes if o.timing and o.contender.impl.startswith("ours")]
    for outcome in mine:
        now = outcome.record(machine, suite)
        then = recorded.get(_key(now))
        times = _slowdown(now, then, args.against) if then else None
        name = " ".join(filter(None, (outcome.shape.name, now["impl"], now["dtype"], accumulation(now))))
        if then is None or times is None:
            unknown.append(name)
            continue
        commits[then["commit"]] = None
        if times > 1 + args.tolerance:
            slower.append(
                f"slower: {name}, {now['graph_us']:.1f} us, recorded {then['graph_us']:.1f} ({then['commit']}); "
                f"{times:.3f} times by {args.against}, {1 + args.tolerance:g} allowed"
            )
    compared = len(mine) - len(unknown)
    lines = [f"Checked {compared} of {len(mine)} against {', '.join(commits) or 'nothing'} by {WHY[args.against]}."]
    if unknown:
        lines.append(f"Not recorded yet, or without kernel time: {_some(unknown)}")
    if not slower and compared:
        lines.append(f"None is slower by more than {args.tolerance:.0%}.")
    return Verdict((*lines, *slower), bool(compared) and not slower)


def passes(
    outcomes: Iterable[Outcome], recorded: Baseline | None, machine: Machine, suite: str, args: argparse.Namespace,
    out: Any,
) -> bool:  # fmt: skip
    """`check`, printed; True where nobody asked for it."""
    if recorded is None:
        return True
    verdict = check(outcomes, recorded, machine, suite, args)
    for line in verdict.lines:
        out.print(line, markup=False)
    return verdict.holds


def _counts(record: Record, machine: Machine) -> bool:
    rounds = record.get("rounds") or Pace.rounds  # older records do not say
    return record["gpu"] == machine.origin.gpu and record["graph_us"] is not None and rounds >= Pace.rounds


def _key(record: Record) -> tuple[Any, ...]:
    return record["impl"], record["dtype"], accumulation(record), *problem_of(record)


def _slowdown(now: Record, then: Record, against: str) -> float | None:
    """How many times longer; None where one of the two has no such figure."""
    if against == "time":
        return now["graph_us"] / then["graph_us"] if now["graph_us"] else None
    shares = then["cublas_fraction"], now["cublas_fraction"]
    return shares[0] / shares[1] if all(shares) else None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
