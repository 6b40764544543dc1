"""`python -m fa3 info`: versions, GPUs, the kernel cache, what works here and why not. Plain text, needs no extra."""

import argparse
import importlib.util
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from fa3 import __version__

PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "apache-tvm-ffi-orcjit", "numpy")
LABEL_WIDTH = 22


def run(arguments: argparse.Namespace) -> int:
    sections = {
        "Versions": versions(),
        "GPUs": gpus(),
        "Kernel cache": cache(),
        "What works here": capabilities(),
    }
    for title, rows in sections.items():
        print(title)
        for label, text in rows:
            print(f"  {label:<{LABEL_WIDTH}} {text}")
    return 0


def versions() -> list[tuple[str, str]]:
    """Of Python and of the packages by their metadata, and of the CUDA that torch was built with."""
    rows = [("fa3", __version__), ("python", f"{platform.python_version()} ({sys.executable})")]
    for package in PACKAGES:
        rows.append((package, _version(package)))
        if package == "torch" and _has("torch"):
            import torch

            rows.append(("torch's CUDA", torch.version.cuda or "none: a CPU build"))
    return rows


def gpus() -> list[tuple[str, str]]:
    """Every GPU that torch sees, and whether the kernels run on it."""
    if not _has("torch"):
        return [("none", "torch is not installed")]
    import torch

    from fa3.device import HOPPER, chip

    if not torch.cuda.is_available():
        return [("none", "this torch is a CPU build" if torch.version.cuda is None else "torch finds no GPU or driver")]
    rows = []
    for index in range(torch.cuda.device_count()):
        found = chip(index)
        needed = "works" if found.is_hopper else "does not work here: the kernels need {}.{} (Hopper)".format(*HOPPER)
        capability = "{}.{}".format(*found.capability)
        rows.append((f"cuda:{index}", f"{found.name}, {found.num_sms} SMs, compute capability {capability}: {needed}"))
    return rows


def cache() -> list[tuple[str, str]]:
    """Where it is and how much it holds."""
    from fa3.heuristics import all_configs
    from fa3.kernels import compile as kernels
    from fa3.kernels.key import target

    found = kernels.entries()
    size = sum(entry.path.stat().st_size for entry in found)
    usable = sum(kernels.state(*kernel) != "absent" for kernel in all_configs())
    return [
        ("folder", str(kernels.directory())),
        (
            "kernels",
            f"{len(found)} in {size:,} bytes; {usable} of the {len(list(all_configs()))} that a call can ask for",
        ),
        ("they are made for", target()),
    ]


def capabilities() -> list[tuple[str, str]]:
    """(what, "yes" or "no: why")."""
    loader = _missing("tvm_ffi", "apache-tvm-ffi") or _missing("tvm_ffi_orcjit", "apache-tvm-ffi-orcjit")
    return [
        ("calls on CPU tensors", _unless(_missing("torch", "torch"))),
        ("calls on CUDA tensors", _unless(_missing("torch", "torch") or _why_not())),
        ("compiling kernels", _unless(_missing("cutlass", "'nvidia-cutlass-dsl~=4.8.1'"))),
        ("loading kernels", _unless(loader)),
        ("looking into kernels", _disassembler()),
        ("demo, compile", _unless(_missing("rich", "rich"))),
        ("check", _unless(_missing("rich", "rich") or _missing("hypothesis", "hypothesis"))),
    ]


def _disassembler() -> str:
    from fa3.kernels import sass

    try:
        return f"yes, with {sass.disassembler()}"
    except sass.DisassemblerMissing as error:
        return f"no: {error}"


def _why_not() -> str | None:
    from fa3 import why_not  # imports torch

    return why_not()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _missing(module: str, package: str) -> str | None:
    """Why what needs the module does not work: None where it is installed."""
    return None if _has(module) else f"{module} is not installed: pip install {package}"


def _unless(reason: str | None) -> str:
    return f"no: {reason}" if reason else "yes"
