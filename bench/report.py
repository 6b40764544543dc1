"""Tables and progress of the benchmarks, by rich; wide enough to be read in a log."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bench import performance
from bench.goals import NEVER_SLOWER
from bench.machine import Machine
from bench.measure import PRODUCT_SIZE, Outcome, Pace
from bench.peers import PEERS
from bench.plots import Plot
from bench.records import Origin
from bench.shapes import Named
from bench.tables import of_model, percent
from fa3.console import table

T = TypeVar("T")
WIDTH = 150  # of a table that goes to a file


def console() -> Console:
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=WIDTH)


def heading(origin: Origin) -> str:
    return f"{origin.gpu}, torch {origin.torch}, commit {origin.commit}"


def progress(to: Console) -> Progress:
    """A bar on a terminal; in a file only the lines that are printed past it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=to, disable=not to.is_terminal)


def stepped(out: Console, items: Sequence[T], name: Callable[[T], str] = str) -> Iterator[T]:
    """One after the other, under a bar."""
    with progress(out) as bar:
        task = bar.add_task("", total=len(items))
        for item in items:
            bar.update(task, description=name(item))
            yield item
            bar.advance(task)


def in_turn(out: Console, shapes: Sequence[Named], pace: Pace, left: list[str]) -> Iterator[Named]:
    """The shapes, under a bar. What would end past the deadline, were it as long as the longest so far, goes to
    `left`.
    """
    longest = 0.0
    for shape in stepped(out, shapes, lambda shape: shape.name):
        if not pace.has_time(longest):
            left.append(shape.name)
            continue
        start = time.monotonic()
        yield shape
        longest = max(longest, time.monotonic() - start)


def short(dtype: str) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8"}.get(dtype, dtype)


def speed(outcome: Outcome) -> str:
    """TFLOP/s, half the distance of the quartiles after it; a star where it is eager time. A dash, or why, where
    there is none.
    """
    if outcome.timing is None:
        return "[red]wrong[/red]" if outcome.problem.startswith("wrong") else "-"
    known = outcome.timing.best_known
    share = (known.upper - known.lower) / 2 / known.median
    return f"{outcome.tflops:.0f} ±{outcome.tflops * share:.0f}{'' if outcome.timing.graph else '*'}"


def cell(outcome: Outcome) -> str:
    return f"{outcome.contender.impl} {short(outcome.contender.dtype)} {speed(outcome)}"


def ratio(outcomes: Iterable[Outcome], dtype: str) -> float | None:
    """Our time over the best peer's, of one dtype at one shape; None without both."""
    mine = [o for o in outcomes if o.contender.dtype == dtype and o.timing]
    ours = min((o.us for o in mine if o.contender.impl == "ours"), default=None)
    best = min((o.us for o in mine if o.contender.impl in PEERS), default=None)
    return ours / best if ours and best else None


def marked(value: float | None, allowed: float, form: str = ".3f") -> str:
    """The value, green where it is allowed and red where not."""
    if value is None:
        return "-"
    return f"[{'green' if value <= allowed else 'red'}]{value:{form}}[/]"


def points_table(points: list[list[Outcome]], impls: list[str]) -> Table:
    """One line a shape and dtype."""
    result = table(
        "TFLOP/s by kernel time (* eager time), ± half the quartile distance; time over the best peer's",
        "shape", "dtype", *impls, "ours/best", text_columns=2,
    )  # fmt: skip
    for outcomes in points:
        for dtype in dict.fromkeys(o.contender.dtype for o in outcomes):
            by_impl = {o.contender.impl: o for o in outcomes if o.contender.dtype == dtype}
            result.add_row(
                outcomes[0].shape.name, short(dtype), *(speed(by_impl[i]) if i in by_impl else "-" for i in impls),
                marked(ratio(outcomes, dtype), NEVER_SLOWER) + ("" if _all_by_graph(by_impl) else "*"),
            )  # fmt: skip
    return result


def utilization_table(points: list[list[Outcome]], machine: Machine, suite: str) -> Table:
    """Of ours: times, and the kernel's speed as a share of the datasheet's peak, of cuBLAS and of the model."""
    result = table(
        "ours: us of kernel (* eager time) and host; the kernel's share of the dense peak, of cuBLAS, of the model",
        "shape", "dtype", "us", "host us", "of the peak", "of cuBLAS", "of the model", text_columns=2,
    )  # fmt: skip
    for outcome in (o for point in points for o in point if o.contender.impl == "ours" and o.timing):
        timing, record = outcome.timing, outcome.record(machine, suite)
        assert timing is not None
        shares = record["peak_fraction"], record["cublas_fraction"], of_model(record) if timing.graph else None
        result.add_row(
            outcome.shape.name, short(outcome.contender.dtype),
            f"{timing.best_known.median:.1f}{'' if timing.graph else '*'}", f"{timing.host.median:.1f}",
            *(percent(share) or "-" for share in shares),
        )  # fmt: skip
    return result


def product(outcomes: Iterable[Outcome]) -> list[str]:
    """How fast the matrix product was that took turns with them."""
    found = {o.shape.name: o.cublas_tflops for o in outcomes if o.cublas_tflops}
    if not found:
        return []
    middle, least, most = statistics.median(found.values()), min(found.values()), max(found.values())
    size = f"{PRODUCT_SIZE}^3"
    return [f"cuBLAS bf16 {size}, in turn with the others: {middle:.0f} TFLOP/s ({least:.0f} to {most:.0f} by shape)"]


def draw(out: Console, folder: Path | None, make: Callable[[], Iterable[Plot]]) -> None:
    """What --plot asks for."""
    if folder is None:
        return
    paths = [str(path) for path in performance.drawn(make(), folder)]
    for line in paths or ["Nothing to plot: nothing was measured that has a place on an axis"]:
        out.print(line, markup=False)


def _all_by_graph(by_impl: dict[str, Outcome]) -> bool:
    return all(o.timing.graph for i, o in by_impl.items() if o.timing and i in ("ours", *PEERS))


def problems(outcomes: Iterable[Outcome]) -> list[str]:
    """What was not timed and why, and what has no kernel time; one line for all shapes with the same reason."""
    where: dict[tuple[str, str], list[str]] = {}
    for o in outcomes:
        why = o.problem or (o.timing.note if o.timing else "")
        if why:
            where.setdefault((f"{o.contender.impl} {short(o.contender.dtype)}", why), []).append(o.shape.name)
    return [
        f"{who}: {escape(why)} ({len(names)}: {', '.join(names[:4])}{', ...' if names[4:] else ''})"
        for (who, why), names in where.items()
    ]


def not_measured(left: list[str]) -> list[str]:
    return [f"Not measured, the time was up: {', '.join(left)}"] if left else []
