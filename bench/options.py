"""The options that suites share, and what is made of them."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.machine import add_arguments, keep_apart
from bench.measure import Pace, deadline
from bench.shapes import GROUPS, NAMED, select_of
from fa3.cli import positive

USUAL = Pace()
QUICK = Pace(rounds=2, seconds=0.02, rest=0.01)


def add_shapes(
    parser: argparse.ArgumentParser, default: Sequence[str], groups: Mapping[str, Any] = GROUPS,
    named: Mapping[str, Any] = NAMED,
) -> None:  # fmt: skip
    """Which shapes, and for how long. `shapes_of` wants the same `groups` and `named`."""
    parser.add_argument(
        "--shapes", nargs="+", metavar="NAME",
        help=f"a group ({', '.join(groups)}) or: {', '.join(named)}; starts of names do (default: {' '.join(default)})",
    )  # fmt: skip
    parser.add_argument("--budget-seconds", type=float, help="begin no shape that would end later than this")
    parser.set_defaults(shapes_by_default=tuple(default))
    add_arguments(parser)


def add_contenders(parser: argparse.ArgumentParser, impls: Sequence[str], default: Sequence[str] = ()) -> None:
    """Who takes part, and how long a sample is."""
    parser.add_argument(
        "--grid", action="store_true", help="as --shapes grid: hd 64/128/256, full/causal, S 512/1K/4K/16K"
    )
    add_pace(parser, impls, default)


def add_pace(parser: argparse.ArgumentParser, impls: Sequence[str], default: Sequence[str] = ()) -> None:
    """The same of a suite without the grid."""
    parser.add_argument("--impl", nargs="+", choices=impls, default=list(default or impls))
    parser.add_argument(
        "--one-call", action="store_true", help="one call a graph, of all: where the next could begin under it"
    )
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument(
        "--rounds", type=positive, help=f"samples of each (default: {Pace.rounds}; with fewer, no baseline of --check)"
    )
    pace.add_argument("--quick", action="store_true", help="two short rounds: to see that it runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the plumbing")


def add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw what was measured here, as PNG")


def shapes_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace, groups: Mapping[str, Any] = GROUPS,
    named: Mapping[str, Any] = NAMED,
) -> tuple[Any, ...]:  # fmt: skip
    """What --grid and --shapes name together, else the default. Exits where there is no such shape, and where what runs
    on a CPU would be kept beside the measurements.
    """
    grid = ["grid"] if getattr(args, "grid", False) else []
    try:
        shapes = select_of([*grid, *(args.shapes or [])] or args.shapes_by_default, groups, named)
    except ValueError as error:
        parser.error(str(error))
    if getattr(args, "device", "cuda") == "cpu":
        keep_apart(parser, args, "measures nothing worth keeping")
    return shapes


def pace_of(args: argparse.Namespace, began: float, usual: Pace = USUAL) -> Pace:
    """Of the options of the functions above."""
    pace = QUICK if args.quick else usual
    return replace(pace, rounds=args.rounds or pace.rounds, deadline=deadline(began, args.budget_seconds))
