"""The public function of ragged attention: sequences of any lengths one after the other, without padding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fa3 import launch_varlen, ops_varlen  # registers the operators
from fa3.operators import note_written
from fa3.problem import (
    check_are_tensors,
    check_descales_apply,
    check_flags,
    check_later_arguments,
    check_scale,
)
from fa3.problem_kvcache import check_splits
from fa3.problem_variant import Extras, sink_of, table_of
from fa3.problem_varlen import Sequences, bound_of, check_ragged, default_scale
from fa3.variant import Variant, variant_of


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    out: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    page_table: Tensor | None = None,
    block_table: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
) -> Any:  # Tensor, or (Tensor, Tensor)
    """`flash_attn_func` of many sequences at once, each to itself, of lengths that only the device need know.

    Sequence b has the queries q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]] and the keys k[cu_seqlens_k[b] :
    cu_seqlens_k[b + 1]]; where seqused_q or seqused_k is given, only that many first ones of these.

    Args:
        q: (total_q, heads, head_dim), bfloat16 or float16 on a Hopper GPU.
        k, v: (total_k, heads_kv, head_dim) and (total_k, heads_kv, head_dim_v) of q's dtype and device. Heads, head
            dims and strides: as in `flash_attn_func`.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) in int32 on q's device, ascending from 0 or more to total_q or total_k
            at most. Any sequence may have length 0, of queries, of keys or of both; batch may be 0.
        max_seqlen_q, max_seqlen_k: bounds on the lengths, an int or a 0-d tensor, or None. They choose the kernel's
            tile and change nothing else: a bound that is too large or too small costs speed at most. The value of a
            tensor on the GPU is not read: it stands for long sequences, as None does.
        seqused_q, seqused_k: (batch,) in int32 on q's device, at least 0 and at most the lengths by cu_seqlens. What
            lies behind them is padding: never read, and in out never written.
        softmax_scale: finite, >= 0; by default 1 / sqrt(head_dim).
        causal: query i of a sequence sees its key j where j <= i + its keys - its queries (bottom-right), else all.
        page_table, or block_table: (batch, width) in int32 on q's device, any strides. Then k and v are pools of pages,
            (pages, page_size, heads_kv, head_dim) and (pages, page_size, heads_kv, head_dim_v), any strides that TMA
            takes (they are not copied), cu_seqlens_k is None, and sequence b has seqused_k[b] keys, which lie in the
            pages page_table[b, :] one after the other. Entries behind its last page are not read, nor are the pages.
            Few queries of each sequence (max_seqlen_q below 128) go to the kernels of `flash_attn_with_kvcache`, and so
            do pages of a size that is no multiple of 16; with seqused_q it must be one on a GPU.
        num_splits: with pages: into how many parts the keys of a sequence are split at most, 0 for as many as the
            device finds best (give it where there are few queries). Without pages 1 or 0: nothing is split.
        scheduler_metadata: accepted and not looked at: there is no plan.
        out: (total_q, heads, head_dim_v) in q's dtype, on its device, with a contiguous last dimension: the result is
            written into it, and it is returned. It must not overlap q, k or v.
        window_size, attention_chunk, softcap, learnable_sink, s_aux: as in `flash_attn_func`, of each sequence alone.
        qv, q_descale, k_descale, v_descale, sm_margin: not supported here yet: must hold their defaults. pack_gqa: with
            pages a hint that is not needed; without None or False.
        deterministic: the forward always is.
        return_attn_probs, return_lse: both mean: return (out, lse). The first is FlashAttention-3's name.

    Returns:
        out (total_q, heads, head_dim_v) in q's dtype; with return_lse also lse (heads, total_q) in float32, the natural
        logarithm of the sum of the exponentials of the scaled scores. A query that sees no key has output 0 and LSE
        -inf, or the sink. Rows of q that are no queries have, with seqused_q, output 0 and LSE -inf. Without seqused_q
        only rows before cu_seqlens_q[0] and from cu_seqlens_q[-1] on are no queries, and there both are uninitialised
        memory, as in FlashAttention-3. A given out keeps what it holds in rows that are no queries.

    Nothing waits for the device. What cu_seqlens and seqused hold may change between replays of a CUDA graph; make one
    call before its capture, which loads the kernel. CPU tensors run `fa3.reference.ragged_attention` in the kernel's
    tiles, float32 and float64 too. A call allocates out, lse, a counter of 4 bytes where there are many
    tiles, and copies of what TMA cannot take (see `flash_attn_func`). A copied out is written back whole.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, its value and what is allowed. What
            cu_seqlens and seqused hold is checked on the CPU; on a GPU other values than allowed are undefined.
        NotImplementedError: an argument is not supported yet, or an input requires a gradient while gradients are on.
        fa3.kernels.compile.CompilerMissing, LoaderMissing: as in `flash_attn_func`.
    """
    pages = table_of(page_table, block_table)
    if pages is None:
        check_later_arguments(qv, num_splits, pack_gqa, sm_margin)
    else:
        check_later_arguments(qv, 1, None, sm_margin)
        check_splits(num_splits, 0)
    check_flags(causal=causal, return_attn_probs=return_attn_probs, return_lse=return_lse)
    if softmax_scale is not None and not isinstance(softmax_scale, float):
        check_scale(softmax_scale)
        softmax_scale = float(softmax_scale)
    bounds = bound_of("max_seqlen_q", max_seqlen_q), bound_of("max_seqlen_k", max_seqlen_k)
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *bounds)  # type: ignore[arg-type]
    if q_descale is not None or k_descale is not None or v_descale is not None:
        check_descales_apply(q, q_descale, k_descale, v_descale)
        check_ragged(q, k, v, sequences)  # says that FP8 comes later
    # fmt: off
    if (  # by type too: an array would compare element by element, a CUDA tensor would wait for the device
        type(window_size) is not tuple or window_size != (-1, -1) or type(attention_chunk) is not int
        or attention_chunk != 0 or type(softcap) is not float or softcap != 0.0
        or learnable_sink is not None or s_aux is not None or pages is not None
    ):
        variant, sink = variant_of(causal, window_size, attention_chunk, softcap), sink_of(learnable_sink, s_aux)
        extras = Extras(variant, sink, pages, int(num_splits))
        if sink is not None or extras.page_table is not None or variant != Variant(causal):
            from fa3.interface_variant import varlen

            made, lse = varlen(q, k, v, sequences, softmax_scale, extras, out)
            return (made, lse) if return_attn_probs or return_lse else made
    # fmt: on
    if ops_varlen.is_plain(q, k, v, sequences, out):
        made, lse = launch_varlen.forward(q, k, v, sequences, softmax_scale, causal, out)
        if out is not None:
            note_written(out)
    else:
        check_are_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        optional = {"seqused_q": seqused_q, "seqused_k": seqused_k, "out": out}
        check_are_tensors(**{name: value for name, value in optional.items() if value is not None})
        made, lse = ops_varlen.attend(
            q, k, v, sequences, default_scale(q) if softmax_scale is None else softmax_scale, causal, out
        )
    return (made, lse) if return_attn_probs or return_lse else made
