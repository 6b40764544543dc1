"""torch.ops.fa3.forward_varlen and forward_varlen_out: the ragged forward on CUDA, on CPU, and its shapes for tracing.

The second writes O into a tensor that it is given. Importing this module registers both. Until the backward exists, a
call that needs a gradient raises.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fa3 import launch_varlen, ops
from fa3.heuristics import ragged_config_for
from fa3.operators import TAGS, is_in_memory, last, register
from fa3.problem import check_gradients, check_scale
from fa3.problem_varlen import Sequences, check_out, check_ragged, existing, ragged_problem, rows_of
from fa3.reference import ragged_attention

_library = torch.library.Library("fa3", "FRAGMENT")
ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal"
)
_library.define(f"forward_varlen({ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=TAGS)
_library.define(f"forward_varlen_out({ARGUMENTS}, Tensor(a!) out) -> Tensor lse", tags=TAGS)

Result = tuple[Tensor, Tensor]  # out, lse


def attend(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, softmax_scale: float, causal: bool, out: Tensor | None
) -> Result:
    """The operators on a record."""
    if out is None:
        return _forward(q, k, v, *sequences, softmax_scale, causal)
    return out, _forward_out(q, k, v, *sequences, softmax_scale, causal, out)


def is_plain(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, out: Tensor | None) -> bool:
    """ops.is_plain, of all tensors of a call."""
    if not ops.is_plain(q, k, v):
        return False
    cu_q, cu_k, used_q, used_k, _, _ = sequences
    if used_q is None and used_k is None and out is None:  # nearly always
        return is_in_memory(cu_q) and is_in_memory(cu_k)
    return all(x is None or is_in_memory(x) for x in (cu_q, cu_k, used_q, used_k, out))


def _split(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, Sequences, float, bool, Tensor | None]:
    q, k, v, *others = arguments
    fields = len(Sequences._fields)
    softmax_scale, causal, *out = others[fields:]
    return q, k, v, Sequences(*others[:fields]), softmax_scale, causal, out[0] if out else None


def _cuda(*arguments: Any) -> Result:
    return launch_varlen.forward(*_split(arguments))


def _cpu(*arguments: Any) -> Result:
    q, k, v, sequences, softmax_scale, causal, out = _split(arguments)
    problem = ragged_problem(q, k, v, sequences, softmax_scale, causal)
    if out is not None:
        check_out(q, v, out)
    rows = rows_of(sequences, problem.total_q, problem.total_k)
    config = ragged_config_for(problem.spec, sequences.max_seqlen_q, sequences.max_seqlen_k)
    made, lse = ragged_attention(q, k, v, rows, softmax_scale, causal, tile_m=config.tile_m, tile_n=config.tile_n)
    return returned(made, lse, sequences, out)


def returned(made: Tensor, lse: Tensor, sequences: Sequences, out: Tensor | None) -> Result:
    """What the CPU made, as an operator returns it: in `out`, where it is given, the rows of queries."""
    lse = lse.to(ops.lse_dtype(made.dtype)).contiguous()
    if out is None:
        return made.contiguous(), lse
    written = existing(sequences, made.shape[0])
    out[written] = made[written]
    return out, lse


def _fake(*arguments: Any) -> Result:
    q, k, v, sequences, softmax_scale, _, out = _split(arguments)
    check_gradients(q, k, v)
    check_ragged(q, k, v, sequences)
    return results_of(q, v, softmax_scale, out)


def results_of(q: Tensor, v: Tensor, softmax_scale: float, out: Tensor | None) -> Result:
    """Shapes for tracing, of valid q and v."""
    if isinstance(softmax_scale, float):  # a symbolic one is checked when it has a value
        check_scale(softmax_scale)
    if out is not None:
        check_out(q, v, out)
    total_q, heads, _ = q.shape
    made = q.new_empty((total_q, heads, v.shape[-1])) if out is None else out
    return made, q.new_empty((heads, total_q), dtype=ops.lse_dtype(q.dtype))


def _elsewhere(*arguments: Any) -> Result:
    q, k, v, sequences, *_ = _split(arguments)
    check_ragged(q, k, v, sequences)  # names the device or the layout that has no kernel
    raise NotImplementedError(f"no attention for tensors of type {type(q).__name__} on {q.device}")


common = ops.refuse_derivatives, _elsewhere
_forward = register(_library, "forward_varlen", _cuda, _cpu, _fake, *common)
_forward_out = register(
    _library, "forward_varlen_out", _cuda, _cpu, _fake, *common, written=last, result=itemgetter(1)
)  # fmt: skip
