"""Which keys a query sees and what becomes of its scores: the ways in which attention differs from call to call."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

UNLIMITED = -1  # of a window
CHUNK_MAX = 2**30  # keys, more than a sequence may have: larger chunks hide the same ones


class Variant(NamedTuple):
    """The keys that a query sees lie side by side: every mask is an interval, and `interval` gives it."""

    causal: bool = False
    window_left: int = UNLIMITED  # keys before the query's own position, -1: all
    window_right: int = UNLIMITED  # keys behind it
    attention_chunk: int = 0  # keys of the chunk of so many that the query's position is in; 0: no chunks
    softcap: float = 0.0  # scaled scores become softcap * tanh(score / softcap); 0: as they are

    def interval(self, row: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """Query `row` sees the keys first..end - 1; none where end <= first.

        Positions are aligned bottom-right: query i stands at key i + seqlen_k - seqlen_q.
        """
        position = row + seqlen_k - seqlen_q
        first, end = 0, seqlen_k
        if self.causal:
            end = min(end, position + 1)
        if self.window_right >= 0:
            end = min(end, position + self.window_right + 1)
        if self.window_left >= 0:
            first = max(first, position - self.window_left)
        if self.attention_chunk > 0:
            chunk = position // self.attention_chunk * self.attention_chunk
            first, end = max(first, chunk), min(end, chunk + self.attention_chunk)
        return max(first, 0), max(end, 0)


def variant_of(causal: Any, window_size: Any, attention_chunk: Any, softcap: Any) -> Variant:
    """FlashAttention-3's arguments as a Variant, or the error that says which is wrong.

    A window side of -1, or None, or any other negative number is unlimited; causal closes the right side.
    """
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be a pair (left, right), got {window_size!r}") from None
    sides = []
    for name, side in (("left", left), ("right", right)):
        if side is not None and not _is_int(side):
            raise TypeError(f"window_size {name} must be an int or None, got {type(side).__name__}")
        sides.append(UNLIMITED if side is None or side < 0 else int(side))
    if not _is_int(attention_chunk):
        raise TypeError(f"attention_chunk must be an int, got {type(attention_chunk).__name__}")
    if attention_chunk < 0:
        raise ValueError(f"attention_chunk is {attention_chunk}; allowed: 0 (none) and more")
    if type(softcap) is not float and (isinstance(softcap, bool) or not isinstance(softcap, numbers.Real)):
        raise TypeError(f"softcap must be a number, got {type(softcap).__name__}")
    if not 0.0 <= float(softcap) < float("inf"):
        raise ValueError(f"softcap is {softcap}; allowed: 0 (none) and finite numbers above")
    return Variant(bool(causal), sides[0], sides[1], min(int(attention_chunk), CHUNK_MAX), float(softcap))


def _is_int(value: Any) -> bool:
    """Of NumPy's kind too. The first question is the quick one."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))
