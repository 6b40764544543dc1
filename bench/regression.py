"""Whether we became worse: what was just measured against the records of the same GPU.

Speed is compared by kernel time, or relative to the matrix product of the same run, which takes out the clock that
power and heat leave to a GPU, but puts the spread of the product in. The baseline of a figure is the best of its newest
records: were it the newest alone, a little could be lost every time.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.machine import Machine
from bench.measure import Pace
from bench.recorded import NAMES, Point, Record, accumulation, case_of, points, problem_of, read, share_of_cublas
from bench.records import PROBLEM, RESULTS, append, short_name
from bench.shapes import Shape

TOLERANCE = 0.05
NEWEST = 5  # runs, the best of which is the baseline
WHY = {
    "time": "kernel time, as users see it; where this GPU's clock is another, --against cublas takes it out",
    "cublas": "the share of the same run's cuBLAS speed, which takes out the clock of this GPU",
}


class Compared(NamedTuple):
    """A figure of a record, less is better, and how it is written."""

    name: str
    unit: str
    form: str = ",.0f"


# What is compared, by suite; and what of `config` makes two records different things.
FIGURES = {
    "forward": (Compared("graph_us", "us", ".1f"),),
    "fp8": (Compared("graph_us", "us", ".1f"),),
    "decode": (Compared("graph_us", "us", ".1f"), Compared("cold_us", "us from DRAM", ".1f")),
    "ragged": (Compared("graph_us", "us", ".1f"),),
    "host": (Compared("cpu_us", "us of the host", ".1f"), Compared("extra_bytes", "bytes")),
    "startup": (Compared("cpu_us", "us"),),
    "memory": (Compared("extra_bytes", "bytes"),),
    "traffic": (Compared("dram_bytes", "bytes of DRAM"), Compared("l2_bytes", "bytes from L2")),
    "accuracy": (Compared("rmse", "RMSE", ".3e"), Compared("rel_error", "relative error", ".3e")),
}
APART = {
    "decode": ("case",),
    "ragged": ("case",),
    "host": ("gradients",),
    "startup": ("cache",),
    "traffic": ("warpgroups",),
    "accuracy": ("scales", "at"),
}

Baseline = Mapping[tuple[Any, ...], Sequence[Record]]  # the newest, by what makes two records comparable


def share(text: str) -> float:
    """A number of at least 0, as the type of an argument."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # a NaN would let everything pass
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: a number of at least 0, as 0.05 for 5 %")
    return value


def add_check(parser: argparse.ArgumentParser, tolerance: float = TOLERANCE, is_of_speed: bool = False) -> None:
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"compare with the best of the newest {NEWEST} records of this GPU; status 1 where worse",
    )
    parser.add_argument(
        "--tolerance", type=share, default=tolerance, help=f"of --check, as a share (default: {tolerance:g})"
    )
    if is_of_speed:
        parser.add_argument("--against", choices=tuple(WHY), default="time", help="of --check: what is compared")
    else:
        parser.set_defaults(against="figure")
    parser.add_argument("--record", action="store_true", help="of --check: keep this run's records too")


@dataclass(frozen=True)
class Verdict:
    """What is printed, and whether everything that could be compared holds and there was something."""

    lines: tuple[str, ...]
    holds: bool


class Run:
    """The records of a run: written as they come, unless it is only to be checked, and compared at its end."""

    def __init__(self, suite: str, machine: Machine, args: argparse.Namespace) -> None:
        self.suite, self.args = suite, args
        self.records: list[Record] = []
        self.recorded = baseline(machine, suite) if args.check else None  # before this run adds to it
        self.is_kept = args.record or not args.check

    def add(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)
        if self.is_kept:
            append(record, self.args.out)

    def points(self, dtype: str) -> list[Point]:
        return points(self.records, dtype)

    def holds(self, out: Any) -> bool:
        """`check`, printed; True where nobody asked for it."""
        if self.recorded is None:
            return True
        verdict = check(self.records, self.recorded, self.args)
        for line in verdict.lines:
            out.print(line, markup=False)
        return verdict.holds


def baseline(machine: Machine, suite: str, results: Path = RESULTS) -> Baseline:
    """The newest records of the same GPU by problem, type and what else makes them comparable, oldest first; of runs
    with all rounds.
    """
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in read(short_name(machine.origin.gpu), suite, results):
        rounds = record.get("rounds") or Pace.rounds  # older records do not say
        if record["gpu"] == machine.origin.gpu and rounds >= Pace.rounds and figures(record):
            found.setdefault(_key(record), []).append(record)
    return {key: of_key[-NEWEST:] for key, of_key in found.items()}


def figures(record: Record) -> list[Compared]:
    """Those that a record has: none of a limit of memory, which is no cost."""
    if str(record.get("case", "")).startswith("limit"):
        return []
    return [figure for figure in FIGURES[record["suite"]] if _value(record, figure) is not None]


def check(now: Sequence[Record], recorded: Baseline, args: argparse.Namespace) -> Verdict:
    """Of every record of ours."""
    worse: list[str] = []
    unknown: list[str] = []
    commits: dict[str, None] = {}
    mine = [r for r in now if r["impl"].startswith("ours") and not str(r.get("case", "")).startswith("limit")]
    for record in mine:
        known = list(_beside(record, recorded.get(_key(record), ()), args.against))
        if not known:
            unknown.append(_words(record))
        for figure, then, times in known:
            commits[then["commit"]] = None
            if times > 1 + args.tolerance:
                values = [f"{_value(r, figure):{figure.form}}" for r in (record, then)]
                worse.append(
                    f"worse: {_words(record)}, {values[0]} {figure.unit}, recorded {values[1]} ({then['commit']}); "
                    f"{times:.3f} times by {args.against}, {1 + args.tolerance:g} allowed"
                )
    compared = len(mine) - len(unknown)
    by = f" by {WHY[args.against]}" if args.against in WHY else ""
    lines = [f"Checked {compared} of {len(mine)} against {', '.join(commits) or 'nothing'}{by}."]
    if unknown:
        lines.append(f"Not recorded yet, or without the figure: {_some(unknown)}")
    if not worse and compared:
        lines.append(f"None is worse by more than {args.tolerance:.0%}.")
    return Verdict((*lines, *worse), bool(compared) and not worse)


def _beside(now: Record, before: Sequence[Record], against: str) -> Iterator[tuple[Compared, Record, float]]:
    """(figure, the best record of it, how many times that ours is now)."""
    for figure in figures(now):
        costs = [(cost, i) for i, then in enumerate(before) if (cost := _cost(then, figure, against)) is not None]
        cost_now = _cost(now, figure, against)
        if costs and cost_now is not None:
            least, place = min(costs)
            yield figure, before[place], cost_now / least if least else math.inf if cost_now else 1.0


def _cost(record: Record, figure: Compared, against: str) -> float | None:
    """Less is better."""
    if against != "cublas":
        return _value(record, figure)
    share = share_of_cublas(record)
    return 1 / share if share else None


def _value(record: Record, figure: Compared) -> float | None:
    found = record.get(figure.name)
    return (record["config"] or {}).get(figure.name) if found is None else found


def _key(record: Record) -> tuple[Any, ...]:
    config = record["config"] or {}
    apart = [config.get(name) for name in APART.get(record["suite"], ())]
    return record["impl"], record["dtype"], accumulation(record), *problem_of(record), record.get("case"), *apart


def _words(record: Record) -> str:
    shape = Shape("", **{name: record[name] for name in PROBLEM})
    name = case_of(record) or NAMES.get(problem_of(record), Point(shape, "", {}).label)
    apart = (str(x) for x in _key(record)[3 + len(PROBLEM) :] if x not in (None, name))
    return " ".join(filter(None, (name, record["impl"], record["dtype"], accumulation(record), *apart)))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
