"""Ragged queries against pages of K and V, on CUDA tensors: few of each sequence by the decode kernel, which packs the
heads of a group and splits keys, many by the ragged forward.
"""

from __future__ import annotations

from torch import Tensor

from fa3 import launch_decode, launch_prefill, launch_varlen
from fa3.launch import remember
from fa3.problem_paged import check_paged
from fa3.problem_variant import Extras, check_variant
from fa3.problem_varlen import Sequences, check_out, default_scale
from fa3.serving import Serving

_checked: dict[tuple, bool] = {}


def forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, softmax_scale: float | None, out: Tensor | None,
    extras: Extras,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As launch_varlen.forward returns it."""
    variant, sink, page_table, num_splits = extras
    cu_q, _, used_q, used_k, max_q, _ = sequences
    if page_table is None or used_q is not None:
        return launch_varlen.forward(q, k, v, sequences, softmax_scale, variant.causal, out, extras)
    # NOTE: by the shapes that are asked for below, so that the errors are those of this function's arguments.
    key = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.get_device(), cu_q.shape,
        sequences.cu_seqlens_k is None,
        None if used_k is None else used_k.shape, page_table.shape, None if sink is None else sink.shape,
    )  # fmt: skip
    if key not in _checked:
        check_paged(q, k, v, sequences, page_table)
        check_variant(variant, sink, q)
        remember(_checked, key, True)
    if out is not None:
        check_out(q, v, out)
    serving = Serving(used_k, 0, None, None, None, page_table, None, cu_q, min(max_q, q.shape[0]))
    if launch_prefill.suits(serving.max_seqlen_q, k.shape[1], serving, num_splits, 0):
        return launch_varlen.forward(q, k, v, sequences, softmax_scale, variant.causal, out, extras)
    scale = default_scale(q) if softmax_scale is None else softmax_scale
    return launch_decode.forward(q, k, v, serving, scale, variant, sink, num_splits, 0, out)
