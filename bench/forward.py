"""Forward attention against its peers: python -m bench.forward --grid

Every output is checked before it is timed; all implementations and types of a shape take turns on the same inputs;
every timing is a line in bench/results/<gpu>/forward.jsonl. What does not import or refuses a shape is named at the
end. Exit status 1 if ours failed anywhere, 2 without a GPU.
"""

import argparse
import time
from dataclasses import replace

from bench.machine import Machine, add_arguments, keep_apart, open_machine, run_command, with_cublas
from bench.measure import Contender, Outcome, Pace, compile_ahead, deadline, jobs_here, measure
from bench.peers import IMPLS, PEERS, config_of, load, spec_of
from bench.records import append
from bench.shapes import NAMED, Shape, select_or_exit

SUITE = "forward"
QUICK = Pace(rounds=2, seconds=0.02, rest=0.01)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m bench.forward", description=__doc__.splitlines()[0])
    result.add_argument(
        "--shapes", nargs="+", metavar="NAME", help=f"grid, models, or: {', '.join(NAMED)}; starts of names do"
    )
    result.add_argument(
        "--grid", action="store_true", help="the 24 points: hd 64/128/256, full/causal, S 512/1K/4K/16K (default)"
    )
    result.add_argument("--dtype", nargs="+", choices=("bfloat16", "float16"), default=["bfloat16"])
    result.add_argument("--impl", nargs="+", choices=IMPLS, default=["ours", *PEERS])
    result.add_argument("--rounds", type=int, help=f"samples of each (default: {Pace.rounds})")
    result.add_argument("--budget-seconds", type=float, help="begin no shape that would end later than this")
    result.add_argument("--quick", action="store_true", help="two short rounds: to see that it runs")
    result.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the plumbing, with --impl ours naive"
    )
    add_arguments(result)
    return result


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    options = parser()
    args = options.parse_args(argv)
    shapes = select_or_exit(options, [*(["grid"] if args.grid or not args.shapes else []), *(args.shapes or [])])
    keep_apart(options, args, "measures nothing worth keeping")
    return run(args, shapes, open_machine(args.device, args.commit), began)


def run(args: argparse.Namespace, shapes: tuple[Shape, ...], machine: Machine, began: float) -> int:
    import torch

    from bench import report

    out = report.console()
    attentions, missing = load(args.impl)
    for name, why in missing.items():
        out.print(f"{name} is not here: {why}", markup=False)
    configs = _configs(shapes, args.dtype, machine) if "ours" in attentions else {}
    compile_ahead(((spec_of(shape, dtype), c) for (shape, dtype), c in configs.items()), jobs_here())
    machine = with_cublas(machine)
    origin = machine.origin
    cublas = f", cuBLAS {origin.cublas_tflops:.0f} TFLOP/s" if origin.cublas_tflops else ""
    out.print(f"{origin.gpu}, torch {origin.torch}, commit {origin.commit}{cublas}")
    pace = QUICK if args.quick else Pace()
    pace = replace(pace, rounds=args.rounds or pace.rounds, deadline=deadline(began, args.budget_seconds))
    points: list[list[Outcome]] = []
    left: list[str] = []
    longest = 0.0
    with torch.no_grad(), report.progress(out) as bar:
        task = bar.add_task("shapes", total=len(shapes))
        for shape in shapes:
            start = time.monotonic()
            if not pace.has_time(longest):
                left.append(shape.name)
                continue
            bar.update(task, description=shape.name)
            contenders = [
                Contender(i, d, a, configs.get((shape, d)) if i == "ours" else None)
                for d in args.dtype
                for i, a in attentions.items()
            ]
            points.append(measure(contenders, shape, machine, pace))
            for outcome in points[-1]:
                if outcome.timing:
                    append(outcome.record(machine, SUITE), args.out)
            cells = "  ".join(report.cell(o) for o in points[-1])
            out.print(f"{shape.name}: {cells}  ({time.monotonic() - began:.0f} s)")
            longest = max(longest, time.monotonic() - start)
            bar.advance(task)
    out.print(report.points_table(points, list(attentions)))
    everything = [outcome for point in points for outcome in point]
    for line in (*report.problems(everything), *report.summary(points)):
        out.print(line)
    if left:
        out.print(f"Not measured, the time was up: {', '.join(left)}")
    failed = "ours" in args.impl and (
        "ours" in missing or any(o.contender.impl == "ours" and o.timing is None for o in everything)
    )
    return int(failed)


def _configs(shapes: tuple[Shape, ...], dtypes: list[str], machine: Machine) -> dict:
    """What fa3 chooses for every shape and dtype; nothing on a CPU, where no kernel runs."""
    if machine.device != "cuda":
        return {}
    return {(shape, dtype): config_of(shape, dtype, machine.num_sms) for shape in shapes for dtype in dtypes}


if __name__ == "__main__":
    run_command(SUITE, main)
