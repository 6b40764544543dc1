"""What fa3/problem.py is for dense calls, for those that attend to a cache: every error of these is raised here.

Nothing here reads values from a GPU: what lengths, page tables and offsets hold is checked on the CPU only. Names in
the messages are those of `flash_attn_with_kvcache`.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa3.kernels.decode.config import ROWS
from fa3.problem import (
    CHECKING_DTYPES,
    DEVICES,
    FP8,
    KERNEL_DTYPES,
    check_are_tensors,
    check_head_dim,
    check_scale,
)
from fa3.problem_varlen import Sequences, rows_of
from fa3.reference_kvcache import sequences_of
from fa3.serving import Serving
from fa3.variant import Variant

SPLIT_STEP = 64  # keys: split_size is a multiple of it
KEYS_MAX = 2**30 - 128  # of a sequence: the kernel counts them, a window and a block more in 32 bits
TILES_MAX = 65535  # of query rows: a dimension of a grid
SINK_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class CacheProblem:
    """A validated call. Sizes may be symbolic."""

    batch: int
    seqlen_q: int | None  # None: q is ragged
    total_q: int  # rows of q
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    page_size: int | None  # None: no pages
    capacity: int | None  # rows that a sequence has room for; None: as many as its pages, which only a list says

    @property
    def out_shape(self) -> tuple[int, ...]:
        rows = (self.total_q,) if self.seqlen_q is None else (self.batch, self.seqlen_q)
        return *rows, self.heads, self.head_dim_v

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (self.heads, self.total_q) if self.seqlen_q is None else (self.batch, self.heads, self.seqlen_q)


def cache_problem(q: Tensor, k_cache: Tensor, v_cache: Tensor, serving: Serving) -> CacheProblem:
    """The CacheProblem of the tensors, or the error that says what is wrong with them."""
    is_ragged, is_paged = serving.cu_seqlens_q is not None, serving.page_table is not None
    check_cache(q, k_cache, v_cache, is_ragged, is_paged)
    check_lists(q, serving)
    batch = batch_of(q, serving.cu_seqlens_q)
    if not is_paged and serving.batch_idx is None and k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache and v_cache must have the batch size of q, {batch}, got {k_cache.shape[0]}; a cache of other "
            "sequences needs cache_batch_idx, one of pages a page_table"
        )
    check_added(k_cache, serving)
    seqlen_q, total_q = (None, q.shape[0]) if is_ragged else (q.shape[1], batch * q.shape[1])
    sizes = (batch, seqlen_q, total_q, q.shape[-2], k_cache.shape[2], q.shape[-1], v_cache.shape[3])
    return CacheProblem(*sizes, k_cache.shape[1] if is_paged else None, capacity_of(k_cache, serving))


def check_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    serving: Serving,
    softmax_scale: float,
    sink: Tensor | None,
    num_splits: int,
    split_size: int,
    out: Tensor | None,
) -> CacheProblem:
    """Everything that the operators take but a Variant, which `variant_of` has checked."""
    problem = cache_problem(q, k_cache, v_cache, serving)
    _check_sizes(problem, serving)
    if isinstance(softmax_scale, (int, float)):  # a symbolic one is checked when it has a value
        check_scale(softmax_scale)
    if sink is not None:
        check_sink(q, sink)
    check_splits(num_splits, split_size)
    if out is not None:
        check_out(q, problem, out)
    return problem


def _check_sizes(problem: CacheProblem, serving: Serving) -> None:
    """What the device counts in 32 bits, and the tiles of a grid. Symbolic sizes are not looked at."""
    p: Any = problem
    if p.page_size is None and type(p.capacity) is int and p.capacity > KEYS_MAX:
        raise ValueError(f"k_cache and v_cache have {p.capacity} rows a sequence; allowed: at most {KEYS_MAX}")
    sizes = serving.max_seqlen_q, p.total_q, p.heads
    if any(type(x) is not int for x in sizes):
        return
    queries = min(serving.max_seqlen_q, p.total_q) if p.seqlen_q is None else p.seqlen_q
    rows, allowed = queries * (p.heads // p.heads_kv), TILES_MAX * ROWS
    if rows > allowed:
        raise ValueError(
            f"a sequence has up to {queries} queries of {p.heads // p.heads_kv} heads for each of k_cache, {rows} "
            f"rows; allowed: at most {allowed}. Split q"
        )


def batch_of(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1


def check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, is_ragged: bool, is_paged: bool) -> None:
    """Types, devices, dtypes, shapes, head ratio, last stride."""
    check_are_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if q.dtype == FP8 or k_cache.dtype == FP8 or v_cache.dtype == FP8:
        raise NotImplementedError(
            f"a cache of {FP8} is not supported yet; allowed: torch.bfloat16 and torch.float16, got q {q.dtype}, "
            f"k_cache {k_cache.dtype}, v_cache {v_cache.dtype}"
        )
    check_rank("q", q, "(total_q, heads, head_dim)" if is_ragged else "(batch, seqlen_q, heads, head_dim)")
    shape = "(pages, page_size, heads_kv, head_dim)" if is_paged else "(batch, seqlen, heads_kv, head_dim)"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_rank(name, cache, shape)
        check_like(name, cache, q)
    if q.device.type not in DEVICES:
        raise ValueError(f"q is on {q.device}; allowed: {', '.join(DEVICES)}")
    if q.dtype not in KERNEL_DTYPES and (q.dtype not in CHECKING_DTYPES or q.device.type == "cuda"):
        raise TypeError(
            f"q has dtype {q.dtype} on {q.device.type}; allowed: torch.bfloat16 and torch.float16, and on CPU "
            "torch.float32 and torch.float64"
        )
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"k_cache and v_cache must have one shape but for the last dimension, got {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}"
        )
    check_head_dim("q", q.shape[-1], q.dtype)
    check_head_dim("v_cache", v_cache.shape[3], q.dtype)
    if k_cache.shape[3] != q.shape[-1]:
        raise ValueError(f"k_cache must have the head_dim of q, {q.shape[-1]}, got {k_cache.shape[3]}")
    heads, heads_kv = q.shape[-2], k_cache.shape[2]
    if heads_kv == 0:
        raise ValueError(f"k_cache and v_cache must have at least 1 head, got q {heads} and k_cache, v_cache 0")
    if heads % heads_kv != 0:
        raise ValueError(
            f"the number of heads of q must be a multiple of that of k_cache and v_cache, got q {heads} and {heads_kv}"
        )
    if is_paged and k_cache.shape[1] == 0:
        raise ValueError("k_cache and v_cache have pages of 0 rows; allowed: 1 and more")
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_last_stride(name, tensor)


def check_lists(q: Tensor, serving: Serving) -> None:
    """Types, devices and shapes of the lists, and which of them go together."""
    s = serving
    if s.cu_seqlens_q is not None:
        check_offsets("cu_seqlens_q", s.cu_seqlens_q, q.device, None)
        _check_max_seqlen(s.max_seqlen_q)
    batch = batch_of(q, s.cu_seqlens_q)
    for name, x in (("cache_seqlens", s.lengths), ("cache_leftpad", s.leftpad), ("cache_batch_idx", s.batch_idx)):
        if x is not None:
            check_list(name, x, q.device)
            check_count(name, x, batch)
    for name, x in (("cu_seqlens_k_new", s.cu_seqlens_k_new), ("kv_indptr", s.indptr)):
        if x is not None:
            check_offsets(name, x, q.device, batch)
    if s.page_table is None:
        if s.indptr is not None:
            raise ValueError("kv_indptr is given without kv_indices")
        return
    _check_pages(s, q.device, batch)


def _check_pages(s: Serving, device: torch.device, batch: int) -> None:
    name, dims = ("page_table", 2) if s.indptr is None else ("kv_indices", 1)
    assert s.page_table is not None
    check_list(name, s.page_table, device, dims)
    if s.indptr is None:
        check_count(name, s.page_table, batch)
    if s.batch_idx is not None:
        raise ValueError(
            f"cache_batch_idx and {name} are both given, which is not supported: a row of the table already says which "
            "pages are the sequence's: permute its rows instead"
        )


def capacity_of(k_cache: Tensor, serving: Serving) -> int | None:
    """Rows that every sequence has room for; None where only a list says."""
    if serving.page_table is None:
        return k_cache.shape[1]
    return None if serving.indptr is not None else serving.page_table.shape[1] * k_cache.shape[1]


def check_added(k_cache: Tensor, serving: Serving) -> None:
    """Whether there is room for the rows that the host knows of."""
    added: Any = serving.added
    if not isinstance(added, int) or (added >= 0 and serving.lengths is not None):
        return
    if added < 0:
        raise ValueError(f"the cache is said to have {added} rows; allowed: 0 and more")
    capacity: Any = capacity_of(k_cache, serving)
    if isinstance(capacity, int) and added > capacity:
        raise ValueError(f"cache_seqlens and the new rows are {added} together, but there is room for {capacity} rows")


def check_sink(q: Tensor, sink: Tensor) -> None:
    check_are_tensors(learnable_sink=sink)
    heads = q.shape[-2]
    if sink.dim() != 1 or sink.shape[0] != heads:
        raise ValueError(f"learnable_sink must have shape (heads,), {(heads,)}, got {tuple(sink.shape)}")
    if sink.dtype not in SINK_DTYPES and not (sink.dtype == q.dtype and sink.dtype in CHECKING_DTYPES):
        raise TypeError(
            f"learnable_sink has dtype {sink.dtype}; allowed: torch.bfloat16, torch.float16 and torch.float32"
        )
    check_device("learnable_sink", sink, q.device)


def check_splits(num_splits: object, split_size: object) -> None:
    num_splits, split_size = check_int("num_splits", num_splits), check_int("split_size", split_size)
    if num_splits < 0:
        raise ValueError(f"num_splits is {num_splits}; allowed: 0 (chosen for the lengths) and more")
    if split_size < 0 or split_size % SPLIT_STEP != 0:
        raise ValueError(f"split_size is {split_size}; allowed: 0 (not fixed) and multiples of {SPLIT_STEP}")
    if num_splits > KEYS_MAX or split_size > KEYS_MAX:
        name, value = ("num_splits", num_splits) if num_splits > KEYS_MAX else ("split_size", split_size)
        raise ValueError(f"{name} is {value}; allowed: at most {KEYS_MAX}")
    if num_splits > 0 and split_size > 0:
        raise ValueError(
            f"num_splits is {num_splits} and split_size is {split_size}; allowed: one of them, the other 0"
        )


def check_out(q: Tensor, problem: CacheProblem, out: Tensor) -> None:
    """A tensor that the result may be written into."""
    check_are_tensors(out=out)
    if tuple(out.shape) != problem.out_shape:
        raise ValueError(f"out must have shape {problem.out_shape}, got {tuple(out.shape)}")
    check_like("out", out, q)
    check_last_stride("out", out)
    if any(stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True) if size > 1):
        raise ValueError(f"out has strides {out.stride()}: every element must have a place of its own, none may be 0")


def check_values(q: Tensor, k_cache: Tensor, serving: Serving, variant: Variant) -> None:
    """What lists on the CPU hold. Of page tables only the entries that are used count."""
    s, rows = serving, k_cache.shape[1]
    if s.cu_seqlens_q is not None:
        same = Sequences(s.cu_seqlens_q, s.cu_seqlens_q, None, None, s.max_seqlen_q, s.max_seqlen_q)
        for i, (queries, _) in enumerate(rows_of(same, q.shape[0], q.shape[0])):
            if len(queries) > s.max_seqlen_q:
                raise ValueError(f"max_seqlen_q is {s.max_seqlen_q}, but sequence {i} has {len(queries)} queries")
    for name, offsets in (("cu_seqlens_k_new", s.cu_seqlens_k_new), ("kv_indptr", s.indptr)):
        if offsets is not None:
            _check_ascending(name, offsets)
    if s.indptr is not None and s.page_table is not None and int(s.indptr[-1]) > s.page_table.shape[0]:
        raise ValueError(f"kv_indptr ends at {int(s.indptr[-1])}, but kv_indices has {s.page_table.shape[0]} pages")
    if s.lengths is not None:
        for i, length in enumerate(s.lengths.tolist()):
            if length < 0 and s.indptr is not None:
                raise ValueError(f"the pages of sequence {i} hold {-length} rows less than k; allowed: all of k's rows")
            if length < 0:
                raise ValueError(f"cache_seqlens[{i}] is {length}; allowed: 0 and more")
    for i, stored in enumerate(sequences_of(q, k_cache, s)):
        start, end = stored.keys.start, stored.keys.stop
        capacity = rows if stored.pages is None else rows * stored.pages.shape[0]
        if end > capacity:
            raise ValueError(
                f"cache_seqlens[{i}] and the new rows are {end} together, but there is room for {capacity} rows"
            )
        if not 0 <= start <= end:
            raise ValueError(f"cache_leftpad[{i}] is {start}; allowed: 0 to the sequence's length, {end}")
        if stored.pages is None:
            if not 0 <= stored.slot < k_cache.shape[0]:
                raise ValueError(f"cache_batch_idx[{i}] is {stored.slot}; allowed: 0 to {k_cache.shape[0] - 1}")
            continue
        seen = stored.rows_seen(variant)
        for at in range(seen.start // rows, -(-seen.stop // rows)):
            if not 0 <= int(stored.pages[at]) < k_cache.shape[0]:
                name = f"page_table[{i}, {at}]" if s.indptr is None else f"kv_indices of sequence {i} at {at}"
                raise ValueError(f"{name} is {int(stored.pages[at])}; allowed: 0 to {k_cache.shape[0] - 1}")


def check_last_pages(indptr: Tensor, last_page_len: Tensor, page_size: int) -> None:
    """What the lists hold, on the CPU."""
    _check_ascending("kv_indptr", indptr)
    edges = indptr.tolist()
    for i, length in enumerate(last_page_len.tolist()):
        if edges[i + 1] > edges[i] and not 1 <= length <= page_size:
            raise ValueError(f"kv_last_page_len[{i}] is {length}; allowed: 1 to the page size, {page_size}")


def _check_ascending(name: str, offsets: Tensor) -> None:
    edges = offsets.tolist()
    for before, edge in zip([0, *edges], edges):
        if edge < before:
            raise ValueError(f"{name} holds {edge} after {before}; allowed: ascending from 0 or more")


def check_int(name: str, value: Any, allowed: str = "an int") -> int:
    """value, an int or one of NumPy's, or the symbol of one."""
    if type(value) is int:  # nearly always, and quick
        return value
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{name} must be {allowed}, got {type(value).__name__}")
    return value if isinstance(value, torch.SymInt) else int(value)  # type: ignore[return-value]


def check_rank(name: str, tensor: Tensor, shape: str) -> None:
    dims = shape.count(",") + 1
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions {shape}, got {tensor.dim()}: {tuple(tensor.shape)}")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} must be on the device of q, {device}, got {tensor.device}")


def check_like(name: str, tensor: Tensor, q: Tensor) -> None:
    check_device(name, tensor, q.device)
    if tensor.dtype != q.dtype:
        raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {tensor.dtype}")


def check_last_stride(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension, which must be contiguous (stride 1)"
        )


def check_list(name: str, value: object, device: torch.device, dims: int = 1) -> None:
    check_are_tensors(**{name: value})
    assert isinstance(value, Tensor)
    if value.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {value.dtype}; allowed: torch.int32. Call {name}.int() first")
    check_device(name, value, device)
    if value.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimension{'s'[: dims - 1]}, got {value.dim()}: {tuple(value.shape)}")


def check_count(name: str, value: Tensor, batch: int) -> None:
    if value.shape[0] != batch:
        raise ValueError(
            f"{name} must have one {'row' if value.dim() > 1 else 'element'} a sequence, {batch}, got {value.shape[0]}"
        )


def check_offsets(name: str, value: object, device: torch.device, batch: int | None) -> None:
    """Offsets have batch + 1 elements; of unknown batch at least 1."""
    check_list(name, value, device)
    assert isinstance(value, Tensor)
    if batch is None and value.shape[0] == 0:
        raise ValueError(f"{name} must have batch + 1 elements, at least 1, got 0")
    if batch is not None and value.shape[0] != batch + 1:
        raise ValueError(f"{name} must have batch + 1 elements, {batch + 1}, got {value.shape[0]}")


def _check_max_seqlen(value: Any) -> None:
    if isinstance(value, int) and value < 0:
        raise ValueError(f"max_seqlen_q is {value}; allowed: 0 and more, or None")
