"""`python -m fa3 compile`: have kernels on disk before anybody calls them; needs no GPU."""

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from fa3 import serving_kernels
from fa3.console import console, quiet_compiler
from fa3.heuristics import all_configs
from fa3.kernels import compile as kernels
from fa3.kernels.forward.config import FP8, TILES, Config, Spec, tile_for
from fa3.kernels.key import target, toolkit, toolkit_is_a_guess
from fa3.presets import PRESETS
from fa3.quant import listing

Kernel = tuple[Any, Any]  # Spec and Config
MAX_JOBS = 8  # each compiler takes about half a gigabyte of memory


@dataclass(frozen=True)
class Outcome:
    """Of one kernel. `seconds` is None where it was there already; `error` is empty where it is on disk now."""

    spec: Any
    config: Any
    seconds: float | None
    error: str = ""


def run(arguments: argparse.Namespace) -> int:
    if arguments.preset:
        chosen = of_presets(arguments.preset, arguments.dtype, arguments.causal, arguments.decode)
    else:
        dims, decode = (arguments.head_dim, arguments.head_dim_v), arguments.decode is not False
        chosen = list(select(arguments.dtype, *dims, arguments.causal, decode))
    jobs = arguments.jobs or min(MAX_JOBS, os.cpu_count() or 1)
    screen = console()
    check_writable()
    start = time.perf_counter()
    with quiet_compiler():
        outcomes = fill(chosen, jobs)
    taken = time.perf_counter() - start
    failed = [outcome for outcome in outcomes if outcome.error]
    for outcome in failed:
        screen.print(f"failed {describe(outcome.spec, outcome.config)}: {outcome.error}", style="red", markup=False)
    compiled = [outcome.seconds for outcome in outcomes if outcome.seconds is not None and not outcome.error]
    mean = f" ({sum(compiled) / len(compiled):.1f} s each)" if compiled else ""
    there = len(outcomes) - len(compiled) - len(failed)
    screen.print(
        f"{len(compiled)} compiled{mean}, {there} already there, {len(failed)} failed; "
        f"{taken:.1f} s with {jobs} at a time; cache {kernels.directory()}, for {target()}",
        markup=False,
    )
    if toolkit_is_a_guess():
        screen.print(
            "Several CUDA flavours are installed and no driver is here to choose by: a machine whose driver is older "
            f"than {toolkit()} will not find these kernels. For it, compile where the extra cu13 is not installed.",
            style="yellow",
            markup=False,
        )
    return 1 if failed else 0


def check_writable() -> None:
    """Exits with one sentence where the kernels could not be kept, before any is compiled."""
    folder = kernels.directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SystemExit(f"kernels cannot be kept in {folder}: {error.strerror}") from None


def select(
    dtype: str | None = None,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    causal: bool | None = None,
    decode: bool = True,
) -> Iterable[Kernel]:
    """Those of the kernels that a call can ask for which serve these head dims (head_dim_v is head_dim unless given).

    What quantises for FP8 is made for head dims and not for tiles: of these head dims, or of all tiles' sizes; rotated,
    without rotary embedding. Attention to a cache (decode) serves both masks. What appends to a cache and merges serves
    every head dim: it is made where none is given.
    Exits with one sentence for a head dim that no kernel serves.
    """
    wanted = None if head_dim is None else (head_dim, head_dim_v or head_dim)
    tile = None if wanted is None else _tile(wanted, dtype)
    for spec, config in all_configs():
        if dtype not in (None, spec.dtype) or causal not in (None, spec.causal):
            continue
        if spec.is_fp8 and wanted is not None and not listing.are_served(wanted):
            continue
        if tile in (None, (spec.head_dim, spec.head_dim_v)):
            yield spec, config
    if dtype in (None, FP8) and (wanted is None or listing.are_served(wanted)):
        yield from listing.all_kernels([wanted] if wanted else TILES)
    if decode:
        yield from serving_kernels.decode_kernels(dtype, tile)
    if wanted is None:
        yield from serving_kernels.all_kernels(dtype)


def of_presets(
    names: list[str], dtype: str | None = None, causal: bool | None = None, decode: bool | None = None
) -> list[Kernel]:
    """The kernels of these presets, of another type or with one mask only where these are given.

    Those of attention to a cache are with them as decode says, or where it is None as each preset does.

    FP8 serves fewer head dims: the others are left out. Exits with one sentence where nothing is left.
    """
    found: dict[Kernel, None] = {}  # as a set that keeps the order
    for preset in (PRESETS[name] for name in names):
        for kind in (dtype,) if dtype else preset.dtypes:
            dims = [d for d in preset.head_dims if kind != FP8 or listing.are_served(d)]
            masks = [mask for mask in preset.masks if causal in (None, mask)]
            for (head_dim, head_dim_v), mask in itertools.product(dims, masks):
                decodes = preset.decodes if decode is None else decode
                found |= dict.fromkeys(select(kind, head_dim, head_dim_v, mask, decodes))
    if not found:
        raise SystemExit(f"no kernel of {' and '.join(names)} is {'' if causal else 'not '}causal")
    return list(found)


def _tile(wanted: tuple[int, int], dtype: str | None) -> tuple[int, int]:
    from fa3.problem import (
        FP8_HEAD_DIM_STEP,
        HEAD_DIM_MAX,
        HEAD_DIM_STEP,
    )  # brings torch, which nothing else here needs

    step = FP8_HEAD_DIM_STEP if dtype == FP8 else HEAD_DIM_STEP
    if any(dim % step or not 0 < dim <= HEAD_DIM_MAX for dim in wanted):
        raise SystemExit(f"no kernel serves head dims {wanted}; allowed: multiples of {step} up to {HEAD_DIM_MAX}")
    return tile_for(*wanted)


def fill(chosen: list[Kernel], jobs: int) -> list[Outcome]:
    """Every kernel on disk, `jobs` compilers at a time, with a progress bar on stderr."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes = []
    # Threads are enough: every compile runs in a process of its own.
    with Progress(*columns, console=console(stderr=True)) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("compiling", total=len(chosen))
        futures = [pool.submit(prepare, spec, config) for spec, config in chosen]
        for future in as_completed(futures):
            outcomes.append(future.result())
            progress.update(task, advance=1, description=describe(outcomes[-1].spec, outcomes[-1].config))
    return outcomes


def prepare(spec: Any, config: Any) -> Outcome:
    """One kernel; what went wrong is kept, so that the others go on."""
    start = time.perf_counter()
    try:
        if kernels.state(spec, config) != "absent":
            return Outcome(spec, config, None)
        kernels.prepare(spec, config)
    except (RuntimeError, OSError) as error:
        return Outcome(spec, config, None, str(error))
    return Outcome(spec, config, time.perf_counter() - start)


def describe(spec: Any, config: Any) -> str:
    """One kernel in a few words: of two that a call can ask for, no two have the same."""
    if isinstance(spec, serving_kernels.DecodeSpec):
        return serving_kernels.describe_decode(spec, config)
    if isinstance(spec, serving_kernels.AnySpec):
        return serving_kernels.describe(spec)
    return describe_forward(spec, config) if isinstance(spec, Spec) else listing.describe(spec)


def describe_forward(spec: Spec, config: Config) -> str:
    mask = "causal" if spec.causal else "full"
    dtype = (
        f"{spec.dtype} {'accurate' if config.promotion else 'fast'} to {spec.dtype_o}" if spec.is_fp8 else spec.dtype
    )
    words = [f"{dtype} {spec.head_dim}/{spec.head_dim_v} {mask} {config.tile_m}x{config.tile_n}"]
    words += ["ragged"] * spec.ragged
    words += ["dynamic" if config.dynamic else "persistent"] * config.persistent
    words += ["two places for Q"] * (config.q_stages > 1) + ["no ping-pong"] * (not config.pingpong)
    return " ".join(words)
