"""Plots of decode: microseconds and TB/s against the number of keys, a panel for each batch."""

from collections.abc import Callable, Sequence

from bench.decode_cases import NAMED, Case
from bench.plots import LOOKS, Panel, Plot, Series, Source
from bench.recorded import Point, Record

ABOUT = "BF16, head dim 128, one query, contiguous; the same cache in every call"
COMMAND = "python -m fa3 bench decode"


def is_plain(case: Case) -> bool:
    """Whether it is told by batch, heads and keys alone."""
    special = case.page_size, case.window, case.captured_at
    return case.shape.seqlen_q == 1 and not case.lengths and special == (None, None, None)


def of_run(points: Sequence[Point]) -> list[Plot]:
    """Of the points of a run, the last of each case; none where nothing has a place on an axis."""
    last = {point.name: point for point in points if point.name in NAMED and is_plain(NAMED[point.name])}
    if not last:
        return []
    here = sorted(last.values(), key=lambda point: point.shape.seqlen_k)
    first = next(iter(here[0].by_name.values()))
    kinds: tuple[tuple[str, str, Callable[[Record], float]], ...] = (
        ("decode-us", "us", lambda record: record["graph_us"]),
        ("decode-bandwidth", "TB/s of K and V", lambda record: record["config"]["tb_per_s"]),
    )
    return [_plot(name, y, value, here, first) for name, y, value in kinds]


def _plot(name: str, y: str, value: Callable[[Record], float], here: Sequence[Point], first: Record) -> Plot:
    source = Source(first["gpu"], first["torch"], first["commit"], first["date"][:10], ABOUT, COMMAND)
    panels = []
    for batch, heads, heads_kv in sorted({_place(point) for point in here}):
        at = [point for point in here if _place(point) == (batch, heads, heads_kv)]
        series = [
            Series(look, tuple((float(p.shape.seqlen_k), value(p.by_name[look])) for p in at if look in p.by_name))
            for look in LOOKS
            if any(look in point.by_name for point in at)
        ]
        panels.append(Panel(f"batch {batch}, {heads}/{heads_kv} heads", tuple(series)))
    ticks = tuple(sorted({float(point.shape.seqlen_k) for point in here}))
    columns = min(3, len(panels))
    return Plot(name, f"Decode, {y}", "keys", y, tuple(panels), columns, source.caption, log_y=y == "us", ticks=ticks)


def _place(point: Point) -> tuple[int, int, int]:
    return point.shape.batch, point.shape.heads, point.shape.heads_kv
