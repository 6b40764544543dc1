"""What TMA can take, and the copy of what it cannot.

A data pointer that is a multiple of 16 bytes, and strides that are multiples of 16 bytes in every dimension of more
than one element; expanded dimensions (stride 0) too. A tensor that does not fit is copied into a contiguous one first;
a dimension of one element whose stride does not fit gets another stride, without a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes

Strides = tuple[int, ...]


def step_of(tensor: Tensor) -> int:
    """The elements that a stride must be a multiple of."""
    return max(1, ALIGNMENT // tensor.element_size())


def strides_for(tensor: Tensor) -> Strides | None:
    """The strides with those of one-element dimensions set to what TMA can take; None when all are good as they are."""
    step = step_of(tensor)
    if not any(stride % step for stride in tensor.stride()[:-1]):
        return None
    row = tensor.shape[-1]
    pairs = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return (*(row if size == 1 and stride % step else stride for size, stride in pairs), 1)


def why_copied(tensor: Tensor, address: int | None) -> str:
    """Why TMA cannot take the tensor, in words; empty when it can. An unknown address (None) counts as aligned."""
    step = step_of(tensor)
    for dim, (size, stride) in enumerate(zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)):
        if size > 1 and stride % step:
            return f"stride {stride} of dimension {dim} is not a multiple of {step} elements"
    if address is not None and address % ALIGNMENT:
        return f"data pointer is {address % ALIGNMENT} bytes past a multiple of {ALIGNMENT}"
    return ""


def fitted(tensor: Tensor) -> Tensor:
    """The tensor as TMA can take it: itself, the same memory under other strides, or a contiguous copy."""
    strides = strides_for(tensor)
    step = step_of(tensor)
    if tensor.data_ptr() % ALIGNMENT or (strides and any(stride % step for stride in strides[:-1])):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor if strides is None else tensor.as_strided(tensor.shape, strides)
