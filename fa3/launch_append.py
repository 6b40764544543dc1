"""The append kernel on CUDA tensors: the compiled kernel, the launch. Never waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, int32

from fa3.append import check_append
from fa3.device import chip
from fa3.kernels.append.config import (
    BATCH_IDX,
    CHUNK,
    CU_K,
    CU_Q,
    INDPTR,
    LENGTHS,
    OWN_POSITION,
    PAGE_TABLE,
    ROTARY_SEQLENS,
    THREADS,
    Config,
    Rotary,
    Spec,
    config_for,
)
from fa3.kernels.compile import load
from fa3.launch import REFUSALS, remember
from fa3.problem import KERNEL_DTYPES, check_chip
from fa3.serving import Serving
from fa3.tma import ALIGNMENT, step_of, strides_for

BITS = (LENGTHS, CU_K, BATCH_IDX, PAGE_TABLE, INDPTR, CU_Q, ROTARY_SEQLENS)  # in the order of the kernel's lists
CTAS_MAX = 2**31 - 1

# Of calls that were checked: the compiled function, and which lists there are.
_plans: dict[tuple, tuple[Callable[..., object], int]] = {}


def append(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, serving: Serving,
    cos: Tensor | None, sin: Tensor | None, rotary_seqlens: Tensor | None, interleaved: bool,
    each_query_its_own_position: bool, start: int,
) -> Tensor:  # fmt: skip
    """As `fa3.append.append`. A call like an earlier one is not checked again but by the compiled function."""
    s, given = serving, (k, v)
    lists = s.lengths, s.cu_seqlens_k_new, s.batch_idx, s.page_table, s.indptr, s.cu_seqlens_q, rotary_seqlens
    key = (
        q.dtype, q.get_device(), q.shape[-1], s.cu_seqlens_q is None and q.shape[0],
        k is not None and s.cu_seqlens_k_new is None and k.shape[0], k is None, v is None, interleaved,
        cos is not None and (cos.shape, cos.dtype), sin is None, *[x is not None and x.shape for x in lists],
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None or not 0 <= start < 2**31:
        check_append(q, k_cache, v_cache, k, v, serving, cos, sin, rotary_seqlens, start)
        check_chip(chip(q.get_device()))
        plan = load(*_kernel(q, cos, interleaved, True)), sum(bit for bit, x in zip(BITS, lists) if x is not None)
        remember(_plans, key, plan)
    run, bits = plan
    if k is None and cos is None:
        return q
    if k is None or v is None:
        k, v = k_cache[:0], v_cache[:0]
    elif s.cu_seqlens_k_new is not None:
        k, v = (x.unsqueeze(0) if _has_sequences(s.cu_seqlens_k_new) else x[None, :0] for x in (k, v))
    rotated, source, out = q, None, None
    if cos is not None:
        rotated = torch.empty_like(q) if q.is_contiguous() else q.new_empty(q.shape)
        if s.cu_seqlens_q is None:
            source, out = q, rotated
        elif _has_sequences(s.cu_seqlens_q):
            source, out = q.unsqueeze(0), rotated.unsqueeze(0)
        else:
            return rotated.copy_(q)
    if k.numel() == 0 and (out is None or out.numel() == 0):
        check_append(q, k_cache, v_cache, *given, serving, cos, sin, rotary_seqlens, start)
        return rotated
    _check_size(out, k, v)
    tensors = source, out, k, v, k_cache, v_cache, cos, sin
    told = _told(lists, bits | OWN_POSITION if each_query_its_own_position else bits, k, start)
    try:
        run(*tensors, told)
    except REFUSALS:
        check_append(q, k_cache, v_cache, *given, serving, cos, sin, rotary_seqlens, start)
        _launch_otherwise(tensors, told, *_kernel(q, cos, interleaved, False), run)
    return rotated


def _kernel(q: Tensor, cos: Tensor | None, interleaved: bool, aligned: bool) -> tuple[Spec, Config]:
    dtype = KERNEL_DTYPES[q.dtype]
    rotary = None
    if cos is not None:
        rotary = Rotary(interleaved, "float32" if cos.dtype == torch.float32 else dtype)
    spec = Spec(dtype, rotary, aligned)
    return spec, config_for(spec)


def _has_sequences(offsets: Tensor) -> bool:
    return offsets.shape[0] > 1


def _told(lists: tuple[Tensor | None, ...], given: int, like: Tensor, start: int) -> tuple:
    """The kernel's lists. Another stands for one that is not given, and is not read. given: those that are, as bits."""
    lengths, cu_k, batch_idx, table, indptr, cu_q, rotary = lists
    one = lengths
    if one is None:
        others = (x for x in (cu_k, batch_idx, indptr, cu_q, rotary) if x is not None)
        one = next(others, None)
        if one is None:
            one = like.new_empty(1, dtype=int32)
    if table is None:
        table = one.unsqueeze(0)
    elif indptr is not None:
        table = table.unsqueeze(0)
    return (
        one, one if cu_k is None else cu_k, one if batch_idx is None else batch_idx, table,
        one if indptr is None else indptr, one if cu_q is None else cu_q, one if rotary is None else rotary,
        given, start,
    )  # fmt: skip


def _check_size(out: Tensor | None, k: Tensor, v: Tensor) -> None:
    """That a grid has room for the CTAs."""
    if k.numel() + v.numel() + (0 if out is None else out.numel()) <= CTAS_MAX:  # nearly always
        return
    parts = [x for x in (out, k, v) if x is not None]
    ctas = sum(x.shape[0] * x.shape[1] * -(-x.shape[2] * x.shape[3] // (CHUNK * THREADS)) for x in parts)
    if ctas > CTAS_MAX:
        raise ValueError(
            f"q and k have {tuple(parts[0].shape)} and {tuple(k.shape)} rows, heads and head_dim, for {ctas} CTAs; "
            f"allowed: {CTAS_MAX}. Split the batch"
        )


def _launch_otherwise(
    tensors: tuple[Tensor | None, ...], told: tuple, spec: Spec, config: Config, run: Callable[..., object]
) -> None:
    """Where strides or addresses are no multiples of 16 bytes: of one-element dimensions they do not matter."""
    views = [x if x is None or (strides := strides_for(x)) is None else x.as_strided(x.shape, strides) for x in tensors]
    if any(x is not None and not _is_aligned(x) for x in views):
        run = load(spec, config)
    run(*views, told)


def _is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % ALIGNMENT == 0 and not any(stride % step_of(x) for stride in x.stride()[:-1])
