"""The error of FP8 attention: python -m fa3 bench accuracy

paper: RMSE by the protocol of the FlashAttention-3 paper, with and without block scales and the rotation. length:
relative error on the same E4M3 tensors at growing length. needle and flat: one key that counts, and keys that all
count, at the longest. Everything is compared with float64, by the kernels that bench.fp8 times; every figure is a line
in bench/results/<gpu>/accuracy.jsonl. Exit status 1 where something is not within its limit, or with --check is worse
than recorded; 2 without a GPU.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from bench.machine import Machine, add_arguments, keep_apart, open_machine, run_command
from bench.measure import deadline
from bench.options import add_plot
from bench.peers import FP8, fa3_fp8, fp8_kernel_of, per_head, reason
from bench.records import record
from bench.regression import Run, add_check
from bench.shapes import Shape
from fa3.cli import positive

SUITE = "accuracy"
CASES = ("paper", "length", "needle", "flat")
PLACES = (0.0, 0.5, 1.0)  # of the needle, as a share of the keys
LENGTH_HEADS = 4

PROTOCOL = (2, 8, 4096, 128)  # batch, heads, seqlen and head_dim of the paper

# What must be shown.
RMSE = 8.5e-3  # of the accurate default with rotation, by the paper's protocol
OF_PER_TENSOR = 0.5  # and over per-tensor scales without rotation
REL_ERROR = 3e-3  # at every length
NEEDLE = FLAT = 1e-2


@dataclass(frozen=True)
class Sizes:
    """paper: batch, heads, seqlen, head_dim."""

    paper: tuple[int, int, int, int]
    seeds: int
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    queries: int

    @property
    def longest(self) -> int:
        return max(self.lengths)


SIZES = {
    "cuda": Sizes(PROTOCOL, 10, (1024, 8192, 65536, 131072), (64, 128, 256), 128),
    "cpu": Sizes((1, 2, 512, 128), 2, (1024, 4096), (64, 128), 64),
}


@dataclass(frozen=True)
class Method:
    """One way from tensors to an output. attention(x: QuantizedQKV, softmax_scale=, causal=) -> (out, lse or None)."""

    name: str
    impl: str
    attention: Callable[..., Any] | None = None  # of quantised tensors
    quantize: Callable[..., Any] | None = None  # (q, k, v) -> QuantizedQKV
    plain: Callable[..., Any] | None = None  # (q, k, v) -> out, where nothing is quantised
    config: Any = None  # what its records say beside the kernel's Config

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.plain else FP8

    def of_inputs(self, q: Any, k: Any, v: Any) -> Any:
        if self.plain:
            return self.plain(q, k, v)
        assert self.attention and self.quantize
        return self.attention(self.quantize(q, k, v), softmax_scale=None, causal=False)[0]


@dataclass(frozen=True)
class Figure:
    """An error of one method; record: how its line is named and what it holds."""

    case: str
    method: Method
    shape: Shape
    error: float
    unit: str  # "rmse" or "rel_error"
    detail: dict[str, Any]


# Methods


def ours(device: str, accumulation: str = "accurate") -> Callable[..., Any]:
    """The public function, on CPU tensors the emulation."""
    import fa3

    def attention(x: Any, softmax_scale: float | None = None, causal: bool = False) -> Any:
        return fa3.flash_attn_quantized_func(x, softmax_scale, causal, accumulation=accumulation, return_lse=True)

    return attention


def quantizers() -> dict[str, Callable[..., Any]]:
    """The paper's ablation: block scales or one scale a tensor, with the rotation or without. And block scales with one
    for each row of Q, and as the largest value gives them, not moved to where the codes are (fa3.quant.cast.fit)."""
    from fa3.quant.formats import PER_TENSOR
    from fa3.quant.interface import quantize_qkv
    from fa3.quant.reference import quantize_qkv as in_torch

    return {
        "block, rotated": partial(quantize_qkv, rotate=True),
        "block": partial(quantize_qkv, rotate=False),
        "block, rotated, rows of Q": partial(quantize_qkv, rotate=True, q_rows=1),
        "block, rotated, not fitted": partial(in_torch, rotate=True, fit=False),
        "tensor, rotated": partial(in_torch, rotate=True, granularity=PER_TENSOR),
        "tensor": partial(in_torch, rotate=False, granularity=PER_TENSOR),
    }


def methods(device: str) -> tuple[list[Method], dict[str, str]]:
    """(those that are here, why not)."""
    import fa3

    impl = "ours" if device == "cuda" else "reference"
    found = [
        Method(name, impl, ours(device), quantize, config={"scales": name, "accumulation": "accurate"})
        for name, quantize in quantizers().items()
    ]
    first = found[0]
    fast = {"scales": first.name, "accumulation": "fast"}
    found.append(replace(first, name="block, rotated, fast", attention=ours(device, "fast"), config=fast))
    found.append(Method("bf16", impl, plain=fa3.flash_attn_func))
    try:
        bind = fa3_fp8()
    except Exception as problem:  # it does not import: a line
        return found, {"fa3": reason(problem)}

    def attention(x: Any, softmax_scale: float | None = None, causal: bool = False) -> Any:
        return bind(x, causal, softmax_scale)(), None

    return [*found, Method("fa3", "fa3", attention, per_head, config={"scales": "head"})], {}


# Cases


def paper(method: Method, sizes: Sizes, device: str) -> Iterable[Figure]:
    """FlashAttention-3, arXiv:2407.08608, section 4.3: the RMSE of every seed, and their mean."""
    from fa3.testing.tolerance import rmse

    batch, heads, seqlen, dim = sizes.paper
    errors = []
    for seed in range(sizes.seeds):
        x, want = _drawn(sizes.paper, seed, device)
        errors.append(rmse(method.of_inputs(*x), want))
    shape = Shape("paper", batch, seqlen, seqlen, heads, heads, dim, dim, False)
    yield Figure("paper", method, shape, sum(errors) / len(errors), "rmse", {"seeds": len(errors)})


@functools.lru_cache(maxsize=16)
def _drawn(sizes: tuple[int, int, int, int], seed: int, device: str) -> tuple[Any, Any]:
    """Inputs and float64 attention to them: the same for all methods."""
    from fa3.testing.inputs import Case, make
    from fa3.testing.tolerance import exact

    batch, heads, seqlen, dim = sizes
    x = make(Case("bfloat16", batch, seqlen, seqlen, heads, 1, dim, dim, values="outliers", seed=seed), device)
    return x, exact(*x)[0]


def length(method: Method, sizes: Sizes, device: str) -> Iterable[Figure]:
    """Q, K ~ N(0, 1), V ~ N(1, 1) in E4M3, scales 1: the norm of the error over that of attention in float64."""
    import torch

    from fa3.quant.cast import cast
    from fa3.quant.reference import dequantize_qkv, from_descales
    from fa3.testing.tolerance import exact

    assert method.attention
    for dim in sizes.head_dims:
        for seqlen in sizes.lengths:
            generator = torch.Generator(device).manual_seed(seqlen)
            codes = [
                cast(torch.randn(1, rows, LENGTH_HEADS, dim, generator=generator, device=device) + mean)
                for rows, mean in ((sizes.queries, 0), (seqlen, 0), (seqlen, 1))
            ]
            x = from_descales(codes[0], codes[1], codes[2])
            out = method.attention(x, softmax_scale=None, causal=False)[0].double()
            want, _ = exact(*dequantize_qkv(x))
            shape = Shape("length", 1, sizes.queries, seqlen, LENGTH_HEADS, LENGTH_HEADS, dim, dim, False)
            yield Figure("length", method, shape, _finite((out - want).norm() / want.norm()), "rel_error", {})


def needle(method: Method, sizes: Sizes, device: str) -> Iterable[Figure]:
    from fa3.testing.fp8_conformance import needle

    shape = Shape("needle", 1, 64, sizes.longest, 1, 1, 128, 128, False)
    for at in PLACES:
        error = needle(_subject(method, device), sizes.longest, at).figure
        yield Figure("needle", method, shape, error, "rel_error", {"at": at})


def flat(method: Method, sizes: Sizes, device: str) -> Iterable[Figure]:
    from fa3.testing.fp8_conformance import truncation

    for queries in (64, 1):
        shape = Shape("flat", 1, queries, sizes.longest, 8, 2, 128, 128, False)
        error = truncation(_subject(method, device), sizes.longest, queries).figure
        yield Figure("flat", method, shape, error, "rel_error", {})


def _subject(method: Method, device: str) -> Any:
    from fa3.testing.fp8 import Subject

    assert method.attention and method.quantize
    return Subject(method.attention, method.quantize, device)


def _finite(error: Any) -> float:
    value = float(error)
    return value if value == value else math.inf


MEASURES: dict[str, Callable[[Method, Sizes, str], Iterable[Figure]]] = {
    "paper": paper, "length": length, "needle": needle, "flat": flat,
}  # fmt: skip
ON_CODES = ("block, rotated", "block, rotated, fast", "fa3")  # methods that take the E4M3 tensors of the other cases


def takes(case: str, method: Method) -> bool:
    return case == "paper" or method.name in ON_CODES


def as_record(figure: Figure, machine: Machine) -> dict[str, Any]:
    """With the Config of our kernel: that of the same shape in suite fp8."""
    method, config = figure.method, {**(figure.method.config or {}), **figure.detail}
    if method.impl == "ours" and method.dtype == FP8:
        accumulation = (method.config or {})["accumulation"]
        config |= asdict(fp8_kernel_of(figure.shape, accumulation, machine.num_sms)[1])
    line = record(machine.origin, SUITE, method.impl, method.dtype, figure.shape, config=config or None)
    errors = {unit: figure.error if figure.unit == unit else None for unit in ("rmse", "rel_error")}
    return {**line, "case": figure.case, **errors}


# What is printed


def must_show(figures: list[Figure]) -> list[tuple[bool, str]]:
    """(whether it holds, the line) for each goal that was measured, at the paper's sizes; of the accurate default."""
    lines = []

    def goal(value: float, limit: float, words: str) -> None:
        fits = value <= limit
        lines.append((fits, f"{words}: [{'green' if fits else 'red'}]{value:.3g}[/]; at most {limit:g}"))

    by_method = {f.method.name: f.error for f in figures if f.case == "paper" and _sizes(f.shape) == PROTOCOL}
    if "block, rotated" in by_method:
        goal(by_method["block, rotated"], RMSE, "paper: RMSE with rotation")
        if "tensor" in by_method:
            share = by_method["block, rotated"] / by_method["tensor"]
            goal(share, OF_PER_TENSOR, "paper: over per-tensor scales without rotation")
    for f in figures:
        if f.case == "length" and f.method.name == "block, rotated":
            goal(f.error, REL_ERROR, f"length: hd{f.shape.head_dim}, {f.shape.seqlen_k} keys")
    for case, limit in (("needle", NEEDLE), ("flat", FLAT)):
        errors = [f.error for f in figures if f.case == case and f.method.name == "block, rotated"]
        if errors:
            goal(max(errors), limit, f"{case}: the worst")
    return lines


def _sizes(shape: Shape) -> tuple[int, int, int, int]:
    return shape.batch, shape.heads, shape.seqlen_q, shape.head_dim


def tables(figures: list[Figure]) -> Iterable[Any]:
    from bench.report import table

    rows: dict[str, list[str]] = {}
    for f in figures:
        if f.case == "paper":
            rows.setdefault(f.method.name, [f"{f.error:.3e}"])
    if rows:
        result = table("RMSE by the paper's protocol, scales and rotation", "", "RMSE")
        for name, cells in rows.items():
            result.add_row(name, *cells)
        yield result
    others = [f for f in figures if f.case != "paper"]
    if others:
        names = list(dict.fromkeys(f.method.name for f in others))
        result = table("Relative error, percent", "case", "head_dim", "keys", *names)
        places: dict[tuple, dict[str, float]] = {}
        for f in others:
            at = f.detail.get("at", "") if f.case == "needle" else f.shape.seqlen_q
            places.setdefault((f.case, at, f.shape.head_dim, f.shape.seqlen_k), {})[f.method.name] = f.error
        for (case, at, dim, keys), errors in places.items():
            label = f"{case} at {at}" if case == "needle" else f"{case}, {at} queries"
            cells = [f"{100 * errors[name]:.3f}" if name in errors else "-" for name in names]
            result.add_row(label, str(dim), str(keys), *cells)
        yield result


# The command


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m fa3 bench accuracy", description=__doc__.splitlines()[0])
    result.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    result.add_argument("--seeds", type=positive, help="of the paper's protocol (default: 10)")
    result.add_argument(
        "--paper", nargs=4, type=positive, metavar=("B", "H", "S", "D"), help="its sizes (default: 2 8 4096 128)"
    )
    result.add_argument("--budget-seconds", type=float, help="begin no case of a method after this")
    result.add_argument("--device", choices=tuple(SIZES), default="cuda", help="cpu: the emulation, at small sizes")
    add_check(result)
    add_plot(result)
    add_arguments(result)
    return result


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    options = parser()
    args = options.parse_args(argv)
    keep_apart(options, args, "is the emulation")
    return run(args, open_machine(args.device, args.commit), began)


def run(args: argparse.Namespace, machine: Machine, began: float) -> int:
    import torch

    from bench import performance, report

    out = report.console()
    kept = Run(SUITE, machine, args)
    sizes = SIZES[machine.device]
    sizes = replace(sizes, seeds=args.seeds or sizes.seeds, paper=tuple(args.paper or sizes.paper))
    until = deadline(began, args.budget_seconds)
    here, missing = methods(machine.device)
    out.print(report.heading(machine.origin))
    figures: list[Figure] = []
    problems = [f"{name} is not here: {why}" for name, why in missing.items()]
    failed = False
    steps = [(c, m) for c in args.case for m in here if takes(c, m)]
    with torch.no_grad():
        for case, method in report.stepped(out, steps, lambda step: f"{step[0]} of {step[1].name}"):
            if until is not None and time.monotonic() > until:
                problems.append(f"{case} of {method.name} was not measured: the time was up")
                continue
            try:
                for figure in MEASURES[case](method, sizes, machine.device):
                    kept.add(as_record(figure, machine))
                    figures.append(figure)
            except Exception as problem:  # a peer that refuses is a line, ours a failure
                failed = failed or method.impl != "fa3"
                problems.append(f"{case} of {method.name}: {reason(problem)}")
    for result in tables(figures):
        out.print(result)
    for line in problems:
        out.print(line, markup=False)
    goals = must_show(figures)
    for _, line in goals:
        out.print(line)
    report.draw(out, args.plot, lambda: performance.of_run_accuracy(kept.records))
    return int(not kept.holds(out) or failed or not all(fits for fits, _ in goals))


if __name__ == "__main__":
    run_command(SUITE, main)
