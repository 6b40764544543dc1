"""Ragged tensors -> RaggedProblem: what fa3/problem.py is for dense ones. The errors of ragged calls are raised here.

Nothing here reads values from a GPU: what offsets and lengths hold is checked on the CPU only.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fa3.heuristics import LONG, ragged_tiles
from fa3.kernels.forward.config import Spec, tile_for
from fa3.problem import (
    FP8,
    KERNEL_DTYPES,
    SIZE_MAX,
    check_are_tensors,
    check_head_dim,
    check_scale,
    check_tensors,
)

TOTAL_MAX = 2**30  # rows that the kernel finds a sequence among


class Sequences(NamedTuple):
    """Where the sequences lie and how long they are: int32 tensors on the device of q, of `batch` sequences."""

    cu_seqlens_q: Tensor  # (batch + 1,)
    cu_seqlens_k: Tensor  # (batch + 1,); None of paged ones
    seqused_q: Tensor | None  # (batch,)
    seqused_k: Tensor | None  # (batch,)
    max_seqlen_q: int  # or SymInt
    max_seqlen_k: int

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1


@dataclass(frozen=True)
class RaggedProblem:
    """A validated call: q (total_q, heads, head_dim), k (total_k, heads_kv, head_dim), v likewise."""

    spec: Spec
    batch: int
    total_q: int
    total_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return self.total_q, self.heads, self.head_dim_v

    @property
    def lse_shape(self) -> tuple[int, int]:
        return self.heads, self.total_q

    @property
    def is_empty(self) -> bool:
        """No kernel runs: there is no query, or no key that one could see."""
        return 0 in (self.batch, self.total_q, self.total_k, self.heads)


def ragged_problem(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, softmax_scale: float, causal: bool
) -> RaggedProblem:
    """The RaggedProblem of a call, or the error that says what is wrong with it."""
    check_ragged(q, k, v, sequences)
    check_scale(softmax_scale)
    (total_q, heads, head_dim), (total_k, heads_kv, head_dim_v) = q.shape, v.shape
    # fp32 and fp64 run on the CPU only, in the order of the bf16 kernel.
    dtype = KERNEL_DTYPES.get(q.dtype, "bfloat16")
    spec = Spec(dtype, *tile_for(head_dim, head_dim_v), causal, ragged=True)
    return RaggedProblem(spec, sequences.batch, total_q, total_k, heads, heads_kv, head_dim, head_dim_v)


def check_ragged(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> None:
    """Types, devices, dtypes, shapes, head ratio, last stride. Sizes may be symbolic: no comparison fixes a length."""
    check_are_tensors(q=q, k=k, v=v)
    if q.dtype == FP8:
        raise NotImplementedError(
            f"ragged sequences of {FP8} are not supported yet; allowed: torch.bfloat16 and torch.float16"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_rank(name, tensor)
    if q.device == k.device == v.device and k.shape[0] != v.shape[0]:
        raise ValueError(f"k and v must have one total length, got k {k.shape[0]}, v {v.shape[0]}")
    check_tensors(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))
    _check_sequences(sequences, q.device)


def _check_rank(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 3:
        raise ValueError(
            f"{name} must have 3 dimensions (total, heads, head_dim), the sequences one after the other, got "
            f"{tensor.dim()}: {tuple(tensor.shape)}"
        )


def _check_sequences(sequences: Sequences, device: torch.device) -> None:
    s = sequences
    lengths = {"seqused_q": s.seqused_q, "seqused_k": s.seqused_k}
    given = {name: tensor for name, tensor in lengths.items() if tensor is not None}
    for name, tensor in {"cu_seqlens_q": s.cu_seqlens_q, "cu_seqlens_k": s.cu_seqlens_k, **given}.items():
        check_are_tensors(**{name: tensor})
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: torch.int32. Call {name}.int() first")
        if tensor.device != device:
            raise ValueError(f"{name} must be on the device of q, {device}, got {tensor.device}")
        if tensor.dim() != 1:
            raise ValueError(f"{name} must have 1 dimension, got {tensor.dim()}: {tuple(tensor.shape)}")
    offsets_q, offsets_k = s.cu_seqlens_q.shape[0], s.cu_seqlens_k.shape[0]
    if offsets_q != offsets_k:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have one length, batch + 1, got {offsets_q} and {offsets_k}"
        )
    if offsets_q == 0:
        raise ValueError("cu_seqlens_q and cu_seqlens_k must have batch + 1 elements, at least 1, got 0")
    for name, tensor in given.items():
        if tensor.shape[0] != offsets_q - 1:
            raise ValueError(
                f"{name} must have one element a sequence, {offsets_q - 1} as cu_seqlens_q has {offsets_q}, got "
                f"{tensor.shape[0]}"
            )
    for name, value in (("max_seqlen_q", s.max_seqlen_q), ("max_seqlen_k", s.max_seqlen_k)):
        _check_bound(name, value)


def check_out(q: Tensor, v: Tensor, out: Tensor) -> None:
    """A tensor that the result may be written into; q and v are valid."""
    check_are_tensors(out=out)
    shape = (*q.shape[:2], v.shape[-1])
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have shape (total_q, heads, head_dim_v), {shape}, got {tuple(out.shape)}")
    if out.dtype != q.dtype:
        raise TypeError(f"out must have the dtype of q, {q.dtype}, got {out.dtype}")
    if out.device != q.device:
        raise ValueError(f"out must be on the device of q, {q.device}, got {out.device}")
    if out.stride(-1) != 1:
        raise ValueError(f"out has stride {out.stride(-1)} in its last dimension, which must be contiguous (stride 1)")
    if any(stride == 0 for size, stride in zip(shape, out.stride(), strict=True) if size > 1):
        raise ValueError(f"out has strides {out.stride()}: every element must have a place of its own, none may be 0")


def check_totals(total_q: int, total_k: int, heads: int, batch: int, tile_m: int) -> None:
    """What the device counts in 32 bits."""
    for name, size in (("total_q", total_q), ("total_k", total_k)):
        if size > TOTAL_MAX:
            raise ValueError(f"{name} is {size}; allowed: at most {TOTAL_MAX}")
    tiles = ragged_tiles(total_q, tile_m, heads, batch)
    if tiles > SIZE_MAX:
        raise ValueError(
            f"{batch} sequences of {total_q} queries and {heads} heads make {tiles} work tiles ((total_q / {tile_m} + "
            f"batch) * heads); allowed: at most {SIZE_MAX}. Split the batch"
        )


def default_scale(q: Tensor) -> float:
    """1 / sqrt(head_dim)."""
    check_are_tensors(q=q)
    _check_rank("q", q)
    check_head_dim("q", q.shape[2], q.dtype)
    return q.shape[2] ** -0.5


def bound_of(name: str, value: object) -> int:
    """max_seqlen_q or max_seqlen_k as a number, or as the SymInt that it is; LONG where it would take a wait.

    It only helps to choose a Config, so a tensor's value is read where it is at hand: in eager code on the CPU.
    """
    if value is None:
        return LONG
    if isinstance(value, Tensor):
        if value.dim() != 0 or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name} must be one whole number, got a tensor {tuple(value.shape)} of {value.dtype}")
        is_at_hand = type(value) is Tensor and value.device.type == "cpu" and not is_compiling()
        return int(value.item()) if is_at_hand else LONG
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, numbers.Integral)):
        raise TypeError(f"{name} must be an int, a 0-d tensor or None, got {type(value).__name__}")
    bound = value if isinstance(value, (int, torch.SymInt)) else int(value)
    _check_bound(name, bound)
    return bound  # type: ignore[return-value]


def _check_bound(name: str, value: int | torch.SymInt) -> None:
    """A symbolic one is not looked at."""
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{name} is {value}; allowed: 0 and more, or None")


def rows_of(sequences: Sequences, total_q: int, total_k: int) -> list[tuple[range, range]]:
    """The rows of each sequence's queries and keys, of tensors on the CPU, or the error that says what is impossible.

    Causal calls count positions from the ends of these.
    """
    s, of_q = sequences, queries_of(sequences, total_q)
    return list(zip(of_q, _rows("k", s.cu_seqlens_k, s.seqused_k, total_k), strict=True))


def queries_of(sequences: Sequences, total_q: int) -> list[range]:
    """The rows of each sequence's queries, likewise."""
    return list(_rows("q", sequences.cu_seqlens_q, sequences.seqused_q, total_q))


def _rows(side: str, offsets: Tensor, used: Tensor | None, total: int) -> Iterator[range]:
    edges = offsets.tolist()
    for i, (edge, before) in enumerate(zip([*edges, total], [0, *edges], strict=True)):
        if edge < before:
            what = f"ends at {before}, past total_{side}" if i == len(edges) else f"holds {edge} after {before}"
            raise ValueError(
                f"cu_seqlens_{side} {what}; allowed: ascending from 0 or more to at most total_{side}, {total}"
            )
    for i, (start, end) in enumerate(zip(edges, edges[1:])):
        length = end - start if used is None else int(used[i])
        if not 0 <= length <= end - start:
            raise ValueError(
                f"seqused_{side}[{i}] is {length}; allowed: 0 to {end - start}, as cu_seqlens_{side} has room for"
            )
        yield range(start, start + length)


def existing(sequences: Sequences, total_q: int) -> Tensor:
    """Which rows of q are queries: (total_q,) of bool. On the device of the offsets, without waiting for it."""
    s = sequences
    rows = torch.arange(total_q, device=s.cu_seqlens_q.device, dtype=torch.int32)
    if s.batch == 0:
        return rows < 0
    # NOTE: of sequences that start at one row all but the last are empty; that one is found.
    at = (torch.bucketize(rows, s.cu_seqlens_q, right=True) - 1).clamp(min=0, max=s.batch - 1)
    start = s.cu_seqlens_q[at]
    end = s.cu_seqlens_q[at + 1] if s.seqused_q is None else start + s.seqused_q[at]
    return (start <= rows) & (rows < end)
