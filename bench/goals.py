"""What must be shown of speed: one table that the suites, and the documents, read and print as met or missed.

A figure is made from points (bench.recorded), of a run or of the records; None where what it takes was not measured.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench import decode_cases, ragged_cases
from bench.peers import PEERS
from bench.recorded import Point, share_of_cublas, sizes
from bench.shapes import DIMS_PAIRS, GRID, NAMED, ODD_PAIRS, Shape

Pairs = Sequence[tuple[Shape, Shape]]
Cases = Sequence[decode_cases.Case] | Sequence[ragged_cases.Case]
Value = Callable[[Point], float | None]
NEVER_SLOWER = 1.02  # times: what two measurements of one kernel differ by


class Figure(NamedTuple):
    """`where`: the point that it is of, the worst, and how many were measured."""

    value: float
    where: str


@dataclass(frozen=True)
class Goal:
    """`limit`: the least that is asked for, or the most that is allowed."""

    what: str
    limit: float
    figure: Callable[[Sequence[Point]], Figure | None]
    is_most: bool = False
    form: str = ".3f"

    def is_met(self, value: float) -> bool:
        return value <= self.limit if self.is_most else value >= self.limit

    @property
    def allowed(self) -> str:
        return f"at {'most' if self.is_most else 'least'} {self.limit:g}"


# Figures


def at(*starts: str) -> tuple[Shape, ...]:
    """The shapes of the grid whose names begin so."""
    return tuple(shape for shape in GRID if shape.name.startswith(starts))


def over(above: str, below: str) -> Value:
    """Time of one over time of the other."""

    def value(point: Point) -> float | None:
        return point.time(above) / point.time(below) if {above, below} <= point.by_name.keys() else None

    return value


def over_best(point: Point) -> float | None:
    """Our time over the fastest peer's."""
    return point.slowdown if "ours" in point.by_name and any(name in point.by_name for name in PEERS) else None


def of_cublas(point: Point) -> float | None:
    return share_of_cublas(point.by_name["ours"]) if "ours" in point.by_name else None


def tflops(name: str) -> Value:
    return lambda point: point.tflops(name) if name in point.by_name else None


def time_of_ours(point: Point) -> float | None:
    return point.time("ours") if "ours" in point.by_name else None


def inverse(value: Value) -> Value:
    def inverted(point: Point) -> float | None:
        found = value(point)
        return found and 1 / found

    return inverted


def measured(points: Iterable[Point], shapes: Iterable[Shape], value: Value) -> dict[str, float]:
    """By the name of the shape, of its last point that has the value."""
    wanted, found = {sizes(shape): shape.name for shape in shapes}, {}
    for point in points:
        name, figure = wanted.get(sizes(point.shape)), value(point)
        if name and figure is not None:
            found[name] = figure
    return found


def worst(shapes: Sequence[Shape], value: Value, is_most: bool = False) -> Callable[[Sequence[Point]], Figure | None]:
    """The largest where the most is allowed, else the least."""
    return lambda points: _worst(measured(points, shapes, value), len(shapes), is_most)


def mean(shapes: Sequence[Shape], value: Value) -> Callable[[Sequence[Point]], Figure | None]:
    """The geometric one, of all the shapes."""

    def figure(points: Sequence[Point]) -> Figure | None:
        found = measured(points, shapes, value)
        is_whole = len(found) == len(shapes)
        return Figure(statistics.geometric_mean(found.values()), f"{len(found)} points") if is_whole else None

    return figure


def ratios(points: Sequence[Point], pairs: Pairs, by_time: bool) -> dict[str, float]:
    """Of our time, or of our speed, at the first shape of a pair over the second's; by the first one's name."""
    times = measured(points, (shape for pair in pairs for shape in pair), time_of_ours)
    found = {}
    for shape, beside in pairs:
        if {shape.name, beside.name} <= times.keys():
            ratio = times[shape.name] / times[beside.name]
            found[shape.name] = ratio if by_time else shape.flops / beside.flops / ratio
    return found


def worst_pair(pairs: Pairs, by_time: bool) -> Callable[[Sequence[Point]], Figure | None]:
    return lambda points: _worst(ratios(points, pairs, by_time), len(pairs), is_most=by_time)


def tb_per_s(point: Point) -> float | None:
    """Of the K and V that our decode reads."""
    return point.by_name["ours"]["config"]["tb_per_s"] if "ours" in point.by_name else None


def at_cases(points: Iterable[Point], names: Iterable[str], value: Value) -> dict[str, float]:
    """By the name of a serving problem, of its last point that has the value."""
    wanted = set(names)
    values = ((point.name, value(point)) for point in points if point.name in wanted)
    return {name: figure for name, figure in values if figure is not None}


def worst_case(cases: Cases, value: Value, is_most: bool = False) -> Callable[[Sequence[Point]], Figure | None]:
    names = [case.name for case in cases]
    return lambda points: _worst(at_cases(points, names, value), len(names), is_most)


def over_case(cases: Cases) -> Callable[[Sequence[Point]], Figure | None]:
    """Our time at the first of two over that at the second."""
    first, beside = (case.name for case in cases)

    def figure(points: Sequence[Point]) -> Figure | None:
        found = at_cases(points, (first, beside), time_of_ours)
        return Figure(found[first] / found[beside], first) if len(found) == 2 else None

    return figure


def _worst(found: dict[str, float], of: int, is_most: bool) -> Figure | None:
    if not found:
        return None
    name = (max if is_most else min)(found, key=found.__getitem__)
    return Figure(found[name], f"{name}; {len(found)} of {of}" if of > 1 else name)


def _dims(*head_dims: int) -> Pairs:
    return [pair for pair in DIMS_PAIRS if pair[0].head_dim in head_dims]


# The table

HD64, HD128, HD256 = "hd64-", "hd128-", "hd256-"
FULL_16K, CAUSAL_16K = [NAMED["hd128-16k-full"]], [NAMED["hd128-16k-causal"]]
FP8_POINTS, FP8_WIDE = at(HD64, HD128), at(HD256)

LEAST_TB_PER_S = {1: 3.6, 16: 4.25, 64: 4.35, 128: 4.35}  # by page size
LATENCY_US = {"b1-1k": 6.6, "b1-4k": 9.0, "b1-64k": 63.0}
ALL_PAGED = [case for cases in ragged_cases.PAGED.values() for case in cases]

GOALS: dict[str, tuple[Goal, ...]] = {
    "forward": (
        Goal("BF16: our time over the fastest peer's", NEVER_SLOWER, worst(GRID, over_best, True), is_most=True),
        Goal("BF16: the fastest peer's time over ours, geometric mean", 1.08, mean(GRID, inverse(over_best))),
        Goal("FP16: time over BF16's", 1.05, worst(GRID, over("ours float16", "ours"), True), is_most=True),
        Goal("head dim 128, 16K full: share of cuBLAS", 0.93, worst(FULL_16K, of_cublas)),
        Goal("head dim 128, 16K causal: share of cuBLAS", 0.90, worst(CAUSAL_16K, of_cublas)),
        Goal("head dim 256, 16K: share of cuBLAS", 0.97, worst(at("hd256-16k"), of_cublas)),
        Goal("head dim 64, 16K: share of cuBLAS", 0.72, worst(at("hd64-16k"), of_cublas)),
        Goal("odd lengths: time over the next multiple of 128's", 1.03, worst_pair(ODD_PAIRS, True), is_most=True),
        Goal("head dims 96 and 192: TFLOP/s over 128's", 0.80, worst_pair(_dims(96, 192), False)),
        Goal("head dims 72, 80 and 160: TFLOP/s over 128's", 0.60, worst_pair(_dims(72, 80, 160), False)),
    ),
    "fp8": (
        Goal(
            "head dims 64 and 128, accurate: time over FlashAttention-3's",
            NEVER_SLOWER, worst(FP8_POINTS, over("accurate", "fa3"), True), is_most=True,
        ),
        Goal(
            "head dims 64 and 128: FlashAttention-3's time over accurate's, geometric mean",
            1.08, mean(FP8_POINTS, over("fa3", "accurate")),
        ),
        Goal(
            "head dim 256, fast: time over FlashAttention-3's",
            NEVER_SLOWER, worst(FP8_WIDE, over("fast", "fa3"), True), is_most=True,
        ),
        Goal("head dim 256: our BF16's time over accurate's", 1.2, worst(FP8_WIDE, over("bf16", "accurate"))),
        Goal("head dim 128, 16K full, accurate: TFLOP/s", 1020, worst(FULL_16K, tflops("accurate")), form=".0f"),
        Goal("head dim 256, 16K full, fast: TFLOP/s", 1230, worst(at("hd256-16k-full"), tflops("fast")), form=".0f"),
        Goal(
            "head dim 128, 16K full: quantising, share of a copy's speed",
            0.75, worst(FULL_16K, over("copy", "ours_quantize")),
        ),
        Goal(
            "head dim 128, 16K full: our BF16's time over the call's",
            1.25, worst(FULL_16K, over("bf16", "ours_call")),
        ),
    ),
    "decode": (
        *(
            Goal(f"{case.name}: us", LATENCY_US[case.name], worst_case([case], time_of_ours, True), True, ".1f")
            for case in decode_cases.LATENCY
        ),
        Goal("contiguous, large batches: TB/s", 4.5, worst_case(decode_cases.BANDWIDTH, tb_per_s), form=".2f"),
        *(
            Goal(f"shuffled pages of {page}: TB/s", LEAST_TB_PER_S[page], worst_case(cases, tb_per_s), form=".2f")
            for page, cases in decode_cases.PAGED.items()
        ),
        Goal(
            "a graph captured at one key, replayed at 64K: time over that captured at 64K",
            1.1, over_case(decode_cases.REPLAYED), is_most=True,
        ),
        Goal("4 queries: time over one's", 1.25, over_case(decode_cases.QUERIES), is_most=True),
        Goal("MHA, pages of 8: us", 125, worst_case([decode_cases.MHA_PAGE8], time_of_ours, True), True, ".1f"),
        Goal("window of 512 in 32K keys: time over 512 keys'", 1.15, over_case(decode_cases.WINDOW), is_most=True),
        Goal(
            "one sequence of 64K keys among 63 of 512: time over equal ones'",
            1.1, over_case(decode_cases.UNEQUAL), is_most=True,
        ),
    ),
    "ragged": (
        Goal(
            "lengths of 1 to 8K, causal: TFLOP/s over those of equal sequences, dense",
            0.92, worst_case(ragged_cases.UNIFORM[:1], over("ours_dense", "ours")),
        ),
        Goal(
            "one sequence of 64K among 63 of 512: time over equal ones'",
            1.1, worst_case(ragged_cases.ONE_LONG, over("ours", "ours_equal"), True), is_most=True,
        ),
        Goal("16K in pages: TFLOP/s over contiguous", 0.95, worst_case(ALL_PAGED, over("ours_equal", "ours"))),
        Goal("16K in pages: TFLOP/s over dense", 0.95, worst_case(ALL_PAGED, over("ours_dense", "ours"))),
    ),
}  # fmt: skip


def lines(suite: str, points: Sequence[Point]) -> list[str]:
    """One for each goal that the points say something about, in rich's markup."""
    made = []
    for goal in GOALS[suite]:
        found = goal.figure(points)
        if found:
            word = "[green]met[/]   " if goal.is_met(found.value) else "[red]missed[/]"
            made.append(f"{word} {goal.what}: {found.value:{goal.form}} ({found.where}); {goal.allowed}")
    return made
