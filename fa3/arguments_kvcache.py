"""The arguments of `flash_attn_with_kvcache` as its caller gave them, and the errors of those that no operator takes.

Nothing here reads a tensor's values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fa3.problem import check_are_tensors
from fa3.problem_kvcache import (
    batch_of,
    cache_problem,
    check_cache,
    check_count,
    check_device,
    check_int,
    check_last_stride,
    check_like,
    check_list,
    check_lists,
    check_out,
    check_rank,
    check_sink,
)
from fa3.serving import Serving

ROTARY_STEP = 16  # of the dims that are rotated, as in FlashAttention-3


class Given(NamedTuple):
    """The tensors of a call under the names that its caller knows."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_seqlens: Tensor | None
    cache_seqlens: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k_new: Tensor | None
    kv_indptr: Tensor | None
    kv_indices: Tensor | None
    kv_last_page_len: Tensor | None
    learnable_sink: Tensor | None
    out: Tensor | None

    @property
    def is_csr(self) -> bool:
        return not (self.kv_indptr is self.kv_indices is self.kv_last_page_len is None)

    def serving(self, lengths: Tensor | None, added: int, max_seqlen_q: int) -> Serving:
        pages = self.kv_indices if self.is_csr else self.page_table
        lists = self.cu_seqlens_k_new, self.cache_leftpad, self.cache_batch_idx, pages, self.kv_indptr
        return Serving(lengths, added, *lists, self.cu_seqlens_q, max_seqlen_q)


def with_own_table(g: Given) -> Given:
    """With pages cache_batch_idx says which row of the table is a sequence's: of these rows a table is made."""
    if g.cache_batch_idx is None or g.page_table is None or g.is_csr:
        return g
    check_are_tensors(q=g.q)
    check_list("page_table", g.page_table, g.q.device, 2)
    check_list("cache_batch_idx", g.cache_batch_idx, g.q.device)
    if g.cu_seqlens_q is None and g.q.dim() > 0:
        check_count("cache_batch_idx", g.cache_batch_idx, g.q.shape[0])
    rows = g.page_table.shape[0]
    if type(g.cache_batch_idx) is Tensor and g.q.device.type == "cpu" and not is_compiling():
        for i, row in enumerate(g.cache_batch_idx.tolist()):
            if not 0 <= row < rows:
                raise ValueError(f"cache_batch_idx[{i}] is {row}; allowed: 0 to {rows - 1}, the rows of page_table")
    return g._replace(page_table=g.page_table.index_select(0, g.cache_batch_idx), cache_batch_idx=None)


def check_given(given: Given, has_length: bool) -> None:
    """Types, devices, dtypes, shapes and strides of all tensors, and which of them go together.

    has_length: the caller said the length of the cache, as a tensor or as an int.
    """
    g = given
    check_cache(g.q, g.k_cache, g.v_cache, g.cu_seqlens_q is not None, g.is_csr or g.page_table is not None)
    if g.is_csr:
        _check_csr(g, has_length)
    elif g.page_table is not None and not has_length:
        raise ValueError("page_table needs cache_seqlens, got None: a table does not say how long a sequence is")
    elif g.k is not None and not has_length:
        raise ValueError("k and v need cache_seqlens, which says where they go, got None")
    problem = cache_problem(g.q, g.k_cache, g.v_cache, g.serving(g.cache_seqlens, 0, 0))
    _check_new_rows(g, problem.batch)
    _check_rotary(g, problem.batch)
    if g.learnable_sink is not None:
        check_sink(g.q, g.learnable_sink)
    if g.out is not None:
        check_out(g.q, problem, g.out)


def _check_csr(g: Given, has_length: bool) -> None:
    """Three lists of pages stand for a page table and lengths."""
    lists = {"kv_indptr": g.kv_indptr, "kv_indices": g.kv_indices, "kv_last_page_len": g.kv_last_page_len}
    missing = [name for name, value in lists.items() if value is None]
    if missing:
        given = " and ".join(name for name in lists if name not in missing)
        raise ValueError(f"{given} given without {' and '.join(missing)}: the three go together")
    for name, is_given in (("page_table", g.page_table is not None), ("cache_seqlens", has_length)):
        if is_given:
            raise ValueError(f"{name} and kv_indptr are both given; allowed: one of them, they say the same")
    check_list("kv_last_page_len", g.kv_last_page_len, g.q.device)
    check_lists(g.q, g.serving(None, 0, 0))
    assert g.kv_last_page_len is not None
    check_count("kv_last_page_len", g.kv_last_page_len, batch_of(g.q, g.cu_seqlens_q))


def _check_new_rows(g: Given, batch: int) -> None:
    k, v, cu_new = g.k, g.v, g.cu_seqlens_k_new
    if (k is None) != (v is None):
        raise ValueError(f"k and v must be given together, got None for {'k' if k is None else 'v'}")
    if k is None or v is None:
        return
    check_are_tensors(k=k, v=v)
    for name, new, cache in (("k", k, g.k_cache), ("v", v, g.v_cache)):
        if cu_new is None:
            check_rank(name, new, "(batch, seqlen_new, heads_kv, head_dim)")
            wanted: tuple = (batch, k.shape[1], *cache.shape[2:])
        else:
            check_rank(name, new, "(total_new, heads_kv, head_dim)")
            wanted = (k.shape[0], *cache.shape[2:])
        if tuple(new.shape) != wanted:
            raise ValueError(f"{name} must have shape {wanted}, as {name}_cache and k say, got {tuple(new.shape)}")
        check_like(name, new, g.q)
        check_last_stride(name, new)


def _check_rotary(g: Given, batch: int) -> None:
    """Tables of angles, and where in them a sequence begins."""
    cos, sin = g.rotary_cos, g.rotary_sin
    if cos is None and sin is None:
        if g.rotary_seqlens is not None:
            raise ValueError("rotary_seqlens is given without rotary_cos and rotary_sin")
        return
    if cos is None or sin is None:
        missing = "rotary_cos" if cos is None else "rotary_sin"
        raise ValueError(f"rotary_cos and rotary_sin must be given together, got None for {missing}")
    if g.k is None and g.rotary_seqlens is None:
        raise ValueError("rotary_cos and rotary_sin without k and v need rotary_seqlens, the positions of q, got None")
    check_are_tensors(rotary_cos=cos, rotary_sin=sin)
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_rank(name, table, "(seqlen_rotary, rotary_dim / 2)")
        if table.dtype not in (g.q.dtype, torch.float32):
            raise TypeError(f"{name} has dtype {table.dtype}; allowed: that of q, {g.q.dtype}, and torch.float32")
        check_device(name, table, g.q.device)
        check_last_stride(name, table)
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        looks = f"{cos.dtype} {tuple(cos.shape)} and {sin.dtype} {tuple(sin.shape)}"
        raise ValueError(f"rotary_cos and rotary_sin must have one shape and dtype, got {looks}")
    dims, head_dim = 2 * cos.shape[1], g.q.shape[-1]
    if dims % ROTARY_STEP != 0 or not 0 < dims <= head_dim:
        raise ValueError(
            f"rotary_cos has {cos.shape[1]} columns, which rotate {dims} dims; allowed: multiples of {ROTARY_STEP} to "
            f"the head_dim of q, {head_dim}"
        )
    if g.rotary_seqlens is not None:
        check_list("rotary_seqlens", g.rotary_seqlens, g.q.device)
        check_count("rotary_seqlens", g.rotary_seqlens, batch)


def check_supported(
    qv: object,
    q_descale: object,
    k_descale: object,
    v_descale: object,
    scheduler_metadata: object,
    pack_gqa: object,
    sm_margin: object,
) -> None:
    """Arguments of FlashAttention-3 that exist for its callers' sake."""
    if not qv is q_descale is k_descale is v_descale is None:
        for name, value in (("qv", qv), ("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
            if value is not None:
                raise NotImplementedError(f"{name} is not supported yet; allowed: None, got {type(value).__name__}")
    if scheduler_metadata is not None and not isinstance(scheduler_metadata, Tensor):
        raise TypeError(f"scheduler_metadata must be a torch.Tensor or None, got {type(scheduler_metadata).__name__}")
    if pack_gqa is not None and not isinstance(pack_gqa, bool):
        raise TypeError(f"pack_gqa must be True, False or None, got {type(pack_gqa).__name__}")
    sm_margin = check_int("sm_margin", sm_margin)
    if sm_margin < 0:
        raise ValueError(f"sm_margin is {sm_margin}; allowed: 0 and more")
    if sm_margin > 0:
        raise NotImplementedError(f"sm_margin={sm_margin} is not supported yet; allowed: 0")


def only_one(first: str, one: Any, second: str, other: Any) -> Any:
    """The argument that has two names."""
    if one is not None and other is not None:
        raise ValueError(f"{first} and {second} are both given; allowed: one of them, they are the same argument")
    return other if one is None else one
