"""Who is measured against a KV cache and over ragged sequences, each called the way its users call it.

Against a cache an implementation is bind(cache, case) -> call, a call without arguments that returns (B, Sq, H, Dv) or
what begins with it; over ragged sequences bind(tensors, case) -> call that returns (total_q, H, Dv). What is of the
lengths alone, as a plan, is made by bind. A problem that an implementation does not take raises there.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

from bench import peers
from bench.decode_cases import Case
from bench.ragged_cases import Case as RaggedCase

Call = Callable[[], Any]
FLASHINFER_PAGE = 16  # a contiguous cache is given to it in such pages, or in smaller ones that divide it


class Cache(NamedTuple):
    """Inputs of a decode problem. Rows past a sequence's keys are zero, and in pages there are no others."""

    q: Any  # (B, Sq, H, D)
    k: Any  # (B, S, Hkv, D), or (pages, page_size, Hkv, D)
    v: Any  # the same with Dv
    lengths: Any  # (B,) int32: keys of each sequence
    page_table: Any | None  # (B, width) int32


class Tensors(NamedTuple):
    """Inputs of a ragged problem: sequences one after the other."""

    q: Any  # (total, H, D)
    k: Any
    v: Any
    starts: Any  # (B + 1,) int32
    most: int  # keys or queries of a sequence


def refuse_unless(is_taken: bool, why: str) -> None:
    if not is_taken:
        raise ValueError(why)


# Against a cache


Bind = Callable[..., Call]  # (cache, case)


def _with_kvcache(function: Callable[..., Any]) -> Bind:
    """Ours, and FlashAttention-3's, which has the same arguments."""

    def bind(cache: Cache, case: Case) -> Call:
        return partial(
            function, cache.q, cache.k, cache.v, cache_seqlens=cache.lengths, page_table=cache.page_table, causal=True,
            window_size=case.window_size,
        )  # fmt: skip

    bind.reads_lengths = True  # type: ignore[attr-defined]  # on the device: a graph follows them
    return bind


def _ours() -> Bind:
    import fa3

    return _with_kvcache(fa3.flash_attn_with_kvcache)


def _fa3() -> Bind:
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        from fa3_fwd_interface import flash_attn_with_kvcache
    return _with_kvcache(flash_attn_with_kvcache)


def _check_dense(case: Case) -> None:
    refuse_unless(case.page_size is None, "takes no pages")
    refuse_unless(not case.lengths, "takes one length for all")


def _sdpa_on(backend: str) -> Bind:
    attention = peers.load([backend])[0][backend]

    def bind(cache: Cache, case: Case) -> Call:
        _check_dense(case)
        refuse_unless(case.window is None, "has no window")
        refuse_unless(case.shape.seqlen_q == 1, "aligns its causal mask top-left")
        return partial(attention, cache.q, cache.k, cache.v, False)

    bind.around = peers.around(attention)  # type: ignore[attr-defined]
    return bind


def _fa4() -> Bind:
    from flash_attn.cute.interface import flash_attn_func

    def bind(cache: Cache, case: Case) -> Call:
        _check_dense(case)
        window = {} if case.window is None else {"window_size": case.window_size}
        return partial(flash_attn_func, cache.q, cache.k, cache.v, causal=True, **window)

    return bind


def _flashinfer() -> Bind:
    """Its batch decode on tensor cores. A plan is of the lengths and the pages; all caches of a case share it. A
    contiguous cache is given as pages in order.
    """
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    def page_of(case: Case) -> int:
        return case.page_size or math.gcd(FLASHINFER_PAGE, max(case.keys))

    @lru_cache(maxsize=1)
    def planned(case: Case, dtype: Any, device: Any, table: Any) -> Any:
        shape, page = case.shape, page_of(case)
        workspace = torch.empty(peers.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        counts = [-(-keys // page) for keys in case.keys]
        width = -(-max(case.keys) // page)
        rows = table.tolist() if table is not None else torch.arange(shape.batch * width).view(-1, width).tolist()
        indices = [number for row, count in zip(rows, counts, strict=True) for number in row[:count]]
        starts = list(accumulate(counts, initial=0))
        last = [keys - (count - 1) * page for keys, count in zip(case.keys, counts, strict=True)]
        queries = {} if shape.seqlen_q == 1 else {"q_len_per_req": shape.seqlen_q}
        wrapper.plan(
            *(torch.tensor(values, dtype=torch.int32, device=device) for values in (starts, indices, last)),
            shape.heads, shape.heads_kv, shape.head_dim, page,
            window_left=case.window_size[0], q_data_type=dtype, kv_data_type=dtype, **queries,
        )  # fmt: skip
        return wrapper

    def bind(cache: Cache, case: Case) -> Call:
        shape, wrapper = case.shape, planned(case, cache.q.dtype, cache.q.device, cache.page_table)
        q = cache.q.view(-1, shape.heads, shape.head_dim)
        kv = tuple(x.view(-1, page_of(case), *x.shape[2:]) for x in (cache.k, cache.v))
        return lambda: wrapper.run(q, kv).view(*cache.q.shape[:2], shape.heads, shape.head_dim_v)

    return bind


def keys_of(cache: Cache, case: Case, sequence: int) -> tuple[Any, Any]:
    """K and V that the queries of a sequence see, (1, keys, Hkv, D)."""
    stop = case.keys[sequence]
    seen = slice(stop - case.seen(stop), stop)
    if cache.page_table is None:
        return cache.k[sequence : sequence + 1, seen], cache.v[sequence : sequence + 1, seen]
    pages = cache.page_table[sequence].long()
    k, v = (x[pages].flatten(0, 1)[None, seen] for x in (cache.k, cache.v))
    return k, v


def _naive() -> Bind:
    import torch

    from fa3.reference import attention

    def bind(cache: Cache, case: Case) -> Call:
        def call() -> Any:
            outs = [
                attention(cache.q[b : b + 1], *keys_of(cache, case, b), causal=True)[0] for b in range(case.shape.batch)
            ]
            return torch.cat(outs)

        return call

    return bind


DECODERS: dict[str, Callable[[], Bind]] = {
    "ours": _ours,
    "cudnn": partial(_sdpa_on, "cudnn"),
    "fa2": partial(_sdpa_on, "fa2"),
    "fa3": _fa3,
    "fa4": _fa4,
    "flashinfer": _flashinfer,
    "naive": _naive,
}


# Over ragged sequences


RaggedBind = Callable[..., Call]  # (tensors, case)


def _varlen(function: Callable[..., Any]) -> RaggedBind:
    """Ours, FlashAttention-3's and FlashAttention-4's: the names of these arguments are the same."""

    def bind(x: Tensors, case: RaggedCase) -> Call:
        return partial(
            function, x.q, x.k, x.v, cu_seqlens_q=x.starts, cu_seqlens_k=x.starts, max_seqlen_q=x.most,
            max_seqlen_k=x.most, causal=case.shape.causal,
        )  # fmt: skip

    return bind


def _our_varlen() -> RaggedBind:
    import fa3

    function = fa3.flash_attn_varlen_func
    contiguous = _varlen(function)
    return lambda x, case: _in_pages(function, x, case, case.page_size) if case.page_size else contiguous(x, case)


def _in_pages(function: Callable[..., Any], x: Tensors, case: RaggedCase, page: int) -> Call:
    """The same keys in shuffled pages. Lengths must fill them."""
    import torch

    refuse_unless(all(length % page == 0 for length in case.lengths), f"lengths must be multiples of the page, {page}")
    batch, device = len(case.lengths), x.k.device
    order = torch.randperm(x.k.shape[0] // page, generator=torch.Generator().manual_seed(0)).to(device)
    pools = []
    for rows in (x.k, x.v):
        pools.append(torch.empty_like(rows).view(-1, page, *rows.shape[1:]))
        pools[-1][order] = rows.view(pools[-1].shape)
    return partial(
        function, x.q, *pools, cu_seqlens_q=x.starts, cu_seqlens_k=None, max_seqlen_q=x.most, max_seqlen_k=x.most,
        seqused_k=x.starts.diff(), page_table=order.view(batch, -1).int(), causal=case.shape.causal,
    )  # fmt: skip


def _our_equal() -> RaggedBind:
    import fa3

    return _varlen(fa3.flash_attn_varlen_func)


def _our_dense() -> RaggedBind:
    import fa3

    attention = fa3.flash_attn_func

    def bind(x: Tensors, case: RaggedCase) -> Call:
        q, k, v = (t.view(case.shape.batch, case.shape.seqlen_q, *t.shape[1:]) for t in (x.q, x.k, x.v))
        return lambda: attention(q, k, v, causal=case.shape.causal).flatten(0, 1)

    return bind


def _fa3_varlen() -> RaggedBind:
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        from fa3_fwd_interface import flash_attn_varlen_func
    return _varlen(flash_attn_varlen_func)


def _fa4_varlen() -> RaggedBind:
    from flash_attn.cute.interface import flash_attn_varlen_func

    return _varlen(flash_attn_varlen_func)


def _naive_varlen() -> RaggedBind:
    from fa3.reference import ragged_attention

    def bind(x: Tensors, case: RaggedCase) -> Call:
        starts = x.starts.tolist()
        rows = [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]
        return lambda: ragged_attention(x.q, x.k, x.v, [(r, r) for r in rows], causal=case.shape.causal)[0]

    return bind


EQUAL = ("ours_equal", "ours_dense")  # these get sequences of one length
VARLEN: dict[str, Callable[[], RaggedBind]] = {
    "ours": _our_varlen,
    "ours_equal": _our_equal,
    "ours_dense": _our_dense,
    "fa3": _fa3_varlen,
    "fa4": _fa4_varlen,
    "naive": _naive_varlen,
}
