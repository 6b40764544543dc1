"""Which key blocks a query tile takes, against the mask written out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="the DSL's types")

from fa3.kernels.algo.blocks import key_blocks
from fa3.kernels.algo.seqlen import Lengths

lengths = st.builds(Lengths, st.integers(1, 400), st.integers(1, 400))
tiles = st.sampled_from([64, 128, 192]), st.sampled_from([64, 80, 112, 128, 176])


def visible(at: Lengths, causal: bool) -> np.ndarray:
    """(seqlen_q, seqlen_k) booleans: bottom-right aligned."""
    return np.tri(at.q, at.k, at.k - at.q, dtype=bool) if causal else np.ones((at.q, at.k), dtype=bool)


@given(lengths, *tiles, st.booleans())
def test_blocks_hold_every_visible_key_and_no_block_is_wasted(at, tile_m, tile_n, causal):
    mask = visible(at, causal)
    for m_block in range(-(-at.q // tile_m)):
        rows = mask[m_block * tile_m : (m_block + 1) * tile_m]
        blocks = key_blocks(m_block, at, tile_m, tile_n, causal)
        assert not rows[:, blocks.count * tile_n :].any(), "a visible key lies beyond the blocks"
        last_block = slice((blocks.count - 1) * tile_n, blocks.count * tile_n)
        whole_tile = (m_block + 1) * tile_m <= at.q  # rows past the end may see more
        assert blocks.count == 1 or not whole_tile or rows[:, last_block].any(), "the last block is seen by no row"
        assert blocks.count >= 1


@given(lengths, *tiles, st.booleans())
def test_blocks_without_mask_are_wholly_visible(at, tile_m, tile_n, causal):
    mask = visible(at, causal)
    for m_block in range(-(-at.q // tile_m)):
        blocks = key_blocks(m_block, at, tile_m, tile_n, causal)
        assert 1 <= blocks.masked <= blocks.count
        for i in range(blocks.masked, blocks.count):
            first = blocks.n_block(i) * tile_n
            block = mask[m_block * tile_m : (m_block + 1) * tile_m, first : first + tile_n]
            assert block.shape[1] == tile_n and block.all()


@given(lengths, *tiles)
def test_only_the_diagonal_and_the_last_block_are_masked(at, tile_m, tile_n):
    """So the mask's cost does not grow with the length."""
    for m_block in range(-(-at.q // tile_m)):
        assert key_blocks(m_block, at, tile_m, tile_n, False).masked == 1
        assert key_blocks(m_block, at, tile_m, tile_n, True).masked <= -(-tile_m // tile_n) + 1


def test_blocks_are_taken_right_to_left():
    blocks = key_blocks(3, Lengths(1000, 1000), 128, 128, True)
    assert blocks == (4, 1)
    assert [blocks.n_block(i) for i in range(blocks.count)] == [3, 2, 1, 0]


def test_a_tile_that_sees_no_key_takes_one_masked_block():
    assert key_blocks(0, Lengths(512, 100), 128, 128, True) == (1, 1)
