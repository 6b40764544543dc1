"""The command line: what each subcommand accepts. Its work is in a module of its own, imported when it runs."""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from fa3 import __version__
from fa3.heuristics import DTYPES
from fa3.kernels.forward.config import FP8
from fa3.presets import PRESETS, lines

BENCH = "bench.suites"  # not of this package: it is there in a clone only
NO_BENCH = 'the benchmarks stand in the repository: clone it, pip install -e ".[bench]" there, and run this there.'


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m fa3", description="FlashAttention-3 for Hopper GPUs, from PyTorch.")
    root.add_argument("--version", action="version", version=f"fa3 {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, module: str, summary: str, **options: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, **options)
        sub.set_defaults(module=module)
        return sub

    command("demo", "fa3.demo", "Run attention on recorded Q, K, V; show its error, then speed or compiled kernel.")
    command("info", "fa3.info", "Show versions, GPUs, the kernel cache, and what works here and why not.")

    # Its options are those of the suites: to this parser they are words. No option begins with a NUL.
    bench = command(
        "bench", BENCH, "Measure speed and error beside other libraries.", prefix_chars="\0", add_help=False
    )
    bench.add_argument("arguments", nargs="*")

    check = command("check", "fa3.check", "Run the property-based accuracy tests on this machine.")
    check.add_argument("--examples", type=positive, default=20, metavar="N", help="examples per property (default 20)")
    check.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if a Hopper GPU is here, else cpu")

    raw = argparse.RawDescriptionHelpFormatter  # a table as it is
    summary = "Fill the kernel cache ahead of use; needs no GPU."
    fill = command("compile", "fa3.precompile", summary, epilog=lines(), formatter_class=raw)
    fill.add_argument("--all", action="store_true", help="every kernel but those of rarer masks and given splits")
    fill.add_argument(
        "--preset", nargs="+", choices=PRESETS, metavar="NAME", help="every kernel of these models, below"
    )
    fill.add_argument(
        "--dtype", choices=(*DTYPES, FP8), help="only this type of Q, K and V; in the place of a preset's"
    )
    fill.add_argument("--head-dim", type=positive, metavar="D", help="only kernels for this head dim of Q and K")
    fill.add_argument("--head-dim-v", type=positive, metavar="D", help="head dim of V (default: that of Q and K)")
    fill.add_argument("--causal", action=argparse.BooleanOptionalAction, help="only with (without) the causal mask")
    fill.add_argument(
        "--decode",
        action=argparse.BooleanOptionalAction,
        help="with (without) the kernels of attention to a cache; a preset has them or not, below",
    )
    fill.add_argument("--jobs", type=positive, metavar="N", help="processes (default: one per CPU core, at most 8)")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status: 1 where something failed. argparse exits with 2."""
    root = parser()
    arguments = root.parse_args(argv)
    if arguments.command == "compile":
        dims, others = (arguments.head_dim, arguments.head_dim_v), (arguments.dtype, arguments.causal)
        is_chosen = any(choice is not None for choice in (*dims, *others, arguments.preset))
        if arguments.all == is_chosen:
            some = "some of --dtype, --head-dim, --head-dim-v and --causal / --no-causal"
            root.error(f"compile: give --all, --preset, or {some}")
        if arguments.preset and dims != (None, None):
            root.error("compile: a preset has its head dims: give --preset or --head-dim")
        if arguments.head_dim_v is not None and arguments.head_dim is None:
            root.error("compile: --head-dim-v needs --head-dim")
    try:
        module = importlib.import_module(arguments.module)
    except ModuleNotFoundError as error:
        if arguments.module != BENCH or error.name not in (BENCH, BENCH.partition(".")[0]):
            raise
        root.exit(2, f"fa3 bench: {NO_BENCH}\n")
    return module.run(arguments)


def positive(text: str) -> int:
    """A whole number of at least 1, as the type of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
