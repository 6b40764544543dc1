"""Forward attention against its peers: python -m fa3 bench forward --grid

Every output is checked before it is timed; all implementations and types of a shape take turns on the same inputs;
every timing is a line in bench/results/<gpu>/forward.jsonl. What does not import or refuses a shape is named at the
end, and what must be shown (bench/goals.py) is met or missed. Exit status 1 if ours failed anywhere, or with --check is
slower than its records; 2 without a GPU.
"""

import argparse
import time

from bench import goals, performance
from bench.machine import Machine, open_machine, run_command
from bench.measure import Contender, Outcome, compile_ahead, jobs_here, measure
from bench.options import add_contenders, add_plot, add_shapes, pace_of, shapes_of
from bench.peers import IMPLS, PEERS, config_of, load, spec_of
from bench.recorded import BOTH
from bench.regression import Run, add_check
from bench.shapes import Shape

SUITE = "forward"
TYPES = {"bfloat16": "BF16", "float16": "FP16"}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m fa3 bench forward", description=__doc__.splitlines()[0])
    add_shapes(result, ("grid",))
    add_contenders(result, IMPLS, ("ours", *PEERS))
    result.add_argument("--dtype", nargs="+", choices=tuple(TYPES), default=["bfloat16"])
    add_check(result, is_of_speed=True)
    add_plot(result)
    return result


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    options = parser()
    args = options.parse_args(argv)
    return run(args, shapes_of(options, args), open_machine(args.device, args.commit), began)


def run(args: argparse.Namespace, shapes: tuple[Shape, ...], machine: Machine, began: float) -> int:
    import torch

    from bench import report

    out = report.console()
    kept = Run(SUITE, machine, args)
    attentions, missing = load(args.impl)
    for name, why in missing.items():
        out.print(f"{name} is not here: {why}", markup=False)
    configs = _configs(shapes, args.dtype, machine) if "ours" in attentions else {}
    compile_ahead(((spec_of(shape, dtype), c) for (shape, dtype), c in configs.items()), jobs_here())
    out.print(report.heading(machine.origin))
    pace = pace_of(args, began)
    points: list[list[Outcome]] = []
    left: list[str] = []
    with torch.no_grad():
        for shape in report.in_turn(out, shapes, pace, left):
            contenders = [
                Contender(i, d, a, configs.get((shape, d)) if i == "ours" else None, args.one_call)
                for d in args.dtype
                for i, a in attentions.items()
            ]
            points.append(measure(contenders, shape, machine, pace))
            for outcome in points[-1]:
                if outcome.timing:
                    kept.add(outcome.record(machine, SUITE))
            cells = "  ".join(report.cell(o) for o in points[-1])
            out.print(f"{shape.name}: {cells}  ({time.monotonic() - began:.0f} s)")
    out.print(report.points_table(points, list(attentions)))
    out.print(report.utilization_table(points, machine, SUITE))
    everything = [outcome for point in points for outcome in point]
    of_run = kept.points(BOTH)
    for line in (
        *report.problems(everything), *report.product(everything), *goals.lines(SUITE, of_run),
        *report.not_measured(left),
    ):  # fmt: skip
        out.print(line)
    report.draw(out, args.plot, lambda: performance.of_run(SUITE, {TYPES[d]: kept.points(d) for d in args.dtype}))
    failed = "ours" in args.impl and (
        "ours" in missing or any(o.contender.impl == "ours" and o.timing is None for o in everything)
    )
    return int(not kept.holds(out) or failed)


def _configs(shapes: tuple[Shape, ...], dtypes: list[str], machine: Machine) -> dict:
    """What fa3 chooses for every shape and dtype; nothing on a CPU, where no kernel runs."""
    if machine.device != "cuda":
        return {}
    return {(shape, dtype): config_of(shape, dtype, machine.num_sms) for shape in shapes for dtype in dtypes}


if __name__ == "__main__":
    run_command(SUITE, main)
