"""`python -m fa3 check`: the property-based accuracy tests of fa3/testing (16 bits and FP8) on this machine."""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import fa3
from fa3.console import console, table

# What the FP8 tensor core, which keeps about 14 bits, may lose of a score, relative to |q| |k|, and of sum p |v|.
KERNEL_SCORE_EPS, KERNEL_SUM_EPS = 2.0**-11, 2.0**-9
EMULATED = 4  # examples of which one is tried in FP8 on the CPU, at least 2: the emulation is slow


def run(arguments: argparse.Namespace) -> int:
    screen = console()
    try:
        from fa3.testing import fp8, properties
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
    examples_fp8 = arguments.examples
    if device == "cpu":
        examples_fp8 = min(examples_fp8, max(2, examples_fp8 // EMULATED))
    start = time.perf_counter()

    def report(record: Any) -> None:
        status.update(f"{record.property}: {'holds' if record.passed else 'FAILS'}")

    with screen.status("checking") as status:
        records = properties.run_all(fa3.flash_attn_func, device, arguments.examples, report)
        records_fp8 = fp8.run_all(subject_fp8(device), examples_fp8, report)
    show(screen, f"Properties on {device}", records)
    show(screen, f"Properties of FP8 on {device}", records_fp8)
    records = (*records, *records_fp8)
    failed = [record for record in records if not record.passed]
    for record in failed:
        screen.print(f"{record.property} ({record.statement}) fails for {record.failure}", style="red", markup=False)
    holding = f"{len(records) - len(failed)} of {len(records)} properties hold"
    tried = f"{arguments.examples} examples each" + (f", of FP8 {examples_fp8}" if device == "cpu" else "")
    screen.print(f"{holding}; {tried}, {time.perf_counter() - start:.1f} s.")
    return 1 if failed else 0


def subject_fp8(device: str) -> Any:
    """The public FP8 functions: kernels on CUDA tensors, the emulation elsewhere."""
    from fa3.testing.fp8 import Subject

    quantize: Callable[..., Any] = fa3.quant.quantize_qkv
    if device == "cpu":
        return Subject(attend_fp8, quantize, device)
    return Subject(attend_fp8, quantize, device, KERNEL_SCORE_EPS, KERNEL_SUM_EPS)


def attend_fp8(x: Any, softmax_scale: float | None = None, causal: bool = False) -> Any:
    return fa3.flash_attn_quantized_func(x, softmax_scale, causal, return_lse=True)


def show(screen: Any, title: str, records: Sequence[Any]) -> None:
    shown = table(title, "property", "holds", "examples", "worst", "limit", "unit", text_columns=2)
    for record in records:
        holds = "[green]yes[/]" if record.passed else "[red]NO[/]"
        figures = (_short(record.worst), _short(record.limit), record.unit)
        shown.add_row(record.property, holds, str(record.examples), *figures)
    screen.print(shown)
    for record in records:
        screen.print(f"{record.property}: {record.statement}", style="dim", markup=False)


def _short(figure: float) -> str:
    return f"{figure:.3g}"
