"""What a call costs beside the kernel: python -m fa3 bench host

Host time: 300 calls at B1 S128 H4 hd128 without waiting for the GPU, for ours and the peers that are here, whose
outputs are checked first, under no_grad and with gradients on (no input requires one). Memory: what a call takes above
its inputs at growing S, beside the bytes of O and LSE. Records go to bench/results/<gpu>/host.jsonl: cpu_us and in
config gradients, "off" or "on", or in config extra_bytes.
"""

import argparse
from functools import partial
from typing import Any

from bench.check import Check
from bench.machine import Machine, add_arguments, open_machine, run_command
from bench.measure import Contender, attempt, make_inputs
from bench.peers import PEERS, Attention, around, load
from bench.records import record
from bench.regression import Run, add_check
from bench.shapes import Shape
from fa3.cli import positive
from fa3.testing.timing import host_sample, interleave, spread

SUITE = "host"
SMALL = Shape("small", 1, 128, 128, 4, 4, 128, 128, False)
CALLS, WARM_UP = 300, 10
GOALS_US = {"off": 12.0, "on": 15.0}  # gradients
TOLERANCE = 0.2  # of --check: the host's clock and its other processes are in the time
MEMORY_SEQLENS = (1024, 4096, 16384, 65536)
MEMORY_SLACK = 64 * 1024  # bytes beyond O and LSE, at any length: the allocator rounds up


def memory_shape(seqlen: int) -> Shape:
    return Shape(f"memory-{seqlen}", 1, seqlen, seqlen, 16, 16, 128, 128, True)


def output_bytes(shape: Shape) -> int:
    """Of O in 16 bit and of LSE in fp32."""
    rows = shape.batch * shape.seqlen_q * shape.heads
    return rows * (shape.head_dim_v * 2 + 4)


def extra_bytes(attention: Attention, shape: Shape, machine: Machine) -> int:
    """Most memory in use during a call, over what the inputs take; the first call, which loads the kernel, is not
    counted.
    """
    import torch

    tensors = make_inputs(shape, "bfloat16", machine)[0]
    attention(*tensors, shape.causal)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(*tensors, shape.causal)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def host_times(
    attentions: dict[str, Attention], machine: Machine, rounds: int, out: Any
) -> tuple[dict[tuple[str, str], list[float]], dict[str, str]]:
    """(name and gradients -> samples in microseconds a call, why not): what refuses or is wrong is not timed."""
    import torch

    from bench import report

    tensors = make_inputs(SMALL, "bfloat16", machine)[0]
    check = Check(SMALL, *tensors)
    found = {name: attempt(Contender(name, "bfloat16", a), SMALL, tensors, check) for name, a in attentions.items()}
    problems = {name: problem for name, (_, problem) in found.items() if problem}

    def sample(attention: Attention, gradients: str) -> float:
        call = partial(attention, *tensors, SMALL.causal)
        with torch.set_grad_enabled(gradients == "on"), around(attention)():
            host_sample([call], WARM_UP)
            value = host_sample([call], CALLS)
        bar.advance(task)
        return value

    measures = {
        (name, gradients): partial(sample, attention, gradients)
        for name, attention in attentions.items()
        for gradients in GOALS_US
        if name not in problems
    }
    with report.progress(out) as bar:
        task = bar.add_task("host time", total=rounds * len(measures))
        return interleave(measures, rounds), problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fa3 bench host", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=7, help=f"of {CALLS} calls each (default: 7)")
    add_check(parser, TOLERANCE)
    add_arguments(parser)
    args = parser.parse_args(argv)
    return run(args, open_machine("cuda", args.commit))


def run(args: argparse.Namespace, machine: Machine) -> int:
    import torch

    from bench import report

    out = report.console()
    kept = Run(SUITE, machine, args)
    attentions, missing = load(["ours", *PEERS])
    times, problems = host_times(attentions, machine, args.rounds, out)
    for name, why in {**missing, **problems}.items():
        out.print(f"{name}: {why}", markup=False)
    columns = ("impl", "gradients", "median", "least", "most", "allowed")
    title = "Host time of a call, B1 S128 H4 hd128, microseconds"
    result = report.table(title, *columns, text_columns=2)
    for (name, gradients), values in times.items():
        s, goal = spread(values), GOALS_US[gradients] if name == "ours" else None
        config = {"gradients": gradients}
        kept.add(record(machine.origin, SUITE, name, "bfloat16", SMALL, cpu_us=s.median, config=config))
        median = f"{s.median:.1f}" if goal is None else report.marked(s.median, goal, ".1f")
        allowed = "" if goal is None else f"{goal:g}"
        result.add_row(name, gradients, median, f"{s.least:.1f}", f"{s.most:.1f}", allowed)
    out.print(result)
    if "ours" in problems:
        return 1
    with torch.no_grad():
        fits = _memory(attentions["ours"], machine, kept, out)
    return int(not kept.holds(out) or not fits)


def _memory(attention: Attention, machine: Machine, kept: Run, out: Any) -> bool:
    from bench import report

    result = report.table(
        "Memory of a call above its inputs, B1 H16 hd128 causal, bytes", "S", "extra", "O + LSE", "beyond"
    )
    fits = True
    for seqlen in report.stepped(out, MEMORY_SEQLENS, lambda seqlen: f"memory at {seqlen}"):
        shape = memory_shape(seqlen)
        extra, needed = extra_bytes(attention, shape, machine), output_bytes(shape)
        config = {"extra_bytes": extra, "o_lse_bytes": needed}
        kept.add(record(machine.origin, SUITE, "ours", "bfloat16", shape, config=config))
        fits = fits and extra - needed <= MEMORY_SLACK
        result.add_row(str(seqlen), f"{extra:,}", f"{needed:,}", report.marked(extra - needed, MEMORY_SLACK, ","))
    out.print(result)
    return fits


if __name__ == "__main__":
    run_command(SUITE, main)
