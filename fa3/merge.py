"""Attention to disjoint sets of keys joined into one: merge_states of two parts, flash_attn_combine of many."""

from __future__ import annotations

import torch
from torch import Tensor

from fa3.operators import note_written
from fa3.problem import (
    CHECKING_DTYPES,
    DEVICES,
    HEAD_DIM_STEP,
    KERNEL_DTYPES,
    SIZE_MAX,
    check_are_tensors,
    check_flags,
)

DTYPES = (*KERNEL_DTYPES, torch.float32)
COMBINED = "(num_splits, batch, seqlen, heads, head_dim) or (num_splits, total, heads, head_dim)"


def merge_states(
    o_a: Tensor,
    lse_a: Tensor,
    o_b: Tensor,
    lse_b: Tensor,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to two disjoint sets of keys as attention to both.

    out = (o_a exp(lse_a) + o_b exp(lse_b)) / (exp(lse_a) + exp(lse_b)), lse = log(exp(lse_a) + exp(lse_b)), without
    overflow. Two parts in either order give the same bits; three in any grouping the same but for rounding. A part with
    lse -inf has no keys: its o is not looked at, NaN or not, and the other part comes back bit for bit. Two such parts
    give out 0 and lse -inf. An lse of +inf is no sign of an empty part (as it was in FlashAttention-2): it outweighs
    all that is finite, and two of them give the mean. An lse of NaN gives NaN.

    Args:
        o_a, o_b: (batch, seqlen, heads, head_dim) or (total, heads, head_dim), of one shape and dtype: bfloat16,
            float16 or float32 on a Hopper GPU, on the CPU float64 too. head_dim is a multiple of 8 and contiguous.
            What has addresses or strides that are no multiples of 16 bytes is copied first.
        lse_a, lse_b: (batch, heads, seqlen) or (heads, total) in float32 (float64 of float64), natural logarithms, any
            strides: as the attention functions return them.
        out, lse_out: where the result is written, of the shapes and dtypes of o_a and lse_a; these may be o_a and lse_a
            or o_b and lse_b themselves. Else they must not overlap them.

    Returns:
        (out, lse): of o_a's and lse_a's shape and dtype. New ones are contiguous.

    In float32 (float64 of such); out is rounded once.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, its value and what is allowed.
        NotImplementedError: an input requires a gradient while gradients are on.
    """
    _check_pair(o_a, lse_a, o_b, lse_b)
    is_ragged = o_a.dim() == 3
    parts = _row_major(o_a, is_ragged), _lse(lse_a, is_ragged), _row_major(o_b, is_ragged), _lse(lse_b, is_ragged)
    if out is not None:
        _check_result("out", out, tuple(o_a.shape), o_a)
        _check_strides("out", out)
    if lse_out is not None:
        _check_result("lse_out", lse_out, tuple(lse_a.shape), lse_a)
    if out is None and lse_out is None:
        merged, lse = _merge(*parts, o_a.dtype)
        return (merged[0], lse[0].t()) if is_ragged else (merged, lse.transpose(1, 2))
    out = o_a.new_empty(o_a.shape) if out is None else out
    lse_out = lse_a.new_empty(lse_a.shape) if lse_out is None else lse_out
    _merge_into(*parts, out, _row_major(out, is_ragged), lse_out, _lse(lse_out, is_ragged))
    return out, lse_out


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """FlashAttention-3's flash_attn_combine: the results of splits of the keys as one. `merge_states` of any number.

    Args:
        out_partial: (num_splits, batch, seqlen, heads, head_dim) or (num_splits, total, heads, head_dim) in float32,
            bfloat16 or float16; at least 1 split. Strides as in `merge_states`.
        lse_partial: (num_splits, batch, seqlen, heads) or (num_splits, total, heads) in float32, natural logarithms.
            Any strides (FlashAttention-3 allows a contiguous seqlen only).
        out: where O is written, (batch, seqlen, heads, head_dim) or (total, heads, head_dim).
        out_dtype: of O, one of those of out_partial; by default out's, else out_partial's.
        return_lse: else None stands for the LSE.

    Returns:
        (out, lse): lse (batch, seqlen, heads) or (total, heads) in float32 with contiguous seqlen or total, that is,
        the transpose of what the attention functions return; as in FlashAttention-3.

    Raises: as `merge_states`.
    """
    check_flags(return_lse=return_lse)
    dtype = _check_many(out_partial, lse_partial, out, out_dtype)
    is_ragged = out_partial.dim() == 4
    o, log_sums = (x.unsqueeze(1) if is_ragged else x for x in (out_partial, lse_partial))
    if out is None:
        made, lse = _merge(o, log_sums, None, None, dtype)
        out, lse = (made[0], lse[0]) if is_ragged else (made, lse)
    else:
        _, *rows, heads = lse_partial.shape
        lse = lse_partial.new_empty((*rows[:-1], heads, rows[-1])).transpose(-1, -2)
        place, lse_place = (x.unsqueeze(0) if is_ragged else x for x in (out, lse))
        _merge_into(o, log_sums, None, None, out, place, lse, lse_place)
    return out, lse if return_lse else None


def _row_major(o: Tensor, is_ragged: bool) -> Tensor:
    """(batch, seqlen, heads, head_dim)"""
    return o.unsqueeze(0) if is_ragged else o


def _lse(lse: Tensor, is_ragged: bool) -> Tensor:
    """(batch, seqlen, heads)"""
    return lse.t().unsqueeze(0) if is_ragged else lse.transpose(1, 2)


def _merge(
    o: Tensor, lse: Tensor, other: Tensor | None, other_lse: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    from fa3 import launch_merge, ops_merge  # registers the operators

    if ops_merge.is_plain(o, lse, other, other_lse):
        return launch_merge.merge(o, lse, other, other_lse, dtype)
    return ops_merge.merge(o, lse, other, other_lse, dtype)


def _merge_into(
    o: Tensor, lse: Tensor, other: Tensor | None, other_lse: Tensor | None,
    out: Tensor, place: Tensor, lse_out: Tensor, lse_place: Tensor,
) -> None:  # fmt: skip
    """Into the views place and lse_place of out and lse_out."""
    from fa3 import launch_merge, ops_merge

    if ops_merge.is_plain(o, lse, other, other_lse, place, lse_place):
        launch_merge.merge_into(o, lse, other, other_lse, place, lse_place)
        note_written(out, lse_out)
    else:
        ops_merge.merge_into(o, lse, other, other_lse, place, lse_place)


def _check_pair(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> None:
    check_are_tensors(o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)
    if o_a.dim() not in (3, 4):
        raise ValueError(
            f"o_a must be (batch, seqlen, heads, head_dim) or (total, heads, head_dim), got {tuple(o_a.shape)}"
        )
    _check_partial("o_a", o_a)
    _check_result("o_b", o_b, tuple(o_a.shape), o_a)
    _check_strides("o_b", o_b)
    if o_a.dim() == 3:
        shape: tuple[int, ...] = (o_a.shape[1], o_a.shape[0])
    else:
        shape = (o_a.shape[0], o_a.shape[2], o_a.shape[1])
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _check_lse(name, lse, shape, o_a)


def _check_many(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype of the result."""
    check_are_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.dim() not in (4, 5):
        raise ValueError(f"out_partial must be {COMBINED}, got {tuple(out_partial.shape)}")
    if out_partial.shape[0] == 0:
        raise ValueError("out_partial has 0 splits; allowed: 1 or more")
    _check_partial("out_partial", out_partial)
    _check_lse("lse_partial", lse_partial, tuple(out_partial.shape[:-1]), out_partial)
    dtype = out_dtype or (out_partial.dtype if out is None else out.dtype)
    allowed = (torch.float64,) if out_partial.dtype == torch.float64 else DTYPES
    if dtype not in allowed:
        raise TypeError(f"out_dtype is {dtype}; allowed: {', '.join(map(str, allowed))}")
    if out is not None:
        _check_result("out", out, tuple(out_partial.shape[1:]), out_partial, dtype)
        _check_strides("out", out)
    return dtype


def _check_partial(name: str, o: Tensor) -> None:
    if o.device.type not in DEVICES:
        raise ValueError(f"{name} is on {o.device}; allowed: {', '.join(DEVICES)}")
    allowed = DTYPES if o.device.type == "cuda" else (*KERNEL_DTYPES, *CHECKING_DTYPES)
    if o.dtype not in allowed:
        raise TypeError(f"{name} has dtype {o.dtype} on {o.device.type}; allowed: {', '.join(map(str, allowed))}")
    if o.shape[-1] == 0 or o.shape[-1] % HEAD_DIM_STEP:
        raise ValueError(f"{name} has head_dim {o.shape[-1]}; allowed: multiples of {HEAD_DIM_STEP}")
    _check_strides(name, o)


def _check_strides(name: str, o: Tensor) -> None:
    if o.stride(-1) != 1:
        raise ValueError(f"{name} has stride {o.stride(-1)} in its last dimension, which must be contiguous (stride 1)")


def _check_lse(name: str, lse: Tensor, shape: tuple[int, ...], o: Tensor) -> None:
    wanted = torch.float64 if o.dtype == torch.float64 else torch.float32
    _check_result(name, lse, shape, o, wanted)


def _check_result(name: str, x: Tensor, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> None:
    check_are_tensors(**{name: x})
    dtype = dtype or like.dtype
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on {like.device} as the other tensors are, got {x.device}")
    if name.startswith(("out", "lse_out")) and any(
        stride == 0 for size, stride in zip(x.shape, x.stride()) if size > 1
    ):
        raise ValueError(f"{name} has strides {x.stride()}: every element must have a place of its own, none may be 0")


def check_size(out: Tensor) -> None:
    """Rows are counted in 32 bits on the device."""
    rows = out.numel() // out.shape[-1]
    if rows > SIZE_MAX:
        raise ValueError(f"out has {rows} rows (batch * seqlen * heads); allowed: at most {SIZE_MAX}. Split the batch")
