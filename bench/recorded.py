"""What the records hold: the points of a suite, each with everything that was measured in turns on the same inputs, and
the newest commit that has all of them.
"""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import FP8
from bench.records import PROBLEM, RESULTS
from bench.shapes import Shape

Record = Mapping[str, Any]
SAME_POINT = datetime.timedelta(seconds=10)  # records of a point are written together; a new process takes longer


class NotRecorded(LookupError):
    """The records lack what was asked for; the message is for the user."""


def read(gpu: str, suite: str, results: Path = RESULTS) -> list[Record]:
    """All records of a suite, oldest first; `gpu` is the name of the folder. None where there is no file."""
    path = results / gpu / f"{suite}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def problem_of(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in PROBLEM)


def accumulation(record: Record) -> str:
    """`accurate` or `fast` of our FP8 attention, empty of everything else."""
    config = record["config"] or {}
    if record["dtype"] != FP8 or record["impl"] not in ("ours", "ours_call"):
        return ""
    return config.get("accumulation") or ("accurate" if config.get("promotion") else "fast")


@dataclass(frozen=True)
class Point:
    """One shape of one run: `by_name` is by impl, in FP8 ours by its accumulation, and bf16 for ours beside it."""

    shape: Shape
    commit: str
    by_name: Mapping[str, Record]

    @property
    def label(self) -> str:
        return f"{self.shape.head_dim} {mask(self.shape)} {length(self.shape.seqlen_q)}"

    def tflops(self, name: str) -> float:
        return self.shape.flops / self.time(name) / 1e6

    def time(self, name: str) -> float:
        return self.by_name[name]["graph_us"]

    @property
    def cublas(self) -> float:
        """TFLOP/s of the bf16 matrix product in the same run."""
        first = next(r for r in self.by_name.values() if r["cublas_fraction"])
        return first["tflops"] / first["cublas_fraction"]


def mask(shape: Shape) -> str:
    return "causal" if shape.causal else "full"


def length(seqlen: int) -> str:
    return f"{seqlen // 1024}K" if seqlen % 1024 == 0 else str(seqlen)


def points(records: Iterable[Record], dtype: str) -> list[Point]:
    """In the order of the records. `dtype` is that of the suite: FP8, or the one of the two types that is wanted."""
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
            shape = Shape("", **{name: group[0][name] for name in PROBLEM})
            made.append(Point(shape, group[0]["commit"], by_name))
    return made


def _together(first: Record, other: Record) -> bool:
    began, then = (datetime.datetime.fromisoformat(r["date"]) for r in (first, other))
    return (first["commit"], problem_of(first)) == (other["commit"], problem_of(other)) and then - began < SAME_POINT


def _name(record: Record, dtype: str, before: Mapping[str, Record]) -> str:
    """What the record is called in its point; "" where it is of another type."""
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
    and those of `beside` that any run of the shape has. Raises NotRecorded where no commit is so whole.
    """
    made: dict[tuple[Any, ...], list[Point]] = {_sizes(shape): [] for shape in shapes}
    for point in points(records, dtype):
        made.get(_sizes(point.shape), []).append(point)
    chosen: list[dict[str, Point]] = []  # of each shape, by commit
    for runs in made.values():
        seen = {name for point in runs for name in point.by_name}
        wanted = {*names, *(seen & set(beside))}
        chosen.append({point.commit: point for point in runs if wanted <= point.by_name.keys()})
    for commit in dict.fromkeys(record["commit"] for record in reversed(records)):
        if chosen and all(commit in by_commit for by_commit in chosen):
            return [by_commit[commit] for by_commit in chosen]
    raise NotRecorded(f"no commit has all {len(shapes)} shapes with {', '.join([*names, *beside])} in {dtype}")


def _sizes(shape: Shape) -> tuple[Any, ...]:
    return tuple(getattr(shape, name) for name in PROBLEM)
