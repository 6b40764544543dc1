"""The documents' tables of decode and of ragged attention, in Markdown. What is not recorded has a line that says what
records it.
"""

from collections.abc import Callable, Sequence

from bench.documents import table
from bench.group_tables import optional
from bench.plots import LOOKS
from bench.recorded import NotRecorded, Point, Records
from bench.tables import PEER_COLUMNS, line, peer_cells, percent

DECODE, RAGGED = "python -m fa3 bench decode", "python -m fa3 bench ragged"
RAGGED_PAGED = f"{RAGGED} --shapes paged"


def decode(records: Records) -> str:
    """Microseconds and TB/s of ours with the cache in L2 where it fits and without, and the fastest peer."""
    points = records.decode
    columns = ["", "us", "TB/s", "of a read or copy", "of the datasheet", "cold us", "cold TB/s", *PEER_COLUMNS]
    rows = []
    for point in points:
        config = point.by_name["ours"]["config"]
        row = [point.name, f"{point.time('ours'):.1f}", f"{config['tb_per_s']:.2f}"]
        row += [percent(config[name]) for name in ("of_measured", "of_datasheet")]
        row += [_number(config["cold_us"], ".1f"), _number(config["cold_tb_per_s"], ".2f")]
        rows.append([*row, *_fastest(point)])
    return f"{line(records, 'decode', points[0].commit, DECODE)}\n\n{table(columns, rows)}"


def _fastest(point: Point) -> list[str]:
    """The fastest peer with its microseconds, and its time over ours; dashes where there was none."""
    try:
        return [f"{LOOKS[point.best][0]} {point.time(point.best):.1f}", f"{1 / point.slowdown:.3f}"]
    except NotRecorded:
        return ["-", "-"]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def ragged(records: Records) -> str:
    return _beside_equal(records, records.ragged, RAGGED)


def ragged_paged(records: Records) -> str:
    return _beside_equal(records, records.ragged_paged, RAGGED_PAGED)


def _beside_equal(records: Records, points: Sequence[Point], command: str) -> str:
    """TFLOP/s, and over those of equal sequences by the same function and by the dense one."""
    columns = ["", "TFLOP/s", "equal", "dense", "over equal", "over dense", *PEER_COLUMNS]
    rows = []
    for point in points:
        speeds = [point.tflops(name) for name in ("ours", "ours_equal", "ours_dense")]
        shares = [f"{speeds[0] / speed:.3f}" for speed in speeds[1:]]
        rows.append([point.name, *(f"{speed:.0f}" for speed in speeds), *shares, *peer_cells(point)])
    return f"{line(records, 'ragged', points[0].commit, command)}\n\n{table(columns, rows)}"


BLOCKS: dict[str, Callable[[Records], str]] = {
    "decode": optional(decode, DECODE),
    "ragged": optional(ragged, RAGGED),
    "ragged-paged": optional(ragged_paged, RAGGED_PAGED),
}
