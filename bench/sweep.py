"""Which Config is fastest: python -m fa3 bench sweep --shapes hd128-4k --tile-n 96 176 16

Every combination of the given values that fits shared memory and registers is compiled (many at a time), dropped if
it spills, checked, and timed against all others on the same inputs. The best of each shape are printed; every timing
is a line in bench/results/<gpu>/sweep.jsonl.
"""

import argparse
import dataclasses
import itertools
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.machine import Machine, open_machine, run_command
from bench.measure import Outcome, Pace, compile_ahead, deadline, jobs_here, measure_configs
from bench.options import add_shapes, shapes_of
from bench.peers import reason, spec_of
from bench.records import append
from bench.shapes import Shape
from fa3.cli import positive
from fa3.kernels.forward.config import SHARED_BYTES, Config, Spec

SUITE = "sweep"
SHAPES = ("hd128-4k-full", "hd128-4k-causal", "hd128-16k-full", "hd128-16k-causal")
SWITCHES = tuple(field for field in dataclasses.fields(Config) if field.type in (bool, "bool"))
# What is tried unless told otherwise; of a switch that is not here its default. optimistic: on, as every row takes it.
TRIED = {"pingpong": ["on", "off"], "persistent": ["on", "off"], "optimistic": ["on"]}
OTHER_REGISTERS = 24  # addresses, row state, loop: about what the kernels need beside the fragments


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m fa3 bench sweep", description=__doc__.splitlines()[0])
    add_shapes(result, SHAPES)
    result.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    result.add_argument("--warpgroups", nargs="+", type=positive, default=[2, 3])
    result.add_argument(
        "--tile-n", nargs=3, type=positive, default=[64, 192, 16], metavar=("FROM", "TO", "STEP"), help="both ends in"
    )
    result.add_argument("--stages", nargs="+", type=positive, default=[2])
    result.add_argument("--q-stages", nargs="+", type=positive, default=[1])
    for switch in SWITCHES:
        default = TRIED.get(switch.name, ["on" if switch.default else "off"])
        result.add_argument(f"--{switch.name.replace('_', '-')}", nargs="+", choices=("on", "off"), default=default)
    result.add_argument("--top", type=positive, default=8, help="lines printed for a shape")
    result.add_argument("--rounds", type=positive, default=3)
    result.add_argument("--jobs", type=positive, default=jobs_here(), help="compilers at a time")
    result.add_argument("--keep-spills", action="store_true", help="do not look for spills: half the compile time")
    return result


def candidates(args: argparse.Namespace) -> list[Config]:
    """Every combination of the values given."""
    first, last, step = args.tile_n
    values: dict[str, Iterable[Any]] = {
        "warpgroups": args.warpgroups, "tile_n": range(first, last + 1, step), "stages": args.stages,
        "q_stages": args.q_stages,
        **{switch.name: [word == "on" for word in getattr(args, switch.name)] for switch in SWITCHES},
    }  # fmt: skip
    return [Config(**dict(zip(values, chosen, strict=True))) for chosen in itertools.product(*values.values())]


def fits(spec: Spec, config: Config) -> bool:
    """Shared memory, and the fragments of S, P and O in a consumer thread's registers. Ping-pong takes two warpgroups
    or more, a dynamic grid is a persistent one, and so is one with two places of Q; prefetching is of FP8, alternating
    of a promoted one, and exponentials are optimistic in 16 bit.
    """
    if config.shared_bytes(spec) > SHARED_BYTES or (config.pingpong and config.warpgroups < 2):
        return False
    if (config.dynamic or config.q_stages > 1) and not config.persistent:
        return False
    if config.prefetch and not spec.is_fp8:
        return False
    if config.optimistic and (spec.is_fp8 or not config.overlap or config.rescale_early):
        return False
    if config.alternate and not (spec.is_fp8 and config.overlap and config.promotion):
        return False
    fragments = spec.head_dim_v // 2 + config.tile_n // 2 + config.tile_n // 4
    return fragments + OTHER_REGISTERS <= config.registers(spec)[1]


def without_spills(kernels: Iterable[tuple[Spec, Config]], jobs: int) -> tuple[list[tuple[Spec, Config]], list[str]]:
    """(those that do not spill, a line for each of the others)."""
    from fa3.kernels import compile as compiler
    from fa3.kernels import sass

    def problem(kernel: tuple[Spec, Config]) -> str:
        try:
            stack = sass.resources(compiler.inspect(*kernel).cubin).stack_bytes
        except Exception as error:
            return reason(error)
        return f"spills: {stack} bytes of stack" if stack else ""

    wanted = list(dict.fromkeys(kernels))
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(problem, wanted))
    good = [kernel for kernel, why in zip(wanted, found, strict=True) if not why]
    return good, [f"{spec} {brief(config)}: {why}" for (spec, config), why in zip(wanted, found, strict=True) if why]


def brief(config: Config) -> str:
    words = [switch.name for switch in SWITCHES if getattr(config, switch.name)]
    stages = f"{config.stages} stages" + (f" {config.q_stages} of Q" if config.q_stages > 1 else "")
    return " ".join([f"{config.tile_m}x{config.tile_n}", stages, *words])


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    options = parser()
    args = options.parse_args(argv)
    return run(args, shapes_of(options, args), open_machine("cuda", args.commit), began)


def run(args: argparse.Namespace, shapes: tuple[Shape, ...], machine: Machine, began: float) -> int:
    import torch

    from bench import report

    out = report.console()
    specs = {shape: spec_of(shape, args.dtype) for shape in shapes}
    kernels = [(spec, c) for spec in dict.fromkeys(specs.values()) for c in candidates(args) if fits(spec, c)]
    dropped: list[str] = []
    if not args.keep_spills:
        kernels, dropped = without_spills(kernels, args.jobs)
    failures = compile_ahead(kernels, args.jobs)
    kernels = [kernel for kernel in kernels if kernel not in failures]
    for line in (*dropped, *(f"{spec} {brief(config)}: {why}" for (spec, config), why in failures.items())):
        out.print(line, markup=False)
    out.print(
        f"{len(kernels)} kernels compiled, {len(dropped) + len(failures)} dropped, {time.monotonic() - began:.0f} s"
    )
    pace = Pace(args.rounds, seconds=0.04, rest=0.02, deadline=deadline(began, args.budget_seconds))
    left: list[str] = []
    with torch.no_grad():
        for shape in report.in_turn(out, shapes, pace, left):
            chosen = [config for spec, config in kernels if spec == specs[shape]]
            outcomes = measure_configs(chosen, shape, args.dtype, machine, pace)
            for outcome in outcomes:
                if outcome.timing:
                    append(outcome.record(machine, SUITE), args.out)
            out.print(_table(shape, outcomes, args.top))
            for line in report.problems(outcomes):
                out.print(line)
    for line in report.not_measured(left):
        out.print(line)
    return int(not kernels)


def _table(shape: Shape, outcomes: list[Outcome], top: int):
    from bench import report

    timed = sorted((o for o in outcomes if o.timing), key=lambda o: o.us)
    result = report.table(
        f"{shape.name}: best {min(top, len(timed))} of {len(outcomes)}", "config", "us", "TFLOP/s", "time/best", "error"
    )
    for outcome in timed[:top]:
        result.add_row(
            brief(outcome.contender.config), f"{outcome.us:.1f}", report.speed(outcome),
            f"{outcome.us / timed[0].us:.3f}", f"{outcome.error:.2f}",
        )  # fmt: skip
    return result


if __name__ == "__main__":
    run_command(SUITE, main)
