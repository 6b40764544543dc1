"""torch.ops.fa3.forward_variant, forward_varlen_variant and forward_varlen_variant_out: attention with windows, chunks,
soft caps and sinks on CUDA, on CPU, and its shapes for tracing.

The last writes O into a tensor that it is given. Importing this module registers them. Until the backward exists, a
call that needs a gradient raises.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fa3 import launch, launch_paged, launch_variant, ops
from fa3.device import ASSUMED
from fa3.heuristics import ragged_config_for
from fa3.launch_variant import nothing_seen
from fa3.operators import TAGS, last, register
from fa3.ops_varlen import results_of, returned
from fa3.problem import check_gradients, check_scale, check_tensors, problem_of
from fa3.problem_paged import check_paged, check_values, paged_problem
from fa3.problem_variant import Extras, check_variant, simplified, with_variant
from fa3.problem_varlen import Sequences, check_out, check_ragged, queries_of, ragged_problem, rows_of
from fa3.reference import paged_attention, ragged_attention, tiled_attention
from fa3.variant import Variant

_library = torch.library.Library("fa3", "FRAGMENT")
VARIANT = "bool causal, int window_left, int window_right, int attention_chunk, float softcap, Tensor? sink"
DENSE = f"Tensor q, Tensor k, Tensor v, float softmax_scale, {VARIANT}"
VARLEN = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    f"SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, {VARIANT}, Tensor? page_table, int num_splits"
)
_library.define(f"forward_variant({DENSE}) -> (Tensor out, Tensor lse)", tags=TAGS)
_library.define(f"forward_varlen_variant({VARLEN}) -> (Tensor out, Tensor lse)", tags=TAGS)
_library.define(f"forward_varlen_variant_out({VARLEN}, Tensor(a!) out) -> Tensor lse", tags=TAGS)

Result = tuple[Tensor, Tensor]  # out, lse
FIELDS, LISTS = len(Variant._fields), len(Sequences._fields)


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, variant: Variant, sink: Tensor | None) -> Result:
    """The operator of dense tensors on a record."""
    return _forward(q, k, v, softmax_scale, *variant, sink)


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, softmax_scale: float, extras: Extras, out: Tensor | None
) -> Result:
    """Those of ragged ones."""
    arguments = q, k, v, *sequences, softmax_scale, *extras.variant, *extras[1:]
    return _forward_varlen(*arguments) if out is None else (out, _forward_varlen_out(*arguments, out))


def _dense(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, float, Variant, Tensor | None]:
    q, k, v, softmax_scale, *variant, sink = arguments
    return q, k, v, softmax_scale, Variant(*variant), sink


def _cuda(*arguments: Any) -> Result:
    return launch_variant.forward(*_dense(arguments))


def _cpu(*arguments: Any) -> Result:
    q, k, v, softmax_scale, variant, sink = _dense(arguments)
    problem = problem_of(q, k, v, softmax_scale, variant.causal)
    check_variant(variant, sink, q)
    variant = simplified(variant, q.shape[1], k.shape[1])
    if problem.is_empty:
        out, lse = q.new_zeros(problem.out_shape), q.new_empty(problem.lse_shape, dtype=ops.lse_dtype(q.dtype))
        return out, nothing_seen(lse, sink)
    config = launch.config_of(with_variant(problem, variant, sink), ASSUMED.num_sms)
    options = dict(tile_m=config.tile_m, tile_n=config.tile_n, variant=variant, sink=sink)
    out, lse = tiled_attention(q, k, v, softmax_scale, **options)  # type: ignore[arg-type]
    return out.contiguous(), lse.to(ops.lse_dtype(q.dtype)).contiguous()


def _fake(*arguments: Any) -> Result:
    q, k, v, softmax_scale, variant, sink = _dense(arguments)
    check_gradients(*_floats(arguments))
    check_tensors(q, k, v)
    check_variant(variant, sink, q)
    if isinstance(softmax_scale, float):  # a symbolic one is checked when it has a value
        check_scale(softmax_scale)
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v.shape[3]))
    return out, q.new_empty((batch, heads, seqlen_q), dtype=ops.lse_dtype(q.dtype))


def _varlen(
    arguments: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor, Sequences, float, Extras, Tensor | None]:
    q, k, v, *others = arguments
    sequences, (softmax_scale, *others) = Sequences(*others[:LISTS]), others[LISTS:]
    variant, (sink, page_table, num_splits, *out) = Variant(*others[:FIELDS]), others[FIELDS:]
    extras = Extras(variant, sink, page_table, num_splits)
    return q, k, v, sequences, softmax_scale, extras, out[0] if out else None


def _varlen_cuda(*arguments: Any) -> Result:
    q, k, v, sequences, softmax_scale, extras, out = _varlen(arguments)
    return launch_paged.forward(q, k, v, sequences, softmax_scale, out, extras)


def _varlen_cpu(*arguments: Any) -> Result:
    q, k, v, sequences, softmax_scale, extras, out = _varlen(arguments)
    variant, sink, table, _ = extras
    if table is None:
        problem = ragged_problem(q, k, v, sequences, softmax_scale, variant.causal)
    else:
        problem = paged_problem(q, k, v, sequences, table, softmax_scale, variant.causal)
    check_variant(variant, sink, q)
    if out is not None:
        check_out(q, v, out)
    variant = simplified(variant)
    spec = with_variant(problem, variant, sink).spec
    config = ragged_config_for(spec, sequences.max_seqlen_q, sequences.max_seqlen_k)
    options = dict(tile_m=config.tile_m, tile_n=config.tile_n, variant=variant, sink=sink)
    if table is None:
        rows = rows_of(sequences, problem.total_q, problem.total_k)
        made, lse = ragged_attention(q, k, v, rows, softmax_scale, **options)  # type: ignore[arg-type]
    else:
        check_values(sequences, table, *k.shape[:2])
        assert sequences.seqused_k is not None
        lengths = zip(queries_of(sequences, problem.total_q), sequences.seqused_k.tolist(), strict=True)
        made, lse = paged_attention(q, k, v, list(lengths), table, softmax_scale, **options)  # type: ignore[arg-type]
    return returned(made, lse, sequences, out)


def _varlen_fake(*arguments: Any) -> Result:
    q, k, v, sequences, softmax_scale, extras, out = _varlen(arguments)
    check_gradients(*_floats(arguments))
    if extras.page_table is None:
        check_ragged(q, k, v, sequences)
    else:
        check_paged(q, k, v, sequences, extras.page_table)
    check_variant(extras.variant, extras.sink, q)
    return results_of(q, v, softmax_scale, out)


def _elsewhere(*arguments: Any) -> Result:
    q = arguments[0]
    raise NotImplementedError(f"no attention for tensors of type {type(q).__name__} on {q.device}")


def _floats(arguments: tuple[Any, ...]) -> list[Tensor]:
    """Those that may ask for a derivative."""
    return [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]


common = ops.refuse_derivatives, _elsewhere
_forward = register(_library, "forward_variant", _cuda, _cpu, _fake, *common)
ragged = _varlen_cuda, _varlen_cpu, _varlen_fake
_forward_varlen = register(_library, "forward_varlen_variant", *ragged, *common)
_forward_varlen_out = register(
    _library, "forward_varlen_variant_out", *ragged, *common, written=last, result=itemgetter(1)
)  # fmt: skip
