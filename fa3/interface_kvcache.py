"""The public functions of serving: attention to a cache of keys and values, dense or in pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fa3 import ops_kvcache  # registers the operators
from fa3.arguments_kvcache import Given, check_given, check_supported, only_one, with_own_table
from fa3.launch import remember
from fa3.operators import note_written
from fa3.problem import MAX_SCALE, check_flags, check_gradients, check_scale
from fa3.problem_kvcache import (
    SINK_DTYPES,
    batch_of,
    check_added,
    check_int,
    check_last_pages,
    check_splits,
    check_values,
)
from fa3.problem_varlen import bound_of
from fa3.serving import Serving
from fa3.variant import Variant, variant_of

_valid: dict[tuple, bool] = {}  # looks of the tensors of calls that were checked


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    out: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    split_size: int = 0,
    block_table: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    kv_last_page_len: Tensor | None = None,
) -> Any:  # Tensor, or (Tensor, Tensor)
    """Attention of a few queries a sequence to the keys that a cache holds of it, after new ones were added to it.

    The keys of sequence b are rows cache_leftpad[b] .. cache_seqlens[b] + new rows - 1 of its cache. Its own is the
    b-th, or the cache_batch_idx[b]-th; with pages row i is in page page_table[b, i // page_size]. What lies past a
    sequence's end, and the entries of a page table past it, are never read.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or with cu_seqlens_q (total_q, heads, head_dim), bfloat16 or float16 on
            a Hopper GPU. Of every sequence the last queries belong to its last keys (bottom-right).
        k_cache, v_cache: (batch, seqlen, heads_kv, head_dim) and (.., head_dim_v), or with pages (pages, page_size,
            heads_kv, ..), of q's dtype and device. heads_kv divides heads; head dims are multiples of 8 to 256. The
            last stride is 1; on a GPU the others, where a dimension has more than one element, and the address are
            multiples of 16 bytes: a cache is not copied. A page has any number of rows.
        k, v: rows to be written into the cache, in place, behind the cache_seqlens[b] that it has, before attention:
            (batch, seqlen_new, heads_kv, ..), or with cu_seqlens_k_new (total_new, heads_kv, ..).
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2) in q's dtype or float32: they rotate q and k. The first
            new row and the first query of a sequence take row rotary_seqlens[b], by default cache_seqlens[b]; those
            that follow take the rows that follow, but without causal and window every query takes the first one's.
            Without k only q is rotated, and rotary_seqlens is needed. rotary_dim is a multiple of 16.
        rotary_interleaved: dims 2i and 2i + 1 are a pair, else i and i + rotary_dim / 2.
        cache_seqlens: rows in the cache before the call, (batch,) in int32 or one int for all sequences. By default
            all rows; k and page_table need it.
        cache_batch_idx, cache_leftpad: (batch,) in int32. The first not with kv_indptr.
        page_table: (batch, pages of the longest) in int32, any strides. block_table is another name of it. With
            cache_batch_idx it has any number of rows, and that says which one is a sequence's.
        cu_seqlens_q, cu_seqlens_k_new: (batch + 1,) in int32, ascending. The second says nothing without k and v: it is
            not looked at, as in FlashAttention-3.
        max_seqlen_q: with cu_seqlens_q, a bound on the queries of a sequence; by default, and where the number is on
            the GPU, total_q.
        rotary_seqlens: (batch,) in int32.
        softmax_scale: finite, >= 0; by default 1 / sqrt(head_dim).
        causal, window_size, attention_chunk, softcap: as in FlashAttention-3. Query i of n stands at key p = i + keys -
            n. causal: it sees keys to p. window_size (left, right): keys p - left .. p + right, both of them too; -1
            or None is unlimited. attention_chunk: the keys of p's chunk, counted from the first key. softcap: scaled
            scores become softcap * tanh(score / softcap), before a mask.
        learnable_sink: (heads,) in bfloat16, float16 or float32: one more score of every query, as it is (not scaled
            or capped), which takes part in the denominator and the LSE and adds nothing to out. s_aux is another name.
        num_splits: parts that a sequence's keys are cut into; 0: chosen on the device by the lengths. split_size: keys
            of a part instead, a multiple of 64; 0: not fixed.
        kv_indptr, kv_indices, kv_last_page_len: pages in CSR form instead of page_table and cache_seqlens, int32: of
            sequence b kv_indices[kv_indptr[b] : kv_indptr[b + 1]], all full but the last one, which has
            kv_last_page_len[b] rows. These count the rows of k and v too, which are the last of the sequence.
        out: of the shape of the result in q's dtype, with a contiguous last dimension: it is written and returned. It
            must not overlap other arguments.
        scheduler_metadata, pack_gqa: taken and not needed. qv, q_descale, k_descale, v_descale, sm_margin: not
            supported here yet: must hold their defaults.
        return_softmax_lse: return (out, lse).

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) or (total_q, heads, head_dim_v) in q's dtype; with return_softmax_lse
        also lse (batch, heads, seqlen_q) or (heads, total_q) in float32, the natural logarithm of the row sum. A query
        that sees no key has output 0 and as LSE its head's sink, or -inf. Rows of q before cu_seqlens_q[0] and from
        cu_seqlens_q[-1] on are no queries: there both are uninitialised memory, and a given out keeps what it holds.

    Sequences of 128 queries and more (max_seqlen_q of ragged ones) are computed by the forward kernels of
    `flash_attn_varlen_func` where these can, which is where no splits are asked for, no cache_leftpad and no kv_indptr,
    and page_size, or the cache's seqlen, is a multiple of 16; all others by the decode kernel, whatever their length.
    Nothing waits for the device. All lists may change between replays of a CUDA graph. CPU tensors run
    `fa3.reference_kvcache.kvcache_attention`, float32 and float64 too.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, its value and what is allowed. What lists
            hold is checked on the CPU; on a GPU other values than allowed are undefined.
        NotImplementedError: an argument is not supported yet, or an input requires a gradient while gradients are on.
        fa3.kernels.compile.CompilerMissing, LoaderMissing: as in `flash_attn_func`.
    """
    if not type(causal) is type(rotary_interleaved) is type(return_softmax_lse) is bool:
        check_flags(causal=causal, rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse)
    check_supported(qv, q_descale, k_descale, v_descale, scheduler_metadata, pack_gqa, sm_margin)
    check_splits(num_splits, split_size)
    variant = variant_of(causal, window_size, attention_chunk, softcap)
    lists = cache_batch_idx, cache_leftpad, only_one("page_table", page_table, "block_table", block_table)
    sink = only_one("learnable_sink", learnable_sink, "s_aux", s_aux)
    pages = kv_indptr, kv_indices, kv_last_page_len
    lengths, count = _lengths(cache_seqlens)
    new = k, v, rotary_cos, rotary_sin, rotary_seqlens
    if k is v is None:
        cu_seqlens_k_new = None  # SGLang gives it in calls that add nothing
    given = Given(q, k_cache, v_cache, *new, lengths, *lists, cu_seqlens_q, cu_seqlens_k_new, *pages, sink, out)
    is_plain = ops_kvcache.is_plain(q, k_cache, v_cache, given[3:])
    if cache_batch_idx is not None:
        given = with_own_table(given)
    if not (is_plain and _is_checked_at_launch(given, cache_seqlens is not None)):
        _check(given, cache_seqlens is not None, is_plain)
    serving = _serving(given, count, max_seqlen_q)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    elif type(softmax_scale) is not float or not 0.0 <= softmax_scale <= MAX_SCALE:
        check_scale(softmax_scale)
        softmax_scale = float(softmax_scale)
    if k is not None or rotary_cos is not None:
        is_local = variant.window_left >= 0 or variant.window_right >= 0 or variant.attention_chunk > 0
        q = _append(given, serving, count or 0, rotary_interleaved, causal or is_local, variant)
    call = q, k_cache, v_cache, serving, softmax_scale, variant, sink, int(num_splits), int(split_size), out
    if is_plain:
        from fa3 import launch_decode  # what a call on the CPU does without

        made, lse = launch_decode.forward(*call)
        if out is not None:
            note_written(out)
    else:
        made, lse = ops_kvcache.attend(ops_kvcache.Call(*call))
    return (made, lse) if return_softmax_lse else made


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """FlashAttention-3's plan of a call, which there is none of here: an empty int32 tensor on cache_seqlens' device.

    For callers that make one before every step. The kernel finds its work from the lengths on the device.
    """
    if not isinstance(cache_seqlens, Tensor):
        raise TypeError(f"cache_seqlens must be a torch.Tensor, got {type(cache_seqlens).__name__}")
    return cache_seqlens.new_empty(0, dtype=torch.int32)


def _lengths(cache_seqlens: Any) -> tuple[Any, int | None]:
    """cache_seqlens as a list on the device, or as a number that the host knows."""
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        return cache_seqlens, None
    count = check_int("cache_seqlens", cache_seqlens, "an int, a torch.Tensor or None")
    if count < 0:
        raise ValueError(f"cache_seqlens is {count}; allowed: 0 and more")
    return None, count


def _is_checked_at_launch(g: Given, has_length: bool) -> bool:
    """Of plain tensors: whether the launch looks at them anyway, by the key of a plan and in the compiled function.

    Each step of decoding is such a call. What these two would let through is asked here.
    """
    return (
        g.k is g.v is g.rotary_cos is g.rotary_sin is g.rotary_seqlens is None
        and g.kv_indptr is g.kv_indices is g.kv_last_page_len is None
        and (has_length or g.page_table is None)
        and g.k_cache.dim() == 4
        and g.q.dim() == (4 if g.cu_seqlens_q is None else 3)
        and g.q.shape[-1] > 0
        and (g.learnable_sink is None or g.learnable_sink.dtype in SINK_DTYPES)
        and (g.out is None or 0 not in g.out.stride())
    )


def _check(given: Given, has_length: bool, is_plain: bool) -> None:
    """Tensors that look like those of an earlier call are right: a step of decoding repeats its looks."""
    if not is_plain:
        check_given(given, has_length)
        return
    looks = [x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in given]
    key = has_length, *looks
    if key not in _valid:
        check_given(given, has_length)
        remember(_valid, key, True)


def _serving(given: Given, count: int | None, max_seqlen_q: int | Tensor | None) -> Serving:
    g = given
    lengths = g.cache_seqlens
    added = 0 if g.k is None or g.cu_seqlens_k_new is not None else g.k.shape[1]
    if g.is_csr:
        lengths = _lengths_before(g, added)
    elif count is not None and g.cu_seqlens_k_new is not None:
        lengths = torch.full((batch_of(g.q, g.cu_seqlens_q),), count, dtype=torch.int32, device=g.q.device)
    elif count is not None:
        added = added + count
    elif lengths is None:
        added = g.k_cache.shape[1]
    serving = g.serving(lengths, added, _bound(g, max_seqlen_q))
    check_added(g.k_cache, serving)
    return serving


def _bound(g: Given, max_seqlen_q: int | Tensor | None) -> int:
    """On the queries of a sequence. Where they are ragged and nobody says, or only the GPU knows: all of them."""
    if g.cu_seqlens_q is None:
        return g.q.shape[1]
    if type(max_seqlen_q) is int and max_seqlen_q >= 0:  # nearly always
        return max_seqlen_q
    bound = bound_of("max_seqlen_q", max_seqlen_q)
    is_known = max_seqlen_q is not None and (not isinstance(max_seqlen_q, Tensor) or _is_at_hand(max_seqlen_q))
    return bound if is_known else g.q.shape[0]


def _lengths_before(g: Given, added: int) -> Tensor:
    """Rows that the pages of each sequence hold without the new ones."""
    assert g.kv_indptr is not None and g.kv_last_page_len is not None
    if _is_at_hand(g.q):
        check_last_pages(g.kv_indptr, g.kv_last_page_len, g.k_cache.shape[1])
    pages = g.kv_indptr[1:] - g.kv_indptr[:-1]
    lengths = torch.where(pages > 0, (pages - 1) * g.k_cache.shape[1] + g.kv_last_page_len, 0)
    if g.cu_seqlens_k_new is not None:
        return lengths - (g.cu_seqlens_k_new[1:] - g.cu_seqlens_k_new[:-1])
    return lengths if g.k is None else lengths - added


def _append(
    given: Given, serving: Serving, start: int, interleaved: bool, each_its_own: bool, variant: Variant
) -> Tensor:
    """Writes the new rows into the caches, from row `start` where there are no lengths; q rotated, or as it is."""
    from fa3.append import append  # what most calls do without

    g = given
    tensors = [x for x in (g.q, g.k_cache, g.v_cache, g.k, g.v, g.learnable_sink, g.out) if x is not None]
    check_gradients(*tensors)
    if _is_at_hand(g.q):
        check_values(g.q, g.k_cache, serving, variant)  # before anything is written
    rotary = g.rotary_cos, g.rotary_sin, g.rotary_seqlens
    return append(g.q, g.k_cache, g.v_cache, g.k, g.v, serving, *rotary, interleaved, each_its_own, start)


def _is_at_hand(x: Tensor) -> bool:
    """Values that may be looked at: on the CPU, in eager code."""
    return type(x) is Tensor and x.device.type == "cpu" and not is_compiling()
