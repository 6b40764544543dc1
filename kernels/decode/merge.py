"""Partial results to final ones: a warp a row.

Launched together with the kernel that makes them, it is there when that ends (programmatic dependent launch).
"""

import math
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..algo.pieces import Line, Piece, Shares
from ..algo.scheduler import LANES
from ..algo.sink import joined
from ..prims.branch import when
from ..prims.ptx import here, read_pair
from .config import Spec
from .rows import Parts, Place, store_pair

WARPS = 4
LOADS = 32  # of a lane that are under way together


class Merge(NamedTuple):
    """The rows of one tile of one sequence."""

    parts: Parts
    mO: cute.Tensor
    mLSE: cute.Tensor
    mSink: cute.Tensor | None  # (heads)
    line: Line
    units: Int32
    unit: Int32
    head_kv: Int32
    spec: Spec
    dtype: object

    @cute.jit
    def run(self: cutlass.Constexpr, item: Int32, warp: Int32):
        """What shares cut in two is merged by the first boundary that is inside of it, item + 1; what lies in given
        granules by the number of the sequence.
        """
        if cutlass.const_expr(self.line.by_granule):
            b, first = item, self.line.batch.before(item)
            count = self.line.batch.sequence(b).count
        else:
            shares = Shares.create(self.line.batch.total(), self.line.parts)
            b, start = self.line.batch.find(shares.first(item + 1))
            b = cutlass.min(b, self.line.batch.given.batch - 1)  # there are fewer granules than shares
            first, count = item, Int32(0)
            if (start < shares.first(item + 1)) & (start >= shares.first(item)):
                count = shares.part_of(start + self.line.batch.sequence(b).count - 1) - item + 1
        none = Int32(0)
        piece = Piece(b, self.line.batch.sequence(b), none, none, cutlass.Boolean(False), *[none] * 5)
        place = Place.of(self.line.batch, piece, self.head_kv, self.line.ratio, self.line.row)
        # NOTE: worked out before the wait.
        place, count = place._replace(first=here(place.first), count=here(place.count)), here(count)
        cute.arch.griddepcontrol_wait()
        if count > 1:
            for i in cutlass.range(warp, place.count, WARPS, unroll=1):
                self.row(place, first, count, i)

    def slot(self, first, nth):
        begins = cutlass.select_(nth == 0, Int32(1), Int32(0))
        return self.line.slot(first + nth, first + nth, begins) * self.units + self.unit

    @cute.jit
    def row(self: cutlass.Constexpr, place: cutlass.Constexpr, first: Int32, count: Int32, i: Int32):
        """Row i of the tile, some parts at a time: what is there is rescaled where they have a larger LSE."""
        lane = cute.arch.lane_idx()
        pairs = (self.spec.head_dim_v + 2 * LANES - 1) // (2 * LANES)  # of columns, a lane
        at_once = min(LOADS // pairs, LANES)
        columns = [cutlass.min(2 * (lane + LANES * p), self.spec.head_dim_v - 2) for p in range(pairs)]
        acc = cute.make_rmem_tensor(2 * pairs, Float32)
        acc.fill(0.0)
        total, top = Float32(0.0), -Float32.inf
        for start in cutlass.range(0, count, at_once, unroll=1):
            # NOTE: past the last part the last one again, with weight 0.
            slots = [self.slot(first, cutlass.min(start + n, count - 1)) for n in range(at_once)]
            own = self.slot(first, cutlass.min(start + lane, count - 1))
            lse = self.parts.lse(own, i)[0]
            parts = [[read_pair(self.parts.o(x, i) + 4 * c) for c in columns] for x in slots]
            lse = cutlass.select_((lane < at_once) & (start + lane < count), lse, -Float32.inf)
            new = cutlass.max(top, warp_max(lse))
            base = cutlass.select_(new == -Float32.inf, Float32(0.0), new)
            factor, weight = weight_of(top - base), weight_of(lse - base)
            total = total * factor
            for p in cutlass.range_constexpr(2 * pairs):
                acc[p] = acc[p] * factor
            for n in cutlass.range_constexpr(at_once):
                share = cute.arch.shuffle_sync(weight, n)
                total = total + share
                for p in cutlass.range_constexpr(pairs):
                    acc[2 * p] = acc[2 * p] + share * parts[n][p][0]
                    acc[2 * p + 1] = acc[2 * p + 1] + share * parts[n][p][1]
            top = new
        inverse = cutlass.select_(total > 0.0, cute.arch.rcp_approx(total), Float32(0.0))
        lse = cutlass.select_(total > 0.0, top, Float32(0.0)) + cute.math.log2(total, fastmath=True) * math.log(2)
        if cutlass.const_expr(self.spec.sink):
            lse, factor = joined(lse, self.mSink[place.head_of(i)].to(Float32))
            inverse = inverse * factor
        start = self.mO.iterator.toint() + 2 * place.offset(self.mO, i)
        for p in cutlass.range_constexpr(pairs):
            column = 2 * (lane + LANES * p)
            low, high = acc[2 * p] * inverse, acc[2 * p + 1] * inverse
            when(column < self.mO.shape[3], partial(store_pair, start + 2 * column, low, high, self.dtype))
        when(lane == 0, partial(place.put_lse, self.mLSE, lse, i))


def weight_of(x) -> Float32:
    """e^x."""
    return cute.math.exp2(x * math.log2(math.e), fastmath=True)


def warp_max(x) -> Float32:
    for shift in range(5):
        x = cutlass.max(x, cute.arch.shuffle_sync_bfly(x, offset=1 << shift))
    return x
