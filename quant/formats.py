"""What is stored: the 8-bit format, which elements share a scale, and a quantised Q, K and V as one record.

Every scale is a descale in float32: real value = stored value * scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64  # rows that share a scale; the kernels' tiles are multiples of it
GROUP = 16  # keys inside which packed V is permuted; packed V is padded with zeros to whole groups
# Stored byte 4j + e of a group holds key (2j, 2j + 1, 2j + 8, 2j + 9)[e]: what thread j of a quad owns of a row of S
# is, in this order, what it must hold of P.
KEY_ORDER = tuple(key for j in range(GROUP // 4) for key in (2 * j, 2 * j + 1, 2 * j + 8, 2 * j + 9))


@dataclass(frozen=True)
class Format:
    """A small float: sign, exponent, mantissa; its subnormal numbers are spaced like its smallest normal ones."""

    dtype: torch.dtype
    max: float  # the largest number; there is no infinity
    mantissa_bits: int
    min_exponent: int  # the smallest normal number is 2^min_exponent

    @property
    def half_step(self) -> float:
        """The largest rounding error of a normal number, relative to its power of two."""
        return 2.0 ** -(self.mantissa_bits + 1)

    @property
    def smallest(self) -> float:
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    def half_ulp(self, x: Tensor) -> Tensor:
        """Half the spacing of the format's numbers around x, the most that rounding x may change it; float64."""
        exponent = torch.frexp(x.double().abs()).exponent - 1
        exponent = torch.where(x == 0, self.min_exponent, exponent).clamp_min(self.min_exponent)
        return self.half_step * torch.exp2(exponent.double())


E4M3 = Format(torch.float8_e4m3fn, 448.0, 3, -6)


@dataclass(frozen=True)
class Granularity:
    """Which elements of a (B, S, H, D) tensor share a scale, and so the shape of the scales.

    tensor: all, (); head: those of a batch and head, (B, H); block: `rows` successive rows of a head, (B, H, ceil(S /
    rows)); channel: a component of all rows of a head, (B, H, D).
    """

    kind: str
    rows: int = 0

    def shape(self, of: tuple[int, int, int, int]) -> tuple[int, ...]:
        """The shape of the scales of a tensor of shape `of`."""
        batch, seqlen, heads, dim = of
        if self.kind == "tensor":
            return ()
        if self.kind == "head":
            return batch, heads
        if self.kind == "channel":
            return batch, heads, dim
        return batch, heads, -(-seqlen // self.rows)


PER_TENSOR = Granularity("tensor")
PER_HEAD = Granularity("head")
PER_BLOCK = Granularity("block", BLOCK)
PER_ROW = Granularity("block", 1)
PER_CHANNEL = Granularity("channel")


@dataclass(frozen=True)
class QuantizedQKV:
    """Q, K and V in E4M3 with their scales, as the FP8 forward takes them. Scales may have stride 0.

    A rotation changes Q and K by one orthogonal matrix, so that attention does not need to know of it.
    """

    q: Tensor  # (B, Sq, H, D)
    k: Tensor  # (B, Sk, Hkv, D)
    v: Tensor  # (B, Hkv, Dv, Sk padded to whole groups): packed, see cast.pack_v
    q_scale: Tensor  # (B, H, ceil(Sq / 64)), or (B, H, Sq): one per row
    k_scale: Tensor  # (B, Hkv, ceil(Sk / 64))
    v_scale: Tensor  # (B, Hkv, ceil(Sk / 64))
    v_channel_scale: Tensor | None  # (B, Hkv, Dv), on top of v_scale: multiplies the columns of O
    seqlen_k: int  # keys without padding
    dtype: torch.dtype  # of the tensors that were quantised, and of O
    rotated: bool = False

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        batch, seqlen, heads, dim = self.q.shape
        return batch, seqlen, heads, dim

    @property
    def heads_kv(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[2]

    @property
    def q_rows(self) -> int:
        """Rows of Q that share a scale: 64 or 1. Where there is one row at most, both mean the same."""
        return 1 if self.q_scale.shape[-1] == self.q.shape[1] else BLOCK

    def validate(self) -> None:
        """TypeError or ValueError, naming the field, unless types, devices and shapes fit together."""
        codes = {"q": self.q, "k": self.k, "v": self.v}
        scales = {"q_scale": self.q_scale, "k_scale": self.k_scale, "v_scale": self.v_scale}
        if self.v_channel_scale is not None:
            scales["v_channel_scale"] = self.v_channel_scale
        for wanted, tensors in ((E4M3.dtype, codes), (torch.float32, scales)):
            for name, tensor in tensors.items():
                if tensor.dtype != wanted:
                    raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {wanted}")
                if tensor.device != self.q.device:
                    raise ValueError(f"{name} is on {tensor.device} and q on {self.q.device}: one device is needed")
        if not self.dtype.is_floating_point or self.dtype.itemsize < 2:
            raise TypeError(f"dtype is {self.dtype}; allowed: the floating point type of the output, 16 bits or more")
        for name, tensor in codes.items():
            if tensor.dim() != 4:
                raise ValueError(f"{name} must have 4 dimensions, got {tensor.dim()}: {tuple(tensor.shape)}")
        batch, _, heads, head_dim = self.q.shape
        if self.heads_kv == 0 or heads % self.heads_kv:
            raise ValueError(f"q has {heads} heads, which k's {self.heads_kv} do not divide")
        padded = -(-self.seqlen_k // GROUP) * GROUP
        k_scales = PER_BLOCK.shape((batch, self.seqlen_k, self.heads_kv, head_dim))
        _check_shape("k", self.k, (batch, self.seqlen_k, self.heads_kv, head_dim))
        _check_shape("v", self.v, (batch, self.heads_kv, self.head_dim_v, padded))
        _check_shape("q_scale", self.q_scale, PER_BLOCK.shape(self.q_shape), PER_ROW.shape(self.q_shape))
        _check_shape("k_scale", self.k_scale, k_scales)
        _check_shape("v_scale", self.v_scale, k_scales)
        if self.v_channel_scale is not None:
            _check_shape("v_channel_scale", self.v_channel_scale, (batch, self.heads_kv, self.head_dim_v))


def _check_shape(name: str, tensor: Tensor, *allowed: tuple[int, ...]) -> None:
    if tuple(tensor.shape) not in allowed:
        shapes = " or ".join(str(shape) for shape in dict.fromkeys(allowed))
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: {shapes}")
