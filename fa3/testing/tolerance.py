"""How wrong attention may be: derived from what plain PyTorch makes of the same inputs in the same type.

Both are compared with float64 on the exact inputs. The rule: the largest error is at most MAX_FACTOR times PyTorch's
plus FLOOR, and the mean error at most MEAN_FACTOR times PyTorch's. Plain PyTorch rounds the scores to 16 bit, a kernel
keeps them in float32: it stays well below both limits. Where few rows make the output, luck decides; compare many.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa3 import reference

MAX_FACTOR = 2.0
MEAN_FACTOR = 1.5
FLOOR = 1e-5
# Where PyTorch happens to be exact (one key, say), float32 rounding of a value near 1 is still allowed.
MEAN_FLOOR = 1e-7

LSE_FLOOR = 1e-5  # of the sum of exponentials and its logarithm, in float32
SCORE_EPS = 2.0**-19  # what the tensor core's float32 accumulation may lose of a score, relative to the largest

RMSE_LIMITS = {"float16": 1.6e-4, "bfloat16": 1.3e-3}  # by the protocol of `rmse`, head dim 128, B2 H8 S4096
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}  # rounding of a 1.x

SCORES_AT_ONCE = 1 << 27  # float64 scores that the reference holds: 1 GB
HEADS_AT_ONCE = 50_000  # matrix products in a batch: some libraries put them into a grid dimension of 65535


@dataclass(frozen=True)
class Errors:
    """Of an output against float64, over all its elements."""

    max: float
    mean: float

    @staticmethod
    def of(out: torch.Tensor, exact: torch.Tensor) -> "Errors":
        if out.numel() == 0:
            return Errors(0.0, 0.0)
        error = (out.double() - exact.double()).abs()
        return Errors(error.max().item(), error.mean().item())


@dataclass(frozen=True)
class Expected:
    """The float64 result and what may be missed of it."""

    out: torch.Tensor  # (B, Sq, H, Dv) float64
    lse: torch.Tensor  # (B, H, Sq) float64
    plain: Errors  # of plain PyTorch
    largest_score: float  # bound on |scaled score|

    @property
    def limit(self) -> Errors:
        return Errors(MAX_FACTOR * self.plain.max + FLOOR, MEAN_FACTOR * self.plain.mean + MEAN_FLOOR)

    @property
    def lse_limit(self) -> float:
        return LSE_FLOOR + SCORE_EPS * self.largest_score

    def share(self, out: torch.Tensor) -> float:
        """The error as a share of what is allowed, the worse of max and mean: at most 1 passes, NaN is inf."""
        errors, limit = Errors.of(out, self.out), self.limit
        share = max(errors.max / limit.max, errors.mean / limit.mean)
        return share if share == share else math.inf

    def lse_share(self, lse: torch.Tensor) -> float:
        """The same for lse; -inf must be met exactly."""
        return lse_error(lse, self.lse) / self.lse_limit

    def assert_out(self, out: torch.Tensor, what: str = "out") -> None:
        """AssertionError with both errors and both limits unless out obeys the rule. NaN and Inf never do."""
        errors, limit = Errors.of(out, self.out), self.limit
        if not (errors.max <= limit.max and errors.mean <= limit.mean):
            raise AssertionError(
                f"{what}: max error {errors.max:.3e} (PyTorch {self.plain.max:.3e}, allowed {limit.max:.3e}), "
                f"mean error {errors.mean:.3e} (PyTorch {self.plain.mean:.3e}, allowed {limit.mean:.3e}), "
                f"{count_not_finite(out)} of {out.numel()} not finite"
            )

    def assert_lse(self, lse: torch.Tensor, what: str = "lse") -> None:
        error = lse_error(lse, self.lse)
        if not error <= self.lse_limit:
            raise AssertionError(f"{what}: error {error:.3e}, allowed {self.lse_limit:.3e}")


def lse_error(lse: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference; inf where one is -inf and the other is not, or anything is NaN."""
    if lse.numel() == 0:
        return 0.0
    difference = torch.where(lse == exact, 0.0, (lse.double() - exact.double()).abs())
    return torch.nan_to_num(difference, nan=math.inf, posinf=math.inf).max().item()


def count_not_finite(x: torch.Tensor) -> int:
    return x.numel() - int(torch.isfinite(x).sum())


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float64 on the inputs' device, a slab of queries at a time: 16K x 16K fits and stays fast."""
    return _in_slabs(_exact_slab, q, k, v, softmax_scale, causal)


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False
) -> torch.Tensor:
    """The formula in PyTorch in the inputs' own type, in slabs like `exact`."""
    return _in_slabs(reference.attention, q, k, v, softmax_scale, causal)[0]


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False
) -> Expected:
    """What attention to these inputs must give. ValueError where plain PyTorch itself overflows: no yardstick then."""
    out, lse = exact(q, k, v, softmax_scale, causal)
    errors = Errors.of(plain(q, k, v, softmax_scale, causal), out)
    if not errors.max < math.inf:
        raise ValueError(f"PyTorch in {q.dtype} is not finite on these inputs and gives no tolerance")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return Expected(out, lse, errors, scale * _longest(q) * _longest(k))


def rmse(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean squared error, as the FlashAttention-3 paper reports it: inputs.draw(..., "outliers")."""
    return (out.double() - exact.double()).square().mean().sqrt().item()


def _longest(x: torch.Tensor) -> float:
    return torch.linalg.vector_norm(x.double(), dim=-1).max().item() if x.numel() else 0.0


def _exact_slab(q, k, v, softmax_scale, causal):
    return reference.attention(q.double(), k.double(), v.double(), softmax_scale, causal)


def _in_slabs(function: Callable, q, k, v, softmax_scale, causal) -> tuple[torch.Tensor, torch.Tensor]:
    """function over slabs of batches, KV heads and queries.

    A causal slab of queries i..j sees the keys before j + Sk - Sq only; cut there, it is aligned bottom-right again.
    """
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = q.shape, k.shape
    ratio, a_head = heads // heads_kv, max(1, seqlen_q * seqlen_k)
    heads_at_once = min(HEADS_AT_ONCE, SCORES_AT_ONCE // a_head)
    batches, groups = max(1, heads_at_once // max(1, heads)), max(1, heads_at_once // max(1, ratio))
    rows = max(1, SCORES_AT_ONCE // max(1, seqlen_k * ratio))
    out = lse = None
    for b in range(0, batch, batches):
        for h in range(0, heads_kv, groups):
            for i in range(0, seqlen_q, rows):
                j = min(i + rows, seqlen_q)
                seen = max(0, j + seqlen_k - seqlen_q) if causal else seqlen_k
                at = slice(b, b + batches), slice(i, j), slice(h * ratio, (h + groups) * ratio)
                keys = slice(b, b + batches), slice(0, seen), slice(h, h + groups)
                part, part_lse = function(q[at], k[keys], v[keys], softmax_scale, causal)
                if out is None or lse is None:
                    out = part.new_zeros(batch, seqlen_q, heads, v.shape[-1])
                    lse = part_lse.new_zeros(batch, heads, seqlen_q)
                out[at], lse[at[0], at[2], at[1]] = part, part_lse
    if out is None or lse is None:  # nothing to cut
        return function(q, k, v, softmax_scale, causal)
    return out, lse
