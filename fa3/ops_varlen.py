"""torch.ops.fa3.forward_varlen and forward_varlen_out: the ragged forward on CUDA, on CPU, and its shapes for tracing.

The second writes O into a tensor that it is given. Importing this module registers both. Until the backward exists, a
call that needs a gradient raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from fa3 import launch_varlen, ops
from fa3.heuristics import ragged_config_for
from fa3.problem import check_gradients, check_scale
from fa3.problem_varlen import Sequences, check_out, check_ragged, existing, ragged_problem, rows_of
from fa3.reference import ragged_attention

_library = torch.library.Library("fa3", "FRAGMENT")
ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal"
)
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(f"forward_varlen({ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=TAGS)
_library.define(f"forward_varlen_out({ARGUMENTS}, Tensor(a!) out) -> Tensor lse", tags=TAGS)
_forward = torch.ops.fa3.forward_varlen.default
_forward_out = torch.ops.fa3.forward_varlen_out.default

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
        return _is_in_memory(cu_q) and _is_in_memory(cu_k)
    return all(x is None or _is_in_memory(x) for x in (cu_q, cu_k, used_q, used_k, out))


def _is_in_memory(x: object) -> bool:
    return type(x) is Tensor and not (x.requires_grad or x.is_neg() or x._is_zerotensor())


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
    lse = lse.to(ops.lse_dtype(q.dtype)).contiguous()
    if out is None:
        return made.contiguous(), lse
    written = existing(sequences, problem.total_q)
    out[written] = made[written]
    return out, lse


def _fake(*arguments: Any) -> Result:
    q, k, v, sequences, softmax_scale, _, out = _split(arguments)
    check_gradients(q, k, v)
    check_ragged(q, k, v, sequences)
    if isinstance(softmax_scale, float):  # a symbolic one is checked when it has a value
        check_scale(softmax_scale)
    if out is not None:
        check_out(q, v, out)
    total_q, heads, _ = q.shape
    made = q.new_empty((total_q, heads, v.shape[2])) if out is None else out
    return made, q.new_empty((heads, total_q), dtype=ops.lse_dtype(q.dtype))


def _elsewhere(*arguments: Any) -> Result:
    q, k, v, sequences, *_ = _split(arguments)
    check_ragged(q, k, v, sequences)  # names the device or the layout that has no kernel
    raise NotImplementedError(f"no attention for tensors of type {type(q).__name__} on {q.device}")


def _check_derivatives(*arguments: Any) -> None:
    q, k, v, *_, out = _split(arguments)
    tensors = (q, k, v) if out is None else (q, k, v, out)
    check_gradients(*tensors)
    if forward_ad._current_level >= 0:
        ops.check_tangents(*tensors)


def _autograd(*arguments: Any) -> Result:
    _check_derivatives(*arguments)
    with _C._AutoDispatchBelowAutograd():
        return _forward(*arguments)


def _autograd_out(*arguments: Any) -> Tensor:
    _check_derivatives(*arguments)
    if not arguments[-1].is_inference():
        increment_version(arguments[-1])
    with _C._AutoDispatchBelowAutograd():
        return _forward_out(*arguments)


for key, function in (("CUDA", _cuda), ("CPU", _cpu), ("CompositeExplicitAutograd", _elsewhere)):
    _library.impl("forward_varlen", function, key)
    _library.impl("forward_varlen_out", lambda *x, function=function: function(*x)[1], key)
_library.impl("forward_varlen", _autograd, "Autograd")
_library.impl("forward_varlen_out", _autograd_out, "Autograd")
torch.library.register_fake("fa3::forward_varlen", _fake, lib=_library)
torch.library.register_fake("fa3::forward_varlen_out", lambda *x: _fake(*x)[1], lib=_library)
