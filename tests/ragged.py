"""Ragged inputs, and what attention to them must give."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from fa3.testing import tolerance
from fa3.testing.inputs import draw
from fa3.testing.tolerance import Errors, Expected


@dataclass(frozen=True, repr=False)
class Ragged:
    """The tensors of a call. Rows of q, k and v that belong to no sequence are NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    used_q: torch.Tensor | None
    used_k: torch.Tensor | None
    queries: list[range]
    keys: list[range]

    @property
    def bounds(self) -> tuple[int, int]:
        return max(map(len, self.queries), default=0), max(map(len, self.keys), default=0)

    @property
    def lists(self) -> tuple:
        """The arguments behind q, k and v."""
        return self.cu_q, self.cu_k, *self.bounds, self.used_q, self.used_k

    @property
    def is_query(self) -> torch.Tensor:
        return self.mask(self.q, self.queries)

    @staticmethod
    def mask(tensor: torch.Tensor, rows: list[range]) -> torch.Tensor:
        found = torch.zeros(tensor.shape[0], dtype=torch.bool)
        found[[i for r in rows for i in r]] = True
        return found.to(tensor.device)

    def call(self, function, scale=None, causal=False, **options):
        return function(self.q, self.k, self.v, *self.lists, scale, causal, return_lse=True, **options)


def make(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    *,
    room_q: Sequence[int] | None = None,
    room_k: Sequence[int] | None = None,
    before: int = 0,
    after: int = 0,
    heads_kv: int = 1,
    ratio: int = 1,
    head_dim: int = 64,
    head_dim_v: int = 64,
    dtype: str = "bfloat16",
    device: str = "cpu",
    seed: int = 0,
) -> Ragged:
    """Sequences of these lengths. room: by cu_seqlens, where lengths are told apart from it. before and after: rows."""
    generator = torch.Generator(device).manual_seed(seed)
    sides = [_side(*lengths, before, after, device) for lengths in ((lengths_q, room_q), (lengths_k, room_k))]
    (cu_q, used_q, queries, total_q), (cu_k, used_k, keys, total_k) = sides
    shapes = (
        ((total_q, heads_kv * ratio, head_dim), queries),
        ((total_k, heads_kv, head_dim), keys),
        ((total_k, heads_kv, head_dim_v), keys),
    )
    tensors = []
    for shape, rows in shapes:
        x = draw(shape, getattr(torch, dtype), generator)
        x[~Ragged.mask(x, rows)] = torch.nan
        tensors.append(x)
    return Ragged(*tensors, cu_q, cu_k, used_q, used_k, queries, keys)


def _side(lengths, room, before: int, after: int, device: str):
    edges = list(accumulate(lengths if room is None else room, initial=before))
    rows = [range(start, start + length) for start, length in zip(edges, lengths)]
    cu, used = (torch.tensor(x, dtype=torch.int32, device=device) for x in (edges, list(lengths)))
    return cu, None if room is None else used, rows, edges[-1] + after


def expected(x: Ragged, scale: float | None = None, causal: bool = False) -> Expected:
    """Of the rows of queries, in their order: sequences of equal lengths are computed together."""
    groups = defaultdict(list)
    for queries, keys in zip(x.queries, x.keys):
        groups[len(queries), len(keys)].append((queries.start, keys.start))
    shape, heads = (x.q.shape[0], x.q.shape[1], x.v.shape[2]), x.q.shape[1]
    out, plain = (x.q.new_zeros(shape, dtype=torch.float64) for _ in range(2))
    lse = x.q.new_zeros((heads, shape[0]), dtype=torch.float64)
    largest = 0.0
    for (len_q, len_k), starts in groups.items():
        at, seen = (
            torch.tensor([s[i] for s in starts])[:, None] + torch.arange(n) for i, n in ((0, len_q), (1, len_k))
        )
        dense = x.q[at], x.k[seen], x.v[seen]
        out[at], found = tolerance.exact(*dense, scale, causal)
        lse[:, at] = found.transpose(0, 1)
        plain[at] = tolerance.plain(*dense, scale, causal).double()
        longest = [t.double().norm(dim=-1).max().item() if t.numel() else 0.0 for t in dense[:2]]
        largest = max(largest, longest[0] * longest[1])
    rows = x.is_query
    errors = Errors.of(plain[rows], out[rows])
    return Expected(out[rows], lse[:, rows], errors, (x.q.shape[-1] ** -0.5 if scale is None else scale) * largest)


def assert_right(x: Ragged, got: tuple[torch.Tensor, torch.Tensor], scale: float | None = None, causal: bool = False):
    """Out and lse of the queries obey the rule of accuracy."""
    (out, lse), rows, wanted = got, x.is_query, expected(x, scale, causal)
    assert out.shape == (*x.q.shape[:2], x.v.shape[2]) and out.dtype == x.q.dtype
    assert lse.shape == x.q.shape[1::-1]
    wanted.assert_out(out[rows])
    wanted.assert_lse(lse[:, rows])
