"""Seeded inputs for tests and benchmarks: the values, and the ways in which they may lie in memory.

Every layout of LAYOUTS holds the same values as "contiguous". What lies around them and belongs to no input is NaN, so
that reading past an end shows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

LAYOUTS = ("contiguous", "packed", "transposed", "expanded", "misaligned", "padded")
VALUES = ("normal", "outliers")

OUTLIER_STD = 10.0  # FlashAttention-3, arXiv:2407.08608, section 4.3: N(0, 1) + N(0, 100) * Bernoulli(0.001)
OUTLIER_SHARE = 0.001


class Inputs(NamedTuple):
    q: torch.Tensor  # (B, Sq, Hq, D)
    k: torch.Tensor  # (B, Sk, Hkv, D)
    v: torch.Tensor  # (B, Sk, Hkv, Dv)


@dataclass(frozen=True)
class Case:
    """One problem, small enough to print. ratio is query heads per KV head; scale None is 1 / sqrt(head_dim)."""

    dtype: str = "bfloat16"
    batch: int = 1
    seqlen_q: int = 128
    seqlen_k: int = 128
    heads_kv: int = 1
    ratio: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    scale: float | None = None
    layout: str = "contiguous"
    values: str = "normal"
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.heads_kv * self.ratio

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, values: str = "normal"
) -> torch.Tensor:
    """values "normal": N(0, 1). "outliers": the FlashAttention-3 paper's, N(0, 1) plus N(0, 10^2) in one of 1000."""
    x = torch.randn(shape, generator=generator, device=generator.device)
    if values == "outliers":
        hit = torch.rand(shape, generator=generator, device=generator.device) < OUTLIER_SHARE
        x += hit * torch.randn(shape, generator=generator, device=generator.device) * OUTLIER_STD
    elif values != "normal":
        raise ValueError(f"values {values!r} is none of {VALUES}")
    return x.to(dtype)


def make(case: Case, device: torch.device | str) -> Inputs:
    """The case's q, k and v, the same for the same seed and kind of device, laid out as the case says."""
    generator = torch.Generator(device).manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    q = draw((case.batch, case.seqlen_q, case.heads, case.head_dim), dtype, generator, case.values)
    k = draw((case.batch, case.seqlen_k, case.heads_kv, case.head_dim), dtype, generator, case.values)
    v = draw((case.batch, case.seqlen_k, case.heads_kv, case.head_dim_v), dtype, generator, case.values)
    return lay_out(Inputs(q, k, v), case.layout)


def lay_out(inputs: Inputs, layout: str) -> Inputs:
    """Views that equal the inputs, with other strides; "expanded" alone changes values (all KV heads become the first).

    contiguous; packed: slices of one (B, max(Sq, Sk), everything) buffer, as a fused projection makes it; transposed:
    (B, H, S, D) storage; expanded: K and V of stride 0 over the heads; misaligned: the storage starts one element late
    and every row is one element longer; padded: more rows, heads and columns in storage than the view shows.
    """
    if layout == "contiguous":
        return Inputs(*(x.contiguous() for x in inputs))
    if layout == "packed":
        return _packed(inputs)
    if layout == "expanded":
        return Inputs(inputs.q, *(x[:, :, :1].expand(x.shape) for x in (inputs.k, inputs.v)))
    place = {"transposed": _transposed, "misaligned": _misaligned, "padded": _padded}[layout]
    return Inputs(*(place(x) for x in inputs))


def poison(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, copies: int = 4) -> None:
    """Fill and free memory, so that the caching allocator's next tensor of this size starts as NaN."""
    blocks = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(copies)]
    del blocks


def _nan(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return x.new_full(shape, float("nan"))


def _packed(inputs: Inputs) -> Inputs:
    sizes = [x.shape[2] * x.shape[3] for x in inputs]
    buffer = _nan(inputs.q, inputs.q.shape[0], max(inputs.q.shape[1], inputs.k.shape[1]), sum(sizes))
    views = []
    for x, part in zip(inputs, buffer.split(sizes, dim=-1)):
        view = part[:, : x.shape[1]].unflatten(-1, x.shape[2:])
        views.append(view.copy_(x))
    return Inputs(*views)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    batch, seqlen, heads, dim = x.shape
    return _nan(x, batch, seqlen, heads, dim + 1)[..., 1:].copy_(x)


def _padded(x: torch.Tensor) -> torch.Tensor:
    batch, seqlen, heads, dim = x.shape
    return _nan(x, batch, seqlen + 9, heads + 1, dim + 16)[:, 1 : seqlen + 1, :heads, 8 : dim + 8].copy_(x)
