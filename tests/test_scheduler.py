"""Orders and schedulers, run on the host: every query tile is computed exactly once, at about equal cost a CTA."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.heuristics import balance
from fa3.kernels.algo.scheduler import Folded, Grid, InOrder, LongestFirst
from fa3.kernels.prims.tma import LONGEST
from fa3.problem_varlen import TOTAL_MAX

grids = st.builds(lambda m, h, b: Grid(m, h, h * b), st.integers(1, 23), st.integers(1, 9), st.integers(1, 7))


def work(order, ctas: int) -> list[list[tuple[int, int]]]:
    """(m_block, sequence) of every tile, CTA by CTA, as Persistent.for_each goes through them."""
    turns = [[order.turn(i, cta, ctas) for i in range(order.turns(cta, ctas))] for cta in range(ctas)]
    return [[(turn.m_block, turn.sequence) for turn in mine if bool(turn.exists)] for mine in turns]


@given(grids, st.integers(1, 80), st.integers(1, 140))
def test_every_tile_exactly_once(grid, section, num_sms):
    wanted = {(m, s): 1 for m in range(grid.m_blocks) for s in range(grid.sequences)}
    for order in (InOrder(grid), LongestFirst(grid, min(section, grid.sequences))):
        assert Counter(order.at(i) for i in range(grid.tiles)) == wanted
    for order in (InOrder(grid), Folded(grid)):
        tiles = work(order, min(grid.tiles, num_sms))
        assert Counter(tile for mine in tiles for tile in mine) == wanted


@given(grids)
def test_tile_names_head_and_batch(grid):
    for sequence in range(grid.sequences):
        tile = grid.tile(0, sequence, 0, 0)
        assert tile.batch * grid.heads + tile.head == sequence and tile.head < grid.heads


@given(grids, st.integers(1, 80))
def test_longest_first_within_a_section(grid, section):
    order = LongestFirst(grid, min(section, grid.sequences))
    for i in range(1, grid.tiles):
        (before, sequence_before), (m_block, sequence) = order.at(i - 1), order.at(i)
        same_section = sequence_before // order.section == sequence // order.section
        assert m_block <= before if same_section else sequence > sequence_before


def test_pairs_cost_the_same():
    """Blocks of a causal tile grow with m_block: a long and a short one make one sum, the middle one of 15 half it."""
    for m_blocks, sums in ((16, {17}), (15, {16, 8})):
        order, ctas = Folded(Grid(m_blocks, 4, 64)), 5
        rounds = order.rounds(ctas)
        assert rounds == (m_blocks + 1) // 2 * 64 // ctas - 1
        turns = [[order.turn(2 * r + part, cta, ctas) for part in (0, 1)] for r in range(rounds) for cta in range(ctas)]
        assert {sum(t.m_block + 1 for t in pair if bool(t.exists)) for pair in turns} == sums
        assert all(a.sequence == b.sequence for a, b in turns)


@pytest.mark.parametrize(
    ("m_blocks", "sequences", "worst"), [(32, 64, 1.012), (16, 128, 1.01), (128, 16, 1.02), (22, 128, 1.02)]
)
def test_ctas_of_a_persistent_causal_grid_end_together(m_blocks, sequences, worst):
    """132 CTAs: the longest load over the mean one, counted in blocks of a tile's length."""
    loads = [sum(m + 1 for m, _ in mine) for mine in work(Folded(Grid(m_blocks, 16, sequences)), 132)]
    assert max(loads) <= worst * sum(loads) / len(loads)
    assert balance(m_blocks, sequences, 132) == pytest.approx(sum(loads) / len(loads) / max(loads), abs=1e-9)


@given(st.integers(1, 23), st.integers(1, 90), st.integers(1, 140))
def test_the_host_foresees_the_balance(m_blocks, sequences, num_sms):
    loads = [sum(m + 1 for m, _ in mine) for mine in work(Folded(Grid(m_blocks, 1, sequences)), num_sms)]
    assert balance(m_blocks, sequences, num_sms) == pytest.approx(sum(loads) / num_sms / max(loads), abs=1e-9)


def test_no_ragged_batch_is_longer_than_what_the_kernel_finds_a_sequence_among():
    assert TOTAL_MAX == LONGEST
