"""What the benchmarks run on, and the one sentence for a machine where they cannot."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.recorded import NotRecorded
from bench.records import RESULTS, Origin, commit

EXTRA = ("rich", "matplotlib")  # packages of the extra `bench`


class NoDevice(Exception):
    """There is no CUDA device; the message is for the user."""


@dataclass(frozen=True)
class Machine:
    device: str  # "cuda" or "cpu"
    num_sms: int
    l2_bytes: int
    origin: Origin


def open_machine(device: str, given_commit: str | None = None) -> Machine:
    """Raises NoDevice where torch sees no CUDA device and device is "cuda"."""
    import torch

    if device == "cpu":
        return Machine("cpu", 1, 0, Origin("cpu", torch.__version__, commit(given_commit)))
    if not torch.cuda.is_available():
        raise NoDevice("this benchmark needs a CUDA GPU and torch sees none here.")
    from fa3.device import chip

    facts = chip(torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    origin = Origin(properties.name, torch.__version__, commit(given_commit), facts.peak_tflops)
    return Machine("cuda", facts.num_sms, properties.L2_cache_size, origin)


def run_command(suite: str, main: Callable[[], int]) -> None:
    """Ends the process with main's status."""
    sys.exit(status(f"bench.{suite}", main))


def status(module: str, main: Callable[[], int]) -> int:
    """main's; 2 and one sentence where there is no device, no package of the extra, or no whole record."""
    try:
        return main()
    except (NoDevice, NotRecorded) as error:
        problem = str(error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        problem = f'{package} is not installed: pip install -e ".[bench]" brings it.'
    print(f"{module}: {problem}", file=sys.stderr)
    return 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark has."""
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records (default: bench/results)")
    parser.add_argument("--commit", help="commit for the records where git cannot tell (else $FA3_COMMIT)")


def keep_apart(parser: argparse.ArgumentParser, args: argparse.Namespace, what_cpu_does: str) -> None:
    """Exits where what runs on a CPU would be kept beside the measurements."""
    if args.device == "cpu" and args.out == RESULTS:
        parser.error(f"--device cpu {what_cpu_does}: give it an --out")
