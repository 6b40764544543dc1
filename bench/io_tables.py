"""The documents' tables of memory and traffic, in Markdown."""

from collections.abc import Callable, Iterable

from bench.documents import table
from bench.memory import FITTED, MEASURED, TRIED, fit
from bench.recorded import Record, Records, length
from bench.tables import line

MEMORY, TRAFFIC = "python -m fa3 bench memory --try", "python -m fa3 bench traffic"


def bytes_of(records: Iterable[Record]) -> dict[str, dict[int, int]]:
    """Of a call above its inputs, by impl and length."""
    found: dict[str, dict[int, int]] = {}
    for record in records:
        if record["case"] == MEASURED:
            found.setdefault(record["impl"], {})[record["seqlen_q"]] = record["extra_bytes"]
    return found


def memory(records: Records) -> str:
    """MB by length, the slope, and the longest S."""
    rows, found = [], bytes_of(records.memory)
    lengths = sorted(set().union(*found.values()))
    limits = {(r["impl"], r["case"]): r for r in records.memory if r["case"] != MEASURED}
    for impl, by_length in found.items():
        cells = [f"{by_length[s] / 1e6:.{1 if by_length[s] < 1e7 else 0}f}" if s in by_length else "-" for s in lengths]
        rows.append([impl, *cells, f"{fit(list(by_length.items())).slope:.3f}"])
    source = line(records, "memory", records.memory[0]["commit"], MEMORY)
    made = table(["S", *(length(s) for s in lengths), "slope"], rows)
    return "\n\n".join(filter(None, [source, made, _limits(limits)]))


def _limits(limits: dict[tuple[str, str], Record]) -> str:
    """What the GPU's memory holds, as far as it was asked."""
    naive, ours, tried = (
        limits.get(key) for key in (("naive", FITTED), ("ours", FITTED), ("naive", TRIED))
    )  # fmt: skip
    if not naive or not ours:
        return ""
    ran = f"; {tried['seqlen_q']:,} ran and {tried['seqlen_q'] + tried['config']['step']:,} did not" if tried else ""
    free = naive["config"]["free_bytes"] / 2**30
    return (
        f"The GPU's {free:.0f} GiB hold naive attention of S {naive['seqlen_q']:,} by the fit{ran}. "
        f"Of ours they would hold {ours['seqlen_q'] / 1e6:.1f} million."
    )


def traffic(records: Records) -> str:
    """MB of a call, counted / by the formula."""
    rows = []
    for record in records.traffic:
        groups = record["config"].get("warpgroups")
        cells = []
        for name, digits in (("dram", 0 if record["impl"] == "naive" else 1), ("l2", 0 if groups is None else 1)):
            values = (record[f"{name}_bytes"], record[f"{name}_formula"])
            cells.append(" / ".join(f"{value / 1e6:.{digits}f}" for value in values if value is not None))
        rows.append([f"ours, {64 * groups} rows" if groups else record["impl"], *cells])
    source = line(records, "traffic", records.traffic[0]["commit"], TRAFFIC)
    return f"{source}\n\n{table(['', 'DRAM', 'L2 to multiprocessors'], rows)}"


BLOCKS: dict[str, Callable[[Records], str]] = {"memory": memory, "traffic": traffic}
