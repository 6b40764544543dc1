"""The check before the clock: parts of the output against float64, held to twice the error that plain PyTorch makes
at the same precision.

A part is up to ROWS query rows of one head. Its keys end where the causal mask of its last row ends, so that the part
is again an attention problem with a bottom-right mask, and no S x S matrix is needed at any length.
"""

from dataclasses import dataclass
from typing import Any

from bench.shapes import Shape
from fa3.reference import attention
from fa3.testing.tolerance import FLOOR, MAX_FACTOR

ROWS = 256
LIMIT = MAX_FACTOR  # times PyTorch's error


@dataclass(frozen=True)
class Part:
    batch: int
    head: int
    start: int
    stop: int
    num_keys: int

    def cut(self, shape: Shape, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """What the part is attention to, (1, rows or keys, 1, head_dim) each."""
        batch, head_kv = slice(self.batch, self.batch + 1), self.head // (shape.heads // shape.heads_kv)
        keys = batch, slice(0, self.num_keys), slice(head_kv, head_kv + 1)
        return q[batch, self.start : self.stop, self.head : self.head + 1], k[keys], v[keys]

    def of(self, out: Any) -> Any:
        """(rows, head_dim_v) of an output, in float64."""
        return out[self.batch, self.start : self.stop, self.head].double()


def parts(shape: Shape) -> tuple[Part, ...]:
    """The first rows of the first head, middle ones of a middle head, the last of the last: head and batch strides
    are all in it.
    """
    last = max(0, shape.seqlen_q - ROWS)
    chosen = []
    for share in (0.0, 0.5, 1.0):
        start = int(last * share)
        stop = min(start + ROWS, shape.seqlen_q)
        seen = stop + shape.seqlen_k - shape.seqlen_q if shape.causal else shape.seqlen_k
        batch, head = round((shape.batch - 1) * share), round((shape.heads - 1) * share)
        chosen.append(Part(batch, head, start, stop, max(seen, 0)))
    return tuple(chosen)


class Check:
    """Reference parts of one set of inputs, made once, for every contender's output."""

    def __init__(self, shape: Shape, q: Any, k: Any, v: Any) -> None:
        self.parts = parts(shape)
        self.exact = []
        self.yardstick = 0.0
        for part in self.parts:
            at_q, at_k, at_v = part.cut(shape, q, k, v)
            exact, _ = attention(at_q.double(), at_k.double(), at_v.double(), causal=shape.causal)
            plain, _ = attention(at_q, at_k, at_v, causal=shape.causal)
            self.exact.append(exact[0, :, 0])
            self.yardstick = max(self.yardstick, (plain.double() - exact).abs().max().item())

    def ratio(self, out: Any) -> float:
        """Largest error over PyTorch's largest; at most LIMIT passes, infinity is what is not finite."""
        worst = 0.0
        for part, exact in zip(self.parts, self.exact, strict=True):
            got = part.of(out)
            if not got.isfinite().all().item():
                return float("inf")
            worst = max(worst, (got - exact).abs().max().item())
        return worst / (self.yardstick + FLOOR / LIMIT)
