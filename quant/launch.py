"""The quantise kernels on CUDA tensors that were checked: outputs, the compiled kernel, the launch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fa3.kernels.compile import load
from fa3.kernels.quantize.config import BEYOND, KEYS, PackSpec, ScalesSpec, Spec, config_for
from fa3.kernels.quantize.config import Rotary as RotarySpec

from . import hadamard, reference
from .checks import KERNEL_DTYPES
from .formats import BLOCK, E4M3, GROUP, QuantizedQKV
from .prepare import Prepared

ALIGNMENT = 16  # bytes: of a row's first element
TILES_MAX = 2**31 - 1  # CTAs of a launch

Codes = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, packed v, q_scale, k_scale, v_scale


def outputs(q: Tensor, k: Tensor, v: Tensor, q_rows: int) -> Codes:
    """Of a quantise kernel, not filled."""
    batch, seqlen_q, heads, head_dim = q.shape
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    blocks = -(-seqlen_k // BLOCK)
    return (
        q.new_empty((batch, seqlen_q, heads, head_dim), dtype=E4M3.dtype),
        k.new_empty((batch, seqlen_k, heads_kv, head_dim), dtype=E4M3.dtype),
        v.new_empty((batch, heads_kv, head_dim_v, -(-seqlen_k // GROUP) * GROUP), dtype=E4M3.dtype),
        q.new_empty((batch, heads, -(-seqlen_q // q_rows)), dtype=torch.float32),
        q.new_empty((batch, heads_kv, blocks), dtype=torch.float32),
        q.new_empty((batch, heads_kv, blocks), dtype=torch.float32),
    )


def quantize(
    q: Tensor, k: Tensor, v: Tensor, rotate: bool, seed: int, rotary: reference.Rotary | None, q_rows: int
) -> Codes:
    batch, seqlen_q, heads, head_dim = q.shape
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    tables = None if rotary is None else (_table(rotary.cos), _table(rotary.sin))
    told = None
    if rotary is not None and tables is not None:
        name = "float32" if tables[0].dtype == torch.float32 else KERNEL_DTYPES[tables[0].dtype]
        told = RotarySpec(2 * tables[0].shape[1], rotary.interleaved, name)
    spec = Spec(KERNEL_DTYPES[q.dtype], head_dim, head_dim_v, rotate, told, q_rows)  # type: ignore[arg-type]
    blocks_q, blocks = -(-seqlen_q // BLOCK), -(-seqlen_k // BLOCK)
    tiles = batch * (heads * blocks_q + heads_kv * (blocks + -(-seqlen_k // KEYS)))
    if tiles > TILES_MAX:
        raise ValueError(f"q, k, v make {tiles} tiles of {BLOCK} rows; allowed: at most {TILES_MAX}. Split the batch")
    made = q8, k8, v8, q_scale, k_scale, v_scale = outputs(q, k, v, q_rows)
    if tiles:
        signs = _signs(q.device, q.dtype, head_dim, seed) if rotate else None
        cos, sin = tables or (None, None)
        offset = 0 if rotary is None else rotary.q_offset
        with torch.cuda.device(q.device):
            load(spec, config_for(spec))(
                aligned(q), aligned(k), aligned(v), q8, q_scale, k8, k_scale, v8, v_scale, signs, cos, sin, offset
            )  # fmt: skip
    return made


def packed_like(v: Tensor) -> Tensor:
    """Where a pack kernel writes V (B, Sk, Hkv, Dv), not filled."""
    batch, seqlen, heads, head_dim = v.shape
    return v.new_empty((batch, heads, head_dim, -(-seqlen // GROUP) * GROUP))


def pack(v: Tensor) -> Tensor:
    packed = packed_like(v)
    if packed.numel():
        spec = PackSpec(v.shape[3])
        with torch.cuda.device(v.device):
            load(spec, config_for(spec))(aligned(v), packed)
    return packed


def prepare(x: QuantizedQKV) -> tuple[Prepared, Tensor]:
    """prepare.prepare(x) in one launch on the current device, and a counter (1) int32 that it set to 0.

    NOTE: a counter of its own for every call: one that calls share would tie their streams together.
    """
    batch, heads, blocks = x.k_scale.shape
    kv, v_max = x.k_scale.new_empty((batch, heads, blocks + BEYOND, 4)), x.k_scale.new_empty((batch, heads))
    tickets = x.k_scale.new_empty(1, dtype=torch.int32)
    load(ScalesSpec(), config_for(ScalesSpec()))(x.k_scale, x.v_scale, kv, v_max, tickets)
    return Prepared(x.q_scale, x.q_rows, kv, v_max), tickets


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype, head_dim: int, seed: int) -> Tensor:
    """NOTE: never forgotten, because a captured graph keeps reading it."""
    return hadamard.random_signs(head_dim, seed).to(device, dtype)


def _table(x: Tensor) -> Tensor:
    """(positions, n) with rows that follow each other, of one row too."""
    x = aligned(x.contiguous())
    return x.view(-1).view(x.shape)


def aligned(x: Tensor) -> Tensor:
    """x as 16-byte loads can take it: itself, the same memory under other strides, or a contiguous copy."""
    step = ALIGNMENT // x.element_size()
    strides = tuple(s if n > 1 or s % step == 0 else step for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True))
    if x.data_ptr() % ALIGNMENT or any(stride % step for stride in strides):
        return x.clone(memory_format=torch.contiguous_format)
    return x if strides == x.stride()[:-1] else x.as_strided(x.shape, (*strides, 1))
