"""torch.ops.fa3.decode and decode_out: attention to a cache on CUDA, on CPU, and its shapes for tracing.

The second writes O into a tensor that it is given. Importing this module registers both. Neither changes the cache.
Until the backward exists, a call that needs a gradient raises.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa3 import ops
from fa3.operators import TAGS, is_in_memory, last, register
from fa3.ops_varlen import returned
from fa3.problem import check_gradients
from fa3.problem_kvcache import CacheProblem, check_decode, check_values
from fa3.problem_varlen import Sequences
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
_library.define(f"decode({ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=TAGS)
_library.define(f"decode_out({ARGUMENTS}, Tensor(a!) out) -> Tensor lse", tags=TAGS)

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
        if x is not None and not is_in_memory(x):
            return False
    return True


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
    call.check()
    check_values(call.q, call.k_cache, call.serving, call.variant)
    tensors = call.q, call.k_cache, call.v_cache
    made, lse = kvcache_attention(*tensors, call.serving, call.variant, call.softmax_scale, call.sink, call.split_size)
    offsets = call.serving.cu_seqlens_q
    if offsets is not None:
        return returned(made, lse, Sequences(offsets, offsets, None, None, 0, 0), call.out)
    lse = lse.to(ops.lse_dtype(made.dtype)).contiguous()
    return (made.contiguous() if call.out is None else call.out.copy_(made)), lse


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


common = ops.refuse_derivatives, _elsewhere
_decode = register(_library, "decode", _cuda, _cpu, _fake, *common)
_decode_out = register(_library, "decode_out", _cuda, _cpu, _fake, *common, written=last, result=itemgetter(1))
