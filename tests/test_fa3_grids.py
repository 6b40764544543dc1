"""The sample of FlashAttention-3's grids, and its checks on CPU tensors: of what is right, and of what is not."""

import random

import pytest
import torch

import fa3
from tests.fa3_grids import (
    KVCACHE,
    KVCACHE_KINDS,
    VARLEN,
    VARLEN_KINDS,
    Expected,
    check_kvcache,
    check_varlen,
    kvcache_allows,
    name_of,
    pairs,
    pairwise,
    varlen_allows,
    wanted,
    whole,
)

GRIDS = [
    (KVCACHE, kvcache_allows),
    (KVCACHE_KINDS, kvcache_allows),
    (VARLEN, varlen_allows),
    (VARLEN_KINDS, varlen_allows),
]
SMALL = dict(head_dim=32, head_dim_v=32)
KVCACHE_CASE = dict(
    queries=9, keys=90, dtype="bfloat16", softcap=0.0, heads_kv=3, full=False, causal=True, local=False, chunk=False,
    new="as q", rotary=0.5, interleaved=True, rotary_seqlens=False, page_size=None, leftpad=True, batch_idx=True,
    varlen_q=True, **SMALL,
)  # fmt: skip
VARLEN_CASE = dict(
    queries=30, keys=60, dtype="bfloat16", softcap=0.0, heads_kv=2, causal=True, local=False, chunk=False, unused=True,
    **SMALL,
)  # fmt: skip


def small(axes, allows, count):
    lengths = [(1, 40), (3, 70), (20, 33), (16, 130)]
    found = pairwise(axes, allows)[:count]
    return [case | SMALL | dict(zip(("queries", "keys"), lengths[i % 4])) for i, case in enumerate(found)]


@pytest.mark.parametrize(("axes", "allows"), GRIDS, ids=["kvcache", "kvcache kinds", "varlen", "varlen kinds"])
def test_the_sample_holds_every_pair_that_the_whole_grid_holds(axes, allows):
    sample = pairwise(axes, allows)
    held = set().union(*map(pairs, sample))
    everything = whole(axes, allows)
    drawn = random.Random(0).sample(everything, min(3000, len(everything)))
    assert held == wanted(axes, allows) == set().union(*map(pairs, drawn))
    assert all(map(allows, sample)) and sample == pairwise(axes, allows)
    assert len(sample) <= 80 and len(set(map(name_of, sample))) == len(sample)


@pytest.mark.parametrize("case", small(VARLEN, varlen_allows, 12), ids=name_of)
def test_varlen(case):
    check_varlen(case, "cpu")


FULL = KVCACHE_CASE | dict(full=True, causal=False)


@pytest.mark.parametrize("case", [*small(KVCACHE, kvcache_allows, 16), FULL], ids=name_of)
def test_kvcache(case):
    check_kvcache(case, "cpu")


def test_the_rule_is_twice_the_error_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 6, 32, generator=generator).bfloat16() for n in (9, 50, 50))
    mask = dict(causal=True, window_size=(-1, -1), attention_chunk=0, softcap=0.0)
    want = Expected([(q, k, v)], mask)
    largest = want.plain.max().item()
    assert largest > 1e-3
    for is_cache in (True, False):
        want.check(want.exact, is_cache)
        wrong = want.exact.float()
        wrong[4, 2, 7] += 8 * largest
        for value in (wrong[4, 2, 7].item(), torch.nan):
            out = want.exact.clone()
            out[4, 2, 7] = value
            with pytest.raises(AssertionError, match="max error"):
                want.check(out, is_cache)
    with pytest.raises(AssertionError, match="mean error"):
        want.check((want.exact.float() + 0.9 * largest).bfloat16(), True)


def without(name, value=None):
    """A function that does not know an argument."""

    def broken(function):
        return lambda *given, **options: function(*given, **{**options, name: value})

    return broken


def forgets_the_cache(function):
    return lambda q, k_cache, v_cache, *given, **options: function(
        q, k_cache.clone(), v_cache.clone(), *given, **options
    )


def writes_too_much(function):
    def broken(q, k_cache, v_cache, *given, **options):
        got = function(q, k_cache, v_cache, *given, **options)
        v_cache[0, -1, 0, 0] = 1
        return got

    return broken


@pytest.mark.parametrize(
    ("broken", "changes"),
    [
        (without("causal", False), {}),
        (without("cache_leftpad"), {}),
        (without("rotary_interleaved", False), {}),
        (without("rotary_seqlens"), dict(rotary_seqlens=True)),
        (without("attention_chunk", 0), dict(chunk=True, keys=96)),  # chunks of 14
        (without("window_size", (-1, -1)), dict(causal=False, local=True)),
        (without("softcap", 0.0), dict(softcap=15.0)),
        (forgets_the_cache, {}),
        (forgets_the_cache, dict(page_size=4, leftpad=False, batch_idx=False)),
        (writes_too_much, {}),
    ],
)
def test_what_is_wrong_on_a_cache_is_seen(broken, changes):
    check_kvcache(KVCACHE_CASE | changes, "cpu")
    with pytest.raises(AssertionError):
        check_kvcache(KVCACHE_CASE | changes, "cpu", broken(fa3.flash_attn_with_kvcache))


@pytest.mark.parametrize(
    ("broken", "changes"),
    [
        (without("causal", False), {}),
        (without("attention_chunk", 0), dict(chunk=True)),
        (without("window_size", (-1, -1)), dict(causal=False, local=True)),
        (without("softcap", 0.0), dict(softcap=15.0)),
    ],
)
def test_what_is_wrong_of_ragged_calls_is_seen(broken, changes):
    check_varlen(VARLEN_CASE | changes, "cpu")
    with pytest.raises(AssertionError):
        check_varlen(VARLEN_CASE | changes, "cpu", broken(fa3.flash_attn_varlen_func))
