"""What the quantise functions refuse: each error names the argument, what was got and what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from fa3.kernels.quantize.config import HEAD_DIM_MAX, HEAD_DIM_STEP, ROTARY_STEP

from . import reference
from .formats import BLOCK, E4M3

KERNEL_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
CPU_DTYPES = (*KERNEL_DTYPES, torch.float32, torch.float64)
DEVICES = ("cuda", "cpu", "meta")  # meta: shapes only
HOPPER = (9, 0)
SEEDS = range(-(2**63), 2**63)


def check_are_tensors(**arguments: object) -> None:
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        _check_dense(name, x)


def check_options(rotate: object, seed: object, interleaved: object, q_offset: object, q_rows: object) -> None:
    for name, flag in (("rotate", rotate), ("rotary_interleaved", interleaved)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    for name, number in (("seed", seed), ("rotary_q_offset", q_offset)):
        if not isinstance(number, (int, torch.SymInt)) or isinstance(number, bool):
            raise TypeError(f"{name} must be an int, got {number!r}")
    if isinstance(seed, int) and seed not in SEEDS:
        raise ValueError(f"seed is {seed}; allowed: 64 bits with a sign")
    if q_rows not in (1, BLOCK):
        raise ValueError(f"q_rows is {q_rows!r}; allowed: 1 and {BLOCK}")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Types, devices, shapes and the last stride. Sizes may be symbolic: no comparison fixes a length."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_dense(name, x)
        allowed = tuple(KERNEL_DTYPES) if x.device.type == "cuda" else CPU_DTYPES
        if x.dtype not in allowed:
            raise TypeError(f"{name} has dtype {x.dtype} on {x.device.type}; allowed: {', '.join(map(str, allowed))}")
        check_shape(name, x)
    check_alike(q, k, v)


def check_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Of tensors of good shapes: whether these fit together."""
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, and q {q.dtype} on {q.device}: allowed: the same")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have the head_dim of q, {q.shape[3]}, got {k.shape[3]} (v's may differ)")
    if k.shape[0] != q.shape[0] or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"k and v must have one batch, seqlen and heads, and q's batch, {q.shape[0]}; got k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads; allowed: a multiple of those of k and v, {k.shape[2]}")


def check_codes(**tensors: Tensor) -> None:
    """(batch, seqlen, heads, head_dim) in E4M3."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.dtype != E4M3.dtype:
            raise TypeError(
                f"{name} is {x.dtype if isinstance(x, Tensor) else type(x).__name__}; allowed: {E4M3.dtype}"
            )
        _check_dense(name, x)
        check_shape(name, x)


def check_shape(name: str, x: Tensor) -> None:
    if x.device.type not in DEVICES:
        raise ValueError(f"{name} is on {x.device}; allowed: cuda and cpu")
    if x.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions (batch, seqlen, heads, head_dim), got {tuple(x.shape)}")
    if x.shape[2] == 0:
        raise ValueError(f"{name} has no heads; allowed: 1 or more")
    if x.shape[3] % HEAD_DIM_STEP or x.shape[3] < HEAD_DIM_STEP or x.shape[3] > HEAD_DIM_MAX:
        raise ValueError(
            f"{name} has head_dim {x.shape[3]}; allowed: multiples of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}"
        )
    if x.stride(3) != 1:
        raise ValueError(f"{name} has stride {x.stride(3)} in its last dimension; allowed: 1. Make it contiguous")


def check_gpu(name: str, device: torch.device, capability: tuple[int, int]) -> None:
    if capability != HOPPER:
        raise ValueError(
            f"{name} is on {device}, sm_{capability[0]}{capability[1]}; allowed: Hopper GPUs (sm_90), or CPU tensors "
            "for the reference"
        )


def rotary_of(
    q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool, q_offset: int
) -> reference.Rotary | None:
    """The rotary embedding of a call, None where there are no tables."""
    if cos is None and sin is None:
        return None
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor as the other one is, got {type(x).__name__}")
        if x.device != q.device or x.dtype not in (torch.float32, q.dtype):
            raise ValueError(f"{name} is {x.dtype} on {x.device}; allowed: torch.float32 or {q.dtype} on {q.device}")
        if x.dim() != 2 or (2 * x.shape[1]) % ROTARY_STEP or x.shape[1] < 1 or 2 * x.shape[1] > q.shape[3]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; allowed: (positions, rotary_dim / 2), rotary_dim a multiple of "
                f"{ROTARY_STEP} up to head_dim, {q.shape[3]}"
            )
    assert cos is not None and sin is not None
    if cos.dtype != sin.dtype:
        raise ValueError(f"rotary_cos is {cos.dtype} and rotary_sin {sin.dtype}; allowed: one type")
    rotary = reference.Rotary(cos, sin, interleaved, q_offset)
    rotary.check(q.shape[1], k.shape[1], q.shape[3])
    return rotary


def check_descale(name: str, scale: object, shape: tuple[int, int], device: torch.device) -> None:
    if not isinstance(scale, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(scale).__name__}")
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {scale.dtype}; allowed: torch.float32")
    if scale.device != device:
        raise ValueError(f"{name} is on {scale.device} and q on {device}: allowed: one device")
    if tuple(scale.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; allowed: (batch, heads of k and v), {shape}")


def _check_dense(name: str, x: Tensor) -> None:
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{name} must be a dense (strided) tensor, got {kind}")
