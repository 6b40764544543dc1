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
