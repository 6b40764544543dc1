"""What the append kernel is given (Spec) and what was chosen for it (Config).

Plain frozen records: importing this module imports no compiler, so a kernel on disk is found without one.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..prims.residency import Resident

DTYPES = ("bfloat16", "float16")
CHUNK = 8  # values of a 16-bit type in 16 bytes: what a thread moves
THREADS = 128  # of a CTA: each moves one chunk of one token
CARVEOUT = 8  # percent of an SM's memory that is shared memory: what the system takes of it for 16 CTAs
ROTARY_STEP = 16  # both halves of a rotary pair are whole chunks
# Lists that a call may have, each a bit of `given`.
LENGTHS, CU_K, BATCH_IDX, PAGE_TABLE, INDPTR, CU_Q, ROTARY_SEQLENS = (1 << i for i in range(7))
OWN_POSITION = 1 << 7  # also a bit of `given`: every query has a position of its own


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of the first dimensions of a head; of how many is a run-time number."""

    interleaved: bool  # pairs (2i, 2i + 1); else (i, i + rotary_dim / 2)
    dtype: str  # of cos and sin: "float32", or the tensors' own


@dataclass(frozen=True)
class Spec:
    """K and V into the cache and Q into a new tensor, in one launch. Sizes and strides are run-time arguments."""

    entry: ClassVar[str] = "fa3.kernels.append.kernel"  # module whose `signature(spec, config)` is compiled

    dtype: str  # "bfloat16" or "float16"
    rotary: Rotary | None = None  # None: Q is not touched, K is copied
    aligned: bool = True  # all addresses and strides are multiples of 16 bytes; else values are moved one by one


@dataclass(frozen=True)
class Config(Resident):
    threads: ClassVar[int] = THREADS


def config_for(spec: Spec) -> Config:
    """As many as an SM has threads for: bytes in flight are what counts."""
    return Config(16)
