"""The name under which a compiled kernel is kept: a hash of everything that its machine code depends on.

Spec and Config, the content (never the age) of the kernel sources, the versions and the CUDA flavour of the compiler
and of tvm-ffi, the GPU architecture, and the kind of host CPU (x86_64, aarch64), for every model of which the host half
of a kernel is made. Nothing here imports the compiler or depends on the Python version, the machine or the folder: a
copied cache is found.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

ARCH = "sm_90a"
FORMAT = "1"  # raised when the stored function is called differently, although no source says so
PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-core", "apache-tvm-ffi", "apache-tvm-ffi-orcjit")
READ_BYTES = 256 * 1024  # more than any source has
RUNTIME = "libcute_dsl_runtime.so"
# The CPU that the host half of a kernel is made for, and a feature of it, in LLVM's words: the oldest of each kind.
# Newer instructions gain nothing: a forward call, launch left out, takes 0.28 us; made for x86-64-v3 0.30 us, for the
# Xeon (AVX-512) on which that was measured 0.28 us.
HOST_TARGETS = {"x86_64": ("x86-64", "+sse2"), "aarch64": ("generic", "+neon")}


def key(spec: Any, config: Any) -> str:
    """The name (64 hex digits) of the kernel of `spec` and `config` on this machine.

    Raises ModuleNotFoundError where `spec.entry` names no module.
    """
    problem = [spec.entry, repr(spec), repr(config), sources(spec.entry)]
    machine = [*versions(), toolkit(), ARCH, platform.machine()]
    return hashlib.sha256("\0".join([FORMAT, *problem, *machine]).encode()).hexdigest()


def sources(entry: str) -> str:
    """A hash of the Python sources of the kernels, of quant, and of the module `entry` where it lies elsewhere."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for root in (Path(__file__).parent, package / "quant"):
        files = [Path(f, n) for f, _, names in os.walk(root, followlinks=True) for n in names if n.endswith(".py")]
        for path in sorted(files):
            _feed(digest, path.relative_to(root).as_posix(), _content(path))
    found = importlib.util.find_spec(entry)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"no module named {entry!r}", name=entry)
    _feed(digest, entry, _content(found.origin))
    return digest.hexdigest()


def versions() -> list[str]:
    """name=version of the packages that make or load a kernel; 'absent' for one that is not installed."""
    return [f"{name}={_version(name)}" for name in PACKAGES]


def toolkit() -> str:
    """The CUDA flavour of the compiler, "cu12" or "cu13", "absent" without one.

    Where several are installed the compiler takes the newest that the driver can run, or the newest if there is no
    driver; this says which one that is.
    """
    flavours = sorted(int(p.parent.parent.name[2:]) for p in _runtime_libraries())
    if not flavours:
        return "absent"
    if len(flavours) > 1:
        driver = _driver_major()
        flavours = [f for f in flavours if driver is None or f <= driver] or flavours[:1]
    return f"cu{flavours[-1]}"


def toolkit_is_a_guess() -> bool:
    """Whether a machine with a driver may take another flavour: several are here, and no driver says which it runs."""
    return len(_runtime_libraries()) > 1 and _driver_major() is None


def target() -> str:
    """What kernels made here are made for, in words."""
    return f"{ARCH}, CUDA flavour {toolkit()}, any {platform.machine()} host CPU"


def runtime_library() -> Path | None:
    """The library that a compiled kernel calls to reach the CUDA runtime, None where the compiler is not installed."""
    return next((p for p in _runtime_libraries() if p.parent.parent.name == toolkit()), None)


def _feed(digest: Any, name: str, content: bytes) -> None:
    """Lengths go in too, so that no two sets of files look alike."""
    digest.update(f"{len(name)} {name} {len(content)} ".encode())
    digest.update(content)


def _content(path: str | Path) -> bytes:
    """NOTE: by 4 system calls a file; open() makes 8, and there are 50 files."""
    file = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(file, READ_BYTES), b""))
    finally:
        os.close(file)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _runtime_libraries() -> list[Path]:
    try:
        found = importlib.util.find_spec("nvidia_cutlass_dsl")  # finds the package, imports nothing
    except (ImportError, ValueError):
        return []
    roots = list(found.submodule_search_locations or ()) if found else []
    return [p for root in roots for p in Path(root).glob(f"cu[0-9]*/lib/{RUNTIME}")]


def _driver_major() -> int | None:
    """The CUDA version of the driver; asking for it creates no context."""
    version = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return version.value // 1000 if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
    except (OSError, AttributeError):
        return None
