"""Which key blocks a query tile takes, against the mask written out."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fa3.kernels.algo.blocks import first_row, key_blocks
from fa3.kernels.algo.seqlen import Lengths

lengths = st.builds(Lengths, st.integers(1, 400), st.integers(1, 400))
tiles = st.sampled_from([64, 128, 192]), st.sampled_from([64, 80, 112, 128, 176])


def visible(at: Lengths, causal: bool) -> np.ndarray:
    """(seqlen_q, seqlen_k) booleans: bottom-right aligned."""
    return np.tri(at.q, at.k, at.k - at.q, dtype=bool) if causal else np.ones((at.q, at.k), dtype=bool)


def tiles_of(at: Lengths, tile_m: int, tile_n: int, causal: bool):
    """(rows of the mask, key blocks) of every tile; rows outside of the sequence are left out."""
    mask = visible(at, causal)
    for m_block in range(-(-at.q // tile_m)):
        first = first_row(m_block, at, tile_m, causal)
        yield mask[max(first, 0) : first + tile_m], key_blocks(first, at, tile_m, tile_n, causal)


@given(lengths, *tiles, st.booleans())
def test_blocks_hold_every_visible_key_and_no_block_is_wasted(at, tile_m, tile_n, causal):
    for rows, blocks in tiles_of(at, tile_m, tile_n, causal):
        full = len(rows) == tile_m  # rows past the end may see more
        assert not rows[:, blocks.count * tile_n :].any(), "a visible key lies beyond the blocks"
        last_block = slice((blocks.count - 1) * tile_n, blocks.count * tile_n)
        assert blocks.count == 1 or not full or rows[:, last_block].any(), "the last block is seen by no row"
        assert blocks.count >= 1


@given(lengths, *tiles, st.booleans())
def test_blocks_without_mask_are_wholly_visible(at, tile_m, tile_n, causal):
    for rows, blocks in tiles_of(at, tile_m, tile_n, causal):
        assert 1 <= blocks.masked <= blocks.count
        for i in range(blocks.masked, blocks.count):
            first = blocks.n_block(i) * tile_n
            block = rows[:, first : first + tile_n]
            assert block.shape[1] == tile_n and block.all()


@given(lengths, *tiles)
def test_only_the_diagonal_and_the_last_block_are_masked(at, tile_m, tile_n):
    """So the mask's cost does not grow with the length."""
    assert {blocks.masked for _, blocks in tiles_of(at, tile_m, tile_n, False)} == {1}
    assert max(blocks.masked for _, blocks in tiles_of(at, tile_m, tile_n, True)) <= -(-tile_m // tile_n) + 1


@given(lengths, tiles[0], st.booleans())
def test_tiles_hold_every_query_once(at, tile_m, causal):
    count = -(-at.q // tile_m)
    firsts = [first_row(m_block, at, tile_m, causal) for m_block in range(count)]
    assert [b - a for a, b in itertools.pairwise(firsts)] == [tile_m] * (count - 1)
    assert firsts[0] <= 0 < firsts[0] + tile_m and firsts[-1] < at.q <= firsts[-1] + tile_m
    assert all(first % 64 == 0 for first in firsts), "a warpgroup's rows are all before query 0 or none"


def test_the_causal_tile_that_is_not_full_is_the_shortest():
    """4096 queries in tiles of 192: 64 of them in the first tile, which takes one block, not in the last of 32."""
    at = Lengths(4096, 4096)
    assert first_row(0, at, 192, True) == -128 and first_row(21, at, 192, True) == 4096 - 192
    counts = [key_blocks(first_row(m, at, 192, True), at, 192, 128, True).count for m in (0, 1, 21)]
    assert counts == [1, 2, 32]


def test_blocks_are_taken_right_to_left():
    blocks = key_blocks(3 * 128, Lengths(1000, 1000), 128, 128, True)
    assert blocks == (4, 1)
    assert [blocks.n_block(i) for i in range(blocks.count)] == [3, 2, 1, 0]


def test_a_tile_that_sees_no_key_takes_one_masked_block():
    assert key_blocks(0, Lengths(512, 100), 128, 128, True) == (1, 1)
