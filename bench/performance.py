"""The tables and plots of docs/performance.md and of the README: python -m bench.performance

Everything is made from bench/results/<gpu>: for each suite of the newest commit that has the whole grid, with every
peer that was ever recorded there. Parts of the documents between markers are replaced, nothing else. With
--check-docs nothing is written, and the exit status is 1 where a document or a plot is not what the records say.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from bench import documents, plots
from bench.documents import table
from bench.machine import run_command
from bench.peers import FP8, PEERS
from bench.plots import LOOKS, Errors, Plot, Source
from bench.recorded import NotRecorded, Point, Record, length, mask, newest, read
from bench.records import RESULTS, ROOT
from bench.shapes import GRID, GRID_HEAD_DIMS, TOKENS, WIDTH
from fa3.device import HOPPER, Chip, named

GPU = "h200"  # whose records the documents show
DOCUMENTS = ("README.md", "docs/performance.md")
FIGURES = Path("docs", "figures")
LONGEST = tuple(shape for shape in GRID if shape.seqlen_q == max(s.seqlen_q for s in GRID))
ABOUT = f"batch * length = {TOKENS}, heads * head dim = {WIDTH}"
KNOWN = {"H100 SXM": "NVIDIA H100 80GB HBM3", "H100 PCIe": "NVIDIA H100 PCIe", "H200": "NVIDIA H200"}

# What a point's speed is a share of, by column. That of the model of our kernel joins here.
UTILIZATION: dict[str, Callable[[Point, Chip], float | None]] = {
    "of the peak": lambda point, chip: chip.peak_tflops and point.tflops("ours") / chip.peak_tflops,
    "of cuBLAS": lambda point, chip: point.tflops("ours") / point.cublas,
}


class Records:
    """What is shown of one GPU, each part read when it is asked for. Raises NotRecorded where there is none."""

    def __init__(self, gpu: str, results: Path = RESULTS) -> None:
        self.gpu = gpu
        self.suite = partial(read, gpu, results=results)

    @cached_property
    def forward(self) -> list[Point]:
        return newest(self.suite("forward"), GRID, "bfloat16", ("ours",), PEERS)

    @cached_property
    def fp8(self) -> list[Point]:
        """At all lengths."""
        return newest(self.suite("fp8"), GRID, FP8, ("accurate",), ("fa3",))

    @cached_property
    def fp8_longest(self) -> list[Point]:
        """With the whole call and BF16."""
        return newest(self.suite("fp8"), LONGEST, FP8, ("accurate", "fast", "ours_call", "bf16"), ("fa3",))

    @cached_property
    def host(self) -> list[Record]:
        return self._of_newest("host", lambda r: r["impl"] if r["cpu_us"] else r["seqlen_q"])

    @cached_property
    def startup(self) -> list[Record]:
        return self._of_newest("startup", lambda r: r["config"]["cache"])

    @cached_property
    def lengths(self) -> list[Record]:
        """Of accuracy: the error at growing length."""
        found = self._of_newest("accuracy", lambda r: (r["case"], r["head_dim"], r["seqlen_k"], r["impl"]))
        return [record for record in found if record["case"] == "length"]

    @cached_property
    def chip(self) -> Chip:
        return named(self.forward[0].by_name["ours"]["gpu"], 0, HOPPER)

    def _of_newest(self, suite: str, kind: Callable[[Record], Any]) -> list[Record]:
        """The records of the newest commit that has one of each kind that any commit has."""
        records = self.suite(suite)
        kinds = {kind(record) for record in records}
        for commit in dict.fromkeys(record["commit"] for record in reversed(records)):
            found = [record for record in records if record["commit"] == commit]
            if {kind(record) for record in found} == kinds:
                return found
        raise NotRecorded(f"no commit has the whole of suite {suite}")

    def source(self, record: Record, command: str, about: str = ABOUT) -> Source:
        return Source(record["gpu"], record["torch"], record["commit"], record["date"][:10], about, command)

    def line(self, suite: str, commit: str, command: str) -> str:
        """Above a table: where it is from."""
        return f"`{command}`; commit {commit} in `bench/results/{self.gpu}/{suite}.jsonl`."


# Parts of the documents


def forward_grid(records: Records) -> str:
    """Ours and the fastest peer: a line for each head dim and mask."""
    points = records.forward
    cells = {point.label: f"{point.tflops('ours'):.0f} / {point.tflops(best(point)):.0f}" for point in points}
    from_4k, below = (
        max((p for p in points if (p.shape.seqlen_q >= 4096) == long), key=slowdown) for long in (True, False)
    )
    source = records.line("forward", points[0].commit, "python -m fa3 bench forward --grid")
    worst = (
        f"The worst point from 4K on takes {slowdown(from_4k):.2f} times the fastest peer's time ({from_4k.label}), "
        f"the worst below it {slowdown(below):.2f} times ({below.label})."
    )
    return "\n\n".join([f"Beside {listed(peers(points))}: {source}", by_length(points, cells), worst])


def forward_points(records: Records) -> str:
    points = records.forward
    with_fa2 = all("fa2" in point.by_name for point in points)
    columns = ["head_dim, mask, S", "TFLOP/s", *UTILIZATION, "fastest peer", "its time over ours"]
    rows = []
    for point in points:
        name = best(point)
        row = [point.label, f"{point.tflops('ours'):.0f}"]
        row += [percent(share(point, records.chip)) for share in UTILIZATION.values()]
        row += [f"{LOOKS[name][0]} {point.tflops(name):.0f}", f"{1 / slowdown(point):.3f}"]
        rows.append([*row, *(fa2_cells(point, records.chip) if with_fa2 else [])])
    ratios = [1 / slowdown(point) for point in points]
    wins = sum(ratio >= 1 for ratio in ratios)
    return "\n\n".join([
        records.line("forward", points[0].commit, "python -m fa3 bench forward --grid"),
        table([*columns, *(FA2_COLUMNS if with_fa2 else [])], rows),
        f"Fastest at {wins} of {len(points)} points; geometric mean of the fastest peer's time over ours "
        f"{statistics.geometric_mean(ratios):.3f}. cuBLAS in the same run: "
        f"{statistics.median(point.cublas for point in points):.0f} TFLOP/s.",
    ])  # fmt: skip


FA2_COLUMNS = ("FA2", "FA2 of the peak", "over FA2")


def fa2_cells(point: Point, chip: Chip) -> list[str]:
    speed, peak = point.tflops("fa2"), chip.peak_tflops
    return [f"{speed:.0f}", percent(peak and speed / peak), f"{point.tflops('ours') / speed:.2f}x"]


def peaks(records: Records) -> str:
    """The datasheets, by the names that torch gives the GPUs."""
    rows = []
    for label, name in KNOWN.items():
        chip = named(name, 0, HOPPER)
        assert chip.peak_tflops and chip.bandwidth
        numbers = chip.peak_tflops, 2 * chip.peak_tflops, chip.bandwidth, chip.peak_tflops / chip.bandwidth
        rows.append([label, *(f"{number:.4g}" for number in numbers)])
    return table(["GPU", "16 bit, TFLOP/s", "FP8, TFLOP/s", "bandwidth, TB/s", "16 bit ridge, FLOP/byte"], rows)


def fp8_longest(records: Records) -> str:
    """Full and causal at the longest length: a line for each head dim, and one more where fast is another kernel."""
    points = records.fp8_longest
    rows = []
    for dim in GRID_HEAD_DIMS:
        here = [point for point in points if point.shape.head_dim == dim]
        rows.append([str(dim), *(both(here, name) for name in ("accurate", "ours_call", "bf16", "fa3"))])
        if any(point.by_name["fast"]["config"]["promotion"] == 0 for point in here):
            rows.append([f'{dim}, `accumulation="fast"`', both(here, "fast"), "", "", ""])
    columns = ["head_dim", "kernel", "call", "BF16 kernel", "FlashAttention-3 FP8 kernel"]
    return f"{records.line('fp8', points[0].commit, 'python -m fa3 bench fp8')}\n\n{table(columns, rows)}"


def fp8_points(records: Records) -> str:
    points = records.fp8
    peak = records.chip.peak_tflops
    with_fa3 = all("fa3" in point.by_name for point in points)
    columns = ["head_dim, mask, S", "TFLOP/s", "of the FP8 peak", "of cuBLAS bf16"]
    rows = []
    for point in points:
        speed = point.tflops("accurate")
        row = [point.label, f"{speed:.0f}", percent(peak and speed / peak / 2), percent(speed / point.cublas)]
        if with_fa3:
            row += [f"{point.tflops('fa3'):.0f}", f"{point.time('fa3') / point.time('accurate'):.3f}"]
        rows.append(row)
    columns += ["FlashAttention-3 FP8", "its time over ours"] if with_fa3 else []
    command = "python -m fa3 bench fp8 --grid --impl accurate fa3"
    return f"{records.line('fp8', points[0].commit, command)}\n\n{table(columns, rows)}"


def errors_of(records: Iterable[Record]) -> Errors:
    found: dict[tuple[int, int, str], float] = {}
    for record in records:
        look = "fa3" if record["impl"] == "fa3" else record["config"]["accumulation"]
        found[record["head_dim"], record["seqlen_k"], look] = record["rel_error"]
    return found


def accuracy(records: Records) -> str:
    rows = records.lengths
    errors = errors_of(rows)
    looks = list(dict.fromkeys(look for _, _, look in errors))
    lines = [
        [str(dim), f"{keys}", *(f"{100 * errors[dim, keys, look]:.3g}" for look in looks)]
        for dim, keys in dict.fromkeys((dim, keys) for dim, keys, _ in errors)
    ]
    source = records.line("accuracy", rows[0]["commit"], "python -m fa3 bench accuracy --case length")
    return f"{source}\n\n{table(['head_dim', 'keys', *(f'{LOOKS[look][0]}, %' for look in looks)], lines)}"


def host(records: Records) -> str:
    """What a call costs beside the kernel."""
    times = {r["impl"]: r["cpu_us"] for r in records.host if r["cpu_us"]}
    small = next(r for r in records.host if r["cpu_us"])
    names = sorted(times.keys() - {"ours"}, key=lambda name: times[name])
    cells = [f"{times['ours']:.1f} us", ", ".join(f"{HOST_NAMES.get(n, LOOKS[n][0])} {times[n]:.1f}" for n in names)]
    sizes = f"B{small['batch']} S{small['seqlen_q']} H{small['heads']} hd{small['head_dim']}"
    beyond = max(r["config"]["extra_bytes"] - r["config"]["o_lse_bytes"] for r in records.host if not r["cpu_us"])
    more = f"; {beyond} bytes more where the grid is dynamic, for its counter" if beyond else ""
    rows = [
        [f"host time of a call ({sizes})", "; ".join(filter(None, cells)), "`python -m fa3 bench host`"],
        ["GPU memory of a call", f"O and LSE{more}", "`python -m fa3 bench host`"],
    ]
    for cache, words in (("cold", "empty cache"), ("filled", "kernel in the cache")):
        seconds = [r["cpu_us"] / 1e6 for r in records.startup if r["config"]["cache"] == cache]
        digits = 1 if cache == "cold" else 2
        middle, *ends = (f"{x:.{digits}f}" for x in (statistics.median(seconds), min(seconds), max(seconds)))
        figure = f"{middle} s ({ends[0]} to {ends[1]}, {len(seconds)} processes)"
        rows.append([f"first call of a process, {words}", figure, "`python -m fa3 bench startup`"])
    commits = f"commits {records.host[0]['commit']} and {records.startup[0]['commit']}"
    folder = f"`bench/results/{records.gpu}`"
    return f"{table(['', '', 'command'], rows)}\n\nOf {commits} in `host.jsonl` and `startup.jsonl` of {folder}."


HOST_NAMES = {"fa2": "FA2 through SDPA", "cudnn": "cuDNN through SDPA", "fa3": "FA3", "fa4": "FA4"}

BLOCKS: dict[str, Callable[[Records], str]] = {
    "forward-grid": forward_grid,
    "forward-points": forward_points,
    "peaks": peaks,
    "fp8-longest": fp8_longest,
    "fp8-points": fp8_points,
    "accuracy": accuracy,
    "host": host,
}

# Plots


def plot_forward(records: Records) -> Plot:
    source = records.source(records.forward[0].by_name["ours"], "python -m fa3 bench forward --grid")
    return plots.speed("forward", "BF16 forward, kernel time", records.forward, source, records.chip.peak_tflops)


def plot_roofline(records: Records) -> Plot:
    source = records.source(records.forward[0].by_name["ours"], "python -m fa3 bench forward --grid")
    return plots.roofline("roofline", "BF16 forward, roofline", records.forward, source, records.chip)


def plot_fp8(records: Records) -> Plot:
    command = "python -m fa3 bench fp8 --grid --impl accurate fa3"
    source = records.source(records.fp8[0].by_name["accurate"], command)
    peak = records.chip.peak_tflops
    return plots.speed("fp8", "FP8 forward, kernel time", records.fp8, source, peak and 2 * peak)


def plot_accuracy(records: Records) -> Plot:
    rows = records.lengths
    about = "the same E4M3 tensors for all, V ~ N(1, 1), against float64"
    source = records.source(rows[0], "python -m fa3 bench accuracy --case length", about)
    return plots.error("accuracy", "FP8, error at growing length", errors_of(rows), source)


PLOTS = (plot_forward, plot_roofline, plot_fp8, plot_accuracy)

# Words and numbers


def peers(points: Sequence[Point]) -> list[str]:
    """That every point has."""
    return [name for name in PEERS if all(name in point.by_name for point in points)]


def best(point: Point) -> str:
    """The fastest peer. Raises NotRecorded where none was measured."""
    here = [name for name in PEERS if name in point.by_name]
    if not here:
        raise NotRecorded(f"no peer beside ours at {point.label}")
    return min(here, key=point.time)


def slowdown(point: Point) -> float:
    """Our time over the fastest peer's."""
    return point.time("ours") / point.time(best(point))


def listed(names: Sequence[str]) -> str:
    words = [LOOKS[name][0] for name in names]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def both(points: Sequence[Point], name: str) -> str:
    """Full / causal."""
    ordered = sorted(points, key=lambda point: point.shape.causal)
    return " / ".join(f"{point.tflops(name):.0f}" if name in point.by_name else "-" for point in ordered)


def by_length(points: Sequence[Point], cells: dict[str, str]) -> str:
    """A line for each head dim and mask, a column for each length."""
    lines: dict[str, list[str]] = {}
    for point in points:
        lines.setdefault(f"{point.shape.head_dim} {mask(point.shape)}", []).append(cells[point.label])
    lengths = [length(seqlen) for seqlen in dict.fromkeys(point.shape.seqlen_q for point in points)]
    return table(["head_dim, mask", f"S {lengths[0]}", *lengths[1:]], [[name, *row] for name, row in lines.items()])


# The command


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m bench.performance", description=__doc__.splitlines()[0])
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


def made_plots(records: Records) -> list[Plot]:
    return [make(records) for make in PLOTS]


def parts(records: Records) -> dict[str, Callable[[], str]]:
    return {name: partial(make, records) for name, make in BLOCKS.items()}


if __name__ == "__main__":
    run_command("performance", main)
