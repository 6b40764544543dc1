"""Many queries of each sequence against a cache, on CUDA tensors: by the ragged forward, not the decode kernel.

A cache without pages is one of as many pages as sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor, int32

from fa3 import launch_varlen
from fa3.problem_variant import Extras
from fa3.problem_varlen import Sequences
from fa3.serving import Serving
from fa3.variant import Variant

QUERIES = 128  # of a sequence, from which on the forward kernels do it
STEP = 16  # keys of a page: a multiple


def suits(seqlen_q: int, page_size: int, s: Serving, num_splits: int, split_size: int) -> bool:
    """Whether the forward kernels take the call. They split no keys and know no padding on the left."""
    is_plain = s.leftpad is None and s.indptr is None and num_splits <= 1 and split_size == 0
    return is_plain and seqlen_q >= QUERIES and page_size % STEP == 0


def forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    s: Serving,
    softmax_scale: float,
    variant: Variant,
    sink: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As launch_decode.forward returns it."""
    is_ragged = s.cu_seqlens_q is not None
    batch = q.shape[0] if s.cu_seqlens_q is None else s.cu_seqlens_q.shape[0] - 1
    used = s.lengths
    if used is None:
        used = q.new_full((batch,), s.added, dtype=int32)
    elif s.added:
        used = used + s.added
    if s.cu_seqlens_k_new is not None:
        used = used + s.cu_seqlens_k_new.diff()
    table = s.page_table
    if table is None:
        table = torch.arange(batch, dtype=int32, device=q.device) if s.batch_idx is None else s.batch_idx
        table = table[:, None]
    capacity = table.shape[1] * k_cache.shape[1]
    extras = Extras(variant, sink, table)
    if is_ragged:
        sequences = Sequences(s.cu_seqlens_q, None, None, used, s.max_seqlen_q, capacity)  # type: ignore[arg-type]
        return launch_varlen.forward(q, k_cache, v_cache, sequences, softmax_scale, variant.causal, out, extras)
    seqlen_q, heads = q.shape[1:3]
    edges = torch.arange(0, (batch + 1) * seqlen_q, seqlen_q, dtype=int32, device=q.device)
    sequences = Sequences(edges, None, None, used, seqlen_q, capacity)  # type: ignore[arg-type]
    made, lse = launch_varlen.forward(
        q.flatten(0, 1), k_cache, v_cache, sequences, softmax_scale, variant.causal, None, extras
    )
    made, lse = made.unflatten(0, (batch, seqlen_q)), lse.view(heads, batch, seqlen_q).transpose(0, 1).contiguous()
    return (made if out is None else out.copy_(made)), lse
