"""torch.ops.fa3.append_ and append_rotary_: new rows into a cache, on CUDA, on CPU, and their shapes for tracing.

Both write into the cache that they are given; the second returns q with its rotary embedding. Importing this module
registers both. They have no derivative: a call that needs one raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa3 import launch_append, ops, reference_append
from fa3.append import check_append, check_start
from fa3.operators import TAGS, is_in_memory, register
from fa3.problem import check_are_tensors, check_gradients
from fa3.serving import Serving

_library = torch.library.Library("fa3", "FRAGMENT")
CACHE = "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, "
LISTS = (
    "Tensor? lengths, Tensor? cu_seqlens_k_new, Tensor? batch_idx, Tensor? page_table, Tensor? indptr, "
    "Tensor? cu_seqlens_q, "
)
ROTARY = "Tensor cos, Tensor sin, Tensor? rotary_seqlens, bool interleaved, bool each_query_its_own_position, "
_library.define(f"append_({CACHE}Tensor k, Tensor v, {LISTS}SymInt start) -> ()", tags=TAGS)
_library.define(f"append_rotary_({CACHE}Tensor? k, Tensor? v, {LISTS}{ROTARY}SymInt start) -> Tensor", tags=TAGS)

NEW = slice(0, 5)  # q, k_cache, v_cache, k, v among the arguments of either
TENSORS = (0, 1, 2, 3, 4, 6, 7, 8)  # among the arguments of fa3.append.append
FIELDS = 6


def append(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, serving: Serving, *others: Any
) -> Tensor:
    """The operators on the arguments of fa3.append.append."""
    cos, sin, rotary_seqlens, *_, start = others
    s = serving
    lists = s.lengths, s.cu_seqlens_k_new, s.batch_idx, s.page_table, s.indptr, s.cu_seqlens_q
    optional = {"k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin, "rotary_seqlens": rotary_seqlens}
    given = {name: x for name, x in optional.items() if x is not None}
    check_are_tensors(q=q, k_cache=k_cache, v_cache=v_cache, **given)
    check_start(start)
    if cos is not None and sin is not None and (k is None) == (v is None):
        return _append_rotary(q, k_cache, v_cache, k, v, *lists, *others)
    if k is None or v is None or cos is not None or sin is not None or rotary_seqlens is not None:
        check_append(q, k_cache, v_cache, k, v, serving, cos, sin, rotary_seqlens, start)
        return q
    _append(q, k_cache, v_cache, k, v, *lists, start)
    return q


def is_plain(*arguments: Any) -> bool:
    """ops.is_plain, of all tensors of a call."""
    q, k_cache, v_cache, k, v, serving, cos, sin, rotary_seqlens, *_ = arguments
    if not (isinstance(q, Tensor) and type(k_cache) is type(v_cache) is Tensor and ops.is_plain(q, k_cache, v_cache)):
        return False
    others = (k, v, cos, sin, rotary_seqlens, *serving)
    return all(x is None or type(x) is int or is_in_memory(x) for x in others)


def _split(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of either operator as those of fa3.append.append."""
    tensors, rest = arguments[NEW], arguments[NEW.stop :]
    lengths, cu_k, batch_idx, page_table, indptr, cu_q = rest[:FIELDS]
    serving = Serving(lengths, 0, cu_k, None, batch_idx, page_table, indptr, cu_q, 0)
    *rotary, start = rest[FIELDS:]
    return *tensors, serving, *(rotary or (None, None, None, False, False)), start


def _check(arguments: tuple[Any, ...]) -> None:
    """Of the arguments of fa3.append.append."""
    q, k_cache, v_cache, k, v, serving, cos, sin, rotary_seqlens, _, _, start = arguments
    check_append(q, k_cache, v_cache, k, v, serving, cos, sin, rotary_seqlens, start)


def _cuda(*arguments: Any) -> Tensor:
    return launch_append.append(*_split(arguments))


def _cpu(*arguments: Any) -> Tensor:
    arguments = _split(arguments)
    _check(arguments)
    return reference_append.append(*arguments)


def _fake(*arguments: Any) -> Tensor:
    check_gradients(*(x for x in arguments if isinstance(x, Tensor)))
    _check(_split(arguments))
    return arguments[0].new_empty(arguments[0].shape)


def _elsewhere(*arguments: Any) -> Tensor:
    _check(_split(arguments))  # names the device or the layout that has no kernel
    raise NotImplementedError(f"no append for tensors of type {type(arguments[0]).__name__} on {arguments[0].device}")


def _written(arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The caches, where there are new rows."""
    return arguments[1:3] if arguments[3] is not None else ()


common = ops.refuse_derivatives, _elsewhere
_append = register(_library, "append_", _cuda, _cpu, _fake, *common, written=_written, result=lambda made: None)
_append_rotary = register(_library, "append_rotary_", _cuda, _cpu, _fake, *common, written=_written)
