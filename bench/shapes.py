"""The shapes that are measured: the grid of the published comparisons, layers of models that people run, lengths that
are multiples of nothing, and the head dims beside those of the grid.

FLOPs are counted as the papers count them: two GEMMs, multiply and add, over the visible (query, key) pairs; under a
causal mask on a square that is half of the square, and the exact number of pairs otherwise.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

TOKENS = 16384  # batch * seqlen of every point of the grid
WIDTH = 2048  # heads * head_dim
GRID_HEAD_DIMS = (64, 128, 256)
GRID_SEQLENS = (512, 1024, 4096, 16384)
MORE_HEAD_DIMS = ((96, 96), (192, 192), (192, 128))
ODD_SEQLENS, ODD_HEAD_DIMS, MULTIPLE = (197, 577, 1000, 4095, 4097), (64, 128), 128
DIMS, DIMS_SEQLEN, DIMS_BESIDE = (72, 80, 96, 160, 192), 4096, 128


@dataclass(frozen=True)
class Shape:
    """One attention problem. q (B, Sq, H, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv); causal is aligned bottom-right."""

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool

    @property
    def doubled_pairs(self) -> int:
        """Twice the (query, key) pairs of a head that count as work (twice, so that half of an odd square is whole)."""
        q, k = self.seqlen_q, self.seqlen_k
        if not self.causal:
            return 2 * q * k
        if q == k:
            return q * k
        rows = min(q, k)  # that see a key: the last of them sees all k, the one before k - 1, ...
        return rows * (2 * k - rows + 1)

    @property
    def flops(self) -> int:
        """Of the forward pass."""
        return self.batch * self.heads * (self.head_dim + self.head_dim_v) * self.doubled_pairs

    def bytes(self) -> int:
        """Of q, k, v and o in 16 bit: the least that must move."""
        q = self.batch * self.seqlen_q * self.heads * (self.head_dim + self.head_dim_v)
        kv = self.batch * self.seqlen_k * self.heads_kv * (self.head_dim + self.head_dim_v)
        return 2 * (q + kv)


def _square(name, batch, seqlen, heads, heads_kv, head_dim, causal, head_dim_v=None):
    return Shape(name, batch, seqlen, seqlen, heads, heads_kv, head_dim, head_dim_v or head_dim, causal)


def label(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def _point(head_dim: int, seqlen: int, causal: bool, head_dim_v: int | None = None) -> Shape:
    """Of the grid, or as large: as many heads as WIDTH holds."""
    dims = f"hd{head_dim}" + (f"v{head_dim_v}" if head_dim_v not in (None, head_dim) else "")
    name, heads = f"{dims}-{label(seqlen)}-{'causal' if causal else 'full'}", WIDTH // head_dim
    return _square(name, TOKENS // seqlen, seqlen, heads, heads, head_dim, causal, head_dim_v)


GRID = tuple(_point(hd, s, causal) for hd in GRID_HEAD_DIMS for causal in (False, True) for s in GRID_SEQLENS)
GRID_MORE = tuple(
    _point(hd, s, causal, hd_v) for hd, hd_v in MORE_HEAD_DIMS for causal in (False, True) for s in GRID_SEQLENS
)

MODELS = (
    _square("llama3-8b-8k", 2, 8192, 32, 8, 128, True),
    _square("llama3-70b-8k", 1, 8192, 64, 8, 128, True),  # Qwen3 32B is the same
    _square("llama3-8b-128k", 1, 131072, 32, 8, 128, True),
    Shape("llama3-8b-chunk", 1, 2048, 32768, 32, 8, 128, 128, True),
    _square("qwen2.5-7b-4k", 4, 4096, 28, 4, 128, True),
    _square("gemma2-9b-8k", 2, 8192, 16, 8, 256, True),
    _square("deepseek-v3-4k", 1, 4096, 128, 128, 192, True, 128),
    _square("vit-l16-197", 256, 197, 16, 16, 64, False),
    _square("vit-l14-577", 64, 577, 16, 16, 64, False),
    _square("phi3-mini-4k", 4, 4096, 32, 32, 96, True),
    _square("nemotron4-340b-4k", 1, 4096, 96, 8, 192, True),
)


def _odd(head_dim: int, seqlen: int, batch: int, causal: bool) -> Shape:
    heads = WIDTH // head_dim
    name = f"odd-hd{head_dim}-{seqlen}-{'causal' if causal else 'full'}"
    made = _square(name, batch, seqlen, heads, heads, head_dim, causal)
    return next((shape for shape in GRID if replace(shape, name=name) == made), made)  # one problem, one name


def _odd_pair(head_dim: int, seqlen: int, causal: bool) -> tuple[Shape, Shape]:
    """The odd length and the next multiple, at the same batch."""
    batch, even = round(TOKENS / seqlen), -(-seqlen // MULTIPLE) * MULTIPLE
    return _odd(head_dim, seqlen, batch, causal), _odd(head_dim, even, batch, causal)


# (shape, what it is set beside): measured one after the other.
ODD_PAIRS = tuple(_odd_pair(hd, s, causal) for hd in ODD_HEAD_DIMS for causal in (False, True) for s in ODD_SEQLENS)
DIMS_PAIRS = tuple(
    (_point(hd, DIMS_SEQLEN, causal), _point(DIMS_BESIDE, DIMS_SEQLEN, causal))
    for causal in (False, True)
    for hd in DIMS
)

SMOKE = (_square("tiny", 2, 128, 4, 2, 64, True),)  # for trying the plumbing, on a CPU too

GROUPS = {
    "grid": GRID,
    "models": MODELS,
    "grid-more": GRID_MORE,
    "odd": tuple(dict.fromkeys(shape for pair in ODD_PAIRS for shape in pair)),
    "dims": tuple(dict.fromkeys(shape for pair in DIMS_PAIRS for shape in reversed(pair))),
}
NAMED = {shape.name: shape for shape in (*(shape for group in GROUPS.values() for shape in group), *SMOKE)}


class HasName(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=HasName)


def select(names: Iterable[str]) -> tuple[Shape, ...]:
    """Shapes by name, by the name of a group, or by the start of a name ("hd128", "hd128-16k"). Raises ValueError for
    no match.
    """
    return select_of(names, GROUPS, NAMED)


def select_of(
    names: Iterable[str], groups: Mapping[str, Sequence[Named]], named: Mapping[str, Named]
) -> tuple[Named, ...]:
    """The same of a suite that has shapes of its own."""
    chosen: dict[str, Named] = {}
    for name in names:
        found = groups.get(name) or [s for s in named.values() if s.name == name or s.name.startswith(f"{name}-")]
        if not found:
            raise ValueError(f"no shape named {name!r}; there are {', '.join((*groups, *named))}")
        chosen.update((shape.name, shape) for shape in found)
    return tuple(chosen.values())
