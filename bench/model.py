"""A model of the forward kernel's time, term by term, and how near the records come to it: python -m fa3 bench model

Each term is the time that one unit of the chip needs for the kernel's work if nothing else costs any. Their largest is
the bound: no order of the same instructions is faster at that clock. The sum of tensor, exp and issue is what a kernel
takes that overlaps nothing. The work is counted from Spec, Config and Shape, padding and masked scores included;
instructions a score are those of kernels/algo and kernels/forward, held to the SASS by tests/test_bench_model.py.
Latency, power and what a tile costs at its start and end are not in it. Needs neither a GPU nor torch.
"""

import argparse
import heapq
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bench.peers import FP8, config_of, fp8_kernel_of, spec_of
from bench.recorded import NotWhole, Record, Records
from bench.records import PROBLEM, RESULTS, short_name
from bench.shapes import GRID, Shape
from fa3 import heuristics
from fa3.cli import positive
from fa3.device import HOPPER, Chip, named
from fa3.kernels.forward.config import OUT_BYTES, Config, Spec

# Of a multiprocessor and clock.
FLOPS = 4096  # dense 16-bit: 4 tensor cores of 512 fused multiply-adds; FP8 twice as many
EX2 = 16
ISSUED = 4  # instructions of a warp, one a scheduler
SHARED_BYTES = 128

# Of the chip and clock. NVIDIA prints it for the A100, of Hopper nothing: assumed, not measured.
L2_BYTES = 5120
LAUNCH_US = 2.0  # a kernel in a graph: what clearing the counter of a dynamic grid adds (docs/tuning.md, The counter)

ROWS, THREADS, LANES = 64, 128, 32  # query rows and threads of a warpgroup, threads of a warp
LSE_BYTES = 4
SIMULATED = 2**15  # tiles that are dealt out one by one at most: more change little

# What a thread issues for a key block beside what grows with scores and columns of O, from the SASS: maxima across
# lanes; FP32 of row factors and scales; everything else (addresses, barriers, the loop) a block and a WGMMA.
PER_BLOCK = {"16 bit": (4, 8, 46, 4), "guessed": (0, 3, 50, 3), "fp8": (8, 24, 84, 2)}
MASK_LIMITS = 15

CHIPS = {
    "h200": "NVIDIA H200",
    "h100": "NVIDIA H100 80GB HBM3",
    "h100-pcie": "NVIDIA H100 PCIe",
    "gh200": "NVIDIA GH200 480GB",
}
TERMS = ("tensor", "exp", "issue", "shared", "l2", "dram")


class NoModel(ValueError):
    """Of a chip, or of what a record ran; the message is for the user."""


class Instructions(NamedTuple):
    """What a thread of a consumer issues for one key block without a mask."""

    ex2: int
    wgmma: int
    convert: float  # F2FP, two numbers each
    max: float
    fp32: float  # FFMA, FMUL, FADD: scale, row sum, O rescaled or promoted
    other: float

    @property
    def total(self) -> float:
        return sum(self)


class Tile(NamedTuple):
    """What one query tile visits: key blocks, those of them that are masked, and keys that exist."""

    blocks: int
    masked: int
    keys: int


class Cycles(NamedTuple):
    """What one key block costs a multiprocessor, all warpgroups of the CTA together, no mask."""

    tensor: float
    exp: float
    issue: float
    shared: float


@dataclass(frozen=True)
class Terms:
    """Microseconds. Those of the multiprocessors (tensor, exp, issue, shared) are of the one with the longest load."""

    tensor: float  # Q K^T and P V
    exp: float
    issue: float  # all instructions
    shared: float  # operands that WGMMA reads, what TMA writes
    l2: float  # Q, K and V from L2 to the multiprocessors; O goes the other way
    dram: float
    launch: float
    balance: float  # mean over longest load

    @property
    def limit(self) -> str:
        """The term that bounds."""
        return max(TERMS, key=lambda name: getattr(self, name))

    @property
    def bound(self) -> float:
        """All overlap perfectly; the launch overlaps with nothing."""
        return getattr(self, self.limit) + self.launch

    @property
    def serial(self) -> float:
        """Nothing overlaps: one warpgroup's matmuls, exponentials and instructions one after the other."""
        return self.tensor + self.exp + self.issue + self.launch


def chip_of(gpu: str) -> Chip:
    """By the device's name. Raises NoModel for one whose datasheet is not known, or with tensor cores of another
    speed.
    """
    found = named(gpu, 114 if "PCIe" in gpu else 132, HOPPER)
    if found.peak_tflops is None or "H20" in gpu.split():
        raise NoModel(f"no model of {gpu!r}; there are {', '.join(CHIPS.values())}")
    return found


def clock_mhz(chip: Chip) -> float:
    """At which the tensor cores reach the datasheet's peak."""
    assert chip.peak_tflops is not None
    return chip.peak_tflops * 1e6 / (chip.num_sms * FLOPS)


def instructions(spec: Spec, config: Config) -> Instructions:
    """A thread has two rows: tile_n / 2 scores and head_dim_v / 2 values of O.

    Of an optimistic kernel the block is one whose guess holds: no maxima, no factors of O.
    """
    scores, columns = config.tile_n // 2, spec.head_dim_v // 2
    chunks = spec.head_dim_v // (config.chunk or spec.head_dim_v)
    wgmma = spec.head_dim // spec.step + chunks * (config.tile_n // spec.step)
    is_guess = config.optimistic
    lanes, rows, block, each = PER_BLOCK["fp8" if spec.is_fp8 else "guessed" if is_guess else "16 bit"]
    return Instructions(
        ex2=scores + (0 if is_guess else 2),
        wgmma=wgmma,
        convert=scores / 2,
        max=0 if is_guess else scores + lanes,
        fp32=2 * scores + (0 if is_guess else columns) + rows,
        other=block + each * wgmma,
    )


def searching(config: Config) -> Config:
    """What an optimistic kernel does in its first block and in masked ones."""
    return replace(config, optimistic=False)


def masking(config: Config) -> int:
    """Instructions more that a thread issues for a masked block: compare and select every score, limits of two rows."""
    return config.tile_n + MASK_LIMITS


def block_cycles(spec: Spec, config: Config) -> Cycles:
    """A warpgroup reads Q (64 rows) and K for Q K^T and V for P V from shared memory, where TMA wrote K and V once for
    all warpgroups.
    """
    issued, groups, kv = instructions(spec, config), config.warpgroups, spec.head_dim + spec.head_dim_v
    read = groups * (ROWS * spec.head_dim + config.tile_n * kv)
    return Cycles(
        tensor=2 * ROWS * groups * config.tile_n * kv / flops_a_clock(spec),
        exp=THREADS * groups * issued.ex2 / EX2,
        issue=THREADS // LANES * groups * issued.total / ISSUED,
        shared=spec.element_bytes * (read + config.tile_n * kv) / SHARED_BYTES,
    )


def flops_a_clock(spec: Spec) -> int:
    return FLOPS * (2 if spec.is_fp8 else 1)


@cache
def tiles(spec: Spec, config: Config, seqlen_q: int, seqlen_k: int) -> tuple[Tile, ...]:
    """Of one head, in order: kernels/algo/blocks.py in plain integers."""
    c, count_all = config, -(-seqlen_k // config.tile_n)
    count_m = -(-seqlen_q // c.tile_m)
    if not spec.causal:
        tile = Tile(count_all, int(seqlen_k % c.tile_n != 0), seqlen_k)  # whole blocks branch around the mask
        return (tile,) * count_m
    end = -(-seqlen_q // ROWS) * ROWS
    found = []
    for m_block in range(count_m):
        row = end - (count_m - m_block) * c.tile_m
        seen_first = row + 1 + seqlen_k - seqlen_q
        count = min(count_all, -(-max(seen_first + c.tile_m - 1, 1) // c.tile_n))
        masked = max(count - max(seen_first, 0) // c.tile_n, 1)
        found.append(Tile(count, masked, min(count * c.tile_n, seqlen_k)))
    return tuple(found)


@cache
def balance(spec: Spec, config: Config, seqlen_q: int, seqlen_k: int, sequences: int, num_sms: int) -> float:
    """Mean over longest load of the multiprocessors, in key blocks.

    By the fixed rule of a causal grid `heuristics.balance`; else who is ready takes the next tile, the longest first.
    """
    loads = [tile.blocks for tile in tiles(spec, config, seqlen_q, seqlen_k)]
    if not spec.causal:
        rounds = len(loads) * sequences / num_sms
        return rounds / -(-len(loads) * sequences // num_sms)
    if config.persistent and not config.dynamic:
        return heuristics.balance(len(loads), sequences, num_sms)
    sequences = min(sequences, -(-SIMULATED // len(loads)))
    ready = [0] * num_sms
    for load in sorted(loads, reverse=True):
        for _ in range(sequences):
            heapq.heapreplace(ready, ready[0] + load)
    return sum(ready) / num_sms / max(ready)


def terms(spec: Spec, config: Config, shape: Shape, chip: Chip, mhz: float | None = None) -> Terms:
    """mhz: the clock of multiprocessors and L2; by default that of the datasheet's peak."""
    assert chip.bandwidth is not None
    c, element = config, spec.element_bytes
    sequences = shape.batch * shape.heads
    mhz = mhz or clock_mhz(chip)
    one_head = tiles(spec, c, shape.seqlen_q, shape.seqlen_k)
    num_tiles, blocks, masked, keys = (
        sequences * n for n in (len(one_head), *(sum(column) for column in zip(*one_head, strict=True)))
    )
    searched = sequences * sum(max(tile.masked, 1) for tile in one_head)
    even = balance(spec, c, shape.seqlen_q, shape.seqlen_k, sequences, chip.num_sms)
    block, search, groups = block_cycles(spec, c), block_cycles(spec, searching(c)), c.warpgroups

    def of_sms(cycles: float) -> float:
        return cycles / (chip.num_sms * mhz * even)

    # Alternating issues Q K^T of one block more, whose scores nobody reads.
    ahead = 2 * ROWS * groups * c.tile_n * spec.head_dim / flops_a_clock(spec) if c.alternate else 0.0
    q_and_o = ROWS * groups * (element * spec.head_dim + 2 * OUT_BYTES * spec.head_dim_v)  # O is written and read
    streamed = keys * (shape.head_dim + shape.head_dim_v) + sequences * shape.seqlen_q * shape.head_dim
    return Terms(
        tensor=of_sms(block.tensor * blocks + ahead * num_tiles),
        exp=of_sms(block.exp * (blocks - searched) + search.exp * searched),
        issue=of_sms(
            block.issue * (blocks - searched)
            + search.issue * searched
            + THREADS // LANES * groups * masking(c) / ISSUED * masked
        ),
        shared=of_sms(block.shared * blocks + q_and_o / SHARED_BYTES * num_tiles),
        l2=element * streamed / (L2_BYTES * mhz),
        dram=dram_bytes(spec, shape) / chip.bandwidth / 1e6,
        launch=LAUNCH_US * (2 if c.dynamic else 1),
        balance=even,
    )


def dram_bytes(spec: Spec, shape: Shape) -> int:
    """Q, K, V, O and LSE once."""
    queries, keys = shape.batch * shape.heads * shape.seqlen_q, shape.batch * shape.heads_kv * shape.seqlen_k
    of_query = spec.element_bytes * shape.head_dim + OUT_BYTES * shape.head_dim_v + LSE_BYTES
    return queries * of_query + keys * spec.element_bytes * (shape.head_dim + shape.head_dim_v)


# Records


def of_record(record: Record, mhz: float | None = None) -> Terms:
    """The model of a record of ours, with the Config that it ran with, on its GPU. Raises NoModel for a record of
    something else, of an unknown GPU, or with a choice that Config does not have any more.
    """
    if record["impl"] != "ours" or record["dtype"] not in (*heuristics.DTYPES, FP8) or not record["config"]:
        raise NoModel(f"no model of {record['impl']} in {record['dtype']} with config {record['config']}")
    gone = record["config"].keys() - {field.name for field in fields(Config)}
    if gone:
        raise NoModel(f"no model of a config with {', '.join(sorted(gone))}")
    shape = Shape("", **{name: record[name] for name in PROBLEM})
    spec = spec_of(shape, record["dtype"])
    if spec.is_fp8:
        spec = replace(spec, dtype_o="bfloat16")
    return terms(spec, Config(**record["config"]), shape, chip_of(record["gpu"]), mhz)


def utilization(record: Record, mhz: float | None = None) -> float | None:
    """Bound over measured kernel time; None where that was not measured. Above 1 where the clock was higher."""
    return of_record(record, mhz).bound / record["graph_us"] if record["graph_us"] else None


# The command


class Point(NamedTuple):
    """A shape in a type: its model, and the record that it is measured by, or why there is none."""

    shape: Shape
    dtype: str
    terms: Terms
    record: Record | None
    why: str = ""


def points(gpu: str, mhz: float | None = None, results: Path = RESULTS) -> list[Point]:
    """The grid in BF16 and FP8. With the Config of the record where there is one, else with the one that fa3 takes.
    The records are those that the documents show, of chips with this one's datasheet.
    """
    chip = chip_of(CHIPS[gpu])
    records = Records(
        short_name(chip.name), results, lambda r: named(r["gpu"], 0, HOPPER).peak_tflops == chip.peak_tflops
    )
    found = []
    for dtype in ("bfloat16", FP8):
        measured, why = _measured(records, dtype)
        for shape, record in zip(GRID, measured, strict=True):
            found.append(_point(shape, dtype, chip, mhz, record, why))
    return found


def _measured(records: Records, dtype: str) -> tuple[list[Record | None], str]:
    """Of every shape of the grid, all of one commit; else nothing, and why. Of FP8 kernels that promote: those that sum
    in the tensor core give another answer.
    """
    try:
        if dtype == FP8:
            return [point.by_name["accurate"] for point in records.fp8], ""
        return [point.by_name["ours"] for point in records.forward], ""
    except NotWhole as missing:
        return [None] * len(GRID), str(missing)


def _point(shape: Shape, dtype: str, chip: Chip, mhz: float | None, record: Record | None, why: str) -> Point:
    """With a record where there is one that has a model."""
    if record:
        try:
            return Point(shape, dtype, of_record(record, mhz), record)
        except NoModel as problem:
            why = f"{problem}, which commit {record['commit']} ran"
    if dtype == FP8:
        kernel = fp8_kernel_of(shape, heuristics.ACCUMULATIONS[0], chip.num_sms)
    else:
        kernel = spec_of(shape, dtype), config_of(shape, dtype, chip.num_sms)
    return Point(shape, dtype, terms(*kernel, shape, chip, mhz), None, why)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fa3 bench model", description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", choices=CHIPS, default="h200")
    parser.add_argument("--mhz", type=positive, help="clock (default: at which the datasheet's peak is reached)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records (default: bench/results)")
    args = parser.parse_args(argv)
    from fa3.console import console, table

    chip, out = chip_of(CHIPS[args.gpu]), console()
    mhz = args.mhz or clock_mhz(chip)
    out.print(f"{chip.name}, {chip.num_sms} multiprocessors at {mhz:.0f} MHz, {chip.bandwidth} TB/s")
    found = points(args.gpu, mhz, args.results)
    for dtype in dict.fromkeys(point.dtype for point in found):
        result = table(f"{dtype}, microseconds", "point", *TERMS, "even", "bound", "serial", "record", "share")
        here = [point for point in found if point.dtype == dtype]
        for point in here:
            result.add_row(*_cells(point))
        out.print(result)
        for commit in dict.fromkeys(point.record["commit"] for point in here if point.record):
            out.print(f"record: of commit {commit}", markup=False)
        for why in dict.fromkeys(point.why for point in here if point.why):
            out.print(f"no record: {why}", markup=False)
    out.print("even: mean over longest load. bound: the largest term (bold) and the launch. serial: tensor, exp,")
    out.print("issue and launch in turn. share: bound over the record, above 1 where the clock was higher.")
    return 0


def _cells(point: Point) -> list[str]:
    of, measured = point.terms, point.record and point.record["graph_us"]
    values = (f"{'[bold]' if name == of.limit else ''}{_us(getattr(of, name))}" for name in TERMS)
    share = (_us(measured), f"{of.bound / measured:.2f}") if measured else ("-", "-")
    return [point.shape.name, *values, f"{of.balance:.2f}", _us(of.bound), _us(of.serial), *share]


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


if __name__ == "__main__":
    from bench.machine import run_command

    run_command("model", main)
