"""One warp of the PTX machine: its registers and what every instruction does. See ptx_machine.py."""

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tests.ptx_numbers import DECODE, bf16, bits, e4m3, f16, floats, signed
from tests.ptx_program import SHARED_BEGIN, Barrier, Blocked, Named, split, swizzled

LANES = np.arange(32)
SWIZZLE_SPAN = {1: 128, 2: 64, 3: 32}  # of a descriptor's mode: bytes


COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "neu": np.not_equal, "gtu": lambda a, b: ~(a <= b), "leu": lambda a, b: ~(a > b), "ltu": lambda a, b: ~(a >= b),
}  # fmt: skip


@dataclass
class Warp:
    cta: Any
    index: int
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    pc: np.ndarray = field(default_factory=lambda: np.zeros(32, np.int64))
    waits_at: int | None = None  # generation of the named barrier that it waits for
    uncommitted: list = field(default_factory=list)  # WGMMAs
    groups: list = field(default_factory=list)
    steps: int = 0  # instructions done

    def run(self) -> bool:
        """Until it has to wait (False) or ends (True)."""
        code, labels = self.cta.code, self.cta.labels
        while True:
            at = int(self.pc.min())
            if at >= len(code):
                return True
            active = self.pc == at
            if ".sync" in code[at][0] and not active.all():
                at = self.behind(at)
                active = self.pc == at
            opcode, operands, predicate, negated = code[at]
            mask = active if predicate is None else active & (self.registers[predicate] ^ negated)
            if opcode.startswith("bra"):
                self.pc[active] = at + 1
                self.pc[mask] = labels[operands[0]]
                continue
            if opcode == "ret":
                self.pc[mask] = len(code)
                self.pc[active & ~mask] = at + 1
                continue
            try:
                if mask.any():
                    self.step(opcode, operands, mask)
                    self.cta.trace.executed[opcode.partition(".")[0]] += 1
            except Blocked:
                return False
            except Exception as error:
                raise RuntimeError(f"warp {self.index}, instruction {at}: {opcode} {operands}") from error
            self.pc[active] = at + 1
            self.steps += 1
            if opcode.startswith("mbarrier.arrive") and self.cta.draws():
                return False

    def behind(self, at: int) -> int:
        """Where lanes are that the ones at instruction `at` wait for: it needs all of a warp."""
        for other in np.unique(self.pc[self.pc > at]):
            if other < len(self.cta.code) and ".sync" not in self.cta.code[other][0]:
                return int(other)
        raise RuntimeError(f"warp {self.index}, instruction {at}: lanes of a warp wait for each other")

    # operands

    def value(self, x: str, kind: str = "b32") -> np.ndarray:
        if x in self.registers:
            return self.registers[x]
        wide = kind.endswith("64")
        if x == "%tid.x":
            return (32 * self.index + LANES).astype(np.uint32)
        if x == "%laneid":
            return LANES.astype(np.uint32)
        if x == "%ctaid.x":
            return np.full(32, self.cta.number, np.uint32)
        if x == "%nctaid.x":
            return np.full(32, self.cta.ctas, np.uint32)
        if x == "__dynamic_shmem__0":
            return np.full(32, SHARED_BEGIN, np.uint32)
        if x.startswith("PARAM"):
            return np.full(32, self.cta.map_address(int(x[5:])), np.uint64)
        if x.startswith("0f"):
            return np.full(32, int(x[2:], 16), np.uint32)
        number = int(x, 0)
        return np.full(32, number % 2**64, np.uint64) if wide else np.full(32, number % 2**32, np.uint32)

    def real(self, x: str) -> np.ndarray:
        """A float, in double precision. There may be a minus before it: see ptx_program.contracted."""
        value = floats(self.value(x.removeprefix("-"))).astype(np.float64)
        return -value if x.startswith("-") else value

    def put(self, x: str, value: np.ndarray, mask: np.ndarray) -> None:
        old = self.registers.get(x)
        if old is None or old.dtype != value.dtype:
            old = np.zeros(32, value.dtype)
        self.registers[x] = np.where(mask, value, old)

    def address(self, x: str) -> np.ndarray:
        base, plus, offset = x.strip("[]").partition("+")
        return self.value(base).astype(np.int64) + (int(offset) if plus else 0)

    # instructions

    def step(self, opcode: str, a: list[str], mask: np.ndarray) -> None:
        name, *rest = opcode.split(".")
        kind = rest[-1] if rest else ""
        handler = getattr(self, f"op_{name}", None)
        assert handler is not None, f"unknown instruction {opcode}"
        handler(a, rest, kind, mask)

    def _binary(self, a, kind, mask, on_int, on_float=None) -> None:
        x, y = self.value(a[1], kind), self.value(a[2], kind)
        if kind.startswith("f"):
            result = bits((on_float or on_int)(floats(x), floats(y)).astype(np.float32))
        elif kind.startswith("s"):
            result = on_int(signed(x), signed(y)).view(x.dtype)
        else:
            result = on_int(x, y)
        self.put(a[0], result, mask)

    def op_add(self, a, rest, kind, mask):
        self._binary(a, kind, mask, np.add)

    def op_sub(self, a, rest, kind, mask):
        self._binary(a, kind, mask, np.subtract)

    def op_min(self, a, rest, kind, mask):
        self._binary(a, kind, mask, np.minimum, np.fmin)
        self._no_less_than_0(a, rest, mask)

    def op_max(self, a, rest, kind, mask):
        self._binary(a, kind, mask, np.maximum, np.fmax)
        self._no_less_than_0(a, rest, mask)

    def _no_less_than_0(self, a, rest, mask) -> None:
        if "relu" in rest:
            self.put(a[0], np.maximum(signed(self.value(a[0])), 0).view(np.uint32), mask)

    def op_and(self, a, rest, kind, mask):
        self._logic(a, kind, mask, np.bitwise_and)

    def op_or(self, a, rest, kind, mask):
        self._logic(a, kind, mask, np.bitwise_or)

    def op_xor(self, a, rest, kind, mask):
        self._logic(a, kind, mask, np.bitwise_xor)

    def _logic(self, a, kind, mask, operation) -> None:
        if kind == "pred":
            self.put(a[0], operation(self.registers[a[1]], self.registers[a[2]]), mask)
        else:
            self._binary(a, kind, mask, operation)

    def op_not(self, a, rest, kind, mask):
        self.put(a[0], ~self.value(a[1], kind), mask)

    def op_neg(self, a, rest, kind, mask):
        x = self.value(a[1], kind)
        self.put(a[0], bits(-floats(x)) if kind.startswith("f") else (-signed(x)).view(x.dtype), mask)

    def op_abs(self, a, rest, kind, mask):
        self.put(a[0], bits(np.abs(floats(self.value(a[1])))), mask)

    def op_mul(self, a, rest, kind, mask):
        if kind == "u16":
            product = (self.value(a[1]) & 0xFFFF) * (self.value(a[2]) & 0xFFFF)
            self.put(a[0], product if rest[0] == "wide" else product & 0xFFFF, mask)
        elif rest[0] == "wide" or rest[0] == "hi":
            x, y = self.value(a[1]), self.value(a[2])
            wide = (signed(x).astype(np.int64) * signed(y)) if kind == "s32" else None
            product = wide.view(np.uint64) if wide is not None else x.astype(np.uint64) * y
            self.put(a[0], product if rest[0] == "wide" else (product >> np.uint64(32)).astype(np.uint32), mask)
        else:
            self._binary(a, kind, mask, np.multiply)

    def op_mad(self, a, rest, kind, mask):
        x, y, z = (self.value(i, kind) for i in a[1:])
        if rest[0] == "wide":
            x, y = self.value(a[1]), self.value(a[2])
            product = signed(x).astype(np.int64) * signed(y) if kind == "s32" else x.astype(np.uint64) * y
            self.put(a[0], product.view(np.uint64) + self.value(a[3], "b64"), mask)
        else:
            self.put(a[0], x * y + z, mask)

    def op_div(self, a, rest, kind, mask):
        self._binary(a, kind, mask, lambda x, y: np.where(y == 0, 0, (x / np.where(y == 0, 1, y))).astype(x.dtype))

    def op_rem(self, a, rest, kind, mask):
        self._binary(a, kind, mask, lambda x, y: np.fmod(x, np.where(y == 0, 1, y)))

    def op_shl(self, a, rest, kind, mask):
        x, n = self.value(a[1], kind), self.value(a[2])
        self.put(a[0], np.left_shift(x, n.astype(x.dtype)), mask)

    def op_shr(self, a, rest, kind, mask):
        x, n = self.value(a[1], kind), self.value(a[2])
        shifted = signed(x) >> n.astype(signed(x).dtype) if kind.startswith("s") else x >> n.astype(x.dtype)
        self.put(a[0], shifted.view(x.dtype), mask)

    def op_fma(self, a, rest, kind, mask):
        x, y, z = (self.real(i) for i in a[1:])
        exact = x * y + z
        result = exact.astype(np.float32)
        if rest[0] == "rp":
            result = np.where(result < exact, np.nextafter(result, np.float32(np.inf)), result)
        self.put(a[0], bits(result), mask)

    def op_ex2(self, a, rest, kind, mask):
        self.put(a[0], bits(np.exp2(floats(self.value(a[1])).astype(np.float64)).astype(np.float32)), mask)

    def op_tanh(self, a, rest, kind, mask):
        self.put(a[0], bits(np.tanh(floats(self.value(a[1])).astype(np.float64)).astype(np.float32)), mask)

    def op_lg2(self, a, rest, kind, mask):
        self.put(a[0], bits(np.log2(floats(self.value(a[1])))), mask)

    def op_rcp(self, a, rest, kind, mask):
        self.put(a[0], bits(np.float32(1) / floats(self.value(a[1]))), mask)

    def op_setp(self, a, rest, kind, mask):
        x, y = self.value(a[1], kind), self.value(a[2], kind)
        if kind.startswith("f"):
            x, y = floats(x), floats(y)
        elif kind.startswith("s"):
            x, y = signed(x), signed(y)
        self.put(a[0], COMPARE[rest[0]](x, y), mask)

    def op_selp(self, a, rest, kind, mask):
        self.put(a[0], np.where(self.registers[a[3]], self.value(a[1], kind), self.value(a[2], kind)), mask)

    def op_mov(self, a, rest, kind, mask):
        if a[1].startswith("{"):
            low, high = (self.value(x) for x in split(a[1][1:-1]))
            if kind == "b64":
                self.put(a[0], low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32)), mask)
            else:
                self.put(a[0], (low & 0xFFFF) | (high << 16), mask)
        elif a[0].startswith("{"):
            whole = self.value(a[1], "b64")
            for x, part in zip(split(a[0][1:-1]), (whole, whole >> np.uint64(32)), strict=True):
                self.put(x, part.astype(np.uint32), mask)
        else:
            self.put(a[0], self.value(a[1], kind), mask)

    def op_cvt(self, a, rest, kind, mask):
        if "bf16x2" in rest or "f16x2" in rest:
            pack = bf16 if "bf16x2" in rest else f16
            high, low = (pack(floats(self.value(x))) for x in a[1:])
            self.put(a[0], (high << 16) | low, mask)
            return
        x, target = self.value(a[1], kind), rest[-2]
        if kind in ("bf16", "f16"):
            self.put(a[0], bits(DECODE[kind](x.astype(np.uint16).view(np.uint8))), mask)
        elif kind == "f32":
            self.put(a[0], {"bf16": bf16, "f16": f16}[target](floats(x)), mask)
        elif kind == "s32" and target == "f32":
            self.put(a[0], bits(signed(x).astype(np.float32)), mask)
        elif target.endswith("64"):
            self.put(a[0], signed(x).astype(np.int64).view(np.uint64) if kind[0] == "s" else x.astype(np.uint64), mask)
        else:
            self.put(a[0], x.astype(np.uint32), mask)

    def op_cvta(self, a, rest, kind, mask):
        self.put(a[0], self.value(a[1], "b64"), mask)

    def op_elect(self, a, rest, kind, mask):
        target, predicate = a[0].split("|")
        leader = int(np.argmax(mask))
        self.put(target, np.full(32, leader, np.uint32), mask)
        self.put(predicate, leader == LANES, mask)

    def op_shfl(self, a, rest, kind, mask):
        value, b = self.value(a[1]), self.value(a[2]).astype(np.int64)
        source = LANES ^ b if rest[1] == "bfly" else b
        self.put(a[0].split("|")[0], value[source & 31], mask)

    def op_vote(self, a, rest, kind, mask):
        assert mask.all()
        votes = self.registers[a[1]]
        if rest[1] == "ballot":
            self.put(a[0], np.full(32, np.sum(votes << LANES), np.uint32), mask)
        else:
            assert rest[:2] == ["sync", "any"]
            self.put(a[0], np.full(32, votes.any()), mask)

    def op_popc(self, a, rest, kind, mask):
        self.put(a[0], np.array([int(x).bit_count() for x in self.value(a[1])], np.uint32), mask)

    def op_E4M3(self, a, rest, kind, mask):
        word = np.zeros(32, np.uint32)
        for i, x in enumerate(a[1:]):
            word |= e4m3(floats(self.value(x))) << (8 * i)
        self.put(a[0], word, mask)

    # memory

    def op_ld(self, a, rest, kind, mask):
        width = int(kind[1:]) // 8
        names = split(a[0][1:-1]) if a[0].startswith("{") else [a[0]]
        if rest[0] == "param":
            number, _, offset = a[1].strip("[]").partition("+")
            raw = self.cta.params[int(number[5:])]
            for i, name in enumerate(names):
                first = int(offset or 0) + i * width
                value = int.from_bytes(raw[first : first + width].tobytes(), "little")
                self.put(name, np.full(32, value, np.uint64 if width == 8 else np.uint32), mask)
            return
        base, plus, offset = a[1].strip("[]").partition("+")
        addresses = self.value(base, "b64").astype(np.int64) + (int(offset) if plus else 0)
        for i, name in enumerate(names):
            words = np.zeros(32, np.uint64 if width == 8 else np.uint32)
            for lane in np.flatnonzero(mask):
                first = int(addresses[lane]) + i * width
                raw = self.cta.bytes(first, width, self.cta.shared if rest[0] == "shared" else None)
                words[lane] = int.from_bytes(raw.tobytes(), "little")
                if rest[0] == "shared":
                    self.cta.trace.loaded[first : first + width] = True
            self.put(name, words, mask)

    def op_st(self, a, rest, kind, mask):
        width = int(kind[1:]) // 8
        addresses, value = self.address(a[0]), self.value(a[1], kind)
        for lane in np.flatnonzero(mask):
            memory = self.cta.shared if rest[0] == "shared" else None
            raw = self.cta.bytes(int(addresses[lane]), width, memory)
            raw[:] = np.frombuffer(int(value[lane]).to_bytes(width, "little"), np.uint8)

    def op_atom(self, a, rest, kind, mask):
        address, value = self.address(a[1]), self.value(a[2])
        old = np.zeros(32, np.uint32)
        for lane in np.flatnonzero(mask):
            raw = self.cta.bytes(int(address[lane]), 4, None).view(np.uint32)
            old[lane] = raw[0]
            raw[0] += value[lane]
        self.put(a[0], old, mask)

    def op_stmatrix(self, a, rest, kind, mask):
        address = self.address(a[0])
        for i, x in enumerate(split(a[1][1:-1])):
            rows = self.value(x).reshape(8, 4)
            for r in range(8):
                self.cta.bytes(int(address[8 * i + r]), 16, self.cta.shared)[:] = rows[r].copy().view(np.uint8)

    # barriers

    def op_mbarrier(self, a, rest, kind, mask):
        barriers = self.cta.barriers
        if rest[0] == "init":
            address = int(self.address(a[0])[mask][0])
            count = int(self.value(a[1])[0])
            barriers[address] = Barrier(count, count)
            return
        assert rest[0] == "arrive", rest
        target = a[1] if a[0] == "_" or not a[0].startswith("[") else a[0]
        for lane in np.flatnonzero(mask):
            barrier = barriers[int(self.address(target)[lane])]
            if rest[1] == "expect_tx":
                barrier.bytes += int(self.value(a[-1])[lane])
            barrier.pending -= 1
            assert barrier.pending >= 0, "more arrivals than the barrier counts"
            barrier.settle()

    def op_WAIT(self, a, rest, kind, mask):
        barrier = self.cta.barriers[int(self.address(f"[{a[0]}]")[mask][0])]
        if barrier.phase % 2 == int(self.value(a[1])[mask][0]) % 2:
            raise Blocked

    def op_bar(self, a, rest, kind, mask):
        if rest[0] == "warp":
            return
        barrier = self.cta.named.setdefault(int(self.value(a[0])[0]), Named())
        threads = int(a[1]) if len(a) > 1 else 32 * len(self.cta.warps)
        if self.waits_at is None:
            self.waits_at = barrier.generation
            barrier.arrive(threads)
        if rest[0] == "sync" and barrier.generation == self.waits_at:
            raise Blocked
        self.waits_at = None

    # asynchronous copies and matrices

    def op_cp(self, a, rest, kind, mask):
        if "tensor" not in rest:
            return
        store = rest[4] == "global"
        where, what = (a[0], a[1]) if store else (a[1], a[0])
        pointer, coordinates = re.match(r"\[(%rd\d+), \{(.*)\}\]", where).groups()
        lane = int(np.argmax(mask))
        tensor_map = self.cta.maps[int(self.value(pointer)[lane])]
        first = [int(signed(self.value(x.strip()))[lane]) for x in coordinates.split(",")]
        shared = int(self.address(what)[lane])
        if store:
            self.cta.copy(tensor_map, first, shared, True)
            return
        barrier = self.cta.barriers[int(self.address(a[2])[lane])]
        self.cta.late.append(partial(self.cta.land, tensor_map, first, shared, barrier))

    def op_WGMMA(self, a, rest, kind, mask):
        self.uncommitted.append((a, rest, self.value(a[0])[0] != 0))

    def op_wgmma(self, a, rest, kind, mask):
        if rest[0] == "commit_group":
            self.groups.append(self.uncommitted)
            self.uncommitted = []
        elif rest[0] == "wait_group":
            while len(self.groups) > int(a[0]):
                for late in self.groups.pop(0):
                    self.matmul(*late)

    def matmul(self, a: list[str], rest: list[str], accumulate: bool) -> None:
        """This warp's 16 rows of m64nNkK."""
        n, k = (int(x) for x in re.match(r"m64n(\d+)k(\d+)", rest[0]).groups())
        kind_a, kind_b = rest[2], rest[3]
        accumulators, from_registers = split(a[1][1:-1]), a[2].startswith("{")
        transposed = kind_b != "e4m3" and a[-1] == "1"
        if from_registers:
            words = np.stack([self.value(x) for x in split(a[2][1:-1])], 1)  # (lane, register)
            A = self.fragment(words, kind_a)
        else:
            A = self.operand(int(self.value(a[2], "b64")[0]), 16, k, kind_a, False, 16 * (self.index % 4))
        B = self.operand(int(self.value(a[3], "b64")[0]), n, k, kind_b, transposed, 0)
        D = A @ B.T
        for i, x in enumerate(accumulators):
            part = D[LANES // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (LANES % 4) + i % 2]
            old = floats(self.registers[x]) if accumulate else np.float32(0)
            self.registers[x] = bits(part + old)

    def op_mma(self, a, rest, kind, mask):
        """m16n8k16: D = A B + C, of this warp alone and at once. Columns of B lie as rows of A do."""
        assert rest[:5] == ["sync", "aligned", "m16n8k16", "row", "col"] and mask.all()
        d, *abc = (split(x[1:-1]) for x in a)
        words_a, words_b, c = (np.stack([self.value(x) for x in names], 1) for names in abc)  # (lane, register)
        D = self.fragment(words_a, rest[6]) @ self.fragment(words_b[:, [0, 0, 1, 1]], rest[7])[:8].T
        for i, x in enumerate(d):
            part = D[LANES // 4 + 8 * (i // 2), 2 * (LANES % 4) + i % 2]
            self.put(x, bits(part + floats(c[:, i].copy())), mask)

    def fragment(self, words: np.ndarray, kind: str) -> np.ndarray:
        """A's registers as 16 rows."""
        values = DECODE[kind](np.ascontiguousarray(words).view(np.uint8).reshape(-1)).reshape(32, 4, -1)
        per = values.shape[2]  # elements of a register
        A = np.zeros((16, 8 * per), np.float32)
        for register in range(4):
            for e in range(per):
                A[LANES // 4 + 8 * (register % 2), 4 * per * (register // 2) + per * (LANES % 4) + e] = values[
                    :, register, e
                ]
        return A

    def operand(self, descriptor: int, rows: int, k: int, kind: str, transposed: bool, first: int) -> np.ndarray:
        """(rows, k) of a matrix in shared memory."""
        size = 1 if kind == "e4m3" else 2
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        span = SWIZZLE_SPAN[descriptor >> 62]
        r, c = np.meshgrid(first + np.arange(rows), np.arange(k), indexing="ij")
        if transposed:
            per = span // size
            address = start + r // per * leading + r % per * size + c // 8 * stride + c % 8 * span
        else:
            address = start + r // 8 * stride + r % 8 * span + c * size
        address = swizzled(address, span)
        raw = np.stack([self.cta.shared[address + i] for i in range(size)], -1)
        return DECODE[kind](np.ascontiguousarray(raw).reshape(-1)).reshape(rows, k)

    def op_fence(self, a, rest, kind, mask): ...

    def op_prefetch(self, a, rest, kind, mask): ...

    def op_setmaxnreg(self, a, rest, kind, mask): ...

    def op_griddepcontrol(self, a, rest, kind, mask): ...
