"""What ping-pong and overlap are worth: python -m fa3 bench ablation

Four kernels with the same tile, stages and registers, and only the order of the work different: neither, each alone,
both, all looking for the largest scores of every block; and both without (Config.optimistic). They take turns on the
same inputs; records go to bench/results/<gpu>/ablation.jsonl, with the Config in each.
"""

import argparse
import time
from dataclasses import replace

from bench.machine import Machine, open_machine, run_command
from bench.measure import Outcome, Pace, compile_ahead, deadline, jobs_here, measure_configs
from bench.options import add_shapes, shapes_of
from bench.peers import config_of, spec_of
from bench.records import append
from bench.shapes import Shape
from fa3.cli import positive

SUITE = "ablation"
SHAPES = ("hd128-16k-full", "hd128-16k-causal", "hd128-4k-full", "hd128-4k-causal")
# (overlap, pingpong, optimistic)
SWITCHES = {
    "neither": (False, False, False),
    "ping-pong": (False, True, False),
    "overlap": (True, False, False),
    "both": (True, True, False),
    "optimistic": (True, True, True),
}
GOAL = 1.15  # both against neither, hd128 16K full


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m fa3 bench ablation", description=__doc__.splitlines()[0])
    add_shapes(result, SHAPES)
    result.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    result.add_argument("--rounds", type=positive, default=12)
    return result


def variants(config) -> dict:
    """The same Config under every setting of the switches."""
    return {name: replace(config, overlap=o, pingpong=p, optimistic=x) for name, (o, p, x) in SWITCHES.items()}


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    options = parser()
    args = options.parse_args(argv)
    return run(args, shapes_of(options, args), open_machine("cuda", args.commit), began)


def run(args: argparse.Namespace, shapes: tuple[Shape, ...], machine: Machine, began: float) -> int:
    import torch

    from bench import report

    out = report.console()
    configs = {shape: variants(config_of(shape, args.dtype, machine.num_sms)) for shape in shapes}
    compile_ahead(((spec_of(s, args.dtype), c) for s, named in configs.items() for c in named.values()), jobs_here())
    pace = Pace(args.rounds, deadline=deadline(began, args.budget_seconds))
    result = report.table("TFLOP/s by kernel time, speed-up over neither", "shape", "tile", *SWITCHES, text_columns=2)
    failed = False
    left: list[str] = []
    with torch.no_grad():
        for shape in report.in_turn(out, shapes, pace, left):
            outcomes = dict(
                zip(SWITCHES, measure_configs(configs[shape].values(), shape, args.dtype, machine, pace), strict=True)
            )
            for name, outcome in outcomes.items():
                if outcome.timing:
                    append(outcome.record(machine, SUITE), args.out)
                else:
                    failed = True
                    out.print(f"{shape.name} {name}: {outcome.problem}", markup=False)
            config = configs[shape]["both"]
            tile = f"{config.tile_m}x{config.tile_n}, {config.stages} stages"
            result.add_row(shape.name, tile, *(_cell(o, outcomes["neither"]) for o in outcomes.values()))
    out.print(result)
    for line in report.not_measured(left):
        out.print(line)
    out.print(f"Goal: both at least {GOAL} of neither at {SHAPES[0]}.")
    return int(failed)


def _cell(outcome: Outcome, neither: Outcome) -> str:
    from bench import report

    gain = f" ({neither.us / outcome.us:.3f}x)" if outcome.timing and neither.timing else ""
    return report.speed(outcome) + gain


if __name__ == "__main__":
    run_command(SUITE, main)
