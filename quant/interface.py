"""Q, K and V to FP8: one kernel on Hopper GPUs, the reference on CPU. Every error comes before a launch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fa3.kernels.compile import load
from fa3.kernels.quantize.config import (
    HEAD_DIM_MAX,
    HEAD_DIM_STEP,
    KEYS,
    ROTARY_STEP,
    PackSpec,
    Spec,
    config_for,
)
from fa3.kernels.quantize.config import Rotary as RotarySpec

from . import cast, hadamard, reference
from .formats import BLOCK, E4M3, GROUP, QuantizedQKV

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
CPU_DTYPES = (*DTYPES, torch.float32, torch.float64)
HOPPER = (9, 0)
ALIGNMENT = 16  # bytes: of a row's first element
TILES_MAX = 2**31 - 1  # CTAs of a launch


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotate: bool = True,
    seed: int = 0,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_q_offset: int = 0,
    q_rows: int = BLOCK,
) -> QuantizedQKV:
    """Q (B, Sq, H, D), K (B, Sk, Hkv, D) and V (B, Sk, Hkv, Dv) of one 16-bit type in E4M3, a scale per 64 rows.

    rotate: Q and K are multiplied with the random orthogonal matrix of `seed`. rotary_cos, rotary_sin (positions,
    rotary_dim / 2), float32 or of q's type: rotary embedding before that, key j at position j, query i at
    rotary_q_offset + i. q_rows: rows of Q that share a scale, 64 or 1. On CUDA tensors one kernel on the current
    stream, which never waits for the host; CPU tensors may be of any float type.

    Raises TypeError or ValueError, naming the argument, what was got and what is allowed.
    """
    _check(q, k, v, rotate, seed, q_rows)
    rotary = _rotary(q, k, rotary_cos, rotary_sin, rotary_interleaved, rotary_q_offset)
    if q.device.type == "cpu":
        return reference.quantize_qkv(q, k, v, rotate=rotate, seed=seed, rotary=rotary, q_rows=q_rows)
    _check_gpu("q", q)
    batch, seqlen_q, heads, head_dim = q.shape
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    tables = None if rotary is None else (_table(rotary.cos), _table(rotary.sin))
    told = None
    if rotary is not None and tables is not None:
        name = "float32" if tables[0].dtype == torch.float32 else DTYPES[tables[0].dtype]
        told = RotarySpec(2 * tables[0].shape[1], rotary.interleaved, name)
    spec = Spec(DTYPES[q.dtype], head_dim, head_dim_v, rotate, told, q_rows)  # type: ignore[arg-type]
    blocks_q, blocks = -(-seqlen_q // BLOCK), -(-seqlen_k // BLOCK)
    tiles = batch * (heads * blocks_q + heads_kv * (blocks + -(-seqlen_k // KEYS)))
    if tiles > TILES_MAX:
        raise ValueError(f"q, k, v make {tiles} tiles of {BLOCK} rows; allowed: at most {TILES_MAX}. Split the batch")
    padded = -(-seqlen_k // GROUP) * GROUP
    q8 = q.new_empty((batch, seqlen_q, heads, head_dim), dtype=E4M3.dtype)
    k8 = k.new_empty((batch, seqlen_k, heads_kv, head_dim), dtype=E4M3.dtype)
    v8 = v.new_empty((batch, heads_kv, head_dim_v, padded), dtype=E4M3.dtype)
    q_scale = q.new_empty((batch, heads, seqlen_q if q_rows == 1 else blocks_q), dtype=torch.float32)
    k_scale = q.new_empty((batch, heads_kv, blocks), dtype=torch.float32)
    v_scale = q.new_empty((batch, heads_kv, blocks), dtype=torch.float32)
    if tiles:
        signs = _signs(q.device, q.dtype, head_dim, seed) if rotate else None
        cos, sin = tables or (None, None)
        offset = 0 if rotary is None else rotary.q_offset
        with torch.cuda.device(q.device):
            load(spec, config_for(spec))(
                _aligned(q), _aligned(k), _aligned(v), q8, q_scale, k8, k_scale, v8, v_scale, signs, cos, sin, offset
            )  # fmt: skip
    return QuantizedQKV(q8, k8, v8, q_scale, k_scale, v_scale, None, seqlen_k, q.dtype, rotate)


def pack_v(v: Tensor) -> Tensor:
    """V (B, Sk, Hkv, Dv) that is E4M3 already, packed as the forward takes it: (B, Hkv, Dv, Sk rounded up to 16).

    Raises TypeError or ValueError, naming what was got and what is allowed.
    """
    if not isinstance(v, Tensor) or v.dtype != E4M3.dtype:
        raise TypeError(f"v is {v.dtype if isinstance(v, Tensor) else type(v).__name__}; allowed: {E4M3.dtype}")
    _check_shape("v", v)
    if v.device.type == "cpu":
        return cast.pack_v(v)
    _check_gpu("v", v)
    batch, seqlen, heads, head_dim = v.shape
    packed = v.new_empty((batch, heads, head_dim, -(-seqlen // GROUP) * GROUP))
    if packed.numel():
        spec = PackSpec(head_dim)
        with torch.cuda.device(v.device):
            load(spec, config_for(spec))(_aligned(v), packed)
    return packed


def _check(q: Tensor, k: Tensor, v: Tensor, rotate: bool, seed: int, q_rows: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        allowed = CPU_DTYPES if x.device.type == "cpu" else tuple(DTYPES)
        if x.dtype not in allowed:
            raise TypeError(f"{name} has dtype {x.dtype} on {x.device.type}; allowed: {', '.join(map(str, allowed))}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, and q {q.dtype} on {q.device}: allowed: the same")
        _check_shape(name, x)
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have the head_dim of q, {q.shape[3]}, got {k.shape[3]} (v's may differ)")
    if k.shape[0] != q.shape[0] or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"k and v must have one batch, seqlen and heads, and q's batch, {q.shape[0]}; got k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads; allowed: a multiple of those of k and v, {k.shape[2]}")
    if not isinstance(rotate, bool):
        raise TypeError(f"rotate must be True or False, got {rotate!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if q_rows not in (1, BLOCK):
        raise ValueError(f"q_rows is {q_rows!r}; allowed: 1 and {BLOCK}")


def _check_shape(name: str, x: Tensor) -> None:
    if x.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions (batch, seqlen, heads, head_dim), got {tuple(x.shape)}")
    if x.shape[2] == 0:
        raise ValueError(f"{name} has no heads; allowed: 1 or more")
    if x.shape[3] % HEAD_DIM_STEP or not 0 < x.shape[3] <= HEAD_DIM_MAX:
        raise ValueError(
            f"{name} has head_dim {x.shape[3]}; allowed: multiples of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}"
        )
    if x.stride(3) != 1:
        raise ValueError(f"{name} has stride {x.stride(3)} in its last dimension; allowed: 1. Make it contiguous")


def _check_gpu(name: str, x: Tensor) -> None:
    if x.device.type != "cuda":
        raise ValueError(f"{name} is on {x.device}; allowed: cuda and cpu")
    capability = _capability(x.device)
    if capability != HOPPER:
        raise ValueError(
            f"{name} is on sm_{capability[0]}{capability[1]}; allowed: Hopper GPUs (sm_90), or CPU tensors for the "
            "reference"
        )


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _rotary(
    q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool, q_offset: int
) -> reference.Rotary | None:
    if cos is None and sin is None:
        return None
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor as the other one is, got {type(x).__name__}")
        if x.device != q.device or x.dtype not in (torch.float32, q.dtype):
            raise ValueError(f"{name} is {x.dtype} on {x.device}; allowed: torch.float32 or {q.dtype} on {q.device}")
        if x.dim() != 2 or (2 * x.shape[1]) % ROTARY_STEP or not 0 < 2 * x.shape[1] <= q.shape[3]:
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


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype, head_dim: int, seed: int) -> Tensor:
    """NOTE: never forgotten, because a captured graph keeps reading it."""
    return hadamard.random_signs(head_dim, seed).to(device, dtype)


def _table(x: Tensor) -> Tensor:
    """(positions, n) with rows that follow each other, of one row too."""
    x = _aligned(x.contiguous())
    return x.view(-1).view(x.shape)


def _aligned(x: Tensor) -> Tensor:
    """x as 16-byte loads can take it: itself, the same memory under other strides, or a contiguous copy."""
    step = ALIGNMENT // x.element_size()
    strides = tuple(s if n > 1 or s % step == 0 else step for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True))
    if x.data_ptr() % ALIGNMENT or any(stride % step for stride in strides):
        return x.clone(memory_format=torch.contiguous_format)
    return x if strides == x.stride()[:-1] else x.as_strided(x.shape, (*strides, 1))
