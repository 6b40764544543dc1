"""One line of JSON a measurement, with the same keys in every suite: bench/results/<gpu>/<suite>.jsonl, appended,
never rewritten.
"""

import dataclasses
import datetime
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.peers import IMPLS, NO_ATTENTION, OTHERS
from bench.shapes import Shape
from fa3.testing.timing import Spread

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PROBLEM = ("head_dim", "head_dim_v", "causal", "batch", "seqlen_q", "seqlen_k", "heads", "heads_kv")
FIELDS = (
    "suite", "impl", "dtype", *PROBLEM, "pass",
    "graph_us", "graph_lower_us", "graph_upper_us", "graph_calls",
    "eager_us", "cpu_us", "rounds", "tflops", "peak_fraction", "cublas_fraction",
    "config", "gpu", "torch", "date", "commit",
)  # fmt: skip
ADDED_FIELDS = ("rounds", "graph_lower_us", "graph_upper_us", "graph_calls")  # older records lack them
MORE_FIELDS = {  # of suites that measure something else than time, or more than a shape says
    "accuracy": ("case", "rmse", "rel_error"),
    "memory": ("case", "extra_bytes"),
    "decode": ("page_size", "mode"),
    "ragged": ("page_size", "mode"),
    "traffic": ("dram_bytes", "dram_formula", "l2_bytes", "l2_formula"),
}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where and with what a record was measured. In TFLOP/s of 16 bit: the datasheet's peak, and the matrix product
    that took turns with what was measured; None where nobody knows them.
    """

    gpu: str
    torch: str
    commit: str
    peak_tflops: float | None = None
    cublas_tflops: float | None = None


def record(
    origin: Origin,
    suite: str,
    impl: str,
    dtype: str,
    shape: Shape,
    *,
    graph_us: float | None = None,
    graph: Spread | None = None,
    graph_calls: int | None = None,
    eager_us: float | None = None,
    cpu_us: float | None = None,
    rounds: int | None = None,
    config: Any = None,
) -> dict[str, Any]:
    """`tflops` and the fractions come from the kernel time alone: without one, and where it is of no attention, they
    are null. The peak is that of the dtype. `rounds`: how many samples the time is the median of. The kernel time is
    given with its quartiles, as `graph`, or alone; `graph_calls`: how many calls its graph held.

    `config` is a dataclass or a mapping: what was chosen for ours, and what the columns have no room for. Raises
    ValueError for an unknown impl.
    """
    if impl not in (*IMPLS, *OTHERS):
        raise ValueError(f"impl must be one of {', '.join((*IMPLS, *OTHERS))}, got {impl!r}")
    graph_us = graph.median if graph else graph_us
    tflops = shape.flops / graph_us / 1e6 if graph_us and impl not in NO_ATTENTION else None
    peak = origin.peak_tflops and origin.peak_tflops * (2 if dtype.startswith("float8") else 1)
    return {
        "suite": suite,
        "impl": impl,
        "dtype": dtype,
        **{name: getattr(shape, name) for name in PROBLEM},
        "pass": "fwd",
        "graph_us": _rounded(graph_us, 3),
        "graph_lower_us": _rounded(graph.lower if graph else None, 3),
        "graph_upper_us": _rounded(graph.upper if graph else None, 3),
        "graph_calls": graph_calls,
        "eager_us": _rounded(eager_us, 3),
        "cpu_us": _rounded(cpu_us, 3),
        "rounds": rounds,
        "tflops": _rounded(tflops, 2),
        "peak_fraction": _fraction(tflops, peak),
        "cublas_fraction": _fraction(tflops, origin.cublas_tflops),
        "config": dict(config) if isinstance(config, Mapping) else config and dataclasses.asdict(config),
        "gpu": origin.gpu,
        "torch": origin.torch,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": origin.commit,
    }


def append(record: Mapping[str, Any], out: Path = RESULTS) -> Path:
    """Adds the record to its file under `out`; returns the file. Raises ValueError for a record with other keys than
    FIELDS and the suite's own.
    """
    fields = FIELDS + MORE_FIELDS.get(str(record.get("suite")), ())
    if tuple(record) != fields:
        raise ValueError(f"a record has the keys {', '.join(fields)}, got {', '.join(record)}")
    path = out / short_name(record["gpu"]) / f"{record['suite']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return path


def short_name(gpu: str) -> str:
    """The first word with a digit in it, else the whole name as one word: "NVIDIA H100 80GB HBM3" is h100."""
    words = gpu.lower().split()
    return next((w for w in words if any(c.isdigit() for c in w)), "-".join(words) or "unknown")


def commit(given: str | None = None) -> str:
    """The commit of this checkout: as given, else $FA3_COMMIT, else git's, else "unknown" (a copy without .git)."""
    named = given or os.environ.get("FA3_COMMIT")
    if named:
        return named
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _fraction(tflops: float | None, of: float | None) -> float | None:
    return round(tflops / of, 4) if tflops and of else None
