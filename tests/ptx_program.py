"""What the PTX machine works on: a program, memory, TMA descriptors, barriers."""

import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

SHARED_BEGIN, SHARED_END = 1024, 1024 + 232448  # addresses of dynamic shared memory


@dataclass
class Tensor:
    """Global memory of a tensor: bytes that a kernel may touch, from an address on."""

    address: int
    data: np.ndarray  # uint8


@dataclass
class TensorMap:
    """What a TMA descriptor says. Dimensions innermost first."""

    tensor: Tensor
    element_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes, of dimension 0 the element's
    box: tuple[int, int]  # elements of dimensions 0 and 1; 1 of the others

    @property
    def span(self) -> int:
        return self.box[0] * self.element_bytes


def swizzled(address: np.ndarray, span: int) -> np.ndarray:
    """The XOR of the 128, 64 and 32 byte swizzles: bits 4.. with bits 7.. ."""
    return address ^ (((address >> 7) & (span // 16 - 1)) << 4)


@dataclass
class Barrier:
    """An mbarrier."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


@dataclass
class Named:
    """A named barrier of the CTA."""

    arrived: int = 0
    generation: int = 0

    def arrive(self, threads: int) -> None:
        self.arrived += 32
        assert self.arrived <= threads
        if self.arrived == threads:
            self.arrived, self.generation = 0, self.generation + 1


@dataclass
class Trace:
    """What a kernel did, all CTAs together."""

    executed: Counter[str] = field(default_factory=Counter)  # instructions of a warp, by their first word
    loaded: np.ndarray = field(default_factory=lambda: np.zeros(SHARED_END, bool))  # shared memory that ld.shared read


class Blocked(Exception):
    """The warp has to try again."""


def parse(ptx: str) -> tuple[list, dict[str, int]]:
    """Instructions (opcode, operands, predicate, negated) and labels."""
    text = re.sub(r"//.*", "", ptx[ptx.index(".reqntid") :])
    text = re.sub(r"kernel_cutlass\w*_param_(\d+)", r"PARAM\1", text[text.index("{") + 1 :])
    code: list = []
    labels: dict[str, int] = {}
    named = Counter(re.findall(r"%\w+", text))
    lines = iter(text.splitlines())
    for raw in lines:
        line = raw.strip()
        if line == "}":
            break
        if not line or line.startswith((".reg", ".pragma")):
            continue
        if label := re.match(r"(\$L\w+):", line):
            labels[label[1]] = len(code)
            continue
        if line.startswith("{"):
            while "}" not in re.sub(r"\{[^{}]*\}", "", line.lstrip("{")):
                line += " " + next(lines).strip()
            code.append(block(line))
            continue
        while ";" not in line:
            line += " " + next(lines).strip()
        match = re.match(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*);", line)
        assert match, line
        code.append((match[3], split(match[4]), match[2], match[1] == "!"))
        if len(code) > 1 and len(code) - 1 not in labels.values() and (one := contracted(*code[-2:], named)):
            code[-2:] = [one]
    return code, labels


def contracted(first: tuple, second: tuple, named: Counter[str]) -> tuple | None:
    """A product and the sum after it that alone takes it: one instruction that rounds once, as ptxas makes of them."""
    if first[0] != "mul.f32" or second[0] not in ("add.f32", "sub.f32") or first[2:] != second[2:]:
        return None
    product, x, y = first[1]
    result, a, b = second[1]
    if named[product] != 2 or product not in (a, b):
        return None
    if second[0] == "sub.f32":
        x, b = (x, f"-{b}") if product == a else (f"-{x}", b)
    return "fma.rn.f32", [result, x, y, b if product == a else a], *second[2:]


def split(operands: str) -> list[str]:
    return [x.strip() for x in re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,\s][^,]*", operands)]


def block(text: str) -> tuple:
    """One of the inline blocks that the compiler and the kernels write."""
    if found := re.search(r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[([^\]]*)\], (%r\d+|\d+)", text):
        return "WAIT", [found[1], found[2]], None, False
    if found := re.search(r"setp\.ne\.b32 p, (%r\d+), 0; wgmma\.mma_async\.sync\.aligned\.(\S+) (.*?);", text):
        return "WGMMA." + found[2], [found[1], *split(found[3])], None, False
    if found := re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32 \w+, (%r\d+), (%r\d+)", text):
        target = re.search(r"mov\.b32 (%r\d+), \{low, high\}", text)
        assert target and len(found) == 2
        return "E4M3", [target[1], found[0][1], found[0][0], found[1][1], found[1][0]], None, False
    raise AssertionError(f"unknown block {text}")
