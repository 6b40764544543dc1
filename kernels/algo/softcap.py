"""What becomes of the scores before the mask."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..prims.ptx import tanh

SMALL = 2.0**-6  # up to here two terms of the series are exact in FP32, and the difference from 1 is not


class Uncapped(NamedTuple):
    """They stay as they are."""

    def apply(self, acc_S: cute.Tensor): ...


class Softcap(NamedTuple):
    """Scaled scores become cap * tanh(score / cap): here tanh of the score alone, whose softmax has the scale `cap`."""

    inner_scale: Float32  # softmax scale / cap

    def apply(self, acc_S: cute.Tensor):
        for i in range(cute.size(acc_S)):
            acc_S[i] = tanh(acc_S[i] * self.inner_scale)


class ExactSoftcap(NamedTuple):
    """The same with a tanh as exact as its exponential, for kernels that wait for memory: 1 - 2 / (1 + e^(2 x))."""

    inner_scale: Float32  # 2 log2(e) softmax scale / cap

    def apply(self, acc_S: cute.Tensor):
        for i in range(cute.size(acc_S)):
            power = acc_S[i] * self.inner_scale
            large = Float32(1.0) - 2.0 * cute.arch.rcp_approx(1.0 + cute.math.exp2(power, fastmath=True))
            x = power * (math.log(2) / 2)
            acc_S[i] = cutlass.select_(x * x < SMALL**2, x - x * x * x / 3.0, large)
