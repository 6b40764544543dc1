"""Random orthogonal matrices for Q and K: (Q R) (K R)^T = Q K^T, and an outlier is spread over its whole row.

R = diag(signs) H / sqrt(d) with H the Hadamard matrix of Sylvester's construction, after QuIP (arXiv:2307.13304) and
FlashAttention-3 (arXiv:2407.08608, section 3.3). The product takes O(d log d): log2(d) stages of sums and differences.
A d that is no power of two is cut into descending powers of two (96 = 64 + 32), with a transform each. `orthogonal` is
a dense matrix for any d. float64 is worked on in float64, all else in float32.
"""

import torch
from torch import Tensor


def parts(dim: int) -> tuple[int, ...]:
    """dim as descending powers of two."""
    return tuple(1 << bit for bit in reversed(range(dim.bit_length())) if dim >> bit & 1)


def random_signs(dim: int, seed: int = 0) -> Tensor:
    """(dim) of +1 and -1 in float32, on the CPU: the same for the same seed, wherever they are used."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (dim,), generator=generator).float() * 2 - 1


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """x R over the last dimension."""
    x = _widen(x)
    return _transform(x * signs.to(x))


def unrotate(x: Tensor, signs: Tensor) -> Tensor:
    """x R^T: undoes rotate."""
    x = _widen(x)
    return _transform(x) * signs.to(x)


def matrix(dim: int, signs: Tensor) -> Tensor:
    """R, (dim, dim) in float64, from the definition."""
    blocks = []
    for size in parts(dim):
        block = torch.ones(1, 1, dtype=torch.float64)
        while len(block) < size:
            block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
        blocks.append(block * size**-0.5)
    return signs.double().cpu()[:, None] * torch.block_diag(*blocks)


def orthogonal(dim: int, seed: int = 0) -> Tensor:
    """A dense random orthogonal (dim, dim) in float64, uniform over all (Stewart's QR of a Gaussian matrix): x @ it."""
    gauss = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, r = torch.linalg.qr(gauss)
    return q * r.diagonal().sign()


def _transform(x: Tensor) -> Tensor:
    """x H / sqrt(d), part by part; one multiplication by 1 / sqrt(d) at the end."""
    done = []
    for part in x.split(parts(x.shape[-1]), dim=-1):
        size, half = part.shape[-1], 1
        while half < size:
            pairs = part.unflatten(-1, (size // (2 * half), 2, half))
            low, high = pairs.unbind(-2)
            part = torch.stack((low + high, low - high), -2).flatten(-3)
            half *= 2
        done.append(part * size**-0.5)
    return torch.cat(done, -1)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
