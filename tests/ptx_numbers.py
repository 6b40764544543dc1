"""The numbers of the PTX machine: registers of 32 bits as what they stand for, and back."""

from collections.abc import Callable

import numpy as np
import torch


def floats(x: np.ndarray) -> np.ndarray:
    return x.view(np.float32)


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def signed(x: np.ndarray) -> np.ndarray:
    return x.view(np.int64 if x.dtype == np.uint64 else np.int32)


def bf16(x: np.ndarray) -> np.ndarray:
    u = bits(x)
    return np.where(np.isnan(x), 0x7FFF, (u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint32)


def f16(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)


def e4m3(x: np.ndarray) -> np.ndarray:
    clipped = torch.from_numpy(np.clip(x, -448, 448))
    return clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint32)


DECODE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bf16": lambda b: (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
    "f16": lambda b: b.view(np.float16).astype(np.float32),
    "e4m3": lambda b: torch.from_numpy(b.copy()).view(torch.float8_e4m3fn).float().numpy(),
}
