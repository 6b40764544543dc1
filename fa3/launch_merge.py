"""The merge kernel on CUDA tensors that were checked: outputs, the compiled kernel, the launch. Never waits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fa3.device import chip
from fa3.kernels.compile import load
from fa3.kernels.merge.config import Spec, config_for, lanes_log2
from fa3.launch import REFUSALS
from fa3.merge import check_size
from fa3.problem import KERNEL_DTYPES, check_chip
from fa3.tma import fitted

NAMES = {**KERNEL_DTYPES, torch.float32: "float32"}


def merge(
    o: Tensor, lse: Tensor, other: Tensor | None, other_lse: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """New O (b, s, h, d) in dtype and LSE (b, s, h), whose places of the sequence follow each other."""
    made = outputs(o, lse, other is not None, dtype)
    merge_into(o, lse, other, other_lse, *made)
    return made


def outputs(o: Tensor, lse: Tensor, is_pair: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, seqlen, heads, head_dim = o.shape if is_pair else o.shape[1:]
    out = o.new_empty((batch, seqlen, heads, head_dim), dtype=dtype)
    return out, lse.new_empty((batch, heads, seqlen)).transpose(1, 2)


def merge_into(
    o: Tensor, lse: Tensor, other: Tensor | None, other_lse: Tensor | None, out: Tensor, out_lse: Tensor
) -> None:
    """o (b, s, h, d) and lse (b, s, h), and others likewise, or with the number of partials in front and no others."""
    if out.numel() == 0:
        return
    check_size(out)
    run = _run(o.get_device(), o.dtype, out.dtype, other is not None)
    lanes = lanes_log2(out.shape[3])
    try:
        run(o, lse, other, other_lse, out, out_lse, lanes)
    except REFUSALS:
        place = fitted(out)
        run(fitted(o), lse, other if other is None else fitted(other), other_lse, place, out_lse, lanes)
        if place.data_ptr() != out.data_ptr():
            out.copy_(place)


@functools.cache
def _run(device: int, dtype: torch.dtype, out_dtype: torch.dtype, is_pair: bool) -> Callable[..., object]:
    check_chip(chip(device))
    spec = Spec(NAMES[dtype], NAMES[out_dtype], is_pair)
    return load(spec, config_for(spec))
