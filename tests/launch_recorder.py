"""Stands for the compiled kernels where a launch is tested with CPU tensors in the GPU's place."""

from typing import NamedTuple

import torch

from fa3.device import ASSUMED
from fa3.kernels.forward.config import Config, Spec
from fa3.quant.prepare import prepare


class Call(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    scales: tuple | None
    v_channel: torch.Tensor | None
    ragged: tuple[torch.Tensor, ...] | None
    tickets: torch.Tensor | None
    scale_log2: float
    num_sms: int


class Recorder:
    """What was loaded, and what the loaded kernel was called with."""

    def __init__(self):
        self.loaded: list[tuple[Spec, Config]] = []
        self.calls: list[Call] = []

    def load(self, spec, config):
        self.loaded.append((spec, config))

        def run(*arguments):
            call = Call(*arguments)
            if not all(takeable(x) and x.dtype == getattr(torch, spec.dtype) for x in call[:3]):
                raise ValueError("as the compiled function does")
            if spec.ragged and not fits_together(call):
                raise ValueError("as the compiled function does")
            self.calls.append(call)

        return run

    def replace(self, monkeypatch, *modules) -> "Recorder":
        """In the place of what these modules load. A CPU tensor's device index is -1: the current device, then."""
        for module in modules:
            monkeypatch.setattr(module, "load", self.load)
            monkeypatch.setattr(module, "chip", lambda index: ASSUMED)
            monkeypatch.setattr(module, "current_device", lambda: -1)
            monkeypatch.setattr(module, "_plans", {})
            if hasattr(module, "prepare"):
                monkeypatch.setattr(module, "prepare", lambda x: (prepare(x), torch.zeros(1, dtype=torch.int32)))
        return self

    def watch_device(self, monkeypatch) -> list[tuple]:
        """What is done with torch.cuda.device from here on: (index, calls so far) as it is entered, ("left", calls)."""
        entered: list[tuple] = []
        calls = self.calls

        class Guard:
            def __init__(self, index):
                self.index = index

            def __enter__(self):
                entered.append((self.index, len(calls)))

            def __exit__(self, *error):
                entered.append(("left", len(calls)))

        monkeypatch.setattr(torch.cuda, "device", Guard)
        return entered


def fits_together(call: Call) -> bool:
    """What a ragged kernel looks at besides: lengths of k and v, out, the lists."""
    are_lists = all(x.dtype == torch.int32 and x.stride() == (1,) for x in call.ragged)
    return are_lists and takeable(call.out) and call.k.shape[1] == call.v.shape[1]


def takeable(x: torch.Tensor) -> bool:
    """The contract of the kernel: 16 bytes."""
    step = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and all(stride % step == 0 for stride in x.stride()[:-1])
