"""Kernels without tensor cores or shared memory on the PTX machine: their instructions and their parameters."""

import re

import numpy as np
import torch

from tests.forward_machine import Memory, param_sizes, view, words
from tests.ptx_machine import Cta
from tests.ptx_program import parse, split
from tests.ptx_warp import Warp, bits


class PlainWarp(Warp):
    """What the forward kernels do not use."""

    def op_min(self, a, rest, kind, mask):
        super().op_min(a, rest, kind, mask)
        if rest[0] == "relu":
            self.put(a[0], np.maximum(self.registers[a[0]].view(np.int32), 0).view(np.uint32), mask)

    def op_max(self, a, rest, kind, mask):
        on_float = np.maximum if "NaN" in rest else np.fmax
        self._binary(a, kind, mask, np.maximum, on_float)

    def op_popc(self, a, rest, kind, mask):
        counts = [bin(x).count("1") for x in self.value(a[1]).tolist()]
        self.put(a[0], np.array(counts, np.uint32), mask)

    def op_vote(self, a, rest, kind, mask):
        assert rest[:2] == ["sync", "ballot"] and mask.all()
        ballot = sum(1 << lane for lane in np.flatnonzero(self.registers[a[1]]).tolist())
        self.put(a[0], np.full(32, ballot, np.uint32), mask)

    def op_mov(self, a, rest, kind, mask):
        if kind == "pred" and not a[1].startswith("%"):
            self.put(a[0], np.full(32, int(a[1]) != 0), mask)
        elif kind == "b32" and a[0].startswith("{"):
            word = self.value(a[1])
            for name, half in zip(split(a[0][1:-1]), (word & 0xFFFF, word >> 16), strict=True):
                self.put(name, half, mask)
        else:
            super().op_mov(a, rest, kind, mask)

    def op_ld(self, a, rest, kind, mask):
        if rest[0] == "param" and a[0].startswith("{"):
            base, _, offset = a[1].strip("[]").partition("+")
            for i, name in enumerate(split(a[0][1:-1])):
                place = f"[{base}+{int(offset or 0) + i * (int(kind[1:]) // 8)}]"
                super().op_ld([name, place], [r for r in rest if r not in ("v2", "v4")], kind, mask)
        else:
            super().op_ld(a, rest, kind, mask)

    def op_st(self, a, rest, kind, mask):
        names = split(a[1][1:-1]) if a[1].startswith("{") else [a[1]]
        base, _, offset = a[0].strip("[]").partition("+")
        width = int(kind[1:]) // 8
        assert not (self.address(a[0])[mask] % (len(names) * width)).any(), "misaligned"
        for i, name in enumerate(names):
            place = f"[{base}+{int(offset or 0) + i * width}]"
            super().op_st([place, name], [r for r in rest if r not in ("v2", "v4")], kind, mask)

    def op_UNPACK(self, a, rest, kind, mask):
        half = self.value(a[1]) >> (16 if a[2] == "high" else 0) & 0xFFFF
        self.put(a[0], bits(half.astype(np.uint16).view(np.float16)), mask)


def parsed(ptx: str) -> tuple:
    """parse, of a program with the inline blocks of prims.fp8.unpack."""
    unpacking = r"\{ \.reg \.b16 low, high; mov\.b32 \{low, high\}, (%r\d+); cvt\.f32\.f16 (%r\d+), (low|high); \}"
    code, labels = parse(re.sub(unpacking, r"unpack.f16 \2, \1, \3;", ptx))
    renamed = {"unpack.f16": "UNPACK.f16"}
    return [(renamed.get(name, name), *others) for name, *others in code], labels


def run(ptx: str, params: list[np.ndarray], memory: Memory, ctas: int, threads: int) -> None:
    """All CTAs of a launch, one after the other."""
    sizes = param_sizes(ptx)
    assert [len(raw) for raw in params] == sizes, list(zip([len(raw) for raw in params], sizes))
    cta = Cta(parsed(ptx), params, {}, memory.tensors, threads)
    cta.warp_type = PlainWarp
    for number in range(ctas):
        cta.run(number, ctas)


def tensor(memory: Memory, x: torch.Tensor, static_last: bool = True) -> np.ndarray:
    """A tensor as a parameter: all sizes, and all strides but a static last one."""
    return view(memory.place(x), x, x.dim(), x.dim() - static_last)


def divisor(n: int) -> list[np.ndarray]:
    """A FastDivmodDivisorV2: x // n = (t + ((x - t) >> 1)) >> (l - 1), t the high word of x * m.

    Granlund and Montgomery, Division by invariant integers using multiplication, 1994, figure 4.1.
    """
    n = max(n, 1)
    log = (n - 1).bit_length()
    m = ((1 << 32) * ((1 << log) - n) // n + 1) % 2**32
    record = np.array([n, m], np.uint32).view(np.uint8)
    return [np.concatenate([record, np.array([min(log, 1), max(log - 1, 0), 0, 0], np.uint8)]), words(n)]
