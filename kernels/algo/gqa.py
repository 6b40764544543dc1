"""Which K/V head serves a query head."""

from typing import NamedTuple

from cutlass import Int32


class HeadMap(NamedTuple):
    """Grouped-query attention: `ratio` query heads in a row share one K/V head."""

    ratio: Int32

    def kv_head(self, head: Int32) -> Int32:
        return head // self.ratio
