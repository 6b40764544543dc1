"""What the forward kernel is given (Spec) and what was chosen for it (Config): together compile key and cache key.

Plain frozen records: importing this module imports no compiler, so a kernel on disk is found without one.
"""

from dataclasses import dataclass
from typing import ClassVar

SHARED_BYTES = 232448  # dynamic shared memory that one CTA may have on sm_90
OUT_BYTES = 2  # an element of O
FP8 = "float8_e4m3fn"
TILES = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))  # (head_dim, head_dim_v)


@dataclass(frozen=True)
class Spec:
    """The problem as the compiler sees it. Sizes, strides, GQA ratio and softmax scale are run-time arguments."""

    entry: ClassVar[str] = "fa3.kernels.forward.kernel"  # module whose `signature(spec, config)` is compiled

    dtype: str  # "bfloat16", "float16" or "float8_e4m3fn": of Q, K and V
    head_dim: int  # of the tile: smaller ones are filled with zeros by TMA
    head_dim_v: int
    causal: bool
    dtype_o: str = ""  # of O where it is not that of Q: "bfloat16" or "float16"
    v_channel_scale: bool = False  # the columns of O have scales
    ragged: bool = False  # sequences of their own lengths, one behind the other
    paged: bool = False  # ragged, with K and V in pages of a pool
    local: str = ""  # keys around the query's own, a mask on both sides: "window" or "chunk"; then not causal
    softcap: bool = False
    sink: str = ""  # type of the sinks, one a head: "float32", "bfloat16" or "float16"

    @property
    def is_variant(self) -> bool:
        """Whether the kernel takes numbers of a variant."""
        return bool(self.local or self.softcap or self.sink)

    @property
    def is_fp8(self) -> bool:
        return self.dtype == FP8

    @property
    def element_bytes(self) -> int:
        return 1 if self.is_fp8 else 2

    @property
    def step(self) -> int:
        """Keys of one step of PV: the K of a WGMMA."""
        return 32 // self.element_bytes


@dataclass(frozen=True)
class Config:
    warpgroups: int  # consumers, 64 query rows each
    tile_n: int  # keys in a block
    stages: int = 2  # K and V blocks in flight
    q_stages: int = 1  # Q tiles in flight: with 2 a persistent CTA has the next tile's Q, K and V before it ends one
    overlap: bool = True  # QK of the next block is issued before PV of this one
    pingpong: bool = True  # the warpgroups take turns at the tensor cores
    persistent: bool = False  # one CTA an SM that takes tile after tile; else one CTA a tile
    dynamic: bool = False  # with persistent: the next tile by a counter in global memory, else by a fixed rule
    prefetch: bool = False  # FP8, with overlap: V, the next K and its scales are awaited behind the exponentials
    alternate: bool = False  # FP8, with promotion: QK is a block ahead, where the PV before it was summed
    rescale_early: bool = False  # with overlap: O is rescaled under the next QK, else among this block's exponentials
    optimistic: bool = False  # 16 bit, with overlap: exponentials against an older max, a new one only where they grow
    promotion: int = 0  # key blocks whose PV the tensor core sums before it is added to O in FP32: 1, or 0 for all
    chunk: int = 0  # with promotion: columns of O that are computed and added at a time; 0: all
    box: int = 0  # of paged K and V: keys that lie in one page together, that TMA fetches at a time

    @property
    def tile_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups)

    def registers(self, spec: Spec) -> tuple[int, int]:
        """Registers a thread of the producer and of the consumers, by setmaxnreg.

        NOTE: together no more than the CTA had at its start, a multiple of 8 a thread: with more the last warpgroup
        waits for ever. The producer of a ragged batch looks for tiles too, that of a local mask
        for the ends of intervals.
        """
        two = (40, 232) if spec.ragged or spec.local else (24, 240)
        return {1: (56, 256), 2: two, 3: (32, 160)}[self.warpgroups]

    def o_place(self, spec: Spec) -> str:
        """Shared memory that O leaves through: "own", or where there is no room "q" or "v".

        Over Q where no other tile follows. Over V where one does, so that its Q and first K are fetched meanwhile.
        """
        if not self.persistent and not spec.is_fp8:
            return "q"
        has_room = self._shared_bytes(spec) + self._o_bytes(spec) <= SHARED_BYTES
        fits_in_v = OUT_BYTES * 64 <= spec.element_bytes * self.tile_n  # a warpgroup's rows in a stage
        return "own" if has_room or not fits_in_v else "v"

    def shared_bytes(self, spec: Spec) -> int:
        """Dynamic shared memory of a CTA."""
        return self._shared_bytes(spec) + (self._o_bytes(spec) if self.o_place(spec) == "own" else 0)

    def _o_bytes(self, spec: Spec) -> int:
        return OUT_BYTES * self.tile_m * spec.head_dim_v

    def _shared_bytes(self, spec: Spec) -> int:
        """Tiles of Q and of the K and V rings, barriers and tickets, one alignment gap."""
        kv = self.stages * self.tile_n * (spec.head_dim + spec.head_dim_v)
        q = self.q_stages * self.tile_m * spec.head_dim
        barriers, tickets = 2 * (3 + self.q_stages + 2 * self.stages), 3 if spec.ragged else 1
        return spec.element_bytes * (q + kv) + 8 * (barriers + tickets) + 1024


def tile_for(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The smallest tile that holds both head dims."""
    return next(t for t in TILES if head_dim <= t[0] and head_dim_v <= t[1])
