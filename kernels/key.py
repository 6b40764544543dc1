"""The name under which a compiled kernel is kept: a hash of everything that its machine code depends on.

Spec and Config, the content (never the age) of the kernel sources, the versions and the CUDA flavour of the compiler
and of tvm-ffi, the GPU architecture, and the instruction set of the host CPU, because the host half of a compiled
kernel is made for the CPU of the machine that compiles it. Nothing here imports the compiler or depends on the Python
version.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from pathlib import Path
from typing import Any

ARCH = "sm_90a"
FORMAT = "1"  # raised when the stored function is called differently, although no source says so
PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-core", "apache-tvm-ffi", "apache-tvm-ffi-orcjit")
READ_BYTES = 256 * 1024  # more than any source has
RUNTIME = "libcute_dsl_runtime.so"
LEVELS = (  # what a CPU must have for each level of the x86-64 psABI, in the words of /proc/cpuinfo, highest first
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("x86-64-v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}),
    ("x86-64-v2", {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
)
# Flags that name instructions a compiler may use. The others (virtualisation, mitigations) change with the host kernel.
INSTRUCTIONS = re.compile(
    r"sse|ssse|avx|fma|f16c|bmi|abm|movbe|popcnt|aes|vaes|v?pclmul|gfni|sha|adx|amx|xsave|rdrand|rdseed|rdpid|clwb"
    r"|clflushopt|movdir|cmpccxadd|raoint|prefetch|serialize|waitpkg|cx16|lahf|fsgsbase|apx|sm3|sm4|tbm|xop|lwp|3dnow"
)


def key(spec: Any, config: Any) -> str:
    """The name (64 hex digits) of the kernel of `spec` and `config` on this machine.

    Raises ModuleNotFoundError where `spec.entry` names no module.
    """
    problem = [spec.entry, repr(spec), repr(config), sources(spec.entry)]
    machine = [*versions(), toolkit(), ARCH, host_cpu()]
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


def runtime_library() -> Path | None:
    """The library that a compiled kernel calls to reach the CUDA runtime, None where the compiler is not installed."""
    return next((p for p in _runtime_libraries() if p.parent.parent.name == toolkit()), None)


def host_cpu() -> str:
    """Level and instruction set of this machine's CPU, like "x86-64-v4 3f2a...": equal where host code is portable."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.system()} {platform.machine()} {platform.processor()}"
    flags = next((set(x.split(":", 1)[1].split()) for x in lines if x.startswith(("flags", "Features"))), set())
    if platform.machine() == "x86_64":
        level = _level(flags)
        flags = {f for f in flags if INSTRUCTIONS.match(f)}
    else:
        level = platform.machine()
    return f"{level} {hashlib.sha256(' '.join(sorted(flags)).encode()).hexdigest()[:16]}"


def _level(flags: set[str]) -> str:
    level = "x86-64-v1"
    for name, needed in reversed(LEVELS):
        if not needed <= flags:
            break
        level = name
    return level


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
