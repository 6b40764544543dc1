"""Tensors seen by the tensor memory accelerator: a copy atom, its coordinate tensor and the layout in shared memory."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import cpasync

from .ring import Ring


class Operand(NamedTuple):
    atom: cute.CopyAtom
    tensor: cute.Tensor  # coordinates, modes as the operand was made
    layout: cute.ComposedLayout  # (row, column, stage) in shared memory


LONGEST = 2**30  # rows of a sequence of a ragged batch
ADDRESSES = 2**64


def ragged(mX: cute.Tensor) -> cute.Tensor:
    """(1, total, h, d) as ((total + 1, LONGEST + 1), LONGEST, h, d), where TMA's own bounds are those of a sequence.

    Row i of the n rows from `first` on has the coordinates ((first + n, LONGEST), LONGEST - n + i): the second one goes
    LONGEST rows back, around the end of the address space. Whatever lies behind row n - 1 is out of bounds, so it reads
    as zeros and is not written. NOTE: a tensor that begins LONGEST rows further up would do for what is within bounds;
    where a load is not, TMA touches the tensor's first address.
    """
    _, total, heads, columns = mX.shape
    _, step, head, column = mX.stride
    number = mX.element_type.width // 8
    aligned = 16 // number
    # NOTE: of one row any stride is accepted, and it leads nowhere.
    step = cute.assume(Int64(cutlass.select_(total > 1, Int64(step), Int64(aligned))), divby=aligned)
    back = cute.assume(Int64(ADDRESSES // LONGEST // number) - step, divby=aligned)
    layout = cute.make_layout(
        ((total + 1, LONGEST + 1), LONGEST, heads, columns), stride=((step, back), step, head, column)
    )
    return cute.make_tensor(mX.iterator, layout)


def operand(op, mX: cute.Tensor, modes: list, layout) -> Operand:
    """mX (b, s, h, d) with its modes reordered, and the TMA that moves one stage of layout."""
    mX = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=modes))
    tile = cute.slice_(layout, (None, None, 0))
    atom, tensor = cpasync.make_tiled_tma_atom(op, mX, tile, (cute.size(tile, mode=[0]), cute.size(tile, mode=[1])))
    return Operand(atom, tensor, layout)


def boxed(op, mX: cute.Tensor, modes: list, layout, mode: int, size: int) -> Operand:
    """`operand`, whose TMA moves a piece of a stage: `size` of its tile's mode `mode`, all of the other."""
    mX = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=modes))
    tile = cute.slice_(layout, (None, None, 0))
    shape = [cute.size(tile, mode=[0]), cute.size(tile, mode=[1])]
    shape[mode] = size
    piece = cute.make_composed_layout(tile.inner, 0, cute.composition(tile.outer, tuple(shape)))
    atom, tensor = cpasync.make_tiled_tma_atom(op, mX, piece, tuple(shape))
    return Operand(atom, tensor, layout)


class Feed(NamedTuple):
    """A TMA copy of tiles g (.., tile) into the stages s (.., stage) of a ring."""

    ring: Ring
    atom: cute.CopyAtom
    g: cute.Tensor
    s: cute.Tensor

    @staticmethod
    def create(ring: Ring, atom: cute.CopyAtom, gX: cute.Tensor, sX: cute.Tensor) -> "Feed":
        one_cta = cute.make_layout(1)
        s, g = cpasync.tma_partition(atom, 0, one_cta, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))
        return Feed(ring, atom, g, s)

    def put(self, i, tile):
        """Tile number `tile` into ring position i."""
        cute.copy(self.atom, self.g[None, tile], self.s[None, self.ring.stage(i)], tma_bar_ptr=self.ring.claim(i))

    def put_all(self, i, tiles: list):
        """Tiles side by side, under the barrier of ring position i: a stage of the ring holds as many."""
        full, first = self.ring.claim(i), self.ring.stage(i) * len(tiles)
        for j, tile in enumerate(tiles):
            cute.copy(self.atom, self.g[None, tile], self.s[None, first + j], tma_bar_ptr=full)
