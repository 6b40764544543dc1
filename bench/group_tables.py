"""The documents' tables of the shapes beside the grid, and of what must be shown, in Markdown. A group that is not
recorded has a line that says what records it.
"""

import contextlib
from collections.abc import Callable
from functools import partial

from bench import goals
from bench.documents import table
from bench.recorded import NotRecorded, NotWhole, Point, Records, dims, length, mask
from bench.shapes import DIMS_PAIRS, ODD_PAIRS
from bench.tables import PEER_COLUMNS, UTILIZATION, by_length, line, of_model, peer_cells, percent, shares

GROUP, FP8_GROUP = "python -m fa3 bench forward --shapes", "python -m fa3 bench fp8 --impl accurate fa3 bf16 --shapes"


def models(records: Records) -> str:
    points = records.group("models")
    columns = ["", "batch", "Sq x Sk", "heads, KV", "head_dim, mask", "TFLOP/s", *UTILIZATION, *PEER_COLUMNS]
    rows = []
    for point in points:
        s = point.shape
        lengths = " x ".join(length(seqlen) for seqlen in (s.seqlen_q, s.seqlen_k))
        row = [point.name, str(s.batch), lengths, f"{s.heads}, {s.heads_kv}", f"{dims(s)} {mask(s)}"]
        rows.append([*row, f"{point.tflops('ours'):.0f}", *shares(point, records.chip), *peer_cells(point)])
    return f"{line(records, 'forward', points[0].commit, f'{GROUP} models')}\n\n{table(columns, rows)}"


def grid_more(records: Records) -> str:
    points = records.group("grid-more")
    columns = ["head_dim, mask, S", "TFLOP/s", *UTILIZATION, *PEER_COLUMNS]
    rows = [[p.label, f"{p.tflops('ours'):.0f}", *shares(p, records.chip), *peer_cells(p)] for p in points]
    return f"{line(records, 'forward', points[0].commit, f'{GROUP} grid-more')}\n\n{table(columns, rows)}"


def odd(records: Records) -> str:
    """TFLOP/s, and time over the next multiple's."""
    points = records.pairs("odd")
    ratios = goals.ratios(points, ODD_PAIRS, by_time=True)
    here = [point for point in points if point.name in ratios]
    cells = {p.label: f"{p.tflops('ours'):.0f}, {ratios[p.name]:.3f}" for p in here}
    return f"{line(records, 'forward', points[0].commit, f'{GROUP} odd')}\n\n{by_length(here, cells)}"


def head_dims(records: Records) -> str:
    """TFLOP/s with the true head dim, and over that of 128."""
    points = records.pairs("dims")
    ratios, by_name = goals.ratios(points, DIMS_PAIRS, by_time=False), {point.name: point for point in points}
    lines: dict[int, list[str]] = {}
    for shape, _ in DIMS_PAIRS:
        speed = f"{by_name[shape.name].tflops('ours'):.0f}, {ratios[shape.name]:.2f}"
        lines.setdefault(shape.head_dim, [str(shape.head_dim)]).append(speed)
    source = line(records, "forward", points[0].commit, f"{GROUP} dims")
    return f"{source}\n\n{table(['head_dim', 'full', 'causal'], list(lines.values()))}"


def fp8_group(records: Records, name: str) -> str:
    points = records.fp8_group(name)
    columns = ["", "TFLOP/s", "of the model", "BF16's time over ours", "FlashAttention-3 FP8", "its time over ours"]
    rows = []
    for p in points:
        row = [p.name, f"{p.tflops('accurate'):.0f}", percent(of_model(p.by_name["accurate"]))]
        row.append(f"{p.time('bf16') / p.time('accurate'):.3f}" if "bf16" in p.by_name else "-")
        peer = (
            [f"{p.tflops('fa3'):.0f}", f"{p.time('fa3') / p.time('accurate'):.3f}"] if "fa3" in p.by_name else ["-"] * 2
        )
        rows.append([*row, *peer])
    return f"{line(records, 'fp8', points[0].commit, f'{FP8_GROUP} {name}')}\n\n{table(columns, rows)}"


def must_show(records: Records) -> str:
    """The goals, each by the first part of the records that has what it takes."""
    parts: dict[str, list[Callable[[], list[Point]]]] = {
        "forward": [
            lambda: records.forward, lambda: records.both_types, lambda: records.pairs("odd"),
            lambda: records.pairs("dims"),
        ],
        "fp8": [lambda: records.fp8, lambda: records.fp8_longest],
        "decode": [lambda: records.decode],
        "ragged": [lambda: records.ragged, lambda: records.ragged_paged],
    }  # fmt: skip
    rows = []
    for suite, of_suite in parts.items():
        there: list[list[Point]] = []
        for part in of_suite:
            with contextlib.suppress(NotRecorded):
                there.append(part())
        for goal in goals.GOALS[suite]:
            found = next(filter(None, map(goal.figure, there)), None)
            measured = [f"{found.value:{goal.form}}", found.where] if found else ["not measured", ""]
            word = ("met" if goal.is_met(found.value) else "**missed**") if found else ""
            rows.append([f"{suite}: {goal.what}", goal.allowed, *measured, word])
    return table(["suite: what", "asked", "measured", "where", ""], rows)


def optional(make: Callable[[Records], str], command: str) -> Callable[[Records], str]:
    """Its table where it is recorded, else what records it."""

    def made(records: Records) -> str:
        try:
            return make(records)
        except NotWhole:
            return f"Not measured yet: `{command}`."

    return made


BLOCKS: dict[str, Callable[[Records], str]] = {
    "must-show": must_show,
    "models": optional(models, f"{GROUP} models"),
    "odd": optional(odd, f"{GROUP} odd"),
    "dims": optional(head_dims, f"{GROUP} dims"),
    "grid-more": optional(grid_more, f"{GROUP} grid-more"),
    "fp8-models": optional(partial(fp8_group, name="models"), f"{FP8_GROUP} models"),
    "fp8-more": optional(partial(fp8_group, name="grid-more"), f"{FP8_GROUP} grid-more"),
}
