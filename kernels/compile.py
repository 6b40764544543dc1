"""Spec and Config in, callable out: the only cute.compile, behind the only cache.

A kernel is looked for in memory, then on disk, then compiled. Compiling happens in a process of its own (process.py)
and gives an object file, which every process links the same way, the one that compiled it included: without the
compiler, by ORC from the bytes in the cache. A linked function also costs less a call than the compiler's own handle
(seven arguments, launch left out: 0.4 us against 1.1 us). Works for any frozen Spec whose `entry` names a module with
`signature(spec, config) -> (callable, arguments)`.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fa3.kernels import cache, process
from fa3.kernels.cache import clear as clear
from fa3.kernels.cache import entries as entries
from fa3.kernels.key import ARCH, HOST_TARGETS, key, runtime_library
from fa3.kernels.process import CompileError as CompileError
from fa3.kernels.process import CompilerMissing as CompilerMissing

FUNCTION = "kernel"  # name of the host function in every object file
ROOM = 1 << 20  # bytes: an object file has up to 0.1 MB, PTX and cubin to look at 0.3 MB more
INSTALL = "pip install 'nvidia-cutlass-dsl~=4.8.1' apache-tvm-ffi apache-tvm-ffi-orcjit"


class LoaderMissing(RuntimeError):
    """A compiled kernel cannot be linked here; the message says what to install."""


class Inspection(NamedTuple):
    """A kernel freshly compiled to be looked at."""

    cubin: bytes
    ptx: str
    remarks: str  # what the compiler wrote, ptxas's account of registers, spills and warnings among it
    seconds: float  # that the compiler took, without its start
    shared_bytes: int  # dynamic shared memory that the launch asks for


class Built(NamedTuple):
    """What a compile gives back. `key` is empty if the sources changed under it."""

    key: str
    code: bytes
    cubin: bytes
    ptx: str
    seconds: float
    shared_bytes: int


_linked: dict[tuple[Any, Any], Callable[..., None]] = {}
_session: Any = None  # of ORC: every kernel of the process is linked in it
_turns: dict[tuple[Any, Any], threading.Lock] = {}
_told: set[str] = set()


def load(spec: Any, config: Any) -> Callable[..., None]:
    """The compiled kernel, ready to be called; compiled now if it is neither in memory nor on disk.

    Raises CompilerMissing, LoaderMissing or CompileError, each with the remedy or the compiler's own words.
    """
    function = _linked.get((spec, config))
    return function if function is not None else _first_load(spec, config)


def state(spec: Any, config: Any) -> Literal["memory", "disk", "absent"]:
    """Where `load` would find the kernel."""
    if (spec, config) in _linked:
        return "memory"
    return "absent" if cache.read(key(spec, config)) is None else "disk"


def prepare(spec: Any, config: Any) -> Path:
    """Have the kernel on disk, compiling it if it is absent; its file. Needs no GPU.

    Raises OSError where it cannot be written, and CompilerMissing or CompileError.
    """
    code, place, problem = _obtain(spec, config)
    if place is None:
        raise problem or OSError(f"not kept, because the sources changed while it was compiled: {spec!r}; try again")
    return place


def inspect(spec: Any, config: Any) -> Inspection:
    """Compile afresh, past the cache, keeping cubin, PTX and ptxas's remarks. Needs no GPU."""
    built, written = _compile(spec, config, look=True)
    return Inspection(built.cubin, built.ptx, written, built.seconds, built.shared_bytes)


def directory() -> Path:
    """The cache folder; it need not exist yet."""
    return cache.settings().directory


def build(spec: Any, config: Any, look: bool) -> Built:
    """Compile, in this process: `process.run` calls it in one made for that."""
    before = key(spec, config)
    try:
        import cutlass.cute as cute
    except ImportError as error:
        raise CompilerMissing(f"compiling {spec!r} needs the CuTe DSL ({error}): {INSTALL}") from error
    entry = importlib.import_module(spec.entry)
    with _workplace() as folder:
        options = f"--enable-tvm-ffi --gpu-arch {ARCH}"
        if look:
            options += f" --keep-ptx --keep-cubin --dump-dir {folder} remarks{{ptx}}"
        start = time.perf_counter()
        function, args = entry.signature(spec, config)
        compiled = cute.compile(function, *args, options=options)
        seconds = time.perf_counter() - start
        file = Path(folder, "kernel.o")
        _make_portable(compiled.ir_module)
        compiled.export_to_c(str(file), function_name=FUNCTION)
        code, name = file.read_bytes(), before if before == key(spec, config) else ""
        if not look:
            return Built(name, code, b"", "", seconds, 0)
        from fa3.kernels.sass import launch_shared_bytes

        shared_bytes = launch_shared_bytes(str(compiled.ir_module))
        return Built(name, code, compiled.__cubin__, compiled.__ptx__, seconds, shared_bytes)


def _workplace() -> tempfile.TemporaryDirectory[str]:
    """A new folder that is nobody else's (the compiler reads back what it dumps) and has room.

    In TMPDIR, or where that is full or cannot be written in memory or beside the kernels. Raises CompileError.
    """
    tried = []
    for place in (_temporary(), Path("/dev/shm"), cache.settings().directory):
        try:
            folder = tempfile.TemporaryDirectory(prefix="fa3-", dir=place)
            try:
                trial = Path(folder.name, "trial")
                trial.write_bytes(bytes(ROOM))
                trial.unlink()
                return folder
            except OSError:
                folder.cleanup()
                raise
        except OSError as error:
            tried.append(f"{place} ({error.strerror})")
    raise CompileError(
        f"the compiler needs {ROOM >> 20} MB for its files and found no room in {', '.join(tried)}: "
        "set TMPDIR to a folder with room"
    )


def _temporary() -> Path:
    """Python's folder for temporary files; where it finds none that takes a byte, the one that was asked for."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return Path(os.environ.get("TMPDIR", "/tmp"))


def _make_portable(module: Any) -> None:
    """Have the host half made for every CPU of this kind: by itself the compiler takes the one that it runs on.

    LLVM puts a function's own CPU and features in the place of the target machine's, each only where it is given.
    """
    from cutlass._mlir import ir

    cpu, feature = HOST_TARGETS[platform.machine()]
    with module.context:
        attributes = {
            "target_cpu": ir.StringAttr.get(cpu),
            "target_features": ir.Attribute.parse(f'#llvm.target_features<["{feature}"]>'),
        }

        def mark(operation: Any) -> Any:
            if operation.name == "llvm.func":
                for name, value in attributes.items():
                    operation.attributes[name] = value
            return ir.WalkResult.ADVANCE

        module.operation.walk(mark)


def _first_load(spec: Any, config: Any) -> Callable[..., None]:
    """One thread obtains and links a kernel, the others wait for it."""
    with _turns.setdefault((spec, config), threading.Lock()):
        function = _linked.get((spec, config))
        if function is None:
            linker = _linker(spec)  # before a compile that would be in vain without it
            code, place, problem = _obtain(spec, config)
            if place is None and problem is not None:
                _tell(f"kernels cannot be kept in {directory()} ({problem.strerror}): each process compiles its own")
            function = linker(code)
            _linked[spec, config] = function
        return function


def _obtain(spec: Any, config: Any) -> tuple[bytes, Path | None, OSError | None]:
    """Object code from disk, or compiled and put there; its file, or why there is none."""
    name = key(spec, config)
    code = cache.read(name)
    if code is not None:
        return code, cache.path(name), None
    with cache.lock(name):
        code = cache.read(name)  # another process may have been first
        if code is not None:
            return code, cache.path(name), None
        built, _ = _compile(spec, config, look=False)
        if not built.key:
            return built.code, None, None
        try:
            return built.code, cache.write(built.key, spec, config, built.code), None
        except OSError as problem:
            return built.code, None, problem


def _compile(spec: Any, config: Any, look: bool) -> tuple[Built, str]:
    try:
        found = importlib.util.find_spec("cutlass")
        reason = "not installed"
    except (ImportError, ValueError) as error:
        found, reason = None, str(error)
    if found is None:
        raise CompilerMissing(f"compiling {spec!r} needs the CuTe DSL ({reason}): {INSTALL}")

    def notice() -> None:
        if not cache.settings().quiet:
            print(f"fa3: compiling {spec!r} {config!r} for {ARCH}", file=sys.stderr, flush=True)

    return process.run(build, spec, config, look, environment={"CUTE_DSL_ARCH": ARCH}, notice=notice)


def _linker(spec: Any) -> Callable[[bytes], Callable[..., None]]:
    """Object code in, function out. Raises LoaderMissing where a package for it is not installed."""
    library = runtime_library()
    if library is None:
        raise CompilerMissing(f"running {spec!r} needs the libraries of the CuTe DSL (not installed): {INSTALL}")
    try:
        import tvm_ffi_orcjit
    except ImportError as error:
        raise LoaderMissing(f"a compiled kernel is loaded by tvm-ffi ({error}): {INSTALL}") from error
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # has the CUDA calls that the object files leave open
    except OSError as error:
        raise LoaderMissing(f"{library} cannot be loaded ({error}): {INSTALL}") from error

    def link(code: bytes) -> Callable[..., None]:
        global _session
        if _session is None:
            # NOTE: without ORC's own runtime, which takes 2 ms to link and runs destructors when a library is closed:
            # ours are never closed, and their only destructor unloads the kernel from the GPU.
            _session = tvm_ffi_orcjit.ExecutionSession(orc_rt=None)
        # NOTE: cxx names the compiler whose C++ library a module needs. Ours need none; asking starts one (5 ms).
        module = _session.load_module(code, keep_module_alive=True, cxx=os.devnull)
        return module.get_function(FUNCTION)

    return link


def _tell(line: str) -> None:
    if line not in _told:
        _told.add(line)
        with contextlib.suppress(OSError, ValueError):
            print(f"fa3: {line}", file=sys.stderr, flush=True)


os.register_at_fork(after_in_child=_turns.clear)  # a thread that held one of them does not exist in the child
