"""What becomes of the scores before the mask."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from ..prims.ptx import tanh


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
            doubled = cute.math.exp2(acc_S[i] * self.inner_scale, fastmath=True)
            acc_S[i] = Float32(1.0) - 2.0 * cute.arch.rcp_approx(1.0 + doubled)
