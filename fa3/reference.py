"""Attention in plain array code, three ways that must agree: the specification of every kernel here.

`attention` forms the whole score matrix. `tiled_attention` keeps a running maximum and sum over key blocks (the
online softmax of Milakov and Gimelshein, arXiv:1805.02867, as FlashAttention tiles it, arXiv:2205.14135).
`split_attention` cuts the keys, attends to every part alone and joins the parts with `merge`. Whatever the tiles and
cuts, the three agree to rounding.

One text serves NumPy and PyTorch: the operations come from the module of the inputs, `xp`, which is numpy or torch,
and only names that mean the same in both are used (torch takes `axis` and `keepdims`). Three helpers hide what
differs: `_cast`, `_numbers` and `_full`.

Shapes everywhere: q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), out (B, Sq, Hq, Dv), lse (B, Hq, Sq). Hq
is a multiple of Hkv, query head h reads KV head h // (Hq / Hkv). Causal is aligned bottom-right: query i sees key j
where j <= i + Sk - Sq. A query that sees no key has out 0 and lse -inf; any length may be 0. lse is the natural
logarithm of the sum of the exponentials of the scaled scores. 16-bit inputs are worked on in float32 (lse is float32,
out of the inputs' type), others in their own type.

`variant` says which keys a query sees, in the place of `causal`, and whether scores are capped. `sink` (Hq) is one more
score a head, of no key and without a value, that takes its share of the softmax: lse includes it, and is the sink's
value for a query that sees no key.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from fa3.variant import Variant

Array = Any  # numpy.ndarray or torch.Tensor; q, k and v of one kind, type and device

LOG2_E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-126  # stands for 0, which would make NaN of a masked score: all keys weigh alike


def attention(
    q: Array, k: Array, v: Array, softmax_scale: float | None = None, causal: bool = False, *,
    variant: Variant | None = None, sink: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """softmax(scale * Q K^T) V with the whole matrix in memory; softmax_scale >= 0, by default 1 / sqrt(D).

    On 16-bit tensors this is the formula as plain PyTorch evaluates it: the scores, P and the output are each rounded
    to the inputs' type and the softmax is float32 inside. The error that this makes is the yardstick for the kernels'
    error.
    """
    xp, scale = _namespace(q), _scale(q, softmax_scale)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    variant = variant or Variant(causal)
    out, lse = _nothing(q, v)
    if seqlen_k == 0:
        return _with_sink(out, lse, sink)
    heads_q, heads_k, heads_v = _by_head(q, k, v)
    scores = xp.matmul(heads_q, xp.swapaxes(heads_k, -1, -2)) * scale
    if variant.softcap:
        scores = xp.tanh(scores / variant.softcap) * variant.softcap
    scores = _widen(scores)
    rows, keys = range(seqlen_q), range(seqlen_k)
    if _hides(variant, rows, keys, seqlen_q, seqlen_k):
        scores = xp.where(_sees(q, variant, rows, keys, seqlen_q, seqlen_k), scores, -math.inf)
    largest = xp.amax(scores, axis=-1, keepdims=True)
    if sink is not None:
        sinks = _by_group(sink, lse, k.shape[2])
        largest = xp.maximum(largest, sinks)
    row_max = _finite(largest)
    p = xp.exp(scores - row_max)
    row_sum = xp.sum(p, axis=-1, keepdims=True)
    if sink is not None:
        row_sum = row_sum + xp.exp(sinks - row_max)
    out[:] = _ungroup(xp.matmul(_cast(p / _positive(row_sum), q.dtype), heads_v))
    log_sum = xp.where(row_sum == 0, -math.inf, xp.log(_positive(row_sum)))
    lse[:] = _ungroup(row_max + log_sum)[..., 0].swapaxes(1, 2)
    return out, lse


def tiled_attention(
    q: Array,
    k: Array,
    v: Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    tile_m: int = 128,
    tile_n: int = 128,
    variant: Variant | None = None,
    sink: Array | None = None,
) -> tuple[Array, Array]:
    """Online softmax over blocks of tile_n keys for every tile_m queries, in the order and with the roundings of the
    kernel.

    Blocks go from the last key that the tile may see to the first one. Scores are float32 products of the 16-bit
    inputs, exponentials are base 2 with the scale folded in, the row sum takes p before it is rounded, P is rounded
    to the inputs' type for P V, O stays in float32, is rescaled for every block and divided once at the end.
    NOTE: the exponent is (score - max) * scale_log2. The kernel's fused multiply-add of score * scale_log2 - max *
    scale_log2 differs from it by a factor close to 1 that a whole row shares; two separate products would lose what
    the fusion keeps.
    """
    variant = variant or Variant(causal)
    out, lse = _tiles(q, k, v, _scale(q, softmax_scale), variant, 0, k.shape[1], tile_m, tile_n)
    out, lse = _with_sink(out, lse, sink)
    return _cast(out, q.dtype), lse


def ragged_attention(
    q: Array,
    k: Array,
    v: Array,
    sequences: Sequence[tuple[range, range]],
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    tile_m: int = 128,
    tile_n: int = 128,
    variant: Variant | None = None,
    sink: Array | None = None,
) -> tuple[Array, Array]:
    """tiled_attention of each sequence alone: q (total_q, Hq, D), k and v (total_k, Hkv, D | Dv), and of each sequence
    the rows of its queries and of its keys.

    Returns out (total_q, Hq, Dv) and lse (Hq, total_q); a row of no sequence has out 0 and lse -inf. No other rows of
    q, k and v are read than those of the sequences.
    """
    out, lse = _nothing(q[None], v[None])
    for queries, keys in sequences:
        at, seen = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        parts = q[None, at], k[None, seen], v[None, seen]
        out[:, at], lse[:, :, at] = tiled_attention(
            *parts, softmax_scale, causal, tile_m=tile_m, tile_n=tile_n, variant=variant, sink=sink
        )
    return out[0], lse[0]


def paged_attention(
    q: Array,
    k: Array,
    v: Array,
    sequences: Sequence[tuple[range, int]],
    page_table: Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    tile_m: int = 128,
    tile_n: int = 128,
    variant: Variant | None = None,
    sink: Array | None = None,
) -> tuple[Array, Array]:
    """tiled_attention of each sequence alone: q (total_q, Hq, D), k and v (pages, page_size, Hkv, D | Dv), and of each
    sequence the rows of its queries and the number of its keys, which lie in the pages page_table[b] one after the
    other.

    Returns out (total_q, Hq, Dv) and lse (Hq, total_q) as ragged_attention does. Only keys of sequences are read.
    """
    out, lse = _nothing(q[None], v)
    for b, (queries, length) in enumerate(sequences):
        at, used = slice(queries.start, queries.stop), -(-length // k.shape[1])
        pages = [int(page) for page in page_table[b, :used]]
        keys, values = (x[pages].reshape(1, -1, *x.shape[2:])[:, :length] for x in (k, v))
        out[:, at], lse[:, :, at] = tiled_attention(
            q[None, at], keys, values, softmax_scale, causal, tile_m=tile_m, tile_n=tile_n, variant=variant, sink=sink
        )
    return out[0], lse[0]


def split_attention(
    q: Array,
    k: Array,
    v: Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    num_splits: int = 2,
    boundaries: Sequence[int] | None = None,
    tile_m: int = 128,
    tile_n: int = 128,
    variant: Variant | None = None,
    sink: Array | None = None,
) -> tuple[Array, Array]:
    """Attention to parts of the keys, merged. boundaries (ascending, inside 0..Sk) are the cuts; else num_splits even
    parts.

    The parts keep O unrounded, as the kernels do between the split and the merge. A part may be empty. The sink counts
    once.
    """
    scale, seqlen_k = _scale(q, softmax_scale), k.shape[1]
    _check_positive(num_splits=num_splits)
    if boundaries is None:
        boundaries = [seqlen_k * i // num_splits for i in range(1, num_splits)]
    cuts = [0, *boundaries, seqlen_k]
    if sorted(cuts) != cuts:
        raise ValueError(f"boundaries {list(boundaries)} must ascend inside 0..{seqlen_k}")
    variant = variant or Variant(causal)
    parts = [_tiles(q, k, v, scale, variant, start, stop, tile_m, tile_n) for start, stop in zip(cuts, cuts[1:])]
    out, lse = _with_sink(*merge([o for o, _ in parts], [lse for _, lse in parts]), sink)
    return _cast(out, q.dtype), lse


def merge(o_parts: Sequence[Array], lse_parts: Sequence[Array]) -> tuple[Array, Array]:
    """Join the attention to disjoint sets of keys: out = sum of out_i * exp(lse_i - lse), lse = log(sum of
    exp(lse_i)).

    o_parts: (B, Sq, H, Dv) each, lse_parts: (B, H, Sq) each, natural logarithms. Returns arrays of those shapes.
    Commutative and, to rounding, associative; (0, -inf) is the identity.
    """
    if not o_parts or len(o_parts) != len(lse_parts):
        raise ValueError(f"merge needs as many outputs as lse, at least one: got {len(o_parts)} and {len(lse_parts)}")
    xp = _namespace(o_parts[0])
    lses = xp.stack(list(lse_parts))
    largest = _finite(xp.amax(lses, axis=0))
    weights = xp.exp(lses - largest)  # a part without keys weighs exp(-inf) = 0
    total = xp.sum(weights, axis=0)
    shares = xp.swapaxes(weights / _positive(total), -1, -2)[..., None]  # (parts, B, Sq, H, 1)
    out = xp.sum(xp.stack(list(o_parts)) * shares, axis=0)
    return out, xp.where(total == 0, -math.inf, largest + xp.log(_positive(total)))


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; allowed: 1 and more")


def _tiles(q, k, v, scale: float, variant: Variant, start: int, stop: int, tile_m: int, tile_n: int):
    """tiled_attention to the keys start..stop, out not yet rounded."""
    _check_positive(tile_m=tile_m, tile_n=tile_n)
    xp, seqlen_q, seqlen_k = _namespace(q), q.shape[1], k.shape[1]
    heads_q, heads_k, heads_v = (_widen(x) for x in _by_head(q, k, v))
    scale_log2 = (variant.softcap or scale) * LOG2_E
    out, lse = _nothing(_widen(q), v)
    for row in range(0, seqlen_q, tile_m):
        rows = range(row, min(row + tile_m, seqlen_q))
        tile = slice(rows.start, rows.stop)
        first, _ = variant.interval(rows[0], seqlen_q, seqlen_k)
        _, end = variant.interval(rows[-1], seqlen_q, seqlen_k)
        keys = range(max(start, first), max(start, first, min(stop, end)))  # what a row of the tile may see
        acc, row_max, row_sum = _online(
            heads_q[..., tile, :], heads_k, heads_v, scale, variant, rows, keys, (seqlen_q, seqlen_k), tile_n, q.dtype
        )
        out[:, tile] = _ungroup(acc / _positive(row_sum))
        log_sum = xp.where(row_sum == 0, -math.inf, xp.log2(_positive(row_sum)))
        lse[:, :, tile] = _ungroup((row_max * scale_log2 + log_sum) * math.log(2))[..., 0].swapaxes(1, 2)
    return out, lse


def _online(
    queries, heads_k, heads_v, scale: float, variant: Variant, rows: range, keys: range, lengths: tuple[int, int],
    tile_n: int, dtype,
):  # fmt: skip
    """The block loop of one query tile: O not normalised, row maximum (0 for a row without a key), row sum."""
    xp = _namespace(queries)
    scale_log2 = (variant.softcap or scale) * LOG2_E
    acc = _full(queries, (*queries.shape[:-1], heads_v.shape[-1]), 0.0)
    row_sum = _full(queries, (*queries.shape[:-1], 1), 0.0)
    row_max = _full(queries, (*queries.shape[:-1], 1), -math.inf)
    blocks = range(keys.start // tile_n, -(-keys.stop // tile_n)) if keys else range(0)
    for block in reversed(blocks):
        left, right = max(keys.start, block * tile_n), min(keys.stop, (block + 1) * tile_n)
        scores = xp.matmul(queries, xp.swapaxes(heads_k[..., left:right, :], -1, -2))
        if variant.softcap:
            scores = xp.tanh(scores * (scale / variant.softcap))
        if _hides(variant, rows, range(left, right), *lengths):
            scores = xp.where(_sees(queries, variant, rows, range(left, right), *lengths), scores, -math.inf)
        new_max = xp.maximum(row_max, xp.amax(scores, axis=-1, keepdims=True))
        base = _finite(new_max)
        p = xp.exp2((scores - base) * scale_log2)
        factor = xp.exp2((row_max - base) * scale_log2)
        row_sum = row_sum * factor + xp.sum(p, axis=-1, keepdims=True)
        acc = acc * factor + xp.matmul(_widen(_cast(p, dtype)), heads_v[..., left:right, :])
        row_max = new_max
    return acc, _finite(row_max), row_sum


def _namespace(x: Array):
    return torch if isinstance(x, torch.Tensor) else numpy


def _cast(x: Array, dtype) -> Array:
    return x.to(dtype) if isinstance(x, torch.Tensor) else x.astype(dtype, copy=False)


def _widen(x: Array) -> Array:
    """x in the type that is worked in."""
    return _cast(x, _namespace(x).float32) if x.dtype.itemsize == 2 else x


def _hides(variant: Variant, rows: range, keys: range, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether one of the queries `rows` does not see one of `keys`: both ends of what they see grow with them."""
    if not rows:
        return False
    first, _ = variant.interval(rows[-1], seqlen_q, seqlen_k)
    _, end = variant.interval(rows[0], seqlen_q, seqlen_k)
    return first > keys.start or end < keys.stop


def _sees(like: Array, variant: Variant, rows: range, keys: range, seqlen_q: int, seqlen_k: int) -> Array:
    """Which of the queries `rows` sees which of `keys`: (rows, keys) of bool."""
    intervals = [variant.interval(i, seqlen_q, seqlen_k) for i in rows]
    first, end = (_numbers(like, [x[side] for x in intervals])[:, None] for side in (0, 1))
    j = _numbers(like, list(keys))[None, :]
    return (first <= j) & (j < end)


def _numbers(like: Array, values: list[int]) -> Array:
    """Whole numbers on the device of an array."""
    if isinstance(like, torch.Tensor):
        return torch.tensor(values, dtype=torch.int64, device=like.device)
    return numpy.array(values, numpy.int64)


def _by_group(sink: Array, lse: Array, heads_kv: int) -> Array:
    """The sinks beside scores (B, Hkv, Hq / Hkv, Sq, Sk), in the type of lse."""
    return _cast(sink, lse.dtype).reshape(1, heads_kv, -1, 1, 1)


def _with_sink(out: Array, lse: Array, sink: Array | None) -> tuple[Array, Array]:
    """out (B, Sq, Hq, Dv) and lse (B, Hq, Sq) with one more score in the softmax, without a value."""
    if sink is None:
        return out, lse
    xp, sinks = _namespace(out), _cast(sink, lse.dtype)[None, :, None]
    base = xp.clip(_finite(xp.maximum(lse, sinks)), None, float(numpy.finfo(numpy.float32).max))
    seen = xp.exp(lse - base)
    total = seen + xp.exp(sinks - base)
    joined = xp.where(total == 0, -math.inf, xp.maximum(lse, sinks) + xp.log(_positive(total)))
    share = xp.swapaxes(seen / _positive(total), 1, 2)[..., None]
    return out * _cast(share, out.dtype), joined


def _full(like: Array, shape: tuple[int, ...], value: float) -> Array:
    """An array of the type, and on the device, of another."""
    return like.new_full(shape, value) if isinstance(like, torch.Tensor) else numpy.full(shape, value, like.dtype)


def _scale(q: Array, softmax_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else max(softmax_scale, SMALLEST_SCALE)


def _by_head(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """q as (B, Hkv, Hq / Hkv, Sq, D), k and v as (B, Hkv, 1, Sk, D | Dv): the group's queries share a broadcast K and
    V."""
    xp, heads_kv = _namespace(q), k.shape[2]
    if heads_kv == 0 or q.shape[2] % heads_kv:
        raise ValueError(f"q has {q.shape[2]} heads, which k's {heads_kv} do not divide")
    grouped = q.reshape(q.shape[0], q.shape[1], heads_kv, q.shape[2] // heads_kv, q.shape[3])
    queries = xp.swapaxes(xp.swapaxes(grouped, 1, 2), 2, 3)
    return queries, xp.swapaxes(k, 1, 2)[:, :, None], xp.swapaxes(v, 1, 2)[:, :, None]


def _ungroup(heads: Array) -> Array:
    """(B, Hkv, Hq / Hkv, S, D) to (B, S, Hq, D)."""
    xp, (batch, heads_kv, ratio, seqlen, dim) = _namespace(heads), heads.shape
    return xp.swapaxes(heads.reshape(batch, heads_kv * ratio, seqlen, dim), 1, 2)


def _nothing(q: Array, v: Array) -> tuple[Array, Array]:
    """out and lse where no query sees a key, to be filled in."""
    out = _full(q, (*q.shape[:-1], v.shape[-1]), 0.0)
    return out, _full(_widen(q[:0]), (q.shape[0], q.shape[2], q.shape[1]), -math.inf)


def _finite(row_max: Array) -> Array:
    """-inf, the maximum of a row without a key, as 0: subtracting it from scores of -inf gives -inf and not NaN."""
    return _namespace(row_max).where(row_max == -math.inf, 0.0, row_max)


def _positive(row_sum: Array) -> Array:
    """Row sums whose logarithm may be taken: that of a row without a key is not used."""
    return _namespace(row_sum).where(row_sum == 0, 1.0, row_sum)
