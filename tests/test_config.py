"""Every Config that heuristics can return fits the chip, and config_for returns no other."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.heuristics import (
    ACCUMULATIONS,
    ALWAYS,
    DTYPES,
    ROWS,
    all_configs,
    config_for,
    ragged_config_for,
    ragged_tiles,
)
from fa3.kernels.forward.config import FP8, SHARED_BYTES, TILES, Config, Spec, tile_for
from fa3.launch_varlen import STEP

REGISTERS = 65536  # of an SM, for the one CTA that runs on it
ALL = set(all_configs())
sizes = st.integers(1, 20000)
heads = st.integers(1, 4096)


@pytest.mark.parametrize(("spec", "config"), list(all_configs()), ids=str)
def test_config_fits_the_chip(spec, config):
    assert config.shared_bytes(spec) <= SHARED_BYTES
    producer, consumer = config.registers(spec)
    of_cta = REGISTERS // config.threads // 8 * 8 * config.threads  # for more than that, setmaxnreg waits for ever
    assert 128 * (producer + config.warpgroups * consumer) <= of_cta <= REGISTERS
    assert producer % 8 == consumer % 8 == 0 and 24 <= producer and consumer <= 256
    assert config.tile_n % 16 == 0 and config.tile_n <= 256  # steps of PV; the N of one WGMMA
    assert config.tile_n % spec.step == 0
    # Accumulators of S, O and a fresh one, P as an operand, in 32-bit registers, with room for the rest of the loop.
    fresh = (config.chunk or spec.head_dim_v) // 2 if config.promotion else 0
    p = config.tile_n // 8 * spec.element_bytes
    s = config.tile_n // 2
    others = s + fresh + p if config.overlap else max(s, fresh) + p  # in turn: S is gone when P V begins
    assert spec.head_dim_v // 2 + others <= consumer - 30


def test_all_configs_are_distinct_and_cover_every_tile():
    pairs = list(all_configs())
    assert len(set(pairs)) == len(pairs)
    kinds = {(s.dtype, s.dtype_o, s.head_dim, s.head_dim_v, s.causal) for s, _ in pairs if not s.ragged}
    dtypes = [(d, "") for d in DTYPES] + [(FP8, d) for d in DTYPES]
    assert kinds == {(*d, *t, c) for d in dtypes for t in TILES for c in (False, True)}
    ragged = {(s.dtype, s.head_dim, s.head_dim_v, s.causal) for s, _ in pairs if s.ragged}
    assert ragged == {(d, *t, c) for d in DTYPES for t in TILES for c in (False, True)}
    assert not any(s.v_channel_scale for s, _ in pairs)
    assert {c.promotion for s, c in pairs if s.is_fp8} == {0, 1} and all(
        not c.promotion for s, c in pairs if not s.is_fp8
    )


@given(st.sampled_from(DTYPES), st.sampled_from(TILES), st.booleans(), sizes, sizes, heads, sizes, sizes)
def test_config_for_returns_what_all_configs_lists(dtype, tile, causal, seqlen_q, seqlen_k, heads, batch, num_sms):
    spec = Spec(dtype, *tile, causal)
    config = config_for(spec, seqlen_q, seqlen_k, heads, batch, num_sms)
    assert (spec, config) in ALL


def ragged(tile, causal, dtype="bfloat16"):
    return Spec(dtype, *tile, causal, ragged=True)


ragged_specs = st.builds(ragged, st.sampled_from(TILES), st.booleans(), st.sampled_from(DTYPES))


@given(ragged_specs, st.integers(0, 20000), st.integers(0, 20000))
def test_ragged_config_for_returns_what_all_configs_lists(spec, max_q, max_k):
    config = ragged_config_for(spec, max_q, max_k)
    assert (spec, config) in ALL and config.dynamic and config.persistent


@given(st.sampled_from(TILES), st.booleans(), sizes, sizes, heads, st.integers(1, 300))
def test_sequences_of_equal_lengths_have_the_tile_of_the_dense_kernel(tile, causal, max_q, max_k, heads, batch):
    """So their bits are the same. Bounds are as good as rounded up to what divides every size that matters."""
    dense = config_for(Spec("bfloat16", *tile, causal), max_q, max_k, heads, batch, 132)

    def choice(*bounds):
        return ragged_config_for(ragged(tile, causal), *bounds)

    found = choice(max_q, max_k)
    assert (found.tile_m, found.tile_n) == (dense.tile_m, dense.tile_n)
    assert found == choice(*(-(-n // STEP) * STEP for n in (max_q, max_k)))


def test_the_step_of_bounds_divides_every_size_and_limit():
    for size in (size for row in ROWS.values() for size in row.sizes(causal=False)):
        limits = {size.small_to, size.two_q, size.config.tile_m, size.config.tile_n} - {ALWAYS}
        assert all(limit % STEP == 0 for limit in limits)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=30), st.sampled_from([128, 192]), heads)
def test_ragged_tiles_are_enough(lengths, tile_m, heads):
    tiles = sum(-(-n // tile_m) for n in lengths) * heads
    assert tiles <= ragged_tiles(sum(lengths), tile_m, heads, len(lengths))


def test_known_choices_of_ragged():
    def choice(tile, causal, longest):
        return ragged_config_for(ragged(tile, causal), longest, longest)

    drawn = {"persistent": True, "dynamic": True, "optimistic": True}
    assert choice((128, 128), True, 8192) == Config(2, 128, pingpong=False, **drawn)
    assert choice((64, 64), False, 16384) == Config(3, 128, 3, **drawn)
    assert choice((64, 64), False, 197) == Config(2, 112, **drawn)
    assert choice((256, 256), True, 512) == Config(2, 64, **drawn)
    assert choice((192, 128), True, 4096) == Config(2, 128, **drawn)


@given(st.integers(1, 256), st.integers(1, 256))
def test_tile_holds_both_head_dims_and_none_smaller_does(head_dim, head_dim_v):
    tile = tile_for(head_dim, head_dim_v)
    assert tile in TILES and head_dim <= tile[0] and head_dim_v <= tile[1]
    for other in TILES:
        if head_dim <= other[0] and head_dim_v <= other[1]:
            assert tile[0] * tile[1] <= other[0] * other[1]


@given(
    st.sampled_from(ACCUMULATIONS), st.sampled_from(DTYPES), st.sampled_from(TILES), st.booleans(),
    sizes, sizes, heads, sizes, sizes,
)  # fmt: skip
def test_config_for_fp8_returns_what_all_configs_lists(
    accumulation, dtype_o, tile, causal, seqlen_q, seqlen_k, heads, batch, num_sms
):
    spec = Spec(FP8, *tile, causal, dtype_o)
    config = config_for(spec, seqlen_q, seqlen_k, heads, batch, num_sms, accumulation)
    assert (spec, config) in ALL
    assert config.promotion == 1 or accumulation == "fast"
    assert not config.chunk or spec.head_dim_v % config.chunk == 0


def test_known_choices_of_fp8():
    def choice(tile, causal, seqlen, accumulation="accurate"):
        return config_for(Spec(FP8, *tile, causal, "bfloat16"), seqlen, seqlen, 16, 8, 132, accumulation)

    free = {"pingpong": False}
    dynamic = {"persistent": True, "dynamic": True, **free}
    assert ACCUMULATIONS[0] == "accurate"
    alternating = Config(2, 128, 3, promotion=1, alternate=True, **free)
    assert choice((128, 128), False, 512) == replace(alternating, persistent=True, q_stages=2)
    assert choice((128, 128), False, 4096) == replace(alternating, persistent=True, dynamic=True, q_stages=2)
    assert choice((128, 128), False, 16384) == replace(alternating, persistent=True, dynamic=True)
    assert choice((128, 128), False, 64) == choice((128, 128), False, 64, "fast") == alternating
    prefetching = Config(3, 128, 3, promotion=1, chunk=32, prefetch=True, q_stages=2, **dynamic)
    assert choice((64, 64), True, 512) == replace(prefetching, dynamic=False)
    assert choice((64, 64), True, 4096) == choice((64, 64), True, 4096, "fast") == prefetching
    in_turn = Config(2, 128, promotion=1, chunk=64, overlap=False)
    assert choice((256, 256), False, 4096) == replace(in_turn, persistent=True, dynamic=True)
    assert choice((256, 256), True, 64) == in_turn and choice((256, 256), True, 64, "fast") == Config(2, 128)


def test_known_choices():
    """bf16, 132 SMs: the rows of docs/tuning.md."""

    def choice(tile, causal, seqlen, heads, batch):
        return config_for(Spec("bfloat16", *tile, causal), seqlen, seqlen, heads, batch, 132)

    fixed = {"persistent": True, "optimistic": True}
    dynamic = {"dynamic": True, **fixed}
    assert choice((128, 128), False, 16384, 16, 1) == Config(2, 128, pingpong=False, **dynamic)
    assert choice((128, 128), True, 4096, 16, 4) == Config(2, 128, pingpong=False, **dynamic)
    assert choice((128, 128), True, 1024, 16, 16) == Config(2, 128, q_stages=2, **fixed)
    assert choice((64, 64), True, 512, 32, 32) == Config(2, 128, q_stages=2, **fixed)
    assert choice((64, 64), False, 512, 32, 32) == Config(3, 128, 3, q_stages=2, **fixed)
    assert choice((64, 64), False, 16384, 32, 1) == Config(3, 128, 3, q_stages=2, **dynamic)
    assert choice((256, 256), False, 1024, 8, 16) == Config(2, 64, **fixed)
    assert choice((256, 256), True, 512, 8, 32) == Config(2, 64, **dynamic)
    assert choice((256, 256), True, 16384, 8, 1) == Config(2, 80, **dynamic)
    assert choice((256, 256), True, 4096, 8, 1) == Config(2, 80, **dynamic)  # 256 tiles: no causal grid by the rule
    assert choice((192, 128), True, 16384, 8, 1) == Config(2, 128, **fixed)
    assert choice((96, 96), True, 16384, 8, 1) == Config(3, 96, q_stages=2, **dynamic)
    assert choice((96, 96), True, 512, 8, 32) == Config(2, 128, q_stages=2, **dynamic)


def test_a_causal_grid_that_would_leave_multiprocessors_idle_is_not_persistent():
    """8 heads of 2048 queries are 128 tiles, the longest 16 blocks and the mean 8.5, for 132 multiprocessors."""
    assert not config_for(Spec("bfloat16", 128, 128, True), 2048, 2048, 8, 1, 132).persistent


def test_shared_bytes_of_the_largest():
    """hd256, 128 x 80, 2 stages: Q 64 KiB, K and V 80 KiB each, 16 barriers, 2 tickets, an alignment gap."""
    spec = Spec("bfloat16", 256, 256, False)
    assert Config(2, 80).shared_bytes(spec) == 65536 + 4 * 40960 + 128 + 8 + 1024
    assert (Config(2, 80).o_place(spec), Config(2, 80, persistent=True).o_place(spec)) == ("q", "v")
    assert Config(2, 128, persistent=True).o_place(Spec("bfloat16", 128, 128, False)) == "own"


@pytest.mark.parametrize(("spec", "config"), list(all_configs()), ids=str)
def test_o_fits_in_its_place(spec, config):
    """A warpgroup's 64 rows of O in its own Q tile, or in a V stage of its own."""
    place = config.o_place(spec)
    assert place != "q" or spec.head_dim_v <= spec.head_dim
    assert place != "v" or (64 * 2 <= config.tile_n * spec.element_bytes and config.warpgroups <= config.stages)
