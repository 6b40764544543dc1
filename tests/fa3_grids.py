"""The grids of FlashAttention-3's tests of ragged calls and of calls on a cache, a sample of them, and its rule.

The values of the parameters, batch sizes, heads and how lengths are drawn are those of test_flash_attn_varlen_output
and test_flash_attn_kvcache in hopper/test_flash_attn.py of Dao-AILab/flash-attention. A case is a dictionary of
parameters, which says everything: its inputs are drawn from it alone.

The rule: with a reference in float32, rounded to the inputs' type at its end, and the same formula in the inputs' type
(scores and P rounded), max |out - reference| <= 2 max |formula - reference| + atol; 3 with a soft cap. On a cache also
mean |out - reference| <= 1.5 mean |formula - reference|, and atol is 1e-5; else it is twice what (reference + 0.3) -
0.3 loses in the inputs' type.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import Any

import torch
from torch import Tensor

import fa3
from fa3.testing.inputs import poison

HEADS = 6
CACHE_BATCH = 5
CAP = 15.0
NO_PAGE = 2**31 - 1
CANDIDATES = 60  # drawn for each case of a sample

Case = dict[str, Any]
Axes = list[list[Case]]  # of each axis its values, any of which sets some parameters


def _axis(name: str, *values: Any) -> list[Case]:
    return [{name: value} for value in values]


def _lengths(*pairs: tuple[int, int]) -> list[Case]:
    return [dict(queries=queries, keys=keys) for queries, keys in pairs]


def _kind(dtype: str, head_dim: int, head_dim_v: int, **more: Any) -> Case:
    return dict(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, **more)


def _cache(page_size: int | None = None, leftpad: bool = False, batch_idx: bool = False) -> Case:
    return dict(page_size=page_size, leftpad=leftpad, batch_idx=batch_idx)


def _rotary(fraction: float = 0.0, interleaved: bool = False, seqlens: bool = False) -> Case:
    return dict(rotary=fraction, interleaved=interleaved, rotary_seqlens=seqlens)


# full: one parameter says it, so that it meets every value of the others.
_WINDOWS = [
    dict(full=True, causal=False, local=False),
    dict(full=False, causal=True, local=False),
    dict(full=False, causal=False, local=True),
]

# Soft caps are not in FlashAttention-3's grid of caches, pages of 16 and rotary_seqlens neither.
KVCACHE: Axes = [
    [_kind("bfloat16", 128, 128, softcap=0.0)],
    _axis("heads_kv", 6, 1, 3),
    # Chunks are drawn with causal or local only.
    [dict(window, chunk=chunk) for window in _WINDOWS for chunk in (False, True) if not (chunk and window["full"])],
    _axis("new", "none", "as q", "fewer"),
    [_rotary(), *(_rotary(*values) for values in product((0.5, 1.0), (False, True), (False, True)))],
    [_cache(None, *values) for values in product((False, True), repeat=2)] + [_cache(n) for n in (1, 4, 16, 128)],
    _axis("varlen_q", False, True),
    _lengths(
        (1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000), (128, 128), (256, 512),
        (2048, 3577),
    ),
]  # fmt: skip
KVCACHE_KINDS: Axes = [
    [
        _kind("float16", 128, 128, softcap=0.0),
        _kind("bfloat16", 64, 64, softcap=0.0),
        _kind("bfloat16", 192, 128, softcap=0.0),
        _kind("bfloat16", 256, 256, softcap=0.0),
        _kind("bfloat16", 128, 128, softcap=CAP),
    ],
    *KVCACHE[1:2],
    [dict(window, chunk=False) for window in _WINDOWS],
    *KVCACHE[3:4],
    [_rotary(), _rotary(0.5, True), _rotary(1.0, False, True)],
    [_cache(None, True, True), _cache(16)],
    *KVCACHE[6:7],
    _lengths((1, 339), (3, 1024), (64, 800)),
]
VARLEN: Axes = [
    [_kind("bfloat16", 128, 128)],
    _axis("heads_kv", 6, 1, 2),
    _axis("softcap", 0.0, CAP),
    _axis("local", False, True),
    _axis("causal", False, True),
    _axis("unused", False, True),
    _axis("chunk", False, True),
    _lengths(
        (1, 1), (1, 3), (2, 1), (511, 1), (3, 513), (64, 128), (128, 128), (256, 256), (113, 203), (128, 217),
        (113, 211), (108, 256), (256, 512), (307, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024),
        (1024, 1023), (2048, 2048), (4096, 4096),
    ),
]  # fmt: skip
VARLEN_KINDS: Axes = [
    [
        _kind("float16", 128, 128),
        *(_kind("bfloat16", *dims) for dims in ((64, 64), (64, 256), (96, 96), (192, 128), (192, 192), (256, 256))),
    ],
    *VARLEN[1:6],
    _axis("chunk", False),
    _lengths((3, 513), (256, 512), (1024, 1023)),
]


def kvcache_allows(case: Case) -> bool:
    """Of any part of a case too."""
    return not (case.get("rotary") and case.get("new") == "none")


def varlen_allows(case: Case) -> bool:
    return not (case.get("chunk") and case.get("queries", 0) > case.get("keys", 0))


def whole(axes: Axes, allows: Callable[[Case], bool]) -> list[Case]:
    return [case for case in map(_merged, product(*axes)) if allows(case)]


def pairwise(axes: Axes, allows: Callable[[Case], bool], seed: int = 0) -> list[Case]:
    """Cases that hold every pair of values of two parameters that may meet: each one the best of some that are drawn.

    allows: as for any pair of axes that it lets meet there is a whole case.
    """
    draw, missing, cases = random.Random(seed), wanted(axes, allows), []
    while missing:
        drawn = (_merged(draw.choice(values) for values in axes) for _ in range(CANDIDATES))
        best = max(filter(allows, drawn), key=lambda case: len(missing & pairs(case)))
        if missing & pairs(best):
            missing -= pairs(best)
            cases.append(best)
    return cases


def wanted(axes: Axes, allows: Callable[[Case], bool]) -> set:
    parts = chain.from_iterable(product(*two) for two in combinations(axes, 2))
    return set().union(*(pairs(part) for part in map(_merged, parts) if allows(part)))


def pairs(case: Case) -> set:
    return set(combinations(case.items(), 2))


def name_of(case: Case) -> str:
    """For pytest: what is not off."""
    words = [f"{case['queries']}x{case['keys']}", case["dtype"], f"{case['head_dim']}-{case['head_dim_v']}"]
    others = {name: value for name, value in case.items() if name not in ("queries", "keys", "dtype")}
    words += [
        name if value is True else f"{name}-{value}"
        for name, value in others.items()
        if value and "head_dim" not in name
    ]
    return " ".join(words)


def _merged(parts: Any) -> Case:
    return {name: value for part in parts for name, value in part.items()}


# Inputs


class Draw:
    """Everything that is drawn for a case."""

    def __init__(self, case: Case, device: str):
        self.host = random.Random(repr(case))
        self.generator = torch.Generator(device).manual_seed(self.host.getrandbits(40))
        self.device, self.dtype = device, getattr(torch, case["dtype"])

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def lengths(self, count: int, longest: int, shortest: int = 1) -> list[int]:
        return [self.host.randint(max(shortest, longest - 20), longest) for _ in range(count)]

    def mask(self, case: Case) -> Case:
        """causal, window_size, attention_chunk and softcap of a call."""
        keys = case["keys"]
        window = (self.host.randrange(keys), self.host.randrange(keys)) if case["local"] else (-1, -1)
        chunk = self.host.randrange(1, 2 * keys) if case["chunk"] else 0
        return dict(causal=case["causal"], window_size=window, attention_chunk=chunk, softcap=case["softcap"])

    def ints(self, values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def rows(self, used: list[int], room: list[int], *shape: int, around: int = 0) -> tuple[Tensor, Tensor, list]:
        """Rows of sequences one behind the other, cu_seqlens, and where each is; NaN in those that nobody uses."""
        starts = [around + sum(room[:i]) for i in range(len(room) + 1)]
        places = [slice(start, start + length) for start, length in zip(starts, used)]
        x = self.normal(starts[-1] + around, *shape)
        nobody = torch.ones(len(x), dtype=torch.bool)
        for place in places:
            nobody[place] = False
        x[nobody.to(x.device)] = torch.nan
        return x, self.ints(starts), places


# What must come out


def attention(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, mask: Case) -> Tensor:
    """Of q (n, heads, d), k (m, heads_kv, d), v (m, heads_kv, dv) of one sequence, every step rounded to dtype."""
    n, m, ratio = len(q), len(k), q.shape[1] // k.shape[1]
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(ratio, 0) for x in (k * q.shape[2] ** -0.5, v))
    scores = q @ k.mT
    if mask["softcap"]:
        scores = torch.tanh(scores / mask["softcap"]) * mask["softcap"]
    hidden = ~visible(n, m, mask, q.device)
    p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).masked_fill(hidden, 0)
    return (p @ v).transpose(0, 1)


def visible(n: int, m: int, mask: Case, device: Any) -> Tensor:
    at, key = torch.arange(m - n, m, device=device)[:, None], torch.arange(m, device=device)
    (left, right), chunk = mask["window_size"], mask["attention_chunk"]
    seen = torch.ones(n, m, dtype=torch.bool, device=device)
    if mask["causal"]:
        seen &= key <= at
    if left >= 0:
        seen &= (at - left <= key) & (key <= at + right)
    if chunk:
        seen &= key // chunk == torch.div(at, chunk, rounding_mode="floor")
    return seen


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (n, heads, d), in float32, rounded once; every product of its own, so that nothing is fused."""
    half = cos.shape[1]
    c, s = (table[positions].float()[:, None] for table in (cos, sin))
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    a, b, out = x[..., first].float(), x[..., second].float(), x.clone()
    out[..., first], out[..., second] = (a * c - b * s).to(x.dtype), (a * s + b * c).to(x.dtype)
    return out


class Expected:
    """Of the queries of all sequences, one sequence after the other."""

    def __init__(self, sequences: Iterable[tuple[Tensor, Tensor, Tensor]], mask: Case):
        exact, plain = [], []
        for q, k, v in sequences:
            exact.append(attention(q, k, v, torch.float32, mask).to(q.dtype))
            plain.append(attention(q, k, v, q.dtype, mask))
        self.exact, self.softcap = torch.cat(exact), mask["softcap"]
        self.plain = (torch.cat(plain).float() - self.exact.float()).abs()

    def check(self, out: Tensor, is_cache: bool) -> None:
        error = (out.float() - self.exact.float()).abs()
        atol = 1e-5 if is_cache else 2 * (self.exact + 0.3 - 0.3 - self.exact).abs().max().item()
        limit = (3 if self.softcap else 2) * self.plain.max().item() + atol
        assert out.shape == self.exact.shape and out.dtype == self.exact.dtype
        assert error.max().item() <= limit, f"max error {error.max().item():.2e}, allowed {limit:.2e}"
        if is_cache:
            limit = 1.5 * self.plain.mean().item()
            assert error.mean().item() <= limit, f"mean error {error.mean().item():.2e}, allowed {limit:.2e}"


# The two functions


def check_varlen(case: Case, device: str, attend: Callable = fa3.flash_attn_varlen_func) -> None:
    draw = Draw(case, device)
    batch = 9 if case["queries"] <= 2048 else 2
    of_q, of_k = draw.lengths(batch, case["queries"]), draw.lengths(batch, case["keys"], 0)
    of_k = [0 if i % 5 == 0 or i == batch - 1 else length for i, length in enumerate(of_k)]
    room_q, room_k = of_q, of_k
    if case["unused"]:
        others = draw.lengths(batch, case["queries"]), draw.lengths(batch, case["keys"])
        (of_q, room_q), (of_k, room_k) = (
            ([*map(min, lengths, more)], [*map(max, lengths, more)]) for lengths, more in zip((of_q, of_k), others)
        )
    q, cu_q, queries = draw.rows(of_q, room_q, HEADS, case["head_dim"])
    k, cu_k, keys = draw.rows(of_k, room_k, case["heads_kv"], case["head_dim"])
    v, _, _ = draw.rows(of_k, room_k, case["heads_kv"], case["head_dim_v"])
    q = _reaching(case["softcap"], q)
    mask = draw.mask(case)
    wanted = Expected(((q[i], k[j], v[j]) for i, j in zip(queries, keys)), mask)
    used = [draw.ints(lengths) if case["unused"] else None for lengths in (of_q, of_k)]
    poison((*q.shape[:-1], case["head_dim_v"]), q.dtype, device)
    out = attend(q, k, v, cu_q, cu_k, max(of_q), max(of_k), *used, **mask)
    wanted.check(torch.cat([out[i] for i in queries]), is_cache=False)


def check_kvcache(case: Case, device: str, attend: Callable = fa3.flash_attn_with_kvcache) -> None:
    """All numbers of splits on the same inputs, without and with metadata; afterwards the caches bit for bit."""
    x = _cache_call(case, Draw(case, device))
    wanted = Expected(x.sequences, x.options)
    sizes = CACHE_BATCH, case["queries"], case["keys"], HEADS, case["heads_kv"], case["head_dim"]
    metadata = fa3.get_scheduler_metadata(*sizes, x.options["cache_seqlens"], x.q.dtype, case["head_dim_v"])
    for splits, plan in ((1, None), (3, None), (0, None), (0, metadata)):
        caches = [cache.clone() for cache in x.caches]
        more = dict(num_splits=splits, scheduler_metadata=plan, return_softmax_lse=True)
        poison((*x.q.shape[:-1], case["head_dim_v"]), x.q.dtype, device)
        out, _ = attend(x.q, *caches, *x.new, **x.options, **more)
        for name, cache, after in zip(("k_cache", "v_cache"), caches, x.after):
            assert torch.equal(cache.view(torch.int16), after.view(torch.int16)), f"{name} after num_splits={splits}"
        rows = out if x.q.dim() == 3 else out.flatten(0, 1)
        wanted.check(torch.cat([rows[place] for place in x.queries]), is_cache=True)


@dataclass
class CacheCall:
    """A call of flash_attn_with_kvcache, and what it works on."""

    q: Tensor
    new: list[Tensor | None]  # k and v
    caches: list[Tensor]  # of K and V, NaN in rows that no query may see
    options: Case  # the other arguments
    after: list[Tensor]  # the caches after the call
    queries: list[slice]  # of each sequence, in the rows of q
    sequences: list[tuple[Tensor, Tensor, Tensor]]  # q, with its rotary embedding, and all keys and values of each


def _cache_call(case: Case, draw: Draw) -> CacheCall:
    longest, is_ragged, in_order = case["queries"], case["varlen_q"], not case["full"]
    q, queries, options = _queries(draw, longest, is_ragged, (HEADS, case["head_dim"]), "cu_seqlens_q")
    q = _reaching(case["softcap"], q)
    if is_ragged:
        options["max_seqlen_q"] = max(i.stop - i.start for i in queries)
    count = {"none": 0, "as q": longest, "fewer": draw.host.randint(1, longest)}[case["new"]]
    new, added = _new_rows(draw, case, count, options)
    room = case["keys"] - (longest if in_order and case["rotary"] else count)
    before = [draw.host.randint(0 if count else 1, room) for _ in queries]
    left = [draw.host.randrange(length) if case["leftpad"] and length else 0 for length in before]
    options["cache_seqlens"] = draw.ints(before)
    if case["leftpad"]:
        options["cache_leftpad"] = draw.ints(left)
    place, shape, pages = _places(draw, case)
    turn, rotary = _turns(draw, case, before)
    caches = [draw.normal(*shape, case["heads_kv"], case[dim]) for dim in ("head_dim", "head_dim_v")]
    nobody = torch.ones(shape, dtype=torch.bool, device=draw.device)
    for b, (first, end) in enumerate(zip(left, before)):
        nobody[place(b, first, end)] = False
    for cache in caches:
        cache[nobody] = torch.nan
    after = [cache.clone() for cache in caches]
    rows, *new_rows = (x if x is None or is_ragged else x.flatten(0, 1) for x in (q, *new))
    sequences = []
    for b, (i, j) in enumerate(zip(queries, added)):
        end = before[b] + j.stop - j.start
        if count:
            after[0][place(b, before[b], end)] = turn(new_rows[0][j], b, True)
            after[1][place(b, before[b], end)] = new_rows[1][j]
        k, v = (cache[place(b, left[b], end)] for cache in after)
        sequences.append((turn(rows[i], b, in_order), k, v))
    return CacheCall(q, new, caches, options | pages | rotary | draw.mask(case), after, queries, sequences)


def _new_rows(draw: Draw, case: Case, count: int, options: Case) -> tuple[list[Tensor | None], list[slice]]:
    """k and v, and where the rows of each sequence are. Into options: the list that says it, of ragged ones."""
    if not count:
        return [None, None], [slice(0, 0)] * CACHE_BATCH
    shape = case["heads_kv"], case["head_dim"]
    k, added, lists = _queries(draw, count, case["varlen_q"], shape, "cu_seqlens_k_new")
    v = draw.normal(*k.shape[:-1], case["head_dim_v"])
    options.update(lists)
    return [k, v.masked_fill(k[..., :1].isnan(), torch.nan)], added


def _reaching(cap: float, q: Tensor) -> Tensor:
    """Queries whose scores come near the cap."""
    return q * (cap / 4) if cap else q


def _queries(draw: Draw, longest: int, is_ragged: bool, shape: tuple, name: str) -> tuple[Tensor, list[slice], Case]:
    """(batch, longest, ..), or (total, ..) with rows of nobody at both ends; where sequences are; their list."""
    batch = CACHE_BATCH
    lengths = draw.lengths(batch, longest) if is_ragged else [longest] * batch
    x, cu, places = draw.rows(lengths, lengths, *shape, around=3 if is_ragged else 0)
    return (x, places, {name: cu}) if is_ragged else (x.unflatten(0, (batch, longest)), places, {})


def _places(draw: Draw, case: Case) -> tuple[Callable, tuple[int, int], Case]:
    """Where rows first .. end - 1 of sequence b are, the blocks and rows of the cache, and the list that says it."""
    batch, page_size, keys = CACHE_BATCH, case["page_size"], case["keys"]
    if page_size is None:
        blocks = 2 * batch if case["batch_idx"] else batch
        slots = draw.host.sample(range(blocks), batch) if case["batch_idx"] else range(batch)
        lists = {"cache_batch_idx": draw.ints(slots)} if case["batch_idx"] else {}
        return lambda b, first, end: (slots[b], slice(first, end)), (blocks, keys), lists
    width = -(-keys // page_size)
    pages = torch.randperm(batch * (width + 1), generator=torch.Generator().manual_seed(draw.host.getrandbits(40)))
    table = pages.int().to(draw.device).view(batch, width + 1)
    table[:, width] = NO_PAGE

    def place(b: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        rows = torch.arange(first, end, device=draw.device)
        return table[b, rows // page_size].long(), rows % page_size

    return place, (batch * (width + 1), page_size), {"page_table": table}


def _turns(draw: Draw, case: Case, before: list[int]) -> tuple[Callable, Case]:
    """The rotation of rows of a sequence, each at a position of its own or all at the first, and the arguments."""
    dim = int(case["rotary"] * case["head_dim"]) // 16 * 16
    if not dim:
        return lambda x, b, in_order: x, {}
    angles = torch.rand(case["keys"], dim // 2, generator=draw.generator, device=draw.device) * 2 * torch.pi
    cos, sin = (f(angles).to(draw.dtype) for f in (torch.cos, torch.sin))
    starts = [length // 2 for length in before] if case["rotary_seqlens"] else before
    lists = dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=case["interleaved"])
    if case["rotary_seqlens"]:
        lists["rotary_seqlens"] = draw.ints(starts)

    def turn(x: Tensor, b: int, in_order: bool) -> Tensor:
        positions = starts[b] + torch.arange(len(x), device=draw.device) * int(in_order)
        return rotated(x, cos, sin, positions, case["interleaved"])

    return turn, lists
