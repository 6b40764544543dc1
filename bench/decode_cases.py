"""The decode problems that are measured: a few queries of each sequence against its KV cache."""

from collections.abc import Iterable
from dataclasses import dataclass

from bench.shapes import Shape, label

PAGE_SIZES = (1, 16, 64, 128)
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Case:
    """`shape`: its seqlen_k is the number of keys of a sequence, their mean where `lengths` differ. Pages lie
    shuffled in their pool.
    """

    shape: Shape
    page_size: int | None = None  # None: the cache is contiguous
    lengths: tuple[int, ...] = ()  # keys of each sequence, where they differ
    window: int | None = None  # keys that a query sees
    captured_at: int | None = None  # the graph is captured with this many keys, and replayed with all

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def keys(self) -> tuple[int, ...]:
        """Of each sequence."""
        return self.lengths or (self.shape.seqlen_k,) * self.shape.batch

    def seen(self, keys: int) -> int:
        """Of so many keys, those that the queries of a sequence see, the last ones."""
        return keys if self.window is None else min(keys, self.window + self.shape.seqlen_q - 1)

    @property
    def window_size(self) -> tuple[int, int]:
        """As FlashAttention-3 takes it: (left, right) of a query, -1 unbounded."""
        return (-1, -1) if self.window is None else (self.window - 1, 0)

    @property
    def kv_bytes(self) -> int:
        """Of the K and V that must be read."""
        row = self.shape.heads_kv * (self.shape.head_dim + self.shape.head_dim_v) * ELEMENT_BYTES
        return row * sum(map(self.seen, self.keys))

    def tb_per_s(self, us: float) -> float:
        return self.kv_bytes / us / 1e6


def _case(
    batch: int, keys: int, heads: int = 32, heads_kv: int = 8, seqlen_q: int = 1, page_size: int | None = None,
    suffix: str = "", name: str = "", **more,
) -> Case:  # fmt: skip
    """Head dim 128. More queries than one are causal; one sees all keys either way."""
    words = (name or f"b{batch}-{label(keys)}", suffix, f"page{page_size}" if page_size else "")
    made = Shape("-".join(filter(None, words)), batch, seqlen_q, keys, heads, heads_kv, 128, 128, True)
    return Case(made, page_size, **more)


def _ragged(lengths: Iterable[int], **more) -> Case:
    lengths = tuple(lengths)
    mean, rest = divmod(sum(lengths), len(lengths))
    assert not rest, "the FLOPs of a record are those of its shape"
    return _case(len(lengths), mean, name=f"b{len(lengths)}-ragged", lengths=lengths, **more)


LATENCY = (_case(1, 1024), _case(1, 4096), _case(1, 65536))
BANDWIDTH = (_case(16, 8192), _case(64, 8192), _case(128, 2048, 64))
PAGED = {
    page: (_case(16, 8192, page_size=page), _case(64, 8192, page_size=page), _case(128, 2048, 64, page_size=page))
    for page in PAGE_SIZES
}
REPLAYED = _case(1, 65536, suffix="replayed", captured_at=1), LATENCY[-1]  # (what is asked about, beside)
QUERIES = _case(32, 8192, seqlen_q=4, suffix="q4"), _case(32, 8192)
WINDOW = _case(16, 32768, window=512, suffix="window512"), _case(16, 512)
UNEQUAL = _ragged([65536] + [512] * 63), _case(64, 1528)
MHA_PAGE8 = _case(16, 2048, 32, 32, page_size=8, name="mha16-2k")
MHA = (
    MHA_PAGE8,
    *(_case(16, 2000, 32, 32, page_size=page, name="mha16-2000") for page in (8, 64)),
    _case(16, 2000, 32, 32, name="mha16-2000", suffix="dense"),
)
CURVE = tuple(
    _case(batch, keys)
    for batch in (1, 16, 64)
    for keys in (1024, 2048, 4096, 8192, 16384, 65536)
    if batch * keys < 2**21
)

SMOKE = (  # for trying the plumbing, on a CPU too
    Case(Shape("tiny", 2, 1, 52, 4, 2, 64, 64, True), 16, (64, 40)),
    Case(Shape("tiny-dense", 2, 2, 52, 4, 2, 64, 64, True), None, (64, 40)),
    Case(Shape("tiny-window", 2, 1, 64, 4, 2, 64, 64, True), window=24),
)

GROUPS: dict[str, tuple[Case, ...]] = {
    "latency": LATENCY,
    "replayed": REPLAYED[::-1],
    "bandwidth": BANDWIDTH,
    "pages": tuple(case for cases in PAGED.values() for case in cases),
    "queries": QUERIES[::-1],
    "mha": MHA,
    "window": WINDOW[::-1],
    "ragged": UNEQUAL[::-1],
    "curve": CURVE,
}
DEFAULT = tuple(name for name in GROUPS if name != "curve")
SHOWN = tuple(dict.fromkeys(case for name in DEFAULT for case in GROUPS[name]))
NAMED = {case.name: case for case in (*SHOWN, *CURVE, *SMOKE)}
