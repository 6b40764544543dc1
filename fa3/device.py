"""Chip facts: how many SMs, what the datasheet promises, is it a Hopper. Nothing is asked of CUDA at import."""

from dataclasses import dataclass
from functools import cache

HOPPER = (9, 0)

# Longest matching name first: (words in the device name, dense 16-bit TFLOP/s, TB/s). NVIDIA's datasheets; those that
# print FLOP/s with sparsity are halved.
DATASHEETS = (
    (("H100", "PCIe"), 756.0, 2.0),
    (("H100", "NVL"), 835.0, 3.9),
    (("H200", "NVL"), 835.0, 4.8),
    (("GH200", "144G"), 989.5, 4.9),
    (("GH200",), 989.5, 4.0),
    (("H200",), 989.5, 4.8),
    (("H100",), 989.5, 3.35),
    (("H800", "PCIe"), 756.0, 2.0),
    (("H800",), 989.5, 3.35),
    (("H20",), 148.0, 4.0),
)


@dataclass(frozen=True)
class Chip:
    """One GPU. `peak_tflops` (dense bf16/fp16) and `bandwidth` (TB/s) are the datasheet's; None: not listed."""

    name: str
    num_sms: int
    capability: tuple[int, int]
    peak_tflops: float | None
    bandwidth: float | None

    @property
    def is_hopper(self) -> bool:
        return self.capability == HOPPER


def named(name: str, num_sms: int, capability: tuple[int, int]) -> Chip:
    """The chip of that name with its datasheet's numbers, if it is listed."""
    words = name.replace("-", " ").split()
    for wanted, tflops, bandwidth in DATASHEETS:
        if all(word in words for word in wanted):
            return Chip(name, num_sms, capability, tflops, bandwidth)
    return Chip(name, num_sms, capability, None, None)


ASSUMED = named("NVIDIA H100 80GB HBM3", 132, HOPPER)  # what a question without a GPU is answered for


@cache
def chip(index: int) -> Chip:
    """Facts of CUDA device `index`, asked once a process. Initialises CUDA."""
    import torch

    found = torch.cuda.get_device_properties(index)
    return named(found.name, found.multi_processor_count, (found.major, found.minor))
