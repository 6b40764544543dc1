"""torch.ops.fa3.forward(q, k, v, softmax_scale, causal) -> (out, lse): CUDA kernel, CPU reference, shapes for tracing.

Importing this module registers the operator. It goes through `torch.library.Library`: define + impl costs 2 us a call,
`custom_op` about 10. Until the backward exists, a call that needs a gradient raises.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _AutoDispatchBelowAutograd, _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad, profiler
from torch.compiler import is_compiling

from fa3 import launch
from fa3.device import ASSUMED
from fa3.problem import FP8, check_gradients, check_scale, check_tensors, out_dtype, problem_of
from fa3.reference import tiled_attention

_library = torch.library.Library("fa3", "DEF")
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor out, Tensor lse)",
    # The exact strides of eager: a compiler that relaid an input could break the contiguous last dimension.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_forward = torch.ops.fa3.forward.default


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, and float64 for the float64 inputs that the CPU takes for checking."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _cpu(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    problem = problem_of(q, k, v, softmax_scale, causal)
    if q.dtype == FP8:
        from fa3 import ops_fp8
        from fa3.quant.interface import from_descales

        return ops_fp8.emulated(from_descales(q, k, v), softmax_scale, causal, problem.accumulation)
    if problem.is_empty:
        out, lse = q.new_zeros(problem.out_shape), q.new_empty(problem.lse_shape, dtype=lse_dtype(q.dtype))
        return out, lse.fill_(-math.inf)
    config = launch.config_of(problem, ASSUMED.num_sms)
    out, lse = tiled_attention(q, k, v, softmax_scale, causal, tile_m=config.tile_m, tile_n=config.tile_n)
    return out.contiguous(), lse.to(lse_dtype(q.dtype)).contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    check_gradients(q, k, v)
    check_tensors(q, k, v)
    if isinstance(softmax_scale, float):  # a symbolic one is checked when it has a value
        check_scale(softmax_scale)
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v.shape[3]), dtype=out_dtype(q.dtype))
    return out, q.new_empty((batch, heads, seqlen_q), dtype=lse_dtype(q.dtype))


def _elsewhere(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    check_tensors(q, k, v)  # names the device or the layout that has no kernel
    raise NotImplementedError(f"no attention for tensors of type {type(q).__name__} on {q.device}")


def _autograd(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    if is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        check_gradients(q, k, v)
    if forward_ad._current_level >= 0:
        check_tangents(q, k, v)
    with _AutoDispatchBelowAutograd():
        return _forward(q, k, v, softmax_scale, causal)


def is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the dispatcher would do nothing but find the CUDA kernel: eager code on plain CUDA tensors.

    Such a call may go to `launch.forward` itself, which halves its host time. Everything that wants to see an operator
    (compilers, tracers, profilers, dispatch modes, function transforms, autograd) and every tensor whose values are not
    in its memory as they are makes the answer False.
    """
    return (
        not is_compiling()
        and type(q) is type(k) is type(v) is Tensor
        and q.is_cuda
        and not (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        and not (q.is_neg() or k.is_neg() or v.is_neg())  # a sign that is not in memory yet
        and not (q._is_zerotensor() or k._is_zerotensor() or v._is_zerotensor())
        and _len_torch_dispatch_stack() == 0
        and maybe_current_level() is None
        and _get_tracing_state() is None
        and forward_ad._current_level < 0
        and not profiler._is_profiler_enabled
    )


def refuse_derivatives(*tensors: Tensor) -> None:
    """Where autograd would have to differentiate, forward or backward."""
    check_gradients(*tensors)
    if forward_ad._current_level >= 0:
        check_tangents(*tensors)


def check_tangents(*tensors: Tensor) -> None:
    """Forward-mode differentiation would lose the tangents without a word."""
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError("an input carries a forward-mode tangent, and the operator has no derivative yet")


_library.impl("forward", launch.forward, "CUDA")
_library.impl("forward", _cpu, "CPU")
_library.impl("forward", _elsewhere, "CompositeExplicitAutograd")
_library.impl("forward", _autograd, "Autograd")
torch.library.register_fake("fa3::forward", _fake, lib=_library)
