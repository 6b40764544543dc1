"""torch.ops.fa3.decode and decode_out: attention to a cache on CUDA, on CPU, and its shapes for tracing.

The second writes O into a tensor that it is given. Importing this module registers both. Neither changes the cache.
Until the backward exists, a call that needs a gradient raises.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from fa3 import ops
from fa3.problem import check_gradients
from fa3.problem_kvcache import CacheProblem, check_decode, check_values
from fa3.problem_varlen import Sequences, existing
from fa3.reference_kvcache import kvcache_attention
from fa3.serving import Serving
from fa3.variant import Variant

_library = torch.library.Library("fa3", "FRAGMENT")
ARGUMENTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, "
    "Tensor? lengths, SymInt added, Tensor? cu_seqlens_k_new, Tensor? leftpad, Tensor? batch_idx, Tensor? page_table, "
    "Tensor? indptr, Tensor? cu_seqlens_q, SymInt max_seqlen_q, "
    "float softmax_scale, "
    "bool causal, int window_left, int window_right, int attention_chunk, float softcap, "
    "Tensor? sink, int num_splits, int split_size"
)
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(f"decode({ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=TAGS)
_library.define(f"decode_out({ARGUMENTS}, Tensor(a!) out) -> Tensor lse", tags=TAGS)
_decode = torch.ops.fa3.decode.default
_decode_out = torch.ops.fa3.decode_out.default

Result = tuple[Tensor, Tensor]  # out, lse


class Call(NamedTuple):
    """What `fa3.launch_decode.forward` takes, in its order."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    serving: Serving
    softmax_scale: float
    variant: Variant
    sink: Tensor | None
    num_splits: int
    split_size: int
    out: Tensor | None

    @property
    def inputs(self) -> list[Tensor]:
        """Tensors that a derivative could be asked of, out with them."""
        return [x for x in (self.q, self.k_cache, self.v_cache, self.sink, self.out) if x is not None]

    def check(self) -> CacheProblem:
        c = self
        tensors = c.q, c.k_cache, c.v_cache
        return check_decode(*tensors, c.serving, c.softmax_scale, c.sink, c.num_splits, c.split_size, c.out)


def attend(call: Call) -> Result:
    """The operators on a record."""
    q, k_cache, v_cache, serving, softmax_scale, variant, sink, num_splits, split_size, out = call
    flat = q, k_cache, v_cache, *serving, softmax_scale, *variant, sink, num_splits, split_size
    return _decode(*flat) if out is None else (out, _decode_out(*flat, out))


def launch(call: Call) -> Result:
    """On CUDA tensors, without the dispatcher."""
    from fa3 import launch_decode  # what a call on the CPU does without

    return launch_decode.forward(*call)


def is_plain(q: Tensor, k_cache: Tensor, v_cache: Tensor, others: tuple[Any, ...]) -> bool:
    """ops.is_plain, of all tensors of a call."""
    if not ops.is_plain(q, k_cache, v_cache):
        return False
    for x in others:  # all() would take twice the time
        if x is not None and not _is_in_memory(x):
            return False
    return True


def _is_in_memory(x: object) -> bool:
    return type(x) is Tensor and not (x.requires_grad or x.is_neg() or x._is_zerotensor())


def _call_of(arguments: tuple[Any, ...]) -> Call:
    q, k_cache, v_cache, *others = arguments
    fields = len(Serving._fields)
    serving, (softmax_scale, *others) = Serving(*others[:fields]), others[fields:]
    fields = len(Variant._fields)
    variant, (sink, num_splits, split_size, *out) = Variant(*others[:fields]), others[fields:]
    tensors = q, k_cache, v_cache, serving
    return Call(*tensors, softmax_scale, variant, sink, num_splits, split_size, out[0] if out else None)


def _cuda(*arguments: Any) -> Result:
    return launch(_call_of(arguments))


def _cpu(*arguments: Any) -> Result:
    call = _call_of(arguments)
    problem = call.check()
    check_values(call.q, call.k_cache, call.serving, call.variant)
    tensors = call.q, call.k_cache, call.v_cache
    made, lse = kvcache_attention(*tensors, call.serving, call.variant, call.softmax_scale, call.sink, call.split_size)
    lse = lse.to(ops.lse_dtype(call.q.dtype)).contiguous()
    if call.out is None:
        return made.contiguous(), lse
    offsets = call.serving.cu_seqlens_q
    if offsets is None:
        call.out.copy_(made)
    else:
        written = existing(Sequences(offsets, offsets, None, None, 0, 0), problem.total_q)
        call.out[written] = made[written]
    return call.out, lse


def _fake(*arguments: Any) -> Result:
    call = _call_of(arguments)
    check_gradients(*call.inputs)
    problem, q = call.check(), call.q
    made = q.new_empty(problem.out_shape) if call.out is None else call.out
    return made, q.new_empty(problem.lse_shape, dtype=ops.lse_dtype(q.dtype))


def _elsewhere(*arguments: Any) -> Result:
    call = _call_of(arguments)
    call.check()  # names the device or the layout that has no kernel
    raise NotImplementedError(f"no attention for tensors of type {type(call.q).__name__} on {call.q.device}")


def _check_derivatives(*arguments: Any) -> None:
    tensors = _call_of(arguments).inputs
    check_gradients(*tensors)
    if forward_ad._current_level >= 0:
        ops.check_tangents(*tensors)


def _autograd(*arguments: Any) -> Result:
    _check_derivatives(*arguments)
    with _C._AutoDispatchBelowAutograd():
        return _decode(*arguments)


def _autograd_out(*arguments: Any) -> Tensor:
    _check_derivatives(*arguments)
    if not arguments[-1].is_inference():
        increment_version(arguments[-1])
    with _C._AutoDispatchBelowAutograd():
        return _decode_out(*arguments)


for key, function in (("CUDA", _cuda), ("CPU", _cpu), ("CompositeExplicitAutograd", _elsewhere)):
    _library.impl("decode", function, key)
    _library.impl("decode_out", lambda *x, function=function: function(*x)[1], key)
_library.impl("decode", _autograd, "Autograd")
_library.impl("decode_out", _autograd_out, "Autograd")
torch.library.register_fake("fa3::decode", _fake, lib=_library)
torch.library.register_fake("fa3::decode_out", lambda *x: _fake(*x)[1], lib=_library)
