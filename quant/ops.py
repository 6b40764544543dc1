"""torch.ops.fa3.quantize_qkv and pack_v on plain tensors: CUDA kernel, CPU reference, shapes for tracing.

Importing this module registers them. They have no derivative: a call that needs one raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa3.operators import TAGS, register

from . import cast, checks, launch, reference
from .launch import Codes

_library = torch.library.Library("fa3", "FRAGMENT")
_library.define(
    "quantize_qkv(Tensor q, Tensor k, Tensor v, bool rotate, int seed, Tensor? rotary_cos, Tensor? rotary_sin, "
    "bool rotary_interleaved, SymInt rotary_q_offset, int q_rows) -> "
    "(Tensor q8, Tensor k8, Tensor v8, Tensor q_scale, Tensor k_scale, Tensor v_scale)",
    tags=TAGS,
)
_library.define("pack_v(Tensor v) -> Tensor", tags=TAGS)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, rotate: bool, seed: int, cos: Tensor | None, sin: Tensor | None,
    interleaved: bool, q_offset: int, q_rows: int,
) -> reference.Rotary | None:  # fmt: skip
    checks.check_qkv(q, k, v)
    checks.check_options(rotate, seed, interleaved, q_offset, q_rows)
    return checks.rotary_of(q, k, cos, sin, interleaved, q_offset)


def _cuda(q: Tensor, k: Tensor, v: Tensor, rotate: bool, seed: int, *others: Any) -> Codes:
    rotary = _checked(q, k, v, rotate, seed, *others)
    checks.check_gpu("q", q.device, launch.capability(q.device))
    return launch.quantize(q, k, v, rotate, seed, rotary, others[-1])


def _cpu(q: Tensor, k: Tensor, v: Tensor, rotate: bool, seed: int, *others: Any) -> Codes:
    rotary = _checked(q, k, v, rotate, seed, *others)
    x = reference.quantize_qkv(q, k, v, rotate=rotate, seed=seed, rotary=rotary, q_rows=others[-1])
    return x.q, x.k, x.v, x.q_scale, x.k_scale, x.v_scale


def _fake(q: Tensor, k: Tensor, v: Tensor, rotate: bool, seed: int, *others: Any) -> Codes:
    refuse_derivatives(q, k, v)
    _checked(q, k, v, rotate, seed, *others)
    return launch.outputs(q, k, v, others[-1])


def _pack_cuda(v: Tensor) -> Tensor:
    checks.check_codes(v=v)
    checks.check_gpu("v", v.device, launch.capability(v.device))
    return launch.pack(v)


def _pack_cpu(v: Tensor) -> Tensor:
    checks.check_codes(v=v)
    return cast.pack_v(v).contiguous()


def _pack_fake(v: Tensor) -> Tensor:
    checks.check_codes(v=v)
    return launch.packed_like(v)


def refuse_derivatives(*arguments: object) -> None:
    """NotImplementedError where autograd would have to differentiate, forward or backward."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise NotImplementedError(
            "an input requires a gradient, and the FP8 path has no derivative: call under torch.no_grad(), or detach"
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("an input carries a forward-mode tangent, and the FP8 path has no derivative")


quantize_op = register(_library, "quantize_qkv", _cuda, _cpu, _fake, refuse_derivatives)
pack_op = register(_library, "pack_v", _pack_cuda, _pack_cpu, _pack_fake, refuse_derivatives)
