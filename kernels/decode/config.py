"""What the decode kernel is given (Spec) and what was chosen for it (Config).

Plain frozen records, as in kernels/forward/config.py: importing this module imports no compiler.
"""

from dataclasses import dataclass
from typing import ClassVar

SHARED_BYTES = 232448  # dynamic shared memory that one CTA may have on sm_90
ROWS = 64  # query rows of a tile: the heads of a group for one token after the other
GATHER = 1  # of Spec.pages: any page size, row by row
BOXES = (64, 16)  # keys that one TMA box of a page holds, where they divide the page size
LOADERS = {True: 4, False: 1}  # warps that copy keys: of a gather all lanes do


@dataclass(frozen=True)
class Spec:
    """The problem as the compiler sees it: lengths, page tables, windows, ratios and strides are run-time arguments."""

    entry: ClassVar[str] = "fa3.kernels.decode.kernel"

    dtype: str  # "bfloat16" or "float16"
    head_dim: int  # of the tile
    head_dim_v: int
    pages: int = 0  # 0: every sequence has its cache; else keys of a page that are copied at a time
    splits: bool = True  # the keys of a sequence are spread over CTAs in shares that are equal, and merged
    granules: bool = False  # with splits: where it is cut is given
    chunk: bool = False  # attention_chunk
    softcap: bool = False
    sink: str = ""  # dtype of the sinks


@dataclass(frozen=True)
class Config:
    tile_n: int  # keys in a block
    stages: int  # K and V blocks in flight
    q_stages: int = 1  # pieces whose Q is in flight
    consumers: int = 1  # warpgroups: they take pieces in turn, so that one begins a piece while another ends one

    def loaders(self, spec: Spec) -> int:
        """Warps that copy keys."""
        return LOADERS[spec.pages == GATHER]

    def threads(self, spec: Spec) -> int:
        return 128 * self.consumers + 32 * self.loaders(spec)

    def shared_bytes(self, spec: Spec) -> int:
        """Dynamic shared memory of a CTA: the rings, their barriers, one alignment gap."""
        kv = self.stages * self.tile_n * (spec.head_dim + spec.head_dim_v)
        return 2 * (self.q_stages * ROWS * spec.head_dim + kv) + 16 * (self.q_stages + 2 * self.stages) + 1024
