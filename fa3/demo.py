"""`python -m fa3 demo`: attention on the Q, K and V of a real transformer that reads real text.

Shows the error against float64 beside that of plain PyTorch in the same precision; then, on a Hopper GPU, the speed
on a standard shape, and without one what the compiled kernels hold.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from importlib.resources import as_file, files

import numpy as np
import torch

import fa3
from fa3.console import console, quiet_compiler, table
from fa3.device import ASSUMED, chip
from fa3.heuristics import config_for
from fa3.kernels import compile as kernels
from fa3.kernels import sass
from fa3.kernels.forward.config import Config, Spec, tile_for
from fa3.precompile import describe
from fa3.testing import timing, tolerance

DTYPES = (torch.float16, torch.bfloat16)
STANDARD = {"batch": 1, "seqlen": 16384, "heads": 16, "head_dim": 128}  # the shape of the FlashAttention-3 paper at 16K


@dataclass(frozen=True)
class Layer:
    """Q, K and V (1, tokens, heads, head_dim) fp16 of one layer."""

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    def tensors(self, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (torch.from_numpy(array).to(device, dtype) for array in (self.q, self.k, self.v))
        return q, k, v


def run(arguments: argparse.Namespace) -> int:
    screen = console()
    reason = fa3.why_not()
    device = "cpu" if reason else "cuda"
    layers = recorded()
    _, tokens, heads, head_dim = layers[0].q.shape
    screen.print(
        f"[bold]Recorded attention[/]: all-MiniLM-L6-v2 reads {tokens} tokens of the Python Language Reference "
        f"({heads} heads, head_dim {head_dim})."
    )
    if reason:
        screen.print(f"No kernel runs here: {reason}.")
        screen.print("The calls take the CPU reference: the kernel's steps and roundings, in its order.")
    else:
        screen.print(f"The calls run on {chip(torch.cuda.current_device()).name}.")
    within = show_errors(screen, layers, device)
    sound = show_speed(screen) if device == "cuda" else show_kernels(screen)
    return 0 if within and sound else 1


def recorded() -> list[Layer]:
    """The layers of fa3/data/minilm_qkv.npz, whose source is named in the README beside it."""
    with as_file(files("fa3") / "data" / "minilm_qkv.npz") as path, np.load(path) as arrays:
        names = sorted({key.split(".")[0] for key in arrays})
        return [Layer(name, *(arrays[f"{name}.{part}"] for part in "qkv")) for name in names]


def show_errors(screen, layers: list[Layer], device: str) -> bool:
    """A row per layer and type; whether all of them obey the tolerance rule."""
    title = "Error against float64, and plain PyTorch's in the same precision"
    errors = ("max\nfa3", "max\ntorch", "\nratio", "mean\nfa3", "mean\ntorch", "\nratio")
    columns = ("layer", "type", *errors, "holds")
    shown = table(title, *columns, text_columns=2)
    within = True
    for layer in layers:
        for dtype in DTYPES:
            q, k, v = layer.tensors(dtype, device)
            expected = tolerance.expected(q, k, v)
            out = fa3.flash_attn_func(q, k, v)
            ours, plain = tolerance.Errors.of(out, expected.out), expected.plain
            passes = expected.share(out) <= 1
            within &= passes
            shown.add_row(
                layer.name, str(dtype).removeprefix("torch."),
                f"{ours.max:.2e}", f"{plain.max:.2e}", f"{ours.max / plain.max:.2f}",
                f"{ours.mean:.2e}", f"{plain.mean:.2e}", f"{ours.mean / plain.mean:.2f}",
                "[green]yes[/]" if passes else "[red]NO[/]",
            )  # fmt: skip
    screen.print(shown)
    most, mean = tolerance.MAX_FACTOR, tolerance.MEAN_FACTOR
    screen.print(f"Holds: the largest error at most {most} times PyTorch's, the mean error at most {mean} times.")
    return within


def show_speed(screen) -> bool:
    """Kernel time of the standard shape, its output checked first; whether it obeys the tolerance rule."""
    batch, seqlen, heads, head_dim = STANDARD.values()
    here = chip(torch.cuda.current_device())
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, seqlen, heads, head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(3))
    calls = {causal: partial(fa3.flash_attn_func, q, k, v, causal=causal) for causal in (False, True)}
    shares = {causal: tolerance.expected(q, k, v, causal=causal).share(call()) for causal, call in calls.items()}
    timings = timing.compare({mask(causal): [call] for causal, call in calls.items()})
    title = f"Speed: bfloat16, B{batch} S{seqlen} H{heads} hd{head_dim}"
    shown = table(title, "mask", "kernel us", "TFLOP/s", "utilization", "allowed error used")
    for causal, share in shares.items():
        spread = timings[mask(causal)].best_known
        speed = tflops(spread.median, causal)
        utilization = f"{speed / here.peak_tflops:.1%}" if here.peak_tflops else "unknown"
        shown.add_row(mask(causal), f"{spread.median:.1f}", f"{speed:.0f}", utilization, f"{share:.0%}")
    screen.print(shown)
    screen.print(f"Utilization is of {here.peak_tflops} TFLOP/s, this chip's datasheet. Causal counts half the FLOP.")
    return max(shares.values()) <= 1


def tflops(microseconds: float, causal: bool) -> float:
    """Of the standard shape: two GEMMs of 2 FLOP a product, half of them under a causal mask."""
    batch, seqlen, heads, head_dim = STANDARD.values()
    return 4 * batch * heads * seqlen**2 * head_dim / (2 if causal else 1) / microseconds / 1e6


def show_kernels(screen) -> bool:
    """What the compiler makes of three kernels; whether it could be shown and no kernel spills registers."""
    counts = ("WGMMA", "TMA\nloads", "TMA\nstores")
    columns = ("kernel", "compile\nseconds", "registers", "shared\nbytes", "spilled\nbytes", *counts)
    shown = table("Compiled for sm_90a", *columns)
    sound = True
    chosen = kernels_shown(head_dim=recorded()[0].q.shape[-1])
    try:
        for spec, config in chosen:
            with screen.status(f"compiling {describe(spec, config)}"), quiet_compiler():
                made = kernels.inspect(spec, config)
                code = sass.read(made.cubin, made.remarks, made.shared_bytes)
            wgmma, loads, stores = (code.count(name) for name in ("HGMMA", "UTMALDG", "UTMASTG"))
            sound &= not code.spills and wgmma > 0 and loads > 0
            registers = f"{code.registers} -> {'/'.join(map(str, code.setmaxnreg))}"
            spilled = max(code.spill_bytes, code.stack_bytes)
            numbers = (registers, f"{code.shared_bytes:,}", str(spilled), str(wgmma), str(loads), str(stores))
            shown.add_row(describe(spec, config), f"{made.seconds:.1f}", *numbers)
    except (kernels.CompilerMissing, sass.DisassemblerMissing) as error:
        screen.print(f"The compiled kernels cannot be shown: {error}", markup=False)
        return False
    screen.print(shown)
    screen.print("registers: at launch, then what setmaxnreg gives producer and consumers. Chosen for an H100 SXM.")
    return sound


def mask(causal: bool) -> str:
    return "causal" if causal else "full"


def kernels_shown(head_dim: int) -> list[tuple[Spec, Config]]:
    """The kernels of the recorded shape and of the standard one, as chosen for an H100 SXM."""
    batch, seqlen, heads, standard = STANDARD.values()
    specs = [Spec("bfloat16", *tile_for(head_dim, head_dim), False)]
    specs += [Spec("bfloat16", *tile_for(standard, standard), causal) for causal in (False, True)]
    return [(spec, config_for(spec, seqlen, seqlen, heads, batch, ASSUMED.num_sms)) for spec in specs]
