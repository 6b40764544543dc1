"""What ptxas made of a kernel: registers, stack, shared memory, instructions, read from a cubin on any machine.

Registers and stack come from the ELF itself; instructions need nvdisasm (PyPI: nvidia-cuda-nvdisasm).
NOTE: a kernel that spills shows it as stack and as LDL/STL, while the LOCAL of a resource table stays 0; `Sass.spills`
asks all that tell.
"""

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)(.*)", re.M)
SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
WARNING = re.compile(r"^.*\bC75\d\d\b.*$", re.M)  # WGMMA serialised, setmaxnreg ignored, fences injected
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
LAUNCH = "struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"  # cudaLaunchConfig_t: grid, block, shared, ...
SHARED_FIELD = re.compile(
    rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\][^\n]*{re.escape(LAUNCH)}\s+llvm\.store (%\w+), \1 : i64"
)

# Attributes in .nv.info, each with the index of a kernel and a value.
REGISTERS, FRAME, MIN_STACK = 0x2F, 0x11, 0x12
SIZED = 0x04  # format of an attribute that carries its size


class DisassemblerMissing(RuntimeError):
    """nvdisasm was not found; the message says what to install."""


@dataclass(frozen=True)
class Resources:
    """Of a thread, the largest over the cubin's kernels."""

    registers: int  # at launch; setmaxnreg moves them between warpgroups later
    stack_bytes: int


@dataclass(frozen=True)
class Sass:
    registers: int
    stack_bytes: int
    shared_bytes: int  # dynamic, as the launch asks for it; 0 if that was not given to `read`
    setmaxnreg: tuple[int, ...]  # registers a thread after each USETMAXREG, in the order of the code
    opcodes: Mapping[str, int] = field(repr=False)  # how often each name with its modifiers occurs, "UTMALDG.4D"
    spill_bytes: int  # stores and loads, as ptxas says
    warnings: tuple[str, ...]  # ptxas's C75xx lines

    def count(self, family: str) -> int:
        """Instructions of a name with any modifiers: count("HGMMA")."""
        return sum(n for name, n in self.opcodes.items() if name == family or name.startswith(f"{family}."))

    @property
    def spills(self) -> bool:
        """Whether anything of a thread lives in local memory."""
        return bool(self.stack_bytes or self.spill_bytes or self.count("LDL") or self.count("STL"))


def read(cubin: bytes, remarks: str = "", shared_bytes: int = 0) -> Sass:
    """The account of a cubin, with the spill bytes and warnings that `remarks` (ptxas's output) holds.

    Raises DisassemblerMissing, and ValueError for bytes that are no cubin.
    """
    known = resources(cubin)
    code = disassemble(cubin)
    remarks = ESCAPE.sub("", remarks)
    found = INSTRUCTION.findall(code)
    return Sass(
        registers=known.registers,
        stack_bytes=known.stack_bytes,
        shared_bytes=shared_bytes,
        setmaxnreg=tuple(_immediate(rest) for name, rest in found if name.startswith("USETMAXREG")),
        opcodes=MappingProxyType(Counter(name for name, _ in found)),
        spill_bytes=sum(int(stores) + int(loads) for stores, loads in SPILLED.findall(remarks)),
        warnings=tuple(line.strip() for line in WARNING.findall(remarks)),
    )


def resources(cubin: bytes) -> Resources:
    """Registers and stack from the ELF, without any tool. Raises ValueError for bytes that are no cubin."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"not a 64-bit ELF: {len(cubin)} bytes that start with {cubin[:5]!r}")
    largest: dict[int, int] = {}
    try:
        for attribute, value in _attributes(_section(cubin, b".nv.info")):
            largest[attribute] = max(largest.get(attribute, 0), value)
    except (struct.error, IndexError) as error:
        raise ValueError(f"damaged cubin of {len(cubin)} bytes: {error}") from error
    if REGISTERS not in largest:
        raise ValueError("no kernel in the cubin")
    return Resources(largest[REGISTERS], max(largest.get(FRAME, 0), largest.get(MIN_STACK, 0)))


def disassemble(cubin: bytes) -> str:
    """SASS as nvdisasm prints it, one instruction a line. Raises DisassemblerMissing, and ValueError if it refuses."""
    tool = disassembler()
    with tempfile.TemporaryDirectory(prefix="fa3-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        done = subprocess.run([tool, "-c", file], capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"{tool} refused the cubin: {done.stderr.strip()[-500:]}")
    return done.stdout


def disassembler() -> Path:
    """nvdisasm, of the pip packages (newest CUDA first) or on the PATH. Raises DisassemblerMissing."""
    try:
        package = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        package = None
    folders = [Path(root) for root in (package.submodule_search_locations or ())] if package else []
    tools = sorted((p for f in folders for p in f.glob("cu*/bin/nvdisasm")), reverse=True)
    on_path = shutil.which("nvdisasm")
    for tool in [*tools, *([Path(on_path)] if on_path else [])]:
        if os.access(tool, os.X_OK):
            return tool
    raise DisassemblerMissing("reading SASS needs nvdisasm: pip install 'nvidia-cuda-nvdisasm<14'")


def launch_shared_bytes(module: str) -> int:
    """Dynamic shared memory of the launch in a compiled module's LLVM dialect text: the largest of its kernels.

    Raises ValueError if there is no launch or its size is computed at run time.
    """
    sizes = []
    for match in SHARED_FIELD.finditer(module):
        constant = rf"{match[2]} = llvm\.mlir\.(?:constant\((\d+) : i64\)|zero : i64)"
        constants = re.findall(constant, module[: match.start()])
        if not constants:
            raise ValueError("the shared memory of the launch is no constant")
        sizes.append(int(constants[-1] or 0))
    if not sizes:
        raise ValueError("no launch in the module")
    return max(sizes)


def _immediate(operands: str) -> int:
    return int(re.findall(r"0x[0-9a-f]+", operands)[-1], 16)


def _section(elf: bytes, wanted: bytes) -> bytes:
    """Content of a section by name, empty if there is none (ELF-64, little endian)."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    count, names_index = struct.unpack_from("<HH", elf, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + 64 * i) for i in range(count)]
    names = headers[names_index][4]
    for header in headers:
        name = names + header[0]
        if elf[name : elf.find(b"\0", name)] == wanted:
            return elf[header[4] : header[4] + header[5]]
    return b""


def _attributes(info: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, value) of .nv.info: a format byte, an attribute byte, and a 16-bit value or size."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == SIZED and attribute in (REGISTERS, FRAME, MIN_STACK):
            yield attribute, struct.unpack_from("<I", info, at + 8)[0]
        at += 4 + (size if form == SIZED else 0)
