"""The tables and plots of docs/performance.md and of the README: python -m fa3 bench report

Everything is made from bench/results/<gpu>: for each suite of the newest commit that has the whole grid, with every
peer that was ever recorded there. Parts of the documents between markers are replaced, nothing else. With
--check-docs nothing is written, and the exit status is 1 where a document or a plot is not what the records say.
"""

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from bench import documents, group_tables, io_tables, plots, serving_tables, tables
from bench.machine import run_command
from bench.plots import Plot, Source
from bench.recorded import NotRecorded, Point, Record, Records, sizes
from bench.records import RESULTS, ROOT
from bench.shapes import GROUPS, TOKENS, WIDTH
from bench.tables import FORWARD, FP8_GRID, LENGTHS, errors_of
from fa3.device import HOPPER, named

GPU = "h200"  # whose records the documents show
DOCUMENTS = ("README.md", "docs/performance.md")
BLOCKS = {**tables.BLOCKS, **group_tables.BLOCKS, **io_tables.BLOCKS, **serving_tables.BLOCKS}
FIGURES = Path("docs", "figures")
ABOUT = f"batch * length = {TOKENS}, heads * head dim = {WIDTH}"
ABOUT_LENGTHS = "the same E4M3 tensors for all, V ~ N(1, 1), against float64"
ABOUT_MEMORY = "B1 H16 hd128, full, BF16"
ON_AN_AXIS = {sizes(shape) for name, group in GROUPS.items() if name != "models" for shape in group}  # all of one size

# Plots


def source(record: Record, command: str, about: str = ABOUT) -> Source:
    return Source(record["gpu"], record["torch"], record["commit"], record["date"][:10], about, command)


def plot_forward(records: Records) -> Plot:
    return of_speed("BF16", records.forward, FORWARD, ABOUT)


def plot_roofline(records: Records) -> Plot:
    return of_roofline("BF16", records.forward, FORWARD, ABOUT)


def plot_fp8(records: Records) -> Plot:
    return of_speed("FP8", records.fp8, FP8_GRID, ABOUT)


def plot_accuracy(records: Records) -> Plot:
    return of_accuracy(records.lengths, LENGTHS)


def plot_memory(records: Records) -> Plot:
    return of_memory(records.memory, io_tables.MEMORY)


PLOTS = (plot_forward, plot_roofline, plot_fp8, plot_accuracy, plot_memory)


def of_speed(words: str, points: Sequence[Point], command: str, about: str) -> Plot:
    first = next(iter(points[0].by_name.values()))
    peak = named(first["gpu"], 0, HOPPER).peak_tflops
    name, times = {"BF16": ("forward", 1), "FP16": ("forward-fp16", 1), "FP8": ("fp8", 2)}[words]
    of = source(first, command, about)
    return plots.speed(name, f"{words} forward, kernel time", points, of, peak and times * peak)


def of_roofline(words: str, points: Sequence[Point], command: str, about: str) -> Plot:
    first = next(iter(points[0].by_name.values()))
    name = "roofline" if words == "BF16" else f"roofline-{words.lower()}"
    chip = named(first["gpu"], 0, HOPPER)
    return plots.roofline(name, f"{words} forward, roofline", points, source(first, command, about), chip)


def of_accuracy(lengths: Sequence[Record], command: str) -> Plot:
    of = source(lengths[0], command, ABOUT_LENGTHS)
    return plots.error("accuracy", "FP8, error at growing length", errors_of(lengths), of)


def of_memory(records: Sequence[Record], command: str) -> Plot:
    of = source(records[0], command, ABOUT_MEMORY)
    return plots.memory("memory", "Memory of a call above its inputs", io_tables.bytes_of(records), of)


# Plots of what was just measured


def of_run(suite: str, points: dict[str, Sequence[Point]]) -> list[Plot]:
    """By the words for the type. Models are no curve: their batches and heads are their own."""
    made = []
    for words, all_points in points.items():
        here = [point for point in all_points if sizes(point.shape) in ON_AN_AXIS]
        if here:
            given = words, here, f"python -m fa3 bench {suite}", "kernel time"
            made += [of_speed(*given), *([of_roofline(*given)] if words != "FP8" else [])]
    return made


def of_run_accuracy(records: Sequence[Record]) -> list[Plot]:
    lengths = [record for record in records if record["case"] == "length"]
    return [of_accuracy(lengths, "python -m fa3 bench accuracy")] if lengths else []


def of_run_memory(records: Sequence[Record]) -> list[Plot]:
    return [of_memory(records, "python -m fa3 bench memory")] if records else []


def drawn(made: Iterable[Plot], folder: Path) -> list[Path]:
    paths = []
    for plot in made:
        paths.append(folder / f"{plot.name}.png")
        plots.draw(plot, paths[-1])
    return paths


# The command


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m fa3 bench report", description=__doc__.splitlines()[0])
    result.add_argument("--gpu", default=GPU, help=f"folder of the records (default: {GPU})")
    result.add_argument("--results", type=Path, default=RESULTS, help="its parent (default: bench/results)")
    result.add_argument("--check-docs", action="store_true", help="write nothing; status 1 where a document is stale")
    result.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="draw what is recorded of this GPU here, and no document"
    )
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    records = Records(args.gpu, args.results)
    if not (args.results / args.gpu).is_dir():
        there = ", ".join(sorted(path.name for path in args.results.glob("*/"))) or "none"
        print(f"nothing is recorded of {args.gpu} in {args.results}; recorded GPUs: {there}")
        return 1
    if args.figures:
        return draw_what_is_there(records, args.figures)
    try:
        return check_documents(records, ROOT) if args.check_docs else write_documents(records, ROOT)
    except NotRecorded as missing:
        print(f"{args.gpu}: {missing}")
        return 1


def write_documents(records: Records, root: Path) -> int:
    for plot in made_plots(records):
        path = root / FIGURES / f"{plot.name}.png"
        if plots.digest_in(path) != plot.digest:
            plots.draw(plot, path)
    documents.write(root, DOCUMENTS, parts(records))
    print(f"{records.gpu}: forward of {records.forward[0].commit}, fp8 of {records.fp8[0].commit}")
    return 0


def check_documents(records: Records, root: Path) -> int:
    stale = documents.stale(root, DOCUMENTS, parts(records))
    for plot in made_plots(records):
        path = FIGURES / f"{plot.name}.png"
        if plots.digest_in(root / path) != plot.digest:
            stale.append(str(path))
    for name in stale:
        print(f"{name} is not what the records say: {documents.COMMAND}")
    return int(bool(stale))


def draw_what_is_there(records: Records, folder: Path) -> int:
    drawn = 0
    for make in PLOTS:
        try:
            plot = make(records)
        except NotRecorded as missing:
            print(f"{make.__name__.removeprefix('plot_')}: {missing}")
            continue
        plots.draw(plot, folder / f"{plot.name}.png")
        print(folder / f"{plot.name}.png")
        drawn += 1
    return int(not drawn)


def parts(records: Records) -> dict[str, documents.Make]:
    return {name: partial(make, records) for name, make in BLOCKS.items()}


def made_plots(records: Records) -> list[Plot]:
    return [make(records) for make in PLOTS]


if __name__ == "__main__":
    run_command("performance", main)
