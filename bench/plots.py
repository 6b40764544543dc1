"""Plots, first as records of what they show, then as PNG by matplotlib.

A Plot is made from the benchmark records without matplotlib, and its digest is kept in the PNG: whether a file still
shows what the records say is read from the file, and does not depend on fonts or versions.
"""

import hashlib
import math
import statistics
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.recorded import Point, dims, mask
from fa3.device import Chip

Curve = tuple[tuple[float, float], ...]  # (x, y), in the order in which a line joins them
Errors = Mapping[tuple[int, int, str], float]  # by head dim, keys and look

SIGNATURE = b"\x89PNG\r\n\x1a\n"
KEYWORD = "Comment"  # of the PNG's text that holds the digest
PANEL_INCHES, DPI = (4.2, 2.9), 90
LEAST_INCHES = 9.0  # of the width: what the caption takes
BELOW_INCHES, ABOVE_INCHES = 0.35, 0.7  # the caption; the title and the legend

# The same look for the same implementation in every plot: (label, colour, marker). The colours are those of Okabe and
# Ito, which people with any colour vision tell apart; markers tell them apart without colour.
LOOKS = {
    "ours": ("fa3 (ours)", "#D55E00", "o"),
    "accurate": ("fa3 (ours), accurate", "#D55E00", "o"),
    "fast": ("fa3 (ours), fast", "#E69F00", "P"),
    "cudnn": ("cuDNN", "#009E73", "s"),
    "fa2": ("FlashAttention-2", "#7F7F7F", "v"),
    "fa3": ("FlashAttention-3", "#0072B2", "^"),
    "fa4": ("FlashAttention-4", "#56B4E9", "D"),
    "flashinfer": ("FlashInfer", "#CC79A7", "X"),
    "naive": ("naive attention", "#000000", "*"),
}
# Limits are lines without markers: (label, line style)
LIMITS = {
    "roof": ("datasheet: dense peak, bandwidth", "-"),
    "cublas": ("cuBLAS bf16, same run", "--"),
}
LIMIT_COLOUR = "#000000"
IN_FRONT = {"ours": 3, "accurate": 3, "fast": 4}
DASHED = ("fast",)  # what may lie on another's line


@dataclass(frozen=True)
class Series:
    """`look` is a key of LOOKS or LIMITS."""

    look: str
    points: Curve


@dataclass(frozen=True)
class Panel:
    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Plot:
    """x is logarithmic to base 2. `peak`: what the axis on the right takes shares of; ticks: of x."""

    name: str
    title: str
    x: str
    y: str
    panels: tuple[Panel, ...]
    columns: int
    caption: str
    log_y: bool = False
    peak: float | None = None
    ticks: tuple[float, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


# What is plotted


@dataclass(frozen=True)
class Source:
    """Where the records are from; `about` is what all points have in common, `command` makes them."""

    gpu: str
    torch: str
    commit: str
    date: str
    about: str
    command: str

    @property
    def caption(self) -> str:
        return f"{self.gpu}, PyTorch {self.torch}, commit {self.commit}, {self.date}; {self.about}; {self.command}"


def speed(name: str, title: str, points: Sequence[Point], source: Source, peak: float | None) -> Plot:
    """TFLOP/s against length: a panel for each head dim and mask."""
    lengths = sorted({float(point.shape.seqlen_q) for point in points})
    panels = _panels(points, lambda point: point.shape.seqlen_q)
    return Plot(
        name, title, "sequence length", "TFLOP/s", panels, _columns(points), source.caption,
        peak=peak, ticks=tuple(lengths),
    )  # fmt: skip


def roofline(name: str, title: str, points: Sequence[Point], source: Source, chip: Chip) -> Plot:
    """TFLOP/s against FLOP for each byte that must move, below what the chip allows."""
    xs = [_intensity(point) for point in points]
    limits: list[Series] = []
    if chip.peak_tflops and chip.bandwidth:
        ridge = chip.peak_tflops / chip.bandwidth
        corners = sorted({min(*xs, ridge) / 2, ridge, max(xs) * 2})
        roof = tuple((x, min(chip.peak_tflops, x * chip.bandwidth)) for x in corners)
        limits.append(Series("roof", roof))
    cublas = statistics.median(point.cublas for point in points)
    limits.append(Series("cublas", ((min(xs) / 2, cublas), (max(xs) * 2, cublas))))
    panels = [replace(panel, series=(*limits, *panel.series)) for panel in _panels(points, _intensity)]
    return Plot(
        name, title, "FLOP per byte of Q, K, V and O", "TFLOP/s", tuple(panels), _columns(points), source.caption,
        log_y=True, ticks=tuple(2.0**k for k in range(6, 15, 2)),
    )  # fmt: skip


def error(name: str, title: str, errors: Errors, source: Source) -> Plot:
    """Relative error in percent against the number of keys: a panel for each head dim."""
    panels = []
    for dim in dict.fromkeys(dim for dim, _, _ in errors):
        curves: dict[str, list[tuple[float, float]]] = {}
        for (of_dim, keys, look), value in errors.items():
            if of_dim == dim:
                curves.setdefault(look, []).append((float(keys), 100 * value))
        if curves.get("fast") == curves.get("accurate"):  # one kernel serves both
            curves.pop("fast", None)
        panels.append(Panel(f"head dim {dim}", tuple(Series(look, tuple(curve)) for look, curve in curves.items())))
    ticks = tuple(sorted({float(keys) for _, keys, _ in errors}))
    return Plot(
        name, title, "keys", "relative error, %", tuple(panels), len(panels), source.caption, log_y=True, ticks=ticks
    )


def memory(name: str, title: str, found: Mapping[str, Mapping[int, int]], source: Source) -> Plot:
    """MB against length, both logarithmic: a slope is a power of the length. `found`: bytes by look and length."""
    series = tuple(
        Series(look, tuple((float(seqlen), size / 1e6) for seqlen, size in sorted(by_length.items())))
        for look, by_length in found.items()
    )
    ticks = tuple(sorted({x for one in series for x, _ in one.points}))
    return Plot(name, title, "sequence length", "MB", (Panel("", series),), 1, source.caption, log_y=True, ticks=ticks)


def _panels(points: Sequence[Point], x: Callable[[Point], float]) -> tuple[Panel, ...]:
    """Rows by mask, columns by head dim; one series for each implementation."""
    panels = []
    for place in sorted(set(map(_place, points))):
        here = sorted((point for point in points if _place(point) == place), key=x)
        looks = [look for look in LOOKS if any(look in point.by_name for point in here)]
        series = [
            Series(look, tuple((float(x(p)), p.tflops(look)) for p in here if look in p.by_name)) for look in looks
        ]
        panels.append(Panel(f"head dim {dims(here[0].shape)}, {mask(here[0].shape)}", tuple(series)))
    return tuple(panels)


def _place(point: Point) -> tuple[bool, int, int]:
    return point.shape.causal, point.shape.head_dim, point.shape.head_dim_v


def _columns(points: Sequence[Point]) -> int:
    return len({_place(point)[1:] for point in points})


def _intensity(point: Point) -> float:
    return point.shape.flops / point.shape.bytes()


# As PNG


def draw(plot: Plot, path: Path) -> None:
    """Writes the PNG. Needs matplotlib, no display."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(plot.panels) / plot.columns)
    size = max(PANEL_INCHES[0] * plot.columns, LEAST_INCHES), PANEL_INCHES[1] * rows + BELOW_INCHES + ABOVE_INCHES
    figure = Figure(figsize=size, dpi=DPI)
    below, above = BELOW_INCHES / size[1], ABOVE_INCHES / size[1]
    figure.set_layout_engine("constrained", rect=(0, below, 1, 1 - below - above))
    shown: dict[str, Any] = {}
    grid = figure.subplots(rows, plot.columns, sharex=True, sharey=True, squeeze=False)
    for place, panel in enumerate(plot.panels):
        row, column = divmod(place, plot.columns)
        axes = grid[row][column]
        for series in panel.series:
            shown.setdefault(series.look, _add(axes, series))
        _dress(axes, plot, panel.title, last_row=row == rows - 1, last_column=column == plot.columns - 1)
        if column == 0:
            axes.set_ylabel(plot.y)
    figure.suptitle(plot.title, y=1 - 0.08 / size[1], va="top", fontsize=12)
    labels = [{**LOOKS, **LIMITS}[look][0] for look in shown]
    figure.legend(
        shown.values(), labels, loc="upper center", bbox_to_anchor=(0.5, 1 - 0.4 / size[1]), ncols=7, frameon=False,
        fontsize=9,
    )  # fmt: skip
    figure.text(0.5, 0.1 / size[1], plot.caption, ha="center", va="bottom", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={KEYWORD: plot.digest, "Software": None})


def _add(axes: Any, series: Series) -> Any:
    xs, ys = zip(*series.points, strict=True)
    if series.look in LIMITS:
        return axes.plot(xs, ys, color=LIMIT_COLOUR, linestyle=LIMITS[series.look][1], linewidth=1.1)[0]
    _, colour, marker = LOOKS[series.look]
    style: dict[str, Any] = {"color": colour, "marker": marker, "linewidth": 1.5, "markersize": 5}
    line = "--" if series.look in DASHED else "-"
    return axes.plot(xs, ys, linestyle=line, zorder=IN_FRONT.get(series.look, 2), **style)[0]


def _dress(axes: Any, plot: Plot, title: str, last_row: bool, last_column: bool) -> None:
    """Scales, ticks, grid, and the share of the peak on the right."""
    axes.set_title(title, fontsize=10)
    axes.set_xscale("log", base=2)
    if plot.ticks:
        axes.set_xticks(plot.ticks, [_number(tick) for tick in plot.ticks])
        axes.minorticks_off()
    ys = [y for panel in plot.panels for series in panel.series for _, y in series.points]
    if plot.log_y:
        axes.set_yscale("log")
        ticks = [step * 10.0**power for power in range(-3, 6) for step in (1, 2, 5)]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(min(ys) / 1.2, max(ys) * 1.2)
    else:
        axes.set_ylim(0, max(ys) * 1.08)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    if last_row:
        axes.set_xlabel(plot.x)
    if plot.peak and last_column:
        share = 100 / plot.peak
        right = axes.secondary_yaxis("right", functions=(lambda y: y * share, lambda y: y / share))
        right.set_ylabel("% of the dense peak")


def _number(value: float) -> str:
    return f"{value / 1024:g}K" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def digest_in(path: Path) -> str | None:
    """Of the plot that a PNG was drawn from; None where there is no such file or it does not say."""
    if not path.exists():
        return None
    for kind, data in _chunks(path.read_bytes()):
        keyword, _, text = data.partition(b"\0")
        if kind == b"tEXt" and keyword == KEYWORD.encode():
            return text.decode("latin-1")
    return None


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(kind, data) of a PNG; nothing of what is none."""
    position = len(SIGNATURE)
    while png.startswith(SIGNATURE) and position + 8 <= len(png):
        size, kind = struct.unpack_from(">I4s", png, position)
        yield kind, png[position + 8 : position + 8 + size]
        position += size + 12  # size, kind and checksum
