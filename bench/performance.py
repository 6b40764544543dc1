"""The tables and plots of docs/performance.md and of the README: python -m fa3 bench report

Everything is made from bench/results/<gpu>: for each suite of the newest commit that has the whole grid, with every
peer that was ever recorded there. Parts of the documents between markers are replaced, nothing else. With
--check-docs nothing is written, and the exit status is 1 where a document or a plot is not what the records say.
"""

import argparse
from functools import partial
from pathlib import Path

from bench import documents, plots
from bench.machine import run_command
from bench.plots import Plot, Source
from bench.recorded import NotRecorded, Record, Records
from bench.records import RESULTS, ROOT
from bench.shapes import TOKENS, WIDTH
from bench.tables import BLOCKS, FORWARD, FP8_GRID, LENGTHS, errors_of

GPU = "h200"  # whose records the documents show
DOCUMENTS = ("README.md", "docs/performance.md")
FIGURES = Path("docs", "figures")
ABOUT = f"batch * length = {TOKENS}, heads * head dim = {WIDTH}"

# Plots


def source(record: Record, command: str, about: str = ABOUT) -> Source:
    return Source(record["gpu"], record["torch"], record["commit"], record["date"][:10], about, command)


def plot_forward(records: Records) -> Plot:
    points = records.forward
    of = source(points[0].by_name["ours"], FORWARD)
    return plots.speed("forward", "BF16 forward, kernel time", points, of, records.chip.peak_tflops)


def plot_roofline(records: Records) -> Plot:
    points = records.forward
    of = source(points[0].by_name["ours"], FORWARD)
    return plots.roofline("roofline", "BF16 forward, roofline", points, of, records.chip)


def plot_fp8(records: Records) -> Plot:
    points, peak = records.fp8, records.chip.peak_tflops
    of = source(points[0].by_name["accurate"], FP8_GRID)
    return plots.speed("fp8", "FP8 forward, kernel time", points, of, peak and 2 * peak)


def plot_accuracy(records: Records) -> Plot:
    of = source(records.lengths[0], LENGTHS, "the same E4M3 tensors for all, V ~ N(1, 1), against float64")
    return plots.error("accuracy", "FP8, error at growing length", errors_of(records.lengths), of)


PLOTS = (plot_forward, plot_roofline, plot_fp8, plot_accuracy)

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
