"""Stands for the compiled kernels where a launch is tested with CPU tensors in the GPU's place."""

from typing import NamedTuple

import torch

from fa3.device import ASSUMED
from fa3.kernels.forward.config import Config, Spec
from fa3.quant.prepare import prepare

# What the launchers ask CUDA for, without CUDA. A CPU tensor's device index is -1: the current device, then.
STATES = {
    "current_device": lambda: lambda: -1,
    "is_current_stream_capturing": lambda: lambda: False,
    "_spares": dict,
}


class Call(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    scales: tuple | None
    v_channel: torch.Tensor | None
    ragged: tuple[torch.Tensor, ...] | None
    variant: tuple | None
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
            if not spec.is_fp8 and not agree(call):
                raise ValueError("as the compiled function does")
            if spec.ragged and not are_lists(call):
                raise ValueError("as the compiled function does")
            self.calls.append(call)

        return run

    def replace(self, monkeypatch, *modules) -> "Recorder":
        """In the place of what these modules load."""
        for module in modules:
            monkeypatch.setattr(module, "load", self.load)
            monkeypatch.setattr(module, "chip", lambda index: ASSUMED)
            monkeypatch.setattr(module, "_plans", {})
            for name, value in STATES.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value())
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


def are_lists(call: Call) -> bool:
    """What the kernel is told about ragged sequences; and out lies in memory as the inputs must."""
    assert call.ragged is not None
    cu_q, cu_k, used_q, used_k = lists = call.ragged[:4]
    fit = all(x.dtype == torch.int32 and x.stride() == (1,) and x.device == call.q.device for x in lists)
    return fit and takeable(call.out) and cu_q.shape == cu_k.shape and used_q.shape == used_k.shape


def takeable(x: torch.Tensor) -> bool:
    """The contract of the kernel: 16 bytes."""
    step = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and all(stride % step == 0 for stride in x.stride()[:-1])


def agree(call: Call) -> bool:
    """Sizes and devices of 16-bit tensors. test_compiled_call.py asks the compiled function itself."""
    tensors = call[:5]
    if any(x.dim() != y for x, y in zip(tensors, (4, 4, 4, 4, 3), strict=True)):
        return False
    (batch, seqlen_q, heads, head_dim), (_, seqlen_k, heads_kv, head_dim_v) = call.q.shape, call.v.shape
    outputs = [(batch, seqlen_q, heads, head_dim_v), (batch, heads, seqlen_q)]
    inputs = [(batch, seqlen_q, heads, head_dim), (batch, seqlen_k, heads_kv, head_dim), tuple(call.v.shape)]
    return [tuple(x.shape) for x in tensors] == [*inputs, *outputs] and len({x.device for x in tensors}) == 1
