"""To E4M3 and back: the scales of a tensor, the saturating cast, and the packed layout of V. Plain torch.

Tensors are (B, S, H, D) of any float type, on CPU or GPU; they are worked on in float32. A scale is the largest
magnitude that it covers / 448:

- 0 where all that it covers is 0; zeros are stored and come back;
- at least 2^-126, the smallest normal float32, where something is not 0;
- NaN where anything is NaN or infinite (also float64 beyond float32): all that it covers comes back as NaN.

The cast divides by the scale (a product with its reciprocal would round twice), rounds to nearest even and saturates.

`fit` moves the scales of rows afterwards, so that what the codes stand for has the rows' own length in the rows' own
direction: the part of the rounding error that lies along a row is gone, of the longest rows where a scale has many. The
keys that matter most to a query point its way, so this part moves its largest scores; docs/fp8.md has the measurements.
It is for rotated Q and K, where every component's error counts alike.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .formats import E4M3, GROUP, KEY_ORDER, PER_BLOCK, Granularity

SMALLEST_SCALE = 2.0**-126
FIT_MAX = 1 / 16  # the half step of E4M3: what rounding may change of a length, as a share


def cast(x: Tensor) -> Tensor:
    """x in E4M3: to nearest even, saturating at +-448 (infinity too), NaN stays NaN."""
    return x.float().clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)


def scale_of(x: Tensor, granularity: Granularity = PER_BLOCK) -> Tensor:
    """The scales of x, float32, in the granularity's shape."""
    largest = _absmax(x.float(), granularity)
    # NOTE: torch divides by a Python number through its reciprocal on a GPU; by a tensor it divides.
    scale = (largest / largest.new_full((), E4M3.max)).clamp_min(SMALLEST_SCALE)
    scale = torch.where(largest == 0, 0.0, scale)
    return torch.where(torch.isfinite(largest), scale, torch.nan)


def spread(scale: Tensor, shape: tuple[int, int, int, int] | torch.Size, granularity: Granularity) -> Tensor:
    """scale as a tensor that broadcasts against the (B, S, H, D) tensor that it belongs to."""
    if granularity.kind == "tensor":
        return scale
    if granularity.kind == "head":
        return scale[:, None, :, None]
    if granularity.kind == "channel":
        return scale[:, None]
    rows = scale.repeat_interleave(granularity.rows, -1)[..., : shape[1]]
    return rows.transpose(1, 2)[..., None]


def divide(x: Tensor, scale: Tensor, granularity: Granularity) -> Tensor:
    """x / scale in float32, 0 where the scale is 0."""
    divisor = spread(scale, x.shape, granularity)
    return torch.where(divisor == 0, 0.0, x.float() / divisor)


def quantize(x: Tensor, granularity: Granularity = PER_BLOCK, fitted: bool = False) -> tuple[Tensor, Tensor]:
    """(x / scale in E4M3, scale). fitted: scales, of blocks or rows, are moved by `fit` after the cast."""
    scale = scale_of(x, granularity)
    quotients = divide(x, scale, granularity)
    codes = cast(quotients)
    return codes, fit(scale, quotients, codes, granularity) if fitted else scale


def fit(scale: Tensor, quotients: Tensor, codes: Tensor, granularity: Granularity) -> Tensor:
    """scale times sum |y|^6 / sum |y|^4 (codes . y) over its rows, y = quotients: with one row, |codes| cos = |y|.

    Of y alone, so that rows times a power of two have scales times it. NOTE: float32 sums, in no order that counts.
    """
    assert granularity.kind == "block"
    rows = granularity.rows
    length, along = ((quotients * other).sum(-1).transpose(1, 2) for other in (quotients, codes.float()))
    whole = (F.pad(x, (0, -x.shape[-1] % rows)).unflatten(-1, (-1, rows)) for x in (length**3, length**2 * along))
    length, along = (x.sum(-1) for x in whole)
    factor = (length / along).nan_to_num(nan=1.0).clamp(1 - FIT_MAX, 1 + FIT_MAX)
    return torch.maximum(scale * factor, scale.clamp_max(SMALLEST_SCALE)).contiguous()


def dequantize(
    codes: Tensor, scale: Tensor, granularity: Granularity = PER_BLOCK, dtype: torch.dtype = torch.float32
) -> Tensor:
    """codes * scale. In float64 it is exact, in float32 it is rounded once."""
    return codes.to(dtype) * spread(scale, codes.shape, granularity).to(dtype)


def pack_v(codes: Tensor) -> Tensor:
    """V (B, S, H, D) of 8 bits to (B, H, D, S padded with zeros to whole groups), keys in KEY_ORDER in every group."""
    by_channel = codes.view(torch.uint8).permute(0, 2, 3, 1)
    padded = F.pad(by_channel, (0, -codes.shape[1] % GROUP)).unflatten(-1, (-1, GROUP))
    return padded[..., _order(codes.device)].flatten(-2).view(codes.dtype)


def unpack_v(packed: Tensor, seqlen: int) -> Tensor:
    """pack_v undone: (B, seqlen, H, D), contiguous."""
    groups = packed.view(torch.uint8).unflatten(-1, (-1, GROUP))
    by_channel = groups[..., _order(packed.device).argsort()].flatten(-2)[..., :seqlen]
    return by_channel.permute(0, 3, 1, 2).contiguous().view(packed.dtype)


def _order(device: torch.device) -> Tensor:
    return torch.tensor(KEY_ORDER, device=device)


def _absmax(x: Tensor, granularity: Granularity) -> Tensor:
    """The largest magnitude per scale; NaN where there is a NaN, 0 where there is nothing."""
    batch, seqlen, heads, dim = x.shape
    if x.numel() == 0:
        return x.new_zeros(granularity.shape((batch, seqlen, heads, dim)))
    if granularity.kind == "block":
        rows = F.pad(x, (0, 0, 0, 0, 0, -seqlen % granularity.rows)).unflatten(1, (-1, granularity.rows))
        return rows.abs().amax((2, 4)).transpose(1, 2).contiguous()
    over = {"tensor": (0, 1, 2, 3), "head": (1, 3), "channel": (1,)}[granularity.kind]
    return x.abs().amax(over)
