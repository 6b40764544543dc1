"""Contenders at one shape: inputs, the check of every output, then the clock for those that passed, all interleaved; a
matrix product takes turns with them, which says how fast the tensor cores are under the same conditions.
"""

import math
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from bench.check import LIMIT, Check
from bench.machine import Machine
from bench.peers import Attention, around, kernel, reason, spec_of
from bench.records import record
from bench.shapes import Shape
from fa3.testing.timing import Around, Calls, Timing, compare, num_input_sets

Inputs = tuple[Any, Any, Any]  # q, k, v
PRODUCT, PRODUCT_SIZE = "cublas", 8192


@dataclass(frozen=True)
class Contender:
    impl: str  # as in the records
    dtype: str
    attention: Attention
    config: Any = None  # of ours: a Config
    is_alone: bool = False  # one call a graph: the kernels of the next could begin under its own

    @property
    def label(self) -> str:
        return f"{self.impl} {self.dtype} {self.config}"


@dataclass(frozen=True)
class Pace:
    """How much time a measurement takes. `deadline` is of time.monotonic: no round is begun after it."""

    rounds: int = 4
    seconds: float = 0.06  # of kernel time in a sample
    rest: float = 0.03  # before each
    deadline: float | None = None

    def has_time(self, seconds: float = 0.0) -> bool:
        """Whether what takes so long may still begin."""
        return self.deadline is None or time.monotonic() + seconds <= self.deadline


@dataclass(frozen=True)
class Outcome:
    """Of one contender at one shape. `timing` is None where there was none: `problem` says why."""

    contender: Contender
    shape: Shape
    timing: Timing | None
    error: float  # largest error over PyTorch's at the same precision; NaN where there was no output
    problem: str = ""
    cublas_tflops: float | None = None  # of the matrix product that took turns with it

    @property
    def us(self) -> float:
        """Kernel time, or eager time where no graph could be captured; infinity without a timing."""
        return self.timing.best_known.median if self.timing else math.inf

    @property
    def tflops(self) -> float:
        return self.shape.flops / self.us / 1e6

    def record(self, machine: Machine, suite: str) -> dict[str, Any]:
        """Of an outcome with a timing."""
        assert self.timing is not None
        return record(
            replace(machine.origin, cublas_tflops=self.cublas_tflops), suite, self.contender.impl, self.contender.dtype,
            self.shape, graph=self.timing.graph, graph_calls=self.timing.graph_calls,
            eager_us=self.timing.eager.median, cpu_us=self.timing.host.median, rounds=self.timing.best_known.count,
            config=self.contender.config,
        )  # fmt: skip


def make_inputs(shape: Shape, dtype: str, machine: Machine) -> list[Inputs]:
    """As many sets of N(0, 1) tensors as it takes to keep them out of L2."""
    import torch

    generator = torch.Generator(machine.device).manual_seed(0)
    b, k, kv = shape.batch, shape.seqlen_k, shape.heads_kv
    sizes = (b, shape.seqlen_q, shape.heads, shape.head_dim), (b, k, kv, shape.head_dim), (b, k, kv, shape.head_dim_v)

    def tensor(size: tuple[int, ...]) -> Any:
        return torch.randn(size, generator=generator, dtype=getattr(torch, dtype), device=machine.device)

    count = num_input_sets(shape.bytes(), machine.l2_bytes)
    return [(tensor(sizes[0]), tensor(sizes[1]), tensor(sizes[2])) for _ in range(count)]


def measure(contenders: Sequence[Contender], shape: Shape, machine: Machine, pace: Pace) -> list[Outcome]:
    """One outcome for each contender, in their order. What fails or answers wrongly is not timed, and stops nobody
    else.
    """
    inputs = {dtype: make_inputs(shape, dtype, machine) for dtype in {c.dtype for c in contenders}}
    checks = {dtype: Check(shape, *sets[0]) for dtype, sets in inputs.items()}
    calls: dict[str, list[Callable[[], Any]]] = {}
    errors: dict[str, float] = {}
    problems: dict[str, str] = {}
    for contender in contenders:
        label, sets = contender.label, inputs[contender.dtype]
        errors[label], problem = attempt(contender, shape, sets[0], checks[contender.dtype])
        if problem:
            problems[label] = problem
        else:
            calls[label] = [partial(contender.attention, *tensors, shape.causal) for tensors in sets]
    timings, cublas = timed(
        calls, machine, pace,
        alone={c.label for c in contenders if c.is_alone}, around={c.label: around(c.attention) for c in contenders},
    )  # fmt: skip
    return [
        Outcome(c, shape, timings.get(c.label), errors[c.label], problems.get(c.label, ""), cublas) for c in contenders
    ]


def timed(
    calls: Mapping[str, Calls], machine: Machine, pace: Pace, alone: Collection[str] = (),
    around: Mapping[str, Around] | None = None,
) -> tuple[dict[str, Timing], float | None]:  # fmt: skip
    """(what `compare` finds, TFLOP/s of the matrix product among them; None without a GPU)."""
    product = {PRODUCT: [matrix_product()]} if calls and machine.device == "cuda" else {}
    found = compare(
        {**calls, **product}, rounds=pace.rounds, seconds=pace.seconds, rest=pace.rest, deadline=pace.deadline,
        device=machine.device, alone=alone, around=around,
    )  # fmt: skip
    of_product = found.pop(PRODUCT, None)
    return found, 2 * PRODUCT_SIZE**3 / of_product.best_known.median / 1e6 if of_product else None


@cache
def matrix_product() -> Callable[[], Any]:
    """A bf16 product of 8192 cubed through cuBLAS, random numbers; three times 128 MiB for the rest of the process."""
    import torch

    size = PRODUCT_SIZE, PRODUCT_SIZE
    a, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return partial(torch.matmul, a, b)


def measure_configs(configs, shape: Shape, dtype: str, machine: Machine, pace: Pace) -> list[Outcome]:
    """One outcome for each Config, in order, of our kernel called directly. A kernel that does not load is an outcome
    too.
    """
    spec = spec_of(shape, dtype)
    contenders = []
    for config in configs:
        try:
            attention = kernel(spec, config, shape, machine.num_sms)
        except Exception as error:  # reported in its line, the others run
            attention = partial(_refuse, reason(error))
        contenders.append(Contender("ours", dtype, attention, config))
    return measure(contenders, shape, machine, pace)


def attempt(contender: Contender, shape: Shape, tensors: Inputs, check: Check) -> tuple[float, str]:
    """(error ratio, what is wrong). An output that the contender holds on to is poisoned first."""
    held = getattr(contender.attention, "output", None)
    if held is not None:
        held.fill_(math.nan)
    return tried(partial(contender.attention, *tensors, shape.causal), around(contender.attention), check.ratio)


def tried(call: Callable[[], Any], entered: Around, ratio: Callable[[Any], float]) -> tuple[float, str]:
    """The same of any call: its output's error over PyTorch's is what `ratio` says."""
    with warnings.catch_warnings(record=True) as said:  # PyTorch's backends say there why they refuse
        warnings.simplefilter("always")
        try:
            with entered():
                out = call()
            error = ratio(out)
        except Exception as problem:  # a peer that refuses, or ours: a line in the table either way
            why = next((str(w.message).split(" (Triggered")[0] for w in said if "because" in str(w.message)), "")
            return math.nan, f"{reason(problem)} {why}".strip()
    return error, "" if error <= LIMIT else f"wrong: {error:.1f} times PyTorch's error, {LIMIT:g} allowed"


def _refuse(why: str, *_) -> None:
    raise RuntimeError(why)


def compile_ahead(kernels: Iterable[tuple[Any, Any]], jobs: int) -> dict[tuple[Any, Any], str]:
    """Puts every (Spec, Config) that is not on disk there, `jobs` at a time; why it failed, for those that did."""
    from fa3.kernels import compile as compiler

    def prepare(kernel: tuple[Any, Any]) -> str:
        try:
            compiler.prepare(*kernel)  # in a process of its own: threads are enough here
        except Exception as error:
            return reason(error)
        return ""

    wanted = list(dict.fromkeys(kernels))
    with ThreadPoolExecutor(jobs) as pool:
        return {kernel: problem for kernel, problem in zip(wanted, pool.map(prepare, wanted), strict=True) if problem}


def deadline(began: float, budget_seconds: float | None) -> float | None:
    return began + budget_seconds if budget_seconds else None


def jobs_here() -> int:
    return min(16, len(os.sched_getaffinity(0)))
