"""What the records hold: the points of a suite, each with everything that was measured in turns on the same inputs, and
the newest commit that has all of them.

The newest commit counts whose grid is whole: with every peer that was ever recorded at a point, so that a quick look at
ours alone does not take the place of a comparison.
"""

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench import decode_cases, ragged_cases
from bench.peers import FP8, PEERS
from bench.records import PROBLEM, RESULTS
from bench.shapes import GRID, GROUPS, NAMED, Shape
from fa3.device import HOPPER, Chip, named

Record = Mapping[str, Any]
LONGEST = tuple(shape for shape in GRID if shape.seqlen_q == max(s.seqlen_q for s in GRID))
SUITES = ("forward", "fp8", "decode", "ragged", "accuracy", "host", "startup", "memory", "traffic")  # that are shown
BOTH = "16 bit"  # a point in both types: BF16 by impl alone, FP16 with its type after it
SAME_POINT = datetime.timedelta(seconds=10)  # records of a point are written together; a new process takes longer


class NotRecorded(LookupError):
    """The records lack what was asked for; the message is for the user."""


class NotWhole(NotRecorded):
    """No commit has all that is shown together."""


def read(gpu: str, suite: str, results: Path = RESULTS) -> list[Record]:
    """All records of a suite, oldest first; `gpu` is the name of the folder. None where there is no file. Raises
    NotRecorded for a line that is no record, as an interrupted run may leave.
    """
    path = results / gpu / f"{suite}.jsonl"
    found = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            found.append(json.loads(line))
        except ValueError:
            raise NotRecorded(f"{path}, line {number} is no record: mend or remove it") from None
    return found


def problem_of(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in PROBLEM)


def sizes(shape: Shape) -> tuple[Any, ...]:
    """The same of a shape."""
    return tuple(getattr(shape, name) for name in PROBLEM)


NAMES = {sizes(shape): shape.name for shape in NAMED.values()}


def case_of(record: Record) -> str:
    """The name of a serving problem, which its sizes alone do not tell; "" elsewhere."""
    return (record["config"] or {}).get("case", "")


def accumulation(record: Record) -> str:
    """`accurate` or `fast` of our FP8 attention, empty of everything else."""
    config = record["config"] or {}
    if record["dtype"] != FP8 or record["impl"] not in ("ours", "ours_call"):
        return ""
    return config.get("accumulation") or ("accurate" if config.get("promotion") else "fast")


def share_of_cublas(record: Record) -> float | None:
    """Of a matrix product that took turns with what was measured. That of older records, which do not say how many
    calls a graph held, ran alone before, under conditions of its own.
    """
    return record["cublas_fraction"] if record.get("graph_calls") else None


@dataclass(frozen=True)
class Point:
    """One shape of one run: `by_name` is by impl, in FP8 ours by its accumulation, and bf16 for ours beside it."""

    shape: Shape
    commit: str
    by_name: Mapping[str, Record]

    @property
    def label(self) -> str:
        return f"{dims(self.shape)} {mask(self.shape)} {length(self.shape.seqlen_q)}"

    @property
    def name(self) -> str:
        """Of the shape, where it has one."""
        return self.shape.name or NAMES.get(sizes(self.shape), self.label)

    @property
    def best(self) -> str:
        """The fastest peer. Raises NotRecorded where none was measured."""
        here = [name for name in PEERS if name in self.by_name]
        if not here:
            raise NotRecorded(f"no peer beside ours at {self.label}")
        return min(here, key=self.time)

    @property
    def slowdown(self) -> float:
        """Our time over the fastest peer's."""
        return self.time("ours") / self.time(self.best)

    def tflops(self, name: str) -> float:
        return self.shape.flops / self.time(name) / 1e6

    def time(self, name: str) -> float:
        return self.by_name[name]["graph_us"]

    @property
    def cublas(self) -> float:
        """TFLOP/s of the bf16 matrix product in the same run. Raises NotRecorded where no record has a share of it."""
        first = next((r for r in self.by_name.values() if r["cublas_fraction"]), None)
        if first is None:
            raise NotRecorded(f"no matrix product was measured beside {self.label} of commit {self.commit}")
        return first["tflops"] / first["cublas_fraction"]


def dims(shape: Shape) -> str:
    same = shape.head_dim == shape.head_dim_v
    return str(shape.head_dim) if same else f"{shape.head_dim}/{shape.head_dim_v}"


def mask(shape: Shape) -> str:
    return "causal" if shape.causal else "full"


def length(seqlen: int) -> str:
    return f"{seqlen // 1024}K" if seqlen % 1024 == 0 else str(seqlen)


def points(records: Iterable[Record], dtype: str) -> list[Point]:
    """In the order of the records. `dtype` is that of the suite: FP8, or the one of the two types that is wanted, or
    BOTH.
    """
    groups: list[list[Record]] = []
    for record in records:
        if groups and _together(groups[-1][0], record):
            groups[-1].append(record)
        else:
            groups.append([record])
    made = []
    for group in groups:
        by_name: dict[str, Record] = {}
        for record in group:
            name = _name(record, dtype, by_name)
            if name and record["graph_us"]:
                by_name[name] = record
        if by_name:
            shape = Shape(case_of(group[0]), **{name: group[0][name] for name in PROBLEM})
            made.append(Point(shape, group[0]["commit"], by_name))
    return made


def _together(first: Record, other: Record) -> bool:
    began, then = (datetime.datetime.fromisoformat(r["date"]) for r in (first, other))
    is_one = all(of(first) == of(other) for of in (lambda r: r["commit"], problem_of, case_of))
    return is_one and then - began < SAME_POINT


def _name(record: Record, dtype: str, before: Mapping[str, Record]) -> str:
    """What the record is called in its point; "" where it is of another type."""
    if dtype == BOTH:
        return record["impl"] if record["dtype"] == "bfloat16" else f"{record['impl']} {record['dtype']}"
    if dtype != FP8:
        return record["impl"] if record["dtype"] == dtype else ""
    if record["impl"] == "ours":
        name = accumulation(record) or "bf16"
        return "fast" if name in before and name == "accurate" else name  # one kernel serves both, and ran twice
    return record["impl"]


def newest(
    records: Sequence[Record], shapes: Sequence[Shape], dtype: str, names: Sequence[str], beside: Sequence[str] = ()
) -> list[Point]:
    """A point for each shape, all of the newest commit that has all of them; of each the newest run that has all names,
    and those of `beside` that any run of the shape has. Raises NotWhole where no commit is so whole.
    """
    made: dict[tuple[Any, ...], list[Point]] = {sizes(shape): [] for shape in shapes}
    for point in points(records, dtype):
        made.get(sizes(point.shape), []).append(point)
    return _newest(
        records, list(made.values()), f"shapes with {', '.join([*names, *beside])} in {dtype}", names, beside
    )


def newest_cases(
    records: Sequence[Record], cases: Sequence[str], names: Sequence[str], beside: Sequence[str] = ()
) -> list[Point]:
    """The same of serving problems, by their names."""
    made: dict[str, list[Point]] = {case: [] for case in cases}
    for point in points(records, "bfloat16"):
        made.get(point.shape.name, []).append(point)
    return _newest(records, list(made.values()), f"cases with {', '.join([*names, *beside])}", names, beside)


def _newest(
    records: Sequence[Record], made: Sequence[list[Point]], what: str, names: Sequence[str], beside: Sequence[str]
) -> list[Point]:
    chosen: list[dict[str, Point]] = []  # of each shape, by commit
    for runs in made:
        seen = {name for point in runs for name in point.by_name}
        wanted = {*names, *(seen & set(beside))}
        chosen.append({point.commit: point for point in runs if wanted <= point.by_name.keys()})
    for commit in dict.fromkeys(record["commit"] for record in reversed(records)):
        if chosen and all(commit in by_commit for by_commit in chosen):
            return [by_commit[commit] for by_commit in chosen]
    raise NotWhole(f"no commit has all {len(made)} {what}")


def one_run(records: Sequence[Record], shapes: Sequence[Shape], dtype: str, names: Sequence[str]) -> list[Point]:
    """The newest points of all shapes that were measured one after the other: what ratios between shapes are made of.
    Raises NotWhole where there was no such run.
    """
    made = [point for point in points(records, dtype) if point.by_name.keys() >= set(names)]
    for end in range(len(made), len(shapes) - 1, -1):
        run = made[end - len(shapes) : end]
        if [sizes(p.shape) for p in run] == [*map(sizes, shapes)] and len({point.commit for point in run}) == 1:
            return run
    raise NotWhole(f"no run has all {len(shapes)} shapes one after the other with {', '.join(names)} in {dtype}")


def gradients(record: Record) -> str:
    """Whether a host time is with gradients "on" or "off": all were off before that was recorded."""
    return (record["config"] or {}).get("gradients", "off")


class Records:
    """What is shown of one GPU, each part read when it is asked for. Raises NotRecorded where there is none.

    `counts` says which records of its folder: two GPUs may have one short name.
    """

    def __init__(self, gpu: str, results: Path = RESULTS, counts: Callable[[Record], bool] = lambda record: True):
        self.gpu, self.results, self.counts = gpu, results, counts

    def suite(self, name: str) -> list[Record]:
        return [record for record in read(self.gpu, name, self.results) if self.counts(record)]

    @cached_property
    def forward(self) -> list[Point]:
        return newest(self.suite("forward"), GRID, "bfloat16", ("ours",), PEERS)

    @cached_property
    def fp8(self) -> list[Point]:
        """At all lengths."""
        return newest(self.suite("fp8"), GRID, FP8, ("accurate",), ("fa3",))

    @cached_property
    def fp8_longest(self) -> list[Point]:
        """With the whole call and BF16."""
        return newest(self.suite("fp8"), LONGEST, FP8, ("accurate", "fast", "ours_call", "bf16"), ("fa3",))

    @cached_property
    def both_types(self) -> list[Point]:
        """BF16 and FP16 in turn."""
        return newest(self.suite("forward"), GRID, BOTH, ("ours", "ours float16"))

    def group(self, name: str) -> list[Point]:
        """Of BF16 forward, a group of shapes."""
        return newest(self.suite("forward"), GROUPS[name], "bfloat16", ("ours",), PEERS)

    def pairs(self, name: str) -> list[Point]:
        """Of BF16 forward, a group whose shapes are set beside one another."""
        return one_run(self.suite("forward"), GROUPS[name], "bfloat16", ("ours",))

    def fp8_group(self, name: str) -> list[Point]:
        return newest(self.suite("fp8"), GROUPS[name], FP8, ("accurate",), ("fast", "bf16", "fa3"))

    @cached_property
    def decode(self) -> list[Point]:
        return newest_cases(self.suite("decode"), [case.name for case in decode_cases.SHOWN], ("ours",), PEERS)

    @cached_property
    def ragged(self) -> list[Point]:
        return self._ragged(ragged_cases.SHOWN)

    @cached_property
    def ragged_paged(self) -> list[Point]:
        return self._ragged(ragged_cases.GROUPS["paged"])

    def _ragged(self, cases: Sequence[ragged_cases.Case]) -> list[Point]:
        names = ("ours", "ours_equal", "ours_dense")
        return newest_cases(self.suite("ragged"), [case.name for case in cases], names, PEERS)

    @cached_property
    def memory(self) -> list[Record]:
        return self._of_newest("memory", lambda r: (r["impl"], r["case"], r["seqlen_q"] if r["case"] == "call" else 0))

    @cached_property
    def traffic(self) -> list[Record]:
        return self._of_newest("traffic", lambda r: (r["impl"], r["seqlen_q"], r["config"].get("warpgroups")))

    @cached_property
    def host(self) -> list[Record]:
        return self._of_newest("host", lambda r: (r["impl"], gradients(r)) if r["cpu_us"] else r["seqlen_q"])

    @cached_property
    def startup(self) -> list[Record]:
        return self._of_newest("startup", lambda r: r["config"]["cache"])

    @cached_property
    def lengths(self) -> list[Record]:
        """Of accuracy: the error at growing length."""
        found = self._of_newest("accuracy", lambda r: (r["case"], r["head_dim"], r["seqlen_k"], r["impl"]))
        return [record for record in found if record["case"] == "length"]

    @cached_property
    def chip(self) -> Chip:
        """By the name in the first record of any suite."""
        first = next((found[0] for found in map(self.suite, SUITES) if found), None)
        if first is None:
            raise NotRecorded("nothing is recorded")
        return named(first["gpu"], 0, HOPPER)

    def _of_newest(self, suite: str, kind: Callable[[Record], Any]) -> list[Record]:
        """The records of the newest commit that has one of each kind that any commit has."""
        records = self.suite(suite)
        kinds = {kind(record) for record in records}
        for commit in dict.fromkeys(record["commit"] for record in reversed(records)):
            found = [record for record in records if record["commit"] == commit]
            if {kind(record) for record in found} == kinds:
                return found
        raise NotWhole(f"no commit has the whole of suite {suite}")
