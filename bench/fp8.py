"""FP8 attention, the kernel alone and the whole call from BF16: python -m fa3 bench fp8

All contenders of a shape take turns on the same BF16 inputs. What is quantised once is quantised before the clock
starts; every output is checked first, against float64 on the BF16 inputs. Every timing is a line in
bench/results/<gpu>/fp8.jsonl; what must be shown (bench/goals.py) is met or missed. Exit status 1 if ours failed
anywhere, or with --check is slower than its records; 2 without a GPU.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from bench import goals, performance
from bench.check import Check
from bench.machine import Machine, open_machine, run_command
from bench.measure import Contender, Outcome, Pace, compile_ahead, jobs_here, make_inputs, timed
from bench.options import add_contenders, add_plot, add_shapes, pace_of, shapes_of
from bench.peers import FP8, fa3_fp8, fp8_kernel, fp8_kernel_of, per_head, reason
from bench.regression import Run, add_check
from bench.shapes import Shape

SUITE = "fp8"
SHAPES = ("hd64-16k", "hd128-16k", "hd256-16k")
ROTATE = True
MOVED = 3  # bytes that quantising moves of an element: two are read, one is written
CHECKED_ROWS = 256  # of the quantised tensors
# The largest RMSE, over what the steps of the quantisation predict. A peer may take other steps and lose more in its
# accumulator; a mask or a head that is wrong gives 20 and more.
ROOM, PEER_ROOM = 2.0, 4.0
CUDNN = "cudnn fp8 is left out: torch reaches cuDNN through scaled_dot_product_attention, which takes 16 bits or more"


@dataclass(frozen=True)
class Entry:
    """A contender and how it is measured."""

    impl: str
    dtype: str
    bind: Callable[..., Callable[[], Any]]  # (q, k, v, causal) -> the call that is timed
    kind: str  # of the check: see Checks.error
    config: Any = None
    is_alone: bool = False  # as of a Contender

    @property
    def contender(self) -> Contender:
        return Contender(self.impl, self.dtype, self.bind, self.config, self.is_alone)


# Contenders, by column of the table: (shape, machine) -> Entry


def _kernel(accumulation: str, shape: Shape, machine: Machine) -> Entry:
    from fa3.quant.interface import quantize_qkv

    if machine.device == "cpu":
        return _emulation(accumulation)
    spec, config = fp8_kernel_of(shape, accumulation, machine.num_sms)
    attention = fp8_kernel(spec, config, shape, machine.num_sms)
    return Entry("ours", FP8, lambda q, k, v, causal: attention(quantize_qkv(q, k, v, rotate=ROTATE)), "fp8", config)


def _emulation(accumulation: str) -> Entry:
    import fa3
    from fa3.quant.interface import quantize_qkv

    def bind(q: Any, k: Any, v: Any, causal: bool) -> Callable[[], Any]:
        x = quantize_qkv(q, k, v, rotate=ROTATE)
        return partial(fa3.flash_attn_quantized_func, x, causal=causal, accumulation=accumulation)

    return Entry("ours", FP8, bind, "fp8", {"accumulation": accumulation})


def _call(shape: Shape, machine: Machine) -> Entry:
    import fa3

    config: dict[str, Any] = {"rotate": ROTATE}
    if machine.device == "cuda":
        config |= asdict(fp8_kernel_of(shape, "accurate", machine.num_sms)[1])

    def bind(q: Any, k: Any, v: Any, causal: bool) -> Callable[[], Any]:
        return partial(fa3.flash_attn_fp8_func, q, k, v, causal=causal, rotate=ROTATE)

    return Entry("ours_call", FP8, bind, "fp8", config, is_alone=True)  # two kernels, the second after the first


def _quantize(shape: Shape, machine: Machine) -> Entry:
    from fa3.quant.interface import quantize_qkv

    def bind(q: Any, k: Any, v: Any, causal: bool) -> Callable[[], Any]:
        return lambda: quantize_qkv(q, k, v, rotate=ROTATE).q_scale

    return Entry("ours_quantize", FP8, bind, "quantized", {"rotate": ROTATE, "bytes": moved_bytes(shape)})


def _copy(shape: Shape, machine: Machine) -> Entry:
    import torch

    total = moved_bytes(shape)
    source = torch.randn(total // 4, dtype=torch.bfloat16, device=machine.device)
    target = torch.empty_like(source)
    return Entry("copy", "bfloat16", lambda q, k, v, causal: partial(target.copy_, source), "none", {"bytes": total})


def _bf16(shape: Shape, machine: Machine) -> Entry:
    import fa3

    def bind(q: Any, k: Any, v: Any, causal: bool) -> Callable[[], Any]:
        return partial(fa3.flash_attn_func, q, k, v, causal=causal)

    return Entry("ours", "bfloat16", bind, "16 bit")


def _fa3(shape: Shape, machine: Machine) -> Entry:
    attention = fa3_fp8()
    return Entry("fa3", FP8, lambda q, k, v, causal: attention(per_head(q, k, v), causal), "peer")


ENTRIES: dict[str, Callable[[Shape, Machine], Entry]] = {
    "accurate": partial(_kernel, "accurate"),
    "fast": partial(_kernel, "fast"),
    "call": _call,
    "quantize": _quantize,
    "copy": _copy,
    "bf16": _bf16,
    "fa3": _fa3,
}
OURS = ("accurate", "fast", "call", "quantize", "bf16")


def moved_bytes(shape: Shape) -> int:
    """Of Q, K and V, read and written, by what quantises them."""
    keys = shape.batch * shape.seqlen_k * shape.heads_kv * (shape.head_dim + shape.head_dim_v)
    return MOVED * (shape.batch * shape.seqlen_q * shape.heads * shape.head_dim + keys)


# Checks


class Checks:
    """What outputs are held to, made once for the first set of inputs."""

    def __init__(self, shape: Shape, q: Any, k: Any, v: Any) -> None:
        from fa3.quant.reference import quantize_qkv
        from fa3.testing.fp8_bound import predicted_rmse

        self.inputs = q, k, v
        self.check = Check(shape, q, k, v)
        scale = shape.head_dim**-0.5
        self.predicted = [
            predicted_rmse(quantize_qkv(*part.cut(shape, q, k, v), rotate=False), scale, shape.causal)
            for part in self.check.parts
        ]

    def error(self, kind: str, out: Any) -> tuple[float, float]:
        """(error, what is allowed), both as a ratio to what they are measured by."""
        from bench.check import LIMIT

        if kind == "none":
            return 0.0, 0.0
        if kind == "16 bit":
            return self.check.ratio(out), LIMIT
        if kind == "quantized":
            return self.of_quantized(), ROOM
        return self.of_fp8(out), ROOM if kind == "fp8" else PEER_ROOM

    def of_fp8(self, out: Any) -> float:
        """The RMSE of the worst part over the predicted one."""
        from fa3.testing.tolerance import rmse

        ratios = [
            rmse(part.of(out), exact) / max(predicted, 1e-300)
            for part, exact, predicted in zip(self.check.parts, self.check.exact, self.predicted, strict=True)
        ]
        return max(ratio if ratio == ratio else math.inf for ratio in ratios)

    def of_quantized(self) -> float:
        """The first rows of Q, K and V, back from E4M3: the RMSE over that of rounding to the nearest."""
        from fa3.quant import hadamard
        from fa3.quant.formats import E4M3
        from fa3.quant.interface import quantize_qkv
        from fa3.testing.fp8_bound import stored
        from fa3.testing.tolerance import rmse

        done = quantize_qkv(*self.inputs, rotate=ROTATE)
        worst = 0.0
        for x, s in zip(self.inputs, stored(done), strict=True):
            rows = slice(0, CHECKED_ROWS)
            want, codes, step = x[:1, rows].float(), s.codes[:1, rows].double(), s.step[:1, rows]
            if ROTATE and x is not self.inputs[2]:
                want = hadamard.rotate(want, hadamard.random_signs(x.shape[-1]))
            allowed = (E4M3.half_ulp(codes) * step).square().mean().sqrt().item() / math.sqrt(3)
            worst = max(worst, rmse(codes * step, want) / max(allowed, 1e-300))
        return worst if worst == worst else math.inf


def measure(entries: Mapping[str, Entry], shape: Shape, machine: Machine, pace: Pace) -> dict[str, Outcome]:
    """One outcome an entry. What fails or answers wrongly is not timed, and stops nobody else."""
    inputs = make_inputs(shape, "bfloat16", machine)
    checks = Checks(shape, *inputs[0])
    calls: dict[str, list[Callable[[], Any]]] = {}
    errors: dict[str, float] = {}
    problems: dict[str, str] = {}
    for name, entry in entries.items():
        errors[name] = math.nan
        try:
            bound = [entry.bind(*tensors, shape.causal) for tensors in inputs]
            errors[name], allowed = checks.error(entry.kind, bound[0]())
        except Exception as problem:  # a peer that refuses, or ours: a line either way
            problems[name] = reason(problem)
            continue
        if errors[name] <= allowed:
            calls[name] = bound
        else:
            problems[name] = f"wrong: {errors[name]:.1f} times the error that is expected, {allowed:g} allowed"
    timings, cublas = timed(calls, machine, pace, alone={name for name, entry in entries.items() if entry.is_alone})
    return {
        name: Outcome(entry.contender, shape, timings.get(name), errors[name], problems.get(name, ""), cublas)
        for name, entry in entries.items()
    }


# What is printed


def us(point: Mapping[str, Outcome], name: str) -> float | None:
    """Kernel time of a contender that was timed."""
    return point[name].us if name in point and point[name].timing else None


def ratio(point: Mapping[str, Outcome], above: str, below: str) -> float | None:
    """Time of one over time of the other."""
    a, b = us(point, above), us(point, below)
    return a / b if a and b else None


def table_of(points: list[Mapping[str, Outcome]]) -> Any:
    from bench import report

    columns = ("accurate", "fast", "call", "bf16", "fa3")
    result = report.table(
        "TFLOP/s by kernel time (* eager time), ± half the quartile distance; Q, K, V to FP8: TB/s, share of a copy's",
        "shape", *columns, "quantize", "of copy", "call/bf16", "accurate/fa3",
    )  # fmt: skip
    for point in points:
        shape = next(iter(point.values())).shape
        quantize, share = us(point, "quantize"), ratio(point, "copy", "quantize")
        speeds = (report.speed(point[name]) if name in point else "-" for name in columns)
        result.add_row(
            shape.name, *speeds, f"{moved_bytes(shape) / quantize / 1e6:.2f}" if quantize else "-", _number(share),
            _number(ratio(point, "bf16", "call")), _number(ratio(point, "fa3", "accurate")),
        )  # fmt: skip
    return result


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# The command


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m fa3 bench fp8", description=__doc__.splitlines()[0])
    add_shapes(result, SHAPES)
    add_contenders(result, tuple(ENTRIES))
    add_check(result, is_of_speed=True)
    add_plot(result)
    return result


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    options = parser()
    args = options.parse_args(argv)
    return run(args, shapes_of(options, args), open_machine(args.device, args.commit), began)


def run(args: argparse.Namespace, shapes: tuple[Shape, ...], machine: Machine, began: float) -> int:
    import torch

    from bench import report

    out = report.console()
    kept = Run(SUITE, machine, args)
    shapes, refused = served(shapes)
    if machine.device == "cuda":
        _compile_ahead(shapes, args.impl, machine)
    out.print(report.heading(machine.origin))
    pace = pace_of(args, began)
    points: list[Mapping[str, Outcome]] = []
    missing: dict[str, str] = {}
    left: list[str] = []
    with torch.no_grad():
        for shape in report.in_turn(out, shapes, pace, left):
            entries = _made(args, shape, machine, missing)
            points.append(measure(entries, shape, machine, pace))
            for outcome in points[-1].values():
                if outcome.timing:
                    kept.add(outcome.record(machine, SUITE))
            cells = "  ".join(f"{name} {report.speed(o)}" for name, o in points[-1].items() if name not in _BYTES)
            out.print(f"{shape.name}: {cells}  ({time.monotonic() - began:.0f} s)")
    out.print(table_of(points))
    everything = [outcome for point in points for outcome in point.values()]
    of_run = kept.points(FP8)
    for line in (
        *missing.values(), CUDNN, *refused, *report.problems(everything), *report.product(everything),
        *goals.lines(SUITE, of_run), *report.not_measured(left),
    ):  # fmt: skip
        out.print(line)
    report.draw(out, args.plot, lambda: performance.of_run(SUITE, {"FP8": of_run}))
    holds = kept.holds(out)
    failed = any(point[name].timing is None for point in points for name in OURS if name in point)
    return int(not holds or failed or any(name in OURS for name in missing))


_BYTES = ("quantize", "copy")


def served(shapes: tuple[Shape, ...]) -> tuple[tuple[Shape, ...], list[str]]:
    """(those that there are FP8 kernels for, a line about the others)."""
    from fa3.quant.listing import are_served

    left = [shape for shape in shapes if not are_served((shape.head_dim, shape.head_dim_v))]
    names = ", ".join(shape.name for shape in left)
    lines = [f"Left out, FP8 takes head dims that are multiples of 16: {names}"] if left else []
    return tuple(shape for shape in shapes if shape not in left), lines


def _made(args: argparse.Namespace, shape: Shape, machine: Machine, missing: dict[str, str]) -> dict[str, Entry]:
    """The entries that can be made here; why not goes to `missing`."""
    from rich.markup import escape

    made = {}
    for name in args.impl:
        try:
            entry = ENTRIES[name](shape, machine)
            made[name] = replace(entry, is_alone=entry.is_alone or args.one_call)
        except Exception as problem:  # a peer that does not import, or ours
            missing.setdefault(name, escape(f"{name} is not here: {reason(problem)}"))
    return made


def _compile_ahead(shapes: Iterable[Shape], names: Iterable[str], machine: Machine) -> None:
    """The kernels of all shapes, many at a time."""
    wanted = ("accurate", "fast") if "fast" in names else ("accurate",)
    compile_ahead((fp8_kernel_of(s, a, machine.num_sms) for s in shapes for a in wanted), jobs_here())


if __name__ == "__main__":
    run_command(SUITE, main)
