"""What a variant of attention asks of the kernel: its Spec's fields, its numbers, and the errors of its arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fa3.kernels.forward.config import Spec
from fa3.problem import FP8, MAX_SCALE, Problem, check_are_tensors
from fa3.problem_varlen import RaggedProblem
from fa3.reference import LOG2_E, SMALLEST_SCALE
from fa3.variant import UNLIMITED, Variant

SINK_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
FARTHEST = 2**31 - 2  # keys on a side of a window, on the device
LARGEST = torch.finfo(torch.float32).max

Numbers = tuple[int, int, int, float, Tensor | None]  # kernels.forward.kernel.VariantNumbers
Validated = TypeVar("Validated", Problem, RaggedProblem)


class Extras(NamedTuple):
    """What a ragged call may say beyond a plain one."""

    variant: Variant
    sink: Tensor | None  # (heads,)
    page_table: Tensor | None = None  # (batch, width); then k and v are (pages, page_size, heads_kv, d)
    num_splits: int = 1  # of the keys of a sequence in pages, 0: as the device finds best


def simplified(variant: Variant, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Variant:
    """The same keys for all queries, said with causal alone where that is enough. Lengths: where they are known.

    What stays has no causal: a window that ends at the query's own position says the same.
    """
    left, right, chunk = variant.window_left, variant.window_right, variant.attention_chunk
    if variant.causal:
        right = 0
    if seqlen_q is not None and seqlen_k is not None:
        if left >= seqlen_k - 1:
            left = UNLIMITED
        if right >= max(seqlen_q - 1, 1):
            right = UNLIMITED
        # Positions before the first key see nothing in chunks.
        if chunk >= seqlen_k and (seqlen_q <= seqlen_k or right == 0):
            chunk = 0
    if left == UNLIMITED and right in (UNLIMITED, 0) and chunk == 0:
        return Variant(causal=right == 0, softcap=variant.softcap)
    return Variant(False, left, right, chunk, variant.softcap)


def with_variant(problem: Validated, variant: Variant, sink: Tensor | None) -> Validated:
    """The problem with the Spec of a variant that is `simplified`."""
    is_local = variant.window_left >= 0 or variant.window_right >= 0 or variant.attention_chunk > 0
    local = "" if not is_local else "chunk" if variant.attention_chunk else "window"
    sink_dtype = "" if sink is None else SINK_DTYPES.get(sink.dtype, "float32")
    fields = dict(causal=variant.causal, local=local, softcap=variant.softcap > 0, sink=sink_dtype)
    spec: Spec = replace(problem.spec, **fields)  # type: ignore[arg-type]
    return replace(problem, spec=spec)


def numbers_of(variant: Variant, softmax_scale: float, sink: Tensor | None) -> tuple[Numbers, float]:
    """What the kernel takes of the variant, and the scale of its softmax, base 2."""
    left, right = (FARTHEST if side < 0 else min(side, FARTHEST) for side in variant[1:3])
    chunk = min(variant.attention_chunk or FARTHEST, FARTHEST)
    cap = variant.softcap
    inner = min(softmax_scale / cap, LARGEST) if cap else 1.0
    return (left, right, chunk, inner, sink), max(cap or softmax_scale, SMALLEST_SCALE) * LOG2_E


def sink_of(learnable_sink: object, s_aux: object) -> Tensor | None:
    """Two names of one argument."""
    if learnable_sink is not None and s_aux is not None:
        raise ValueError("learnable_sink and s_aux are two names of one argument; allowed: one of them")
    sink = s_aux if learnable_sink is None else learnable_sink
    if sink is not None:
        check_are_tensors(**{"learnable_sink" if s_aux is None else "s_aux": sink})
    return sink  # type: ignore[return-value]


def table_of(page_table: object, block_table: object) -> Tensor | None:
    """Two names of one argument."""
    if page_table is not None and block_table is not None:
        raise ValueError("page_table and block_table are two names of one argument; allowed: one of them")
    table = block_table if page_table is None else page_table
    if table is not None:
        check_are_tensors(**{"page_table" if block_table is None else "block_table": table})
    return table  # type: ignore[return-value]


def check_variant(variant: Variant, sink: Tensor | None, q: Tensor) -> None:
    """q is valid: (.., heads, head_dim)."""
    if q.dtype == FP8:
        raise NotImplementedError(
            f"window_size, attention_chunk, softcap and learnable_sink are not supported for {FP8} yet; allowed: "
            "their defaults, or torch.bfloat16 and torch.float16"
        )
    if not variant.softcap <= MAX_SCALE:
        raise ValueError(f"softcap is {variant.softcap}; allowed: up to {MAX_SCALE:.3g}")
    if sink is None:
        return
    heads = q.shape[-2]
    if sink.dim() != 1 or sink.shape[0] != heads:
        raise ValueError(f"learnable_sink must have shape (heads,), {(heads,)}, got {tuple(sink.shape)}")
    if sink.dtype not in SINK_DTYPES and not (sink.dtype == torch.float64 and q.device.type != "cuda"):
        allowed = ", ".join(map(str, SINK_DTYPES))
        raise TypeError(f"learnable_sink has dtype {sink.dtype}; allowed: {allowed}, and on CPU torch.float64")
    if sink.device != q.device:
        raise ValueError(f"learnable_sink must be on the device of q, {q.device}, got {sink.device}")
