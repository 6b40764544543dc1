"""Bytes that attention moves, counted by Nsight Compute beside the formulas: python -m fa3 bench traffic

One call (B1 H16 hd64, full, BF16) of naive attention, and of our kernel with query tiles of 64, 128 and 192 rows.
Metrics of sm_90: dram__bytes_read.sum and dram__bytes_write.sum; for L2 to the multiprocessors
l1tex__m_xbar2l1tex_read_bytes.sum, all that comes over the crossbar into L1 and shared memory, TMA's boxes included.
Where ncu knows them two more are recorded as a check: lts__t_sectors_srcunit_tex_op_read.sum, the same reads counted
by L2 in sectors of 32 bytes, and l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum, TMA's share. ncu empties the
caches before every kernel, so a kernel reads from DRAM what the one before it wrote; what L2 still holds of a kernel's
writes at its end is not counted. Records go to
bench/results/<gpu>/traffic.jsonl. Needs ncu on the PATH and the right to read the GPU's counters.
"""

import argparse
import csv
import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.machine import Machine, NoDevice, add_arguments, open_machine, run_command
from bench.measure import compile_ahead, jobs_here
from bench.naive import naive
from bench.peers import Attention, kernel, spec_of
from bench.records import ROOT, record
from bench.regression import Run, add_check
from bench.shapes import Shape
from fa3.cli import positive
from fa3.kernels.forward.config import Config

SUITE = "traffic"
SEQLEN = 8192  # one head's scores are 128 MiB, over twice the L2
ELEMENT_BYTES, LSE_BYTES, SECTOR_BYTES = 2, 4, 32
PATIENCE = 600  # seconds for one call under ncu

DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
L2 = "l1tex__m_xbar2l1tex_read_bytes.sum"
L2_SECTORS, TMA = "lts__t_sectors_srcunit_tex_op_read.sum", "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum"
METRICS = (*DRAM, L2, L2_SECTORS, TMA)
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": 1, "": 1}

NAIVE = "naive"
CONFIGS = {str(64 * n): Config(n, 128, pingpong=n > 1) for n in (1, 2, 3)}  # by the rows of a query tile
NAMES = (NAIVE, *CONFIGS)


def shape_of(seqlen: int) -> Shape:
    return Shape(f"traffic-{seqlen}", 1, seqlen, seqlen, 16, 16, 64, 64, False)


def attention_of(name: str, shape: Shape, num_sms: int) -> Attention:
    return naive if name == NAIVE else kernel(spec_of(shape, "bfloat16"), CONFIGS[name], shape, num_sms)


# The formulas


def score_bytes(shape: Shape) -> int:
    """Of the scores of all heads in 16 bit, once."""
    return shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k * ELEMENT_BYTES


def kv_stream_bytes(shape: Shape, tile_m: int) -> int:
    """K and V of its head once for each query tile."""
    tiles = shape.batch * shape.heads * -(-shape.seqlen_q // tile_m)
    return tiles * shape.seqlen_k * (shape.head_dim + shape.head_dim_v) * ELEMENT_BYTES


def q_bytes(shape: Shape) -> int:
    return shape.batch * shape.heads * shape.seqlen_q * shape.head_dim * ELEMENT_BYTES


def dram_formula(name: str, shape: Shape) -> int:
    """Naive: scores and P each written and read, Q scaled (read, written), Q, K, V read, O written. Ours: Q, K, V, O
    and LSE once.
    """
    if name == NAIVE:
        return 4 * score_bytes(shape) + 2 * q_bytes(shape) + shape.bytes()
    return shape.bytes() + LSE_BYTES * shape.batch * shape.heads * shape.seqlen_q


def l2_formula(name: str, shape: Shape) -> int | None:
    """Ours: K and V once a query tile, Q once. None for naive attention: its matrix products choose their tiles."""
    return None if name == NAIVE else kv_stream_bytes(shape, CONFIGS[name].tile_m) + q_bytes(shape)


# Nsight Compute


def command(ncu: str, name: str, seqlen: int) -> list[str]:
    metrics = ",".join(METRICS)
    options = ["--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off", "--metrics", metrics]
    return [ncu, *options, sys.executable, "-m", "bench.one_call", name, str(seqlen)]


def profile(ncu: str, name: str, seqlen: int) -> list[dict[str, float]]:
    """One call's kernels. Raises RuntimeError with ncu's words where it fails."""
    done = subprocess.run(command(ncu, name, seqlen), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise RuntimeError(why_not(done.stdout + done.stderr) or f"ncu ended with status {done.returncode}")
    return parse(done.stdout)


def why_not(said: str) -> str:
    """ncu's errors, else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]
    return " ".join(errors) or (lines[-1] if lines else "")


def parse(said: str) -> list[dict[str, float]]:
    """Metrics in bytes or counts by kernel, from what `ncu --csv --page raw` prints: its own lines, a header, a line of
    units, a line a kernel. A metric that has no number is left out. Raises ValueError where there is no table, and for
    a unit that is not known.
    """
    lines = said.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"no table in ncu's output: {why_not(said)}")
    header, units, *rows = csv.reader(line for line in lines[start:] if line.startswith('"'))
    columns = [(i, name) for i, name in enumerate(header) if name in METRICS]
    kernels = []
    for row in rows:
        found = {}
        for i, name in columns:
            value = row[i].replace(",", "")
            if value and value.lower() != "n/a":
                if units[i] not in UNITS:
                    raise ValueError(f"{name} is in {units[i]!r}; known are {', '.join(filter(None, UNITS))}")
                found[name] = float(value) * UNITS[units[i]]
        kernels.append(found)
    return kernels


def counted(kernels: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """(DRAM bytes, bytes from L2 to the multiprocessors) of all kernels of a call. Raises ValueError for a metric that
    is missing.
    """
    for metric in (*DRAM, L2):
        if not kernels or any(metric not in found for found in kernels):
            raise ValueError(f"ncu counted no {metric} here")
    return sum(found[m] for found in kernels for m in DRAM), sum(found[L2] for found in kernels)


def checks(kernels: Sequence[Mapping[str, float]]) -> dict[str, int | None]:
    """L2's own count of the same bytes, and those that TMA loaded; None where ncu does not know them."""

    def total(metric: str, each: int) -> int | None:
        if any(metric not in found for found in kernels):
            return None
        return round(sum(found[metric] for found in kernels) * each)

    return {"l2_sector_bytes": total(L2_SECTORS, SECTOR_BYTES), "tma_bytes": total(TMA, 1)}


# The command


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fa3 bench traffic", description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=positive, default=SEQLEN, help=f"default: {SEQLEN}")
    parser.add_argument("--impl", nargs="+", choices=NAMES, default=NAMES, help="naive, or rows of our query tile")
    add_check(parser)
    add_arguments(parser)
    args = parser.parse_args(argv)
    machine = open_machine("cuda", args.commit)
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NoDevice("this benchmark needs Nsight Compute's ncu on the PATH; it comes with the CUDA toolkit.")
    return run(args, machine, ncu)


def run(args: argparse.Namespace, machine: Machine, ncu: str) -> int:
    from bench import report

    out, shape = report.console(), shape_of(args.seqlen)
    spec = spec_of(shape, "bfloat16")
    compile_ahead(((spec, CONFIGS[name]) for name in args.impl if name != NAIVE), jobs_here())
    result = report.table(
        f"MB of one call, B1 H16 hd64 S {args.seqlen} full",
        "",
        "DRAM",
        "formula",
        "ratio",
        "L2 to SM",
        "formula",
        "ratio",
    )
    kept = Run(SUITE, machine, args)
    problems = []
    for name in report.stepped(out, args.impl):
        try:
            kernels = profile(ncu, name, args.seqlen)
            dram, l2 = counted(kernels)
        except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
            problems.append(f"{name}: {error}")
            continue
        kept.add(line_of(name, shape, dram, l2, kernels, machine))
        cells = (*_beside(dram, dram_formula(name, shape)), *_beside(l2, l2_formula(name, shape)))
        result.add_row(name if name == NAIVE else f"ours, {name} rows", *cells)
    out.print(result)
    for problem in problems:
        out.print(problem, markup=False)
    return int(not kept.holds(out) or bool(problems))


def line_of(
    name: str, shape: Shape, dram: float, l2: float, kernels: Sequence[Mapping[str, float]], machine: Machine
) -> dict[str, Any]:
    """A record: the Config of ours, how many kernels ran, and the checks."""
    config = {} if name == NAIVE else dataclasses.asdict(CONFIGS[name])
    config |= {"kernels": len(kernels), **checks(kernels)}
    line = record(machine.origin, SUITE, NAIVE if name == NAIVE else "ours", "bfloat16", shape, config=config)
    return {
        **line,
        "dram_bytes": round(dram),
        "dram_formula": dram_formula(name, shape),
        "l2_bytes": round(l2),
        "l2_formula": l2_formula(name, shape),
    }


def _beside(found: float, formula: int | None) -> tuple[str, str, str]:
    if formula is None:
        return f"{found / 1e6:,.1f}", "-", "-"
    return f"{found / 1e6:,.1f}", f"{formula / 1e6:,.1f}", f"{found / formula:.2f}"


if __name__ == "__main__":
    run_command(SUITE, main)
