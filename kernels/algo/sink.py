"""Attention sinks: one more score a head, of no key and without a value, that takes its share of each row's softmax."""

import math
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..prims.wgmma import ROWS

LARGEST = 3.4028234663852886e38  # finite in FP32


class NoSink(NamedTuple):
    def join(self, head: Int32, inverse: cute.Tensor, lse: cute.Tensor): ...


class Sink(NamedTuple):
    """It joins a tile that is done: the merge of two parts, one of which has no values. Counted from the larger of
    both, so that neither overflows; of a row without a key LSE is the sink and O stays 0.
    """

    scores: cute.Tensor  # (heads), natural units, of the scaled scores

    def join(self, head: Int32, inverse: cute.Tensor, lse: cute.Tensor):
        """inverse (2) and lse (2), as `Softmax.finish` leaves them, take the sink in."""
        sink = self.scores[head].to(Float32)
        for r in range(ROWS):
            lse[r], factor = joined(lse[r], sink)
            inverse[r] = inverse[r] * factor


@cute.jit
def joined(lse: Float32, sink: Float32) -> tuple[Float32, Float32]:
    """The LSE of a row with its sink, and what its O is multiplied with."""
    largest = cute.arch.fmax(lse, sink)
    # NOTE: a finite number, so that a difference with it is no NaN where both are the same infinity.
    base = Float32(0.0) if largest == -Float32.inf else cute.arch.fmin(largest, Float32(LARGEST))
    seen = cute.math.exp2((lse - base) * math.log2(math.e), fastmath=True)
    total = seen + cute.math.exp2((sink - base) * math.log2(math.e), fastmath=True)
    factor = Float32(0.0) if total == 0.0 else seen * cute.arch.rcp_approx(total)
    return largest + cute.math.log2(total, fastmath=True) * math.log(2), factor
