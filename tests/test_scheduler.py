"""Orders and schedulers, run on the host: every query tile is computed exactly once, at about equal cost a CTA."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fa3.heuristics import num_items
from fa3.kernels.algo.scheduler import Folded, Grid, InOrder, LongestFirst, OneTile, Persistent
from fa3.kernels.forward.config import Config

grids = st.builds(lambda m, h, b: Grid(m, h, h * b), st.integers(1, 23), st.integers(1, 9), st.integers(1, 7))


def orders(grid: Grid, section: int) -> list:
    return [InOrder(grid), LongestFirst(grid, min(section, grid.sequences)), Folded(grid)]


def work(scheduler: Persistent, ctas: int) -> list[list[tuple[int, int]]]:
    """(m_block, sequence) of every tile, CTA by CTA, as Persistent.for_each goes through them."""
    order = scheduler.order
    turns = [[scheduler.at(turn, cta, ctas) for turn in range(scheduler.turns(cta, ctas))] for cta in range(ctas)]
    return [[order.at(*turn) for turn in mine if bool(order.exists(*turn))] for mine in turns]


@given(grids, st.integers(1, 80), st.integers(1, 140))
def test_every_tile_exactly_once(grid, section, num_sms):
    wanted = {(m, s): 1 for m in range(grid.m_blocks) for s in range(grid.sequences)}
    for order in orders(grid, section):
        if order.parts == 1:
            assert Counter(order.at(i, 0) for i in range(OneTile(order).ctas(num_sms))) == wanted
        scheduler = Persistent(order)
        tiles = work(scheduler, scheduler.ctas(num_sms))
        assert Counter(tile for mine in tiles for tile in mine) == wanted
        assert min(len(mine) for mine in tiles) >= 1


@given(grids, st.booleans(), st.booleans())
def test_the_host_counts_the_same_items(grid, causal, persistent):
    config = Config(2, 128, persistent=persistent)
    order = InOrder(grid) if not causal else Folded(grid) if persistent else LongestFirst(grid, 1)
    for seqlen_q in ((grid.m_blocks - 1) * config.tile_m + 1, grid.m_blocks * config.tile_m):
        assert num_items(config, causal, seqlen_q, grid.sequences) == order.items


@given(grids)
def test_tile_names_head_and_batch(grid):
    for sequence in range(grid.sequences):
        tile = grid.tile(0, sequence, 0, 0)
        assert tile.batch * grid.heads + tile.head == sequence and tile.head < grid.heads


@given(grids, st.integers(1, 80))
def test_longest_first_within_a_section(grid, section):
    order = LongestFirst(grid, min(section, grid.sequences))
    for i in range(1, order.items):
        (before, sequence_before), (m_block, sequence) = order.at(i - 1, 0), order.at(i, 0)
        same_section = sequence_before // order.section == sequence // order.section
        assert m_block <= before if same_section else sequence > sequence_before


def test_folded_items_cost_the_same():
    """Blocks of a causal tile grow with m_block: a long and a short one make one sum."""
    order = Folded(Grid(16, 4, 8))
    costs = {sum(order.at(item, part)[0] + 1 for part in (0, 1)) for item in range(order.items)}
    assert costs == {17}


def test_folded_persistent_grid_is_balanced():
    """B4 H16, 4096 keys in tiles of 128: every CTA gets 7 or 8 pairs of 33 blocks."""
    loads = [sum(m + 1 for m, _ in mine) for mine in work(Persistent(Folded(Grid(32, 16, 64))), 132)]
    assert (min(loads), max(loads)) == (7 * 33, 8 * 33)
