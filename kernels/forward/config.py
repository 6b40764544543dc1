"""What the forward kernel is given (Spec) and what was chosen for it (Config): together compile key and cache key.

Plain frozen records: importing this module imports no compiler, so a kernel on disk is found without one.
"""

from dataclasses import dataclass
from typing import ClassVar

SHARED_BYTES = 232448  # dynamic shared memory that one CTA may have on sm_90
ELEMENT_BYTES = 2
TILES = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))  # (head_dim, head_dim_v)


@dataclass(frozen=True)
class Spec:
    """The problem as the compiler sees it. Sizes, strides, GQA ratio and softmax scale are run-time arguments."""

    entry: ClassVar[str] = "fa3.kernels.forward.kernel"  # module whose `signature(spec, config)` is compiled

    dtype: str  # "bfloat16" or "float16": of Q, K, V and O
    head_dim: int  # of the tile: smaller ones are filled with zeros by TMA
    head_dim_v: int
    causal: bool


@dataclass(frozen=True)
class Config:
    warpgroups: int  # consumers, 64 query rows each
    tile_n: int  # keys in a block
    stages: int = 2  # K and V blocks in flight
    overlap: bool = True  # QK of the next block is issued before PV of this one
    pingpong: bool = True  # the warpgroups take turns at the tensor cores
    persistent: bool = False  # one CTA an SM that takes tile after tile; else one CTA a tile
    dynamic: bool = False  # with persistent: the next tile by a counter in global memory, else by a fixed rule
    rescale_early: bool = False  # with overlap: O is rescaled under the next QK, else among this block's exponentials

    @property
    def tile_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of the producer and of the consumers: what setmaxnreg makes of the 64 Ki of an SM."""
        return {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.warpgroups]

    def o_place(self, spec: Spec) -> str:
        """Shared memory that O leaves through: "own", or where there is no room "q" or "v".

        Over Q where no other tile follows. Over V where one does, so that its Q and first K are fetched meanwhile.
        """
        if not self.persistent:
            return "q"
        return "own" if self._shared_bytes(spec) + self._o_bytes(spec) <= SHARED_BYTES else "v"

    def shared_bytes(self, spec: Spec) -> int:
        """Dynamic shared memory of a CTA."""
        return self._shared_bytes(spec) + (self._o_bytes(spec) if self.o_place(spec) == "own" else 0)

    def _o_bytes(self, spec: Spec) -> int:
        return ELEMENT_BYTES * self.tile_m * spec.head_dim_v

    def _shared_bytes(self, spec: Spec) -> int:
        """Tiles of Q and of the K and V rings, barriers and tickets, one alignment gap."""
        kv = self.stages * self.tile_n * (spec.head_dim + spec.head_dim_v)
        return ELEMENT_BYTES * (self.tile_m * spec.head_dim + kv) + 8 * (2 * (4 + 2 * self.stages) + 1) + 1024


def tile_for(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The smallest tile that holds both head dims."""
    return next(t for t in TILES if head_dim <= t[0] and head_dim_v <= t[1])
