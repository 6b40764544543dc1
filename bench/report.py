"""Tables and progress of the benchmarks, by rich; wide enough to be read in a log."""

import time
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bench.measure import Outcome, Pace
from bench.peers import PEERS
from bench.records import Origin
from bench.shapes import Shape
from fa3.console import table

WIDTH = 150  # of a table that goes to a file


def console() -> Console:
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=WIDTH)


def heading(origin: Origin) -> str:
    cublas = f", cuBLAS bf16 {origin.cublas_tflops:.0f} TFLOP/s" if origin.cublas_tflops else ""
    return f"{origin.gpu}, torch {origin.torch}, commit {origin.commit}{cublas}"


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


def in_turn(out: Console, shapes: Sequence[Shape], pace: Pace, left: list[str]) -> Iterator[Shape]:
    """The shapes, one after the other, under a bar. What would end past the deadline, were it as long as the longest so
    far, goes to `left`.
    """
    longest = 0.0
    with progress(out) as bar:
        task = bar.add_task("shapes", total=len(shapes))
        for shape in shapes:
            if not pace.has_time(longest):
                left.append(shape.name)
                continue
            start = time.monotonic()
            bar.update(task, description=shape.name)
            yield shape
            bar.advance(task)
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


def limit(seqlen: int) -> float:
    """How much longer than the best peer we may take."""
    return 1.06 if seqlen >= 4096 else 1.25


def marked(value: float | None, allowed: float, form: str = ".3f") -> str:
    """The value, green where it is allowed and red where not."""
    if value is None:
        return "-"
    return f"[{'green' if value <= allowed else 'red'}]{value:{form}}[/]"


def reached(value: float | None, least: float, form: str = ".3f") -> str:
    """The value, green where it is at least so much and red where not."""
    if value is None:
        return "not measured"
    return f"[{'green' if value >= least else 'red'}]{value:{form}}[/]"


def points_table(points: list[list[Outcome]], impls: list[str]) -> Table:
    """One line a shape and dtype."""
    result = table(
        "TFLOP/s by kernel time (* eager time), ± half the quartile distance; time over the best peer's",
        "shape", "dtype", *impls, "ours us", "host us", "ours/best", text_columns=2,
    )  # fmt: skip
    for outcomes in points:
        for dtype in dict.fromkeys(o.contender.dtype for o in outcomes):
            by_impl = {o.contender.impl: o for o in outcomes if o.contender.dtype == dtype}
            shape, ours = outcomes[0].shape, by_impl.get("ours")
            mine = ours.timing if ours else None
            result.add_row(
                shape.name, short(dtype), *(speed(by_impl[i]) if i in by_impl else "-" for i in impls),
                f"{mine.best_known.median:.1f}" if mine else "-", f"{mine.host.median:.1f}" if mine else "-",
                marked(ratio(outcomes, dtype), limit(shape.seqlen_q)) + ("" if _all_by_graph(by_impl) else "*"),
            )  # fmt: skip
    return result


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


def summary(points: list[list[Outcome]]) -> list[str]:
    """The worst ratio to the best peer on either side of 4K, and fp16 beside bf16."""
    lines = []
    worst: dict[float, tuple[float, str]] = {}
    for outcomes in points:
        shape = outcomes[0].shape
        for dtype in {o.contender.dtype for o in outcomes}:
            value = ratio(outcomes, dtype)
            if value is not None:
                key = limit(shape.seqlen_q)
                worst[key] = max(worst.get(key, (0.0, "")), (value, f"{shape.name} {short(dtype)}"))
    for allowed, (value, name) in sorted(worst.items()):
        lengths = "Sq >= 4096" if allowed == limit(4096) else "Sq < 4096"
        lines.append(
            f"{lengths}: at worst {marked(value, allowed)} of the best peer's time ({name}); allowed {allowed}"
        )
    distances = [(abs(fp16 / bf16 - 1), name) for fp16, bf16, name in _both_types(points)]
    if distances:
        lines.append(
            f"fp16 against bf16: at most {marked(max(distances)[0], 0.05)} apart ({max(distances)[1]}); allowed 0.05"
        )
    return lines


def not_measured(left: list[str]) -> list[str]:
    return [f"Not measured, the time was up: {', '.join(left)}"] if left else []


def _both_types(points: list[list[Outcome]]) -> Iterable[tuple[float, float, str]]:
    """Our times in fp16 and in bf16, where there are both, and the shape's name."""
    for outcomes in points:
        ours = {o.contender.dtype: o.us for o in outcomes if o.contender.impl == "ours" and o.timing}
        if {"float16", "bfloat16"} <= ours.keys():
            yield ours["float16"], ours["bfloat16"], outcomes[0].shape.name
