"""The tables that the documents show of one GPU, in Markdown: each a function of its records."""

import statistics
from collections.abc import Callable, Iterable, Sequence

from bench.documents import table
from bench.model import NoModel, of_record, utilization
from bench.peers import PEERS
from bench.plots import LOOKS, Errors
from bench.recorded import NotRecorded, Point, Record, Records, dims, gradients, length, mask
from bench.shapes import GRID_HEAD_DIMS
from fa3.device import HOPPER, Chip, named

FORWARD = "python -m fa3 bench forward --grid"
FP8_GRID = "python -m fa3 bench fp8 --grid --impl accurate fa3"
BOTH_TYPES = "python -m fa3 bench forward --grid --dtype bfloat16 float16"
LENGTHS = "python -m fa3 bench accuracy --case length"
KNOWN = {"H100 SXM": "NVIDIA H100 80GB HBM3", "H100 PCIe": "NVIDIA H100 PCIe", "H200": "NVIDIA H200"}
PEER_COLUMNS = ("fastest peer", "its time over ours")
FA2_COLUMNS = ("FA2", "FA2 of the peak", "over FA2")
HOST_NAMES = {"fa2": "FA2 through SDPA", "cudnn": "cuDNN through SDPA", "fa3": "FA3", "fa4": "FA4"}

# What a point's speed is a share of, by column.
UTILIZATION: dict[str, Callable[[Point, Chip], float | None]] = {
    "of the peak": lambda point, chip: chip.peak_tflops and point.tflops("ours") / chip.peak_tflops,
    "of cuBLAS": lambda point, chip: point.tflops("ours") / point.cublas,
    "of the model": lambda point, chip: of_model(point.by_name["ours"]),
}

# Words and numbers


def peers(points: Sequence[Point]) -> list[str]:
    """That every point has."""
    return [name for name in PEERS if all(name in point.by_name for point in points)]


def listed(names: Sequence[str]) -> str:
    words = [LOOKS[name][0] for name in names]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def of_model(record: Record) -> float | None:
    """None where there is no model of the chip, or of what ran."""
    try:
        return utilization(record)
    except NoModel:
        return None


def bound(record: Record) -> str:
    """Of the model, in microseconds, and what bounds; a dash where there is no model."""
    try:
        terms = of_record(record)
    except NoModel:
        return "-"
    return f"{terms.bound:.0f} {terms.limit}"


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
        lines.setdefault(f"{dims(point.shape)} {mask(point.shape)}", []).append(cells[point.label])
    lengths = [length(seqlen) for seqlen in dict.fromkeys(point.shape.seqlen_q for point in points)]
    return table(["head_dim, mask", f"S {lengths[0]}", *lengths[1:]], [[name, *row] for name, row in lines.items()])


def line(records: Records, suite: str, commit: str, command: str) -> str:
    """Above a table: where it is from."""
    return f"`{command}`; commit {commit} in `bench/results/{records.gpu}/{suite}.jsonl`."


# Tables


def forward_grid(records: Records) -> str:
    """Ours and the fastest peer: a line for each head dim and mask."""
    points = records.forward
    cells = {point.label: f"{point.tflops('ours'):.0f} / {point.tflops(point.best):.0f}" for point in points}
    from_4k, below = (
        max((p for p in points if (p.shape.seqlen_q >= 4096) == long), key=lambda point: point.slowdown)
        for long in (True, False)
    )
    source = line(records, "forward", points[0].commit, FORWARD)
    worst = (
        f"The worst point from 4K on takes {from_4k.slowdown:.2f} times the fastest peer's time ({from_4k.label}), "
        f"the worst below it {below.slowdown:.2f} times ({below.label})."
    )
    return "\n\n".join([f"Beside {listed(peers(points))}: {source}", by_length(points, cells), worst])


def forward_points(records: Records) -> str:
    """Every point: utilization, the fastest peer, FlashAttention-2."""
    points, chip = records.forward, records.chip
    with_fa2 = all("fa2" in point.by_name for point in points)
    columns = ["head_dim, mask, S", "TFLOP/s", *UTILIZATION, *PEER_COLUMNS]
    rows = []
    for point in points:
        row = [point.label, f"{point.tflops('ours'):.0f}", *shares(point, chip), *peer_cells(point)]
        rows.append([*row, *(fa2_cells(point, chip) if with_fa2 else [])])
    ratios = [1 / point.slowdown for point in points]
    wins = sum(ratio >= 1 for ratio in ratios)
    summary = (
        f"Fastest at {wins} of {len(points)} points; geometric mean of the fastest peer's time over ours "
        f"{statistics.geometric_mean(ratios):.3f}. cuBLAS in the same run: "
        f"{statistics.median(point.cublas for point in points):.0f} TFLOP/s."
    )
    made = table([*columns, *(FA2_COLUMNS if with_fa2 else [])], rows)
    paragraphs = [line(records, "forward", points[0].commit, FORWARD), made, summary]
    return "\n\n".join([*paragraphs, *([fa2_range(points, chip)] if with_fa2 else [])])


def fa2_range(points: Sequence[Point], chip: Chip) -> str:
    """Its share of the peak and our speed-up, from the least to the most."""
    speed_ups = sorted(point.tflops("ours") / point.tflops("fa2") for point in points)
    times = f"fa3 is {speed_ups[0]:.2f} to {speed_ups[-1]:.2f} times as fast as FlashAttention-2"
    if not chip.peak_tflops:
        return f"{times}."
    shares = sorted(point.tflops("fa2") / chip.peak_tflops for point in points)
    return f"{times}, which reaches {percent(shares[0])} to {percent(shares[-1])} of the peak."


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


def fp16_over_bf16(point: Point) -> float:
    return point.time("ours float16") / point.time("ours")


def fp16_worst(records: Records) -> str:
    points = records.both_types
    at = max(points, key=fp16_over_bf16)
    speeds = f"{at.tflops('ours float16'):.0f} against {at.tflops('ours'):.0f} TFLOP/s"
    where = f"{at.label}: {speeds}; `{BOTH_TYPES}`, commit {at.commit}"
    return f"FP16 takes up to {fp16_over_bf16(at):.3f} times BF16's time ({where})."


def fp16(records: Records) -> str:
    """FP16 and its time over BF16's: a line for each head dim and mask."""
    points = records.both_types
    cells = {p.label: f"{p.tflops('ours float16'):.0f}, {fp16_over_bf16(p):.3f}" for p in points}
    return f"{line(records, 'forward', points[0].commit, BOTH_TYPES)}\n\n{by_length(points, cells)}"


def peer_cells(point: Point) -> list[str]:
    """The fastest, and its time over ours; dashes where there was none."""
    try:
        return [f"{LOOKS[point.best][0]} {point.tflops(point.best):.0f}", f"{1 / point.slowdown:.3f}"]
    except NotRecorded:
        return ["-", "-"]


def shares(point: Point, chip: Chip) -> list[str]:
    return [percent(share(point, chip)) for share in UTILIZATION.values()]


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
    return f"{line(records, 'fp8', points[0].commit, 'python -m fa3 bench fp8')}\n\n{table(columns, rows)}"


def fp8_points(records: Records) -> str:
    points = records.fp8
    peak = records.chip.peak_tflops
    with_fa3 = all("fa3" in point.by_name for point in points)
    columns = ["head_dim, mask, S", "TFLOP/s", "of the FP8 peak", "of cuBLAS bf16", "of the model"]
    rows = []
    for point in points:
        speed = point.tflops("accurate")
        row = [point.label, f"{speed:.0f}", percent(peak and speed / peak / 2), percent(speed / point.cublas)]
        row.append(percent(of_model(point.by_name["accurate"])))
        if with_fa3:
            row += [f"{point.tflops('fa3'):.0f}", f"{point.time('fa3') / point.time('accurate'):.3f}"]
        rows.append(row)
    columns += ["FlashAttention-3 FP8", "its time over ours"] if with_fa3 else []
    return f"{line(records, 'fp8', points[0].commit, FP8_GRID)}\n\n{table(columns, rows)}"


def model(records: Records) -> str:
    """The bound of every point in microseconds, and what bounds."""
    tables = []
    for words, suite, points, name in (
        ("BF16", "forward", records.forward, "ours"), ("FP8, accurate", "fp8", records.fp8, "accurate"),
    ):  # fmt: skip
        cells = {point.label: bound(point.by_name[name]) for point in points}
        where = f"with the configs of commit {points[0].commit} in `bench/results/{records.gpu}/{suite}.jsonl`:"
        tables.append(f"{words}, {where}\n\n{by_length(points, cells)}")
    return "\n\n".join(tables)


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
    source = line(records, "accuracy", rows[0]["commit"], LENGTHS)
    return f"{source}\n\n{table(['head_dim', 'keys', *(f'{LOOKS[look][0]}, %' for look in looks)], lines)}"


def host(records: Records) -> str:
    """What a call costs beside the kernel."""
    times = {r["impl"]: r["cpu_us"] for r in records.host if r["cpu_us"] and gradients(r) == "off"}
    on = [r["cpu_us"] for r in records.host if r["cpu_us"] and gradients(r) == "on" and r["impl"] == "ours"]
    small = next(r for r in records.host if r["cpu_us"])
    names = sorted(times.keys() - {"ours"}, key=lambda name: times[name])
    ours = f"{times['ours']:.1f} us{''.join(f' (with gradients on {us:.1f})' for us in on)}"
    cells = [ours, ", ".join(f"{HOST_NAMES.get(n, LOOKS[n][0])} {times[n]:.1f}" for n in names)]
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


BLOCKS: dict[str, Callable[[Records], str]] = {
    "fp16-worst": fp16_worst,
    "fp16": fp16,
    "forward-grid": forward_grid,
    "forward-points": forward_points,
    "peaks": peaks,
    "model": model,
    "fp8-longest": fp8_longest,
    "fp8-points": fp8_points,
    "accuracy": accuracy,
    "host": host,
}
