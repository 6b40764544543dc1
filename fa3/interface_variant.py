"""Calls of the public functions with a window, chunks, a soft cap or sinks: imported at the first one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fa3 import launch_paged, launch_variant, ops, ops_variant  # registers the operators
from fa3.operators import is_in_memory, note_written
from fa3.problem import check_are_tensors, check_descales_apply, check_scale, default_scale
from fa3.problem_variant import Extras, check_variant, sink_of
from fa3.problem_varlen import Sequences
from fa3.problem_varlen import default_scale as default_scale_varlen
from fa3.variant import Variant

Result = tuple[Tensor, Tensor]  # out, lse


def _scale(softmax_scale: Any) -> float | None:
    if softmax_scale is None or isinstance(softmax_scale, float):
        return softmax_scale
    check_scale(softmax_scale)
    return float(softmax_scale)


def dense(
    q: Tensor, k: Tensor, v: Tensor, descales: tuple, softmax_scale: Any, variant: Variant, learnable_sink: Any,
    s_aux: Any, keeps_lse: bool,
) -> Result:  # fmt: skip
    """`flash_attn_func`."""
    sink, softmax_scale = sink_of(learnable_sink, s_aux), _scale(softmax_scale)
    is_plain = ops.is_plain(q, k, v) and (sink is None or is_in_memory(sink))
    if is_plain and all(descale is None for descale in descales):
        return launch_variant.forward(q, k, v, softmax_scale, variant, sink, keeps_lse)
    check_are_tensors(q=q, k=k, v=v)
    check_descales_apply(q, *descales)
    check_variant(variant, sink, q)
    return ops_variant.attend(q, k, v, default_scale(q) if softmax_scale is None else softmax_scale, variant, sink)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, softmax_scale: float | None, extras: Extras,
    out: Tensor | None,
) -> Result:  # fmt: skip
    """`flash_attn_varlen_func`."""
    variant, sink, page_table, _ = extras
    lists = *sequences[:4], sink, page_table, out
    if ops.is_plain(q, k, v) and all(x is None or is_in_memory(x) for x in lists):
        made, lse = launch_paged.forward(q, k, v, sequences, softmax_scale, out, extras)
        if out is not None:
            note_written(out)
        return made, lse
    check_are_tensors(q=q, k=k, v=v, cu_seqlens_q=sequences.cu_seqlens_q)
    if page_table is None:
        check_are_tensors(cu_seqlens_k=sequences.cu_seqlens_k)
    optional = {"seqused_q": sequences.seqused_q, "seqused_k": sequences.seqused_k, "out": out}
    check_are_tensors(**{name: value for name, value in optional.items() if value is not None})
    check_variant(variant, sink, q)
    scale = default_scale_varlen(q) if softmax_scale is None else softmax_scale
    return ops_variant.attend_varlen(q, k, v, sequences, scale, extras, out)
