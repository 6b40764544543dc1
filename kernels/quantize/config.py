"""What the quantise kernels are given (Spec, PackSpec, ScalesSpec) and what was chosen for them (Config).

Plain frozen records: importing this module imports no compiler, so a kernel on disk is found without one.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..prims.residency import Resident

DTYPES = ("bfloat16", "float16")
BLOCK = 64  # rows that share a scale
GROUP = 16  # keys inside which packed V is permuted
KEYS = 2 * BLOCK  # of V that one CTA packs: 128 bytes of a row of the packed tensor
WARPS = 8  # of a CTA
THREADS = 32 * WARPS
WARP_WORDS = 3  # in which warps leave each other a maximum and two sums
LANES = 4  # that share a row of Q or K
CHUNK = 8  # values of a 16-bit type that one load of 16 bytes brings
SCALE_THREADS = 512  # of a CTA that prepares a head's scales
SCALE_MIN = 2.0**-60  # least scale of K that the forward is given: 0 would make NaN of a masked score
# Least log2 of a scale of V over the largest: row sums, which grow by its inverse and by the fall of a reference, stay
# in float32's range.
RATIO_LOG2_MIN = -64.0
BEYOND = 3  # scales past the last block's, that change nothing: a tile of up to 256 keys may reach so far
SM_BYTES, RESERVED_BYTES = 233472, 1024  # shared memory of an SM of sm_90, and what the system takes of it a CTA
HEAD_DIM_STEP, HEAD_DIM_MAX = 16, 256
ROTARY_STEP = 16  # both halves of a rotary pair are whole chunks


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of the first `dim` of a head's dimensions, before the rotation."""

    dim: int
    interleaved: bool  # pairs (2i, 2i + 1); else (i, i + dim / 2)
    dtype: str  # of cos and sin: "float32", or the inputs' own


@dataclass(frozen=True)
class Spec:
    """Q, K and V in one launch. Sizes, strides and head counts are run-time arguments."""

    entry: ClassVar[str] = "fa3.kernels.quantize.kernel"  # module whose `signature(spec, config)` is compiled

    dtype: str  # "bfloat16" or "float16"
    head_dim: int  # of Q and K
    head_dim_v: int
    rotate: bool = False  # Q and K times diag(signs) and a normalised Hadamard matrix
    rotary: Rotary | None = None
    q_rows: Literal[1, 64] = 64  # rows of Q that share a scale


@dataclass(frozen=True)
class PackSpec:
    """V that is e4m3 already: transposed and permuted, not scaled."""

    entry: ClassVar[str] = "fa3.kernels.quantize.pack"

    head_dim_v: int


@dataclass(frozen=True)
class ScalesSpec:
    """The scales of K and V, from the blocks' own to what the forward reads."""

    entry: ClassVar[str] = "fa3.kernels.quantize.scales"


@dataclass(frozen=True)
class Config(Resident):
    threads: ClassVar[int] = THREADS

    def shared_bytes(self, spec: Spec | PackSpec) -> int:
        """Dynamic shared memory of a CTA: the packed tile of V and, of every warp, a maximum and two sums."""
        return KEYS * spec.head_dim_v + 4 * WARP_WORDS * WARPS

    def carveout(self, spec: Spec | PackSpec) -> int:
        """Percent of an SM's memory that is shared memory: what its CTAs need. The rest caches."""
        return min(100, -(-100 * self.ctas * (self.shared_bytes(spec) + RESERVED_BYTES) // SM_BYTES))


def config_for(spec: Spec | PackSpec | ScalesSpec) -> Config:
    """As many CTAs as registers allow without spilling: bytes in flight are what counts."""
    if isinstance(spec, ScalesSpec):
        return Config(1)
    if isinstance(spec, PackSpec):
        return Config(8 if spec.head_dim_v <= 128 else 4)
    widest = max(spec.head_dim, spec.head_dim_v)
    if spec.rotary is not None:
        return Config(3 if widest <= 128 else 2)
    return Config(6 if widest <= 64 else 5 if widest <= 128 else 3 if widest <= 192 or spec.q_rows == BLOCK else 2)


def parts(head_dim: int) -> tuple[int, ...]:
    """The descending powers of two that sum to head_dim: each has a Hadamard matrix of its own."""
    return tuple(1 << i for i in range(head_dim.bit_length() - 1, -1, -1) if head_dim >> i & 1)
