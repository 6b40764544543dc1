"""A run-time branch whose sides keep what they hold at compile time: the DSL makes run-time numbers of a record that an
`if` calls a method of.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean


@cute.jit
def when(condition: Boolean, then: cutlass.Constexpr):
    if condition:
        then()


@cute.jit
def either(condition: Boolean, then: cutlass.Constexpr, otherwise: cutlass.Constexpr):
    if condition:
        then()
    else:
        otherwise()
