"""`python -m fa3 check`: the property-based accuracy tests of fa3/testing/properties.py on this machine."""

import argparse
import time

import fa3
from fa3.console import console, table


def run(arguments: argparse.Namespace) -> int:
    screen = console()
    try:
        from fa3.testing import properties
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise SystemExit("This command needs hypothesis, which is not installed: pip install hypothesis.") from None
    reason = fa3.why_not()
    if arguments.device == "cuda" and reason:
        raise SystemExit(f"The kernels cannot run here: {reason}.")
    device = arguments.device or ("cpu" if reason else "cuda")
    if arguments.device is None and reason:
        screen.print(f"No kernel runs here: {reason}. The CPU reference is checked.")
    shown = table(f"Properties on {device}", "property", "holds", "examples", "worst", "limit", "unit", text_columns=2)
    start = time.perf_counter()
    with screen.status("checking") as status:
        records = properties.run_all(
            fa3.flash_attn_func,
            device,
            arguments.examples,
            report=lambda record: status.update(f"{record.property}: {'holds' if record.passed else 'FAILS'}"),
        )
    for record in records:
        holds = "[green]yes[/]" if record.passed else "[red]NO[/]"
        figures = (_short(record.worst), _short(record.limit), record.unit)
        shown.add_row(record.property, holds, str(record.examples), *figures)
    screen.print(shown)
    for record in records:
        screen.print(f"{record.property}: {record.statement}", style="dim", markup=False)
    failed = [record for record in records if not record.passed]
    for record in failed:
        screen.print(f"{record.property} ({record.statement}) fails for {record.failure}", style="red", markup=False)
    holding = f"{len(records) - len(failed)} of {len(records)} properties hold"
    screen.print(f"{holding}; {arguments.examples} examples each, {time.perf_counter() - start:.1f} s.")
    return 1 if failed else 0


def _short(figure: float) -> str:
    return f"{figure:.3g}"
