"""torch.ops.fa3.merge and merge_out: partial attention into one, on CUDA, on CPU, and their shapes for tracing.

Partials are o (b, s, h, d) and lse (b, s, h) and others likewise, or o (n, b, s, h, d) and lse (n, b, s, h) alone. The
second operator writes into tensors that it is given. Importing this module registers both. They have no derivative: a
call that needs one raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from fa3 import launch_merge, ops, ops_varlen, reference_merge
from fa3.problem import check_gradients

_library = torch.library.Library("fa3", "FRAGMENT")
PARTIALS = "Tensor o, Tensor lse, Tensor? other, Tensor? other_lse"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(f"merge({PARTIALS}, ScalarType dtype) -> (Tensor out, Tensor out_lse)", tags=TAGS)
_library.define(f"merge_out({PARTIALS}, Tensor(a!) out, Tensor(b!) out_lse) -> ()", tags=TAGS)
merge = torch.ops.fa3.merge.default
merge_into = torch.ops.fa3.merge_out.default


def is_plain(o: Tensor, lse: Tensor, other: Tensor | None, other_lse: Tensor | None, *results: Tensor) -> bool:
    """ops.is_plain, of all tensors of a call."""
    others = (other, other_lse, *results)
    return ops.is_plain(o, lse, lse) and all(x is None or ops_varlen._is_in_memory(x) for x in others)


def _cpu(
    o: Tensor, lse: Tensor, other: Tensor | None, other_lse: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if other is not None and other_lse is not None:
        o, lse = torch.stack([o, other]), torch.stack([lse, other_lse])
    made = launch_merge.outputs(o, lse, False, dtype)
    for place, x in zip(made, reference_merge.merge(o, lse, dtype), strict=True):
        place.copy_(x)
    return made


def _cpu_into(
    o: Tensor, lse: Tensor, other: Tensor | None, other_lse: Tensor | None, out: Tensor, out_lse: Tensor
) -> None:
    made, made_lse = _cpu(o, lse, other, other_lse, out.dtype)
    out.copy_(made)
    out_lse.copy_(made_lse)


def _fake(
    o: Tensor, lse: Tensor, other: Tensor | None, other_lse: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    check_gradients(*(x for x in (o, lse, other, other_lse) if x is not None))
    return launch_merge.outputs(o, lse, other is not None, dtype)


def _fake_into(*arguments: Any) -> None:
    check_gradients(*(x for x in arguments if x is not None))


def _elsewhere(o: Tensor, *_: Any) -> Any:
    raise NotImplementedError(f"no merge for tensors of type {type(o).__name__} on {o.device}")


def _check_derivatives(*arguments: Any) -> None:
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    check_gradients(*tensors)
    if forward_ad._current_level >= 0:
        ops.check_tangents(*tensors)


def _autograd(*arguments: Any) -> tuple[Tensor, Tensor]:
    _check_derivatives(*arguments)
    with _C._AutoDispatchBelowAutograd():
        return merge(*arguments)


def _autograd_into(*arguments: Any) -> None:
    _check_derivatives(*arguments)
    for given in arguments[-2:]:
        if not given.is_inference():
            increment_version(given)
    with _C._AutoDispatchBelowAutograd():
        merge_into(*arguments)


for key, new, into in (
    ("CUDA", launch_merge.merge, launch_merge.merge_into),
    ("CPU", _cpu, _cpu_into),
    ("CompositeExplicitAutograd", _elsewhere, _elsewhere),
    ("Autograd", _autograd, _autograd_into),
):
    _library.impl("merge", new, key)
    _library.impl("merge_out", into, key)
torch.library.register_fake("fa3::merge", _fake, lib=_library)
torch.library.register_fake("fa3::merge_out", _fake_into, lib=_library)
