"""How long the first call of a new process takes: python -m fa3 bench startup

Cold: an empty kernel cache, the kernel is compiled. Filled: the kernel is on disk and importing cutlass is forbidden.
Every sample is a process of its own (first_call.py says what is in the time); each is a line in
bench/results/<gpu>/startup.jsonl, its time in cpu_us. Python may keep bytecode, as it has for installed packages.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from bench.machine import add_arguments, open_machine, run_command
from bench.records import ROOT, record
from bench.regression import Run, add_check
from bench.shapes import Shape
from fa3.cli import positive
from fa3.testing.timing import spread

SUITE = "startup"
SHAPE = Shape("first-call", 1, 1024, 1024, 8, 8, 128, 128, False)  # what first_call.py runs
GOALS = {"cold": 10.0, "filled": 0.15}  # seconds
MODES = {"cold": "free", "filled": "forbidden"}
PATIENCE = 300  # seconds for one process
TOLERANCE = 0.5  # of --check: other processes are in the time


def first_call(mode: str, cache: str) -> float:
    """Seconds of one sample, in a new process. Raises RuntimeError with the last lines that it wrote."""
    environment = os.environ | {"FA3_CACHE_DIR": cache, "FA3_QUIET": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # NOTE: to compile the modules of tvm_ffi anew would take 55 ms
    command = [sys.executable, "-m", "bench.first_call", mode]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-5:]) or f"ended with status {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])["seconds"]


def samples(case: str, repeats: int) -> list[float]:
    """Seconds of each process. Cold ones get a cache each; filled ones share one that a first process filled."""
    if case == "cold":
        seconds = []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory(prefix="fa3-cold-") as cache:
                seconds.append(first_call(MODES[case], cache))
        return seconds
    with tempfile.TemporaryDirectory(prefix="fa3-filled-") as cache:
        first_call(MODES["cold"], cache)
        return [first_call(MODES[case], cache) for _ in range(repeats)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fa3 bench startup", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=positive, default=3, help="processes of each kind (default: 3)")
    add_arguments(parser)
    add_check(parser, TOLERANCE)
    args = parser.parse_args(argv)
    machine = open_machine("cuda", args.commit)
    kept = Run(SUITE, machine, args)
    from bench import report

    out = report.console()
    result = report.table("First call of a process, seconds", "cache", "median", "least", "most", "allowed")
    for case, goal in GOALS.items():
        try:
            seconds = samples(case, args.repeats)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            out.print(f"{case}: {error}", markup=False)
            return 1
        for value in seconds:
            config = {"cache": case, "cutlass": "importable" if case == "cold" else "forbidden"}
            kept.add(record(machine.origin, SUITE, "ours", "bfloat16", SHAPE, cpu_us=value * 1e6, config=config))
        s = spread(seconds)
        result.add_row(case, report.marked(s.median, goal), f"{s.least:.3f}", f"{s.most:.3f}", f"{goal:g}")
    out.print(result)
    return int(not kept.holds(out))


if __name__ == "__main__":
    run_command(SUITE, main)
