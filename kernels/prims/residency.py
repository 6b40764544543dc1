"""How many CTAs an SM has at the same time. A plain frozen record: importing this module imports no compiler."""

from dataclasses import dataclass
from typing import ClassVar

REGISTERS = 65536  # of an SM of sm_90
THREAD_REGISTERS_MAX = 255


@dataclass(frozen=True)
class Resident:
    """The Config of a kernel whose only choice this is."""

    threads: ClassVar[int]  # of a CTA

    ctas: int  # of an SM at the same time, which caps the registers of a thread

    @property
    def registers_max(self) -> int:
        return min(THREAD_REGISTERS_MAX, REGISTERS // (self.threads * self.ctas) // 8 * 8)
