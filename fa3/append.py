"""New keys and values written into a cache in place, and rotary embedding, before attention to that cache."""

from __future__ import annotations

import torch
from torch import Tensor

from fa3.kernels.append.config import ROTARY_STEP
from fa3.operators import note_written
from fa3.problem import CHECKING_DTYPES, DEVICES, KERNEL_DTYPES, check_are_tensors, check_head_dim
from fa3.serving import Serving


def append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    serving: Serving,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    interleaved: bool = True,
    each_query_its_own_position: bool = True,
    start: int = 0,
) -> Tensor:
    """Write new rows of K and V into their cache, with their rotary embedding, and return q with its own.

    New row i of sequence b becomes row lengths[b] + i of its cache, where `serving` says that it lies. Left padding
    counts in lengths: it moves no row. Nothing else of the cache is written.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with serving.cu_seqlens_q; bfloat16 or
            float16 on a Hopper GPU, on the CPU float32 and float64 too.
        k_cache, v_cache: (batch_cache, seqlen, heads_kv, head_dim) and (.., head_dim_v), or with serving.page_table
            (pages, page_size, ..); any strides but a contiguous last dimension, any number of elements.
        k, v: (batch, seqlen_new, heads_kv, head_dim) and (.., head_dim_v), or with serving.cu_seqlens_k_new
            (total_new, ..). None, both: nothing is written.
        serving: the lists. Of these `added`, `leftpad` and `max_seqlen_q` are not looked at.
        cos, sin: (positions, rotary_dim / 2) in q's dtype or float32, any row stride; rotary_dim a multiple of 16 up to
            head_dim. The dimensions behind rotary_dim are copied. None, both: no rotary embedding.
        rotary_seqlens: (batch,) in int32: the position of each sequence's new row 0 and query 0; by default lengths.
        interleaved: pairs (2i, 2i + 1), else (i, i + rotary_dim / 2).
        each_query_its_own_position: query i is at its sequence's position + i, as causal and local attention needs it;
            else all queries of a sequence are at the same position. New rows of K always have their own.
        start: rows in the cache before this call where serving.lengths is None.

    Returns:
        q with its rotary embedding in a new, contiguous tensor, or q itself without one. In float32 (float64 of such),
        rounded once. A query that belongs to no sequence is copied.

    On the CPU a row past the cache or its page table, a page or place that does not exist and a position that the
    tables do not have raise ValueError before anything is written. On a GPU, where nothing waits to look, such rows are
    not written, and such positions make NaN. Two new rows that go to one place leave either.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, its value and what is allowed.
        NotImplementedError: an input requires a gradient while gradients are on.
    """
    from fa3 import launch_append, ops_append  # registers the operators

    arguments = (
        q, k_cache, v_cache, k, v, serving, cos, sin, rotary_seqlens, interleaved, each_query_its_own_position, start
    )  # fmt: skip
    if not ops_append.is_plain(*arguments):
        return ops_append.append(*arguments)
    rotated = launch_append.append(*arguments)
    if k is not None:
        note_written(k_cache, v_cache)
    return rotated


def check_append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    serving: Serving,
    cos: Tensor | None,
    sin: Tensor | None,
    rotary_seqlens: Tensor | None,
    start: int = 0,
) -> None:
    """Types, devices, dtypes and shapes of what `append` takes. What lists hold is not looked at."""
    check_are_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if q.device.type not in DEVICES:
        raise ValueError(f"q is on {q.device}; allowed: {', '.join(DEVICES)}")
    allowed = tuple(KERNEL_DTYPES) if q.device.type == "cuda" else (*KERNEL_DTYPES, *CHECKING_DTYPES)
    if q.dtype not in allowed:
        raise TypeError(f"q has dtype {q.dtype} on {q.device.type}; allowed: {', '.join(map(str, allowed))}")
    _check_rows("q", q, q, serving.cu_seqlens_q, "cu_seqlens_q")
    check_head_dim("q", q.shape[-1], q.dtype)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_alike(name, cache, q)
        if cache.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch or pages, seqlen or page_size, heads_kv, head_dim), got "
                f"{tuple(cache.shape)}"
            )
    if tuple(v_cache.shape[:3]) != tuple(k_cache.shape[:3]):
        raise ValueError(
            f"k_cache and v_cache must have one shape but for head_dim, got {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}"
        )
    if k_cache.shape[3] != q.shape[-1]:
        raise ValueError(f"k_cache must have the head_dim of q, {q.shape[-1]}, got {k_cache.shape[3]}")
    check_head_dim("v_cache", v_cache.shape[3], q.dtype)
    batch = _batch(q, serving.cu_seqlens_q)
    _check_lists(serving, rotary_seqlens, batch, q.device)
    _check_new(q, k_cache, v_cache, k, v, serving, batch)
    _check_tables(q, cos, sin, rotary_seqlens)
    check_start(start)


def check_start(start: object) -> None:
    if not isinstance(start, (int, torch.SymInt)) or isinstance(start, bool):
        raise TypeError(f"start must be an int, got {type(start).__name__}")
    if isinstance(start, int) and not 0 <= start < 2**31:
        raise ValueError(f"start is {start}; allowed: 0 to {2**31 - 1}")


def _batch(x: Tensor, offsets: Tensor | None) -> int:
    return x.shape[0] if offsets is None else offsets.shape[0] - 1


def _check_new(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, serving: Serving, batch: int
) -> None:
    if k is None and v is None:
        return
    if k is None or v is None:
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing} is None and {given} is not; allowed: both or neither")
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_are_tensors(**{name: x})
        _check_rows(name, x, q, serving.cu_seqlens_k_new, "cu_seqlens_k_new")
        if tuple(x.shape[-2:]) != tuple(cache.shape[2:]):
            raise ValueError(
                f"{name} must have the heads and head_dim of {name}_cache, {tuple(cache.shape[2:])}, got "
                f"{tuple(x.shape[-2:])}"
            )
    if tuple(k.shape[:-1]) != tuple(v.shape[:-1]):
        raise ValueError(f"k and v must have one shape but for head_dim, got {tuple(k.shape)} and {tuple(v.shape)}")
    if _batch(k, serving.cu_seqlens_k_new) != batch:
        raise ValueError(
            f"k and v must have as many sequences as q, {batch}, got {_batch(k, serving.cu_seqlens_k_new)}"
        )
    if serving.page_table is not None and k_cache.shape[1] == 0:
        raise ValueError("k_cache has pages of 0 rows; allowed: 1 or more")


def _check_rows(name: str, x: Tensor, q: Tensor, offsets: Tensor | None, offsets_name: str) -> None:
    _check_alike(name, x, q)
    rank, form = (4, "(batch, seqlen, heads, head_dim)") if offsets is None else (3, "(total, heads, head_dim)")
    if x.dim() != rank:
        told = "without" if offsets is None else "with"
        raise ValueError(f"{name} must be {form} {told} {offsets_name}, got {tuple(x.shape)}")


def _check_alike(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != q.dtype:
        raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if x.dim() and x.stride(-1) != 1:
        raise ValueError(f"{name} has stride {x.stride(-1)} in its last dimension, which must be contiguous (stride 1)")


def _check_lists(serving: Serving, rotary_seqlens: Tensor | None, batch: int, device: torch.device) -> None:
    s = serving
    if s.page_table is not None and s.batch_idx is not None:
        raise ValueError("cache_batch_idx is given with a page_table; allowed: one of them")
    if s.page_table is None and s.indptr is not None:
        raise ValueError("indptr is given without a page_table; allowed: with one")
    each = (batch,)
    for name, x, shape in (
        ("cu_seqlens_q", s.cu_seqlens_q, (batch + 1,)),
        ("cu_seqlens_k_new", s.cu_seqlens_k_new, (batch + 1,)),
        ("cache_seqlens", s.lengths, each),
        ("cache_batch_idx", s.batch_idx, each),
        ("rotary_seqlens", rotary_seqlens, each),
        ("indptr", s.indptr, (batch + 1,)),
        ("page_table", s.page_table, (batch, None) if s.indptr is None else (None,)),
    ):
        if x is not None:
            _check_list(name, x, shape, device)


def _check_list(name: str, x: Tensor, shape: tuple[int | None, ...], device: torch.device) -> None:
    check_are_tensors(**{name: x})
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}; allowed: torch.int32. Call {name}.int() first")
    if x.device != device:
        raise ValueError(f"{name} must be on the device of q, {device}, got {x.device}")
    wrong = x.dim() != len(shape) or any(want not in (None, got) for want, got in zip(shape, x.shape))
    if wrong:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(x.shape)}")


def _check_tables(q: Tensor, cos: Tensor | None, sin: Tensor | None, rotary_seqlens: Tensor | None) -> None:
    if cos is None and sin is None:
        if rotary_seqlens is not None:
            raise ValueError("rotary_seqlens is given without rotary_cos and rotary_sin; allowed: with both")
        return
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x is None:
            raise ValueError(f"{name} is None and the other table is not; allowed: both or neither")
        check_are_tensors(**{name: x})
        if x.dtype not in (q.dtype, torch.float32):
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: that of q, {q.dtype}, and torch.float32")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
        if x.dim() != 2 or x.shape[0] == 0 or x.shape[1] == 0 or (2 * x.shape[1]) % ROTARY_STEP:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; allowed: (positions, rotary_dim / 2) of 1 position or more, "
                f"rotary_dim a multiple of {ROTARY_STEP}"
            )
        if 2 * x.shape[1] > q.shape[-1]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, for rotary_dim {2 * x.shape[1]}; allowed: up to head_dim, "
                f"{q.shape[-1]}"
            )
        if x.stride(1) != 1:
            raise ValueError(f"{name} has stride {x.stride(1)} in its last dimension, which must be contiguous")
    assert cos is not None and sin is not None
    if cos.dtype != sin.dtype or tuple(cos.shape) != tuple(sin.shape):
        raise ValueError(
            f"rotary_cos and rotary_sin must be alike, got {cos.dtype} {tuple(cos.shape)} and {sin.dtype} "
            f"{tuple(sin.shape)}"
        )
