"""The merge of partial attention on the CPU, in torch: the specification of the merge kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(o: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """O (b, s, h, d) in dtype and LSE (b, s, h) of partials o (n, b, s, h, d) and lse (n, b, s, h).

    In float32 (float64 of such), partial after partial; O is rounded once. A partial with LSE -inf is not looked at.
    """
    wide = torch.float64 if o.dtype == torch.float64 else torch.float32
    largest = lse.amax(0)  # NaN of NaN
    total, found = torch.zeros_like(largest), torch.full(o.shape[1:], -0.0, dtype=wide)
    for part, log_sum in zip(o, lse, strict=True):
        # The largest weighs 1, also where it is infinite.
        weight = torch.where(log_sum == largest, 1.0, torch.exp(log_sum - largest))
        is_empty = log_sum == -torch.inf
        total = total + torch.where(is_empty, 0.0, weight)
        found = found + torch.where(is_empty[..., None], -0.0, part.to(wide) * weight[..., None])
    is_empty = largest == -torch.inf
    found = torch.where(is_empty[..., None], 0.0, found * (1.0 / total)[..., None])
    return found.to(dtype), torch.where(is_empty | (total == 1.0), largest, largest + torch.log(total))
