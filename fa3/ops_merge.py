"""torch.ops.fa3.merge and merge_out: partial attention into one, on CUDA, on CPU, and their shapes for tracing.

Partials are o (b, s, h, d) and lse (b, s, h) and others likewise, or o (n, b, s, h, d) and lse (n, b, s, h) alone. The
second operator writes into tensors that it is given. Importing this module registers both. They have no derivative: a
call that needs one raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa3 import launch_merge, ops, reference_merge
from fa3.operators import TAGS, is_in_memory, register
from fa3.problem import check_gradients

_library = torch.library.Library("fa3", "FRAGMENT")
PARTIALS = "Tensor o, Tensor lse, Tensor? other, Tensor? other_lse"
_library.define(f"merge({PARTIALS}, ScalarType dtype) -> (Tensor out, Tensor out_lse)", tags=TAGS)
_library.define(f"merge_out({PARTIALS}, Tensor(a!) out, Tensor(b!) out_lse) -> ()", tags=TAGS)


def is_plain(o: Tensor, lse: Tensor, other: Tensor | None, other_lse: Tensor | None, *results: Tensor) -> bool:
    """ops.is_plain, of all tensors of a call."""
    others = (other, other_lse, *results)
    return ops.is_plain(o, lse, lse) and all(x is None or is_in_memory(x) for x in others)


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


common = ops.refuse_derivatives, _elsewhere
merge = register(_library, "merge", launch_merge.merge, _cpu, _fake, *common)
merge_into = register(
    _library, "merge_out", launch_merge.merge_into, _cpu_into, _fake_into, *common, written=lambda x: x[-2:]
)  # fmt: skip
