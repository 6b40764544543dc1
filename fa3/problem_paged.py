"""K and V in pages of a pool -> RaggedProblem: what fa3/problem_varlen.py is for sequences one behind the other.

Nothing here reads values from a GPU: what a page table holds is checked on the CPU only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa3.kernels.forward.config import Spec, tile_for
from fa3.problem import FP8, KERNEL_DTYPES, SIZE_MAX, check_are_tensors, check_scale, check_tensors
from fa3.problem_varlen import RaggedProblem, Sequences
from fa3.tma import why_copied

PAGE_STEP = 16  # keys: what a TMA box of a page must be a multiple of


def paged_problem(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, page_table: Tensor, softmax_scale: float, causal: bool
) -> RaggedProblem:
    """The RaggedProblem of a call, or the error that says what is wrong with it. total_k: of the pool."""
    check_paged(q, k, v, sequences, page_table)
    check_scale(softmax_scale)
    (total_q, heads, head_dim), (pages, page_size, heads_kv, head_dim_v) = q.shape, v.shape
    # fp32 and fp64 run on the CPU only, in the order of the bf16 kernel.
    dtype = KERNEL_DTYPES.get(q.dtype, "bfloat16")
    spec = Spec(dtype, *tile_for(head_dim, head_dim_v), causal, ragged=True, paged=True)
    return RaggedProblem(spec, sequences.batch, total_q, pages * page_size, heads, heads_kv, head_dim, head_dim_v)


def check_paged(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, page_table: Tensor) -> None:
    """Types, devices, dtypes, shapes, head ratio, strides."""
    s = sequences
    check_are_tensors(q=q, k=k, v=v, page_table=page_table)
    if q.dtype == FP8:
        raise NotImplementedError(f"pages of {FP8} are not supported yet; allowed: torch.bfloat16 and torch.float16")
    if q.dim() != 3:
        raise ValueError(f"q must have 3 dimensions (total, heads, head_dim), got {q.dim()}: {tuple(q.shape)}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"with a page_table {name} must have 4 dimensions (pages, page_size, heads_kv, head_dim), got "
                f"{tensor.dim()}: {tuple(tensor.shape)}"
            )
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k and v must have the same pages, got k {tuple(k.shape[:2])}, v {tuple(v.shape[:2])}")
    # As one page is checked all are: their number is no batch.
    check_tensors(q[None, :1].expand(min(k.shape[0], 1), -1, -1, -1), k[:1], v[:1])
    page_size = k.shape[1]
    if page_size < 1:
        raise ValueError(f"k and v have pages of {page_size} keys; allowed: 1 and more")
    if s.cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k must be None with a page_table: seqused_k says how many keys a sequence has")
    if s.seqused_k is None:
        raise ValueError("seqused_k must be given with a page_table: how many keys each sequence has, got None")
    lists = {"cu_seqlens_q": s.cu_seqlens_q, "seqused_q": s.seqused_q, "seqused_k": s.seqused_k}
    ranks = {"page_table": 2}
    for name, tensor in {**{n: t for n, t in lists.items() if t is not None}, "page_table": page_table}.items():
        check_are_tensors(**{name: tensor})
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: torch.int32. Call {name}.int() first")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")
        rank = ranks.get(name, 1)
        if tensor.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimension(s), got {tensor.dim()}: {tuple(tensor.shape)}")
    if s.cu_seqlens_q.shape[0] == 0:
        raise ValueError("cu_seqlens_q must have batch + 1 elements, at least 1, got 0")
    for name, tensor in (("seqused_q", s.seqused_q), ("seqused_k", s.seqused_k), ("page_table", page_table)):
        if tensor is not None and tensor.shape[0] != s.batch:
            raise ValueError(
                f"{name} must have one {'row' if name == 'page_table' else 'element'} a sequence, {s.batch} as "
                f"cu_seqlens_q has {s.batch + 1}, got {tensor.shape[0]}"
            )


def check_pages_of_kernel(k: Tensor, v: Tensor) -> None:
    """What the kernel asks of a pool besides: it is never copied."""
    page_size = k.shape[1]
    if page_size % PAGE_STEP:
        raise NotImplementedError(
            f"k and v have pages of {page_size} keys; allowed for prefill: multiples of {PAGE_STEP}"
        )
    for name, size in (("pages", k.shape[0]), ("page_size", page_size)):
        if size > SIZE_MAX:
            raise ValueError(f"{name} is {size}; allowed: at most {SIZE_MAX}")


def check_layout_of_pool(k: Tensor, v: Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        reason = why_copied(tensor, tensor.data_ptr())
        if reason:
            raise ValueError(f"{name}: {reason}, as pages that are read in place must have it")


def check_values(sequences: Sequences, page_table: Tensor, pages: int, page_size: int) -> None:
    """Of tensors on the CPU: lengths and the pages that they reach."""
    assert sequences.seqused_k is not None
    room = page_table.shape[1] * page_size
    for b, length in enumerate(sequences.seqused_k.tolist()):
        if not 0 <= length <= room:
            raise ValueError(f"seqused_k[{b}] is {length}; allowed: 0 to {room}, as page_table has room for")
        for i, page in enumerate(page_table[b, : -(-length // page_size)].tolist()):
            if not 0 <= page < pages:
                raise ValueError(f"page_table[{b}, {i}] is {page}; allowed: 0 to {pages - 1}")
