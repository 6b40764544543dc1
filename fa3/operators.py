"""What all operators of the fa3 namespace share: how one is registered that has no derivative.

It knows no operator, so that attention and quantisation use the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd.graph import increment_version

TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def is_in_memory(x: object) -> bool:
    """A plain tensor that needs no gradient and whose values are in its memory as they are."""
    return type(x) is Tensor and not (x.requires_grad or x.is_neg() or x._is_zerotensor())


def note_written(*tensors: Tensor) -> None:
    """For autograd: their values are others now."""
    for x in tensors:
        if not x.is_inference():
            increment_version(x)


def register(
    library: torch.library.Library,
    name: str,
    cuda: Callable[..., Any],
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
    refuse: Callable[..., None],
    elsewhere: Callable[..., Any] | None = None,
    *,
    written: Callable[[tuple[Any, ...]], Iterable[Tensor]] = lambda arguments: (),
    result: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:
    """An operator that `library` defines, with its implementations; the operator.

    refuse(*tensors) raises where autograd would have to differentiate. elsewhere: on other devices and layouts.
    written: those of its arguments that it writes into. result: what the operator returns of what the functions give,
    by default all of it.
    """
    operator = getattr(torch.ops.fa3, name).default

    def returning(function: Callable[..., Any]) -> Callable[..., Any]:
        return function if result is None else lambda *arguments: result(function(*arguments))

    def autograd(*arguments: Any) -> Any:
        refuse(*(x for x in arguments if isinstance(x, Tensor)))
        note_written(*written(arguments))
        with _C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    for key, function in (("CUDA", cuda), ("CPU", cpu), ("CompositeExplicitAutograd", elsewhere)):
        if function is not None:
            library.impl(name, returning(function), key)
    library.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"fa3::{name}", returning(fake), lib=library)
    return operator


def last(arguments: tuple[Any, ...]) -> tuple[Tensor]:
    """Of `register`: an operator that writes into its last argument."""
    return (arguments[-1],)
