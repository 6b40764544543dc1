"""What the merge kernel is given (Spec) and what was chosen for it (Config).

Plain frozen records: importing this module imports no compiler, so a kernel on disk is found without one.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..prims.residency import Resident

DTYPES = ("bfloat16", "float16", "float32")
CHUNK = 8  # values of O that a thread takes at once
THREADS = 128  # of a CTA
LANES_MAX = 32  # that share a row
AHEAD = 4  # partials that are loaded before the first is added
CARVEOUT = 4  # percent of an SM's memory that is shared memory: what the system takes of it for 8 CTAs


@dataclass(frozen=True)
class Spec:
    """Partial O and LSE into one. Their number, sizes and strides are run-time arguments."""

    entry: ClassVar[str] = "fa3.kernels.merge.kernel"  # module whose `signature(spec, config)` is compiled

    dtype: str  # of the partial O
    dtype_o: str  # of the result
    pair: bool  # two tensors, else one with a dimension of partials


@dataclass(frozen=True)
class Config(Resident):
    threads: ClassVar[int] = THREADS


def config_for(spec: Spec) -> Config:
    """As many CTAs as registers for AHEAD partials of float32 allow; a pair needs fewer."""
    return Config(8 if spec.pair else 6)


def lanes_log2(head_dim: int) -> int:
    """Of the lanes that share a row: a power of two with a chunk for most of them."""
    return min((-(-head_dim // CHUNK) - 1).bit_length(), (LANES_MAX - 1).bit_length())
