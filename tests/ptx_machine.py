"""A machine that runs a kernel's PTX on the CPU: the numbers of a warp-specialised WGMMA kernel without a GPU.

One CTA at a time. Warps take turns, each until it has to wait; the 32 lanes of a warp are a NumPy vector. What is
asynchronous on the chip is late here: a WGMMA reads its operands and writes its accumulator when a wait_group asks for
it, a load lands after its warp has stopped, so that a missing wait gives wrong numbers. Global accesses are checked
against the ends of their tensors, a TMA store must not begin at a negative coordinate, and warps that all wait for ever
are an error. Approximate instructions are exact here, sums of the tensor core are FP32 without its truncation.
"""

import numpy as np

from tests.ptx_program import SHARED_BEGIN, SHARED_END, Barrier, Named, Tensor, TensorMap, Trace, swizzled
from tests.ptx_warp import Warp


class Cta:
    """Runs one CTA of a grid."""

    warp_type = Warp

    def __init__(
        self, program, params: list[np.ndarray], maps: dict[int, TensorMap], tensors: list[Tensor], threads: int,
        trace: Trace | None = None,
    ):  # fmt: skip
        self.code, self.labels = program
        self.params, self.tensors = params, tensors
        self.maps = {self.map_address(number): tensor_map for number, tensor_map in maps.items()}
        self.threads = threads
        self.trace = trace or Trace()

    @staticmethod
    def map_address(number: int) -> int:
        return (1 << 52) + 128 * number

    def bytes(self, address: int, size: int, memory: np.ndarray | None) -> np.ndarray:
        assert address % size == 0, f"misaligned access of {size} bytes at {address:#x}"
        if memory is not None:
            assert SHARED_BEGIN <= address <= len(memory) - size, f"{address:#x} is outside the shared memory"
            return memory[address : address + size]
        for tensor in self.tensors:
            if tensor.address <= address <= tensor.address + len(tensor.data) - size:
                return tensor.data[address - tensor.address :][:size]
        raise AssertionError(f"{address:#x} is outside every tensor")

    def copy(self, m: TensorMap, first: list[int], shared: int, store: bool) -> int:
        """A box between global and shared memory; its bytes."""
        assert not store or min(first) >= 0, f"a TMA store begins at {first}"
        width, height = m.box
        address = shared + np.arange(height)[:, None] * m.span + np.arange(m.span)[None]
        address = swizzled(address, m.span)
        inside = all(0 <= c < size for c, size in zip(first[2:], m.shape[2:], strict=True))
        base = sum(c * s for c, s in zip(first[2:], m.strides[2:], strict=True))
        for row in range(height):
            y = first[1] + row
            low, high = max(0, -first[0]), min(width, m.shape[0] - first[0])
            is_there = inside and 0 <= y < m.shape[1] and low < high
            if not store:
                self.shared[address[row]] = 0
            if is_there:
                place = (base + y * m.strides[1] + (first[0] + low) * m.element_bytes) % 2**64  # see prims.tma.ragged
                size = (high - low) * m.element_bytes
                cells = address[row][low * m.element_bytes : high * m.element_bytes]
                if store:
                    m.tensor.data[place : place + size] = self.shared[cells]
                else:
                    self.shared[cells] = m.tensor.data[place : place + size]
        return height * m.span

    def land(self, m: TensorMap, first: list[int], shared: int, barrier: Barrier) -> None:
        """What a TMA load does when its time comes."""
        barrier.bytes -= self.copy(m, first, shared, False)
        barrier.settle()

    def draws(self) -> bool:
        """Half of the times, where the order is drawn."""
        return self.draw is not None and self.draw.random() < 0.5

    def run(self, number: int, ctas: int, seed: int | None = None) -> None:
        """CTA `number` of `ctas`. seed: warps take turns, stop behind arrivals, and TMA loads land, in an order drawn
        from it.
        """
        self.number, self.ctas = number, ctas
        self.shared = np.full(SHARED_END, 0xFF, np.uint8)  # NaN
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, Named] = {}
        self.late: list = []  # loads under way, as what each does when it lands
        self.warps = [self.warp_type(self, i) for i in range(self.threads // 32)]
        self.draw = None if seed is None else np.random.default_rng((seed, number))
        running = list(self.warps)
        with np.errstate(all="ignore"):
            while running:
                if self.draw is not None:
                    self.draw.shuffle(running)
                before = [warp.steps for warp in running]
                left = [warp for warp in running if not warp.run()]
                stuck = before == [warp.steps for warp in left]
                landing = [load for load in self.late if stuck or self.draw is None or self.draws()]
                assert landing or not stuck, "all warps wait for ever"
                self.late = [load for load in self.late if not any(load is other for other in landing)]
                for load in landing:
                    load()
                running = left
