"""Attention sinks: one more score a head, that takes weight and gives nothing."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32


def with_sink(lse, sink) -> tuple[Float32, Float32]:
    """LSE with the sink, natural log, and what O must be multiplied with. Of a row without a key the LSE is the sink's
    value, and -inf where that is -inf too.
    """
    top = cutlass.max(lse, sink)
    top = cutlass.select_(top == -Float32.inf, Float32(0.0), top)
    own = cute.math.exp2((lse - top) * math.log2(math.e), fastmath=True)
    total = own + cute.math.exp2((sink - top) * math.log2(math.e), fastmath=True)
    factor = cutlass.select_(total > 0.0, own * cute.arch.rcp_approx(total), Float32(0.0))
    return top + cute.math.log2(total, fastmath=True) * math.log(2), factor
