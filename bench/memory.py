"""GPU memory of a call against its length, naive attention beside ours: python -m fa3 bench memory

What a call takes above its inputs at growing S (B1 H16 hd128, full, BF16), by the allocator's peak. The slope of
log(memory) against log(S) is 2 where the scores lie in memory and 1 where O and LSE are all. From the fit through the
points follows the S at which naive attention runs out of this GPU's memory; --try looks for it by running. Records go
to bench/results/<gpu>/memory.jsonl. Exit status 1 where ours failed, or with --check takes more than recorded.
"""

import argparse
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bench.host import extra_bytes, output_bytes
from bench.machine import Machine, add_arguments, keep_apart, open_machine, run_command
from bench.measure import make_inputs
from bench.naive import naive
from bench.options import add_plot
from bench.peers import Attention, load, reason
from bench.records import record
from bench.regression import Run, add_check
from bench.shapes import Shape
from fa3.cli import positive

SUITE = "memory"
SEQLENS = (1024, 2048, 4096, 8192, 16384, 32768)
STEP = 1024  # of --try
AROUND = 0.25  # --try looks so far below and above what the fit says
MEASURED, FITTED, TRIED = "call", "limit, fitted", "limit, tried"  # cases of the records


def shape_of(seqlen: int) -> Shape:
    return Shape(f"memory-{seqlen}", 1, seqlen, seqlen, 16, 16, 128, 128, False)


class Fit(NamedTuple):
    """bytes = factor * S^slope."""

    slope: float
    factor: float

    def bytes(self, seqlen: float) -> float:
        return self.factor * seqlen**self.slope


def fit(points: Sequence[tuple[int, int]]) -> Fit:
    """Least squares of log(bytes) on log(S). Raises ValueError for fewer than two lengths."""
    if len({seqlen for seqlen, _ in points}) < 2:
        raise ValueError(f"a slope takes two lengths, got {points}")
    x, y = ([math.log(value) for value in column] for column in zip(*points, strict=True))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)
    return Fit(slope, math.exp(mean_y - slope * mean_x))


def input_bytes(seqlen: int) -> int:
    """Of Q, K and V in 16 bit."""
    shape = shape_of(seqlen)
    return shape.bytes() - 2 * seqlen * shape.heads * shape.head_dim_v


def fitted_limit(of: Fit, free: int) -> int:
    """The largest S whose inputs and call fit in that many bytes."""
    return largest(lambda seqlen: input_bytes(seqlen) + of.bytes(seqlen) <= free, 0, 2**30, 1)


def largest(runs: Callable[[int], bool], low: int, high: int, step: int) -> int:
    """The largest multiple of step for which runs, by bisection; low is taken to run and high not to."""
    low, high = low // step, -(-high // step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle * step) else (low, middle)
    return low * step


class Live:
    """Bytes of the tensors that operations made and that are still held, and their most: the CPU's stand-in for the
    allocator's peak. What an operation holds inside of it is not seen.
    """

    def __init__(self) -> None:
        self.now = self.most = 0
        self._known: set[int] = set()

    def add(self, result: Any) -> None:
        import torch

        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._known:
                storage = x.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def extra_bytes_on_cpu(attention: Attention, shape: Shape, machine: Machine) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    tensors = make_inputs(shape, "bfloat16", machine)[0]
    live = Live()
    for x in tensors:
        live.add(x)
    before = live.now

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            live.add(result)
            return result

    with Watch():
        attention(*tensors, shape.causal)
    return live.most - before


def measured(attention: Attention, shape: Shape, machine: Machine) -> int | None:
    """Bytes of a call above its inputs; None where they do not fit."""
    import torch

    if machine.device != "cuda":
        return extra_bytes_on_cpu(attention, shape, machine)
    torch.cuda.empty_cache()  # blocks that are held for other sizes are memory too
    try:
        return extra_bytes(attention, shape, machine)
    except torch.OutOfMemoryError:
        return None


def free_bytes(machine: Machine) -> int | None:
    """Of the GPU, beside context and loaded kernels; None without one."""
    import torch

    if machine.device != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


# The command


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m fa3 bench memory", description=__doc__.splitlines()[0])
    result.add_argument(
        "--seqlens", nargs="+", type=positive, default=SEQLENS, help="lengths (default: 1K, doubled to 32K)"
    )
    result.add_argument(
        "--try", dest="is_tried", action="store_true", help="look for naive's longest length by running"
    )
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu counts the tensors of PyTorch")
    add_check(result)
    add_plot(result)
    add_arguments(result)
    return result


def main(argv: list[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(argv)
    if len(set(args.seqlens)) < 2:
        options.error("--seqlens takes two lengths or more: a slope goes through them")
    keep_apart(options, args, "sees no memory inside an operation")
    return run(args, open_machine(args.device, args.commit))


def run(args: argparse.Namespace, machine: Machine) -> int:
    import torch

    from bench import performance, report

    out = report.console()
    kept = Run(SUITE, machine, args)
    loaded, missing = load(["ours"])
    attentions = {"naive": naive, **loaded}
    for name, why in missing.items():
        out.print(f"{name} is not here: {why}", markup=False)
    found: dict[str, dict[int, int]] = {name: {} for name in attentions}
    with torch.no_grad():
        steps = [(seqlen, name) for seqlen in sorted(set(args.seqlens)) for name in attentions]
        for seqlen, name in report.stepped(out, steps, lambda step: f"{step[1]} at {step[0]}"):
            _measure(name, attentions[name], seqlen, machine, kept, found[name], out)
        out.print(_table(found))
        for name, by_seqlen in found.items():
            if len(by_seqlen) > 1:
                of = fit(list(by_seqlen.items()))
                out.print(f"{name}: slope {of.slope:.3f}")
                _limit(name, attentions[name], of, machine, kept, out)
    report.draw(out, args.plot, lambda: performance.of_run_memory(kept.records))
    failed = "ours" not in attentions or len(found["ours"]) < len(set(args.seqlens))
    return int(not kept.holds(out) or failed)


def _measure(name: str, attention: Attention, seqlen: int, machine: Machine, kept: Run, found: dict, out: Any) -> None:
    shape = shape_of(seqlen)
    try:
        extra = measured(attention, shape, machine)
    except Exception as error:
        out.print(f"{name} at {seqlen}: {reason(error)}", markup=False)
        return
    if extra is None:
        out.print(f"{name} at {seqlen}: out of memory")
        return
    found[seqlen] = extra
    _add(name, shape, MEASURED, extra, {"o_lse_bytes": output_bytes(shape)}, machine, kept)


def _limit(name: str, attention: Attention, of: Fit, machine: Machine, kept: Run, out: Any) -> None:
    """The longest S by the fit, and of naive attention by trying."""
    free = free_bytes(machine)
    if free is None:
        return
    limit = fitted_limit(of, free)
    config = {"slope": round(of.slope, 4), "free_bytes": free}
    _add(name, shape_of(limit), FITTED, round(of.bytes(limit)), config, machine, kept)
    out.print(f"{name}: {free / 2**30:.1f} GiB hold S {limit:,} by the fit")
    if name == "naive" and kept.args.is_tried:
        _try(attention, limit, free, machine, kept, out)


def _try(attention: Attention, near: int, free: int, machine: Machine, kept: Run, out: Any) -> None:
    """Looks for naive's longest S around one."""

    def runs(seqlen: int) -> bool:
        return measured(attention, shape_of(seqlen), machine) is not None

    low, high = (round(near * (1 + side) / STEP) * STEP for side in (-AROUND, AROUND))
    if low == 0 or not runs(low) or runs(high):
        out.print(f"naive: its longest S is not between {low:,} and {high:,}")
        return
    longest = largest(runs, low, high, STEP)
    extra = measured(attention, shape_of(longest), machine)
    assert extra is not None
    _add("naive", shape_of(longest), TRIED, extra, {"step": STEP, "free_bytes": free}, machine, kept)
    out.print(f"naive: S {longest:,} ran, {longest + STEP:,} did not")


def _add(name: str, shape: Shape, case: str, extra: int, config: dict, machine: Machine, kept: Run) -> None:
    line = record(machine.origin, SUITE, name, "bfloat16", shape, config=config)
    kept.add({**line, "case": case, "extra_bytes": extra})


def _table(found: dict[str, dict[int, int]]) -> Any:
    from bench import report

    result = report.table(
        "Memory of a call above its inputs, B1 H16 hd128 full, bytes", "S", *found, "O + LSE", text_columns=0
    )
    for seqlen in sorted(set().union(*found.values())):
        cells = (f"{by[seqlen]:,}" if seqlen in by else "-" for by in found.values())
        result.add_row(f"{seqlen:,}", *cells, f"{output_bytes(shape_of(seqlen)):,}")
    return result


if __name__ == "__main__":
    run_command(SUITE, main)
