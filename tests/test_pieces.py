"""How keys are dealt out to CTAs (kernels/algo/pieces.py), its formulas worked out with Python's numbers.

Whatever lengths, windows and splits are: every key that a query sees is taken once, partial results have places of
their own, and the merge looks at just these.
"""

import random
import types

import pytest

from fa3.kernels.algo import pieces, window
from fa3.kernels.algo.pieces import Batch, Given, Line, Shares
from fa3.kernels.algo.seqlen import Lengths
from fa3.kernels.algo.window import Chunk, Window

FAR = 2**30  # keys: no limit
CASES, TILES_N = 400, (64, 128)


class Parts:
    """Stands for prims.divide.Divisor."""

    def __init__(self, divisor):
        self.divisor = divisor

    def quotient(self, x):
        return x // self.divisor


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    chosen = types.SimpleNamespace(max=max, min=min, select_=lambda condition, a, b: a if condition else b)
    for module in (pieces, window):
        monkeypatch.setattr(module, "cutlass", chosen)
        monkeypatch.setattr(module, "Int32", int)
    monkeypatch.setattr(pieces, "read", lambda numbers, i: numbers[i])


def total(line):
    return sum(line.batch.granules(b) for b in range(line.batch.given.batch))


def start_of(line, b):
    return sum(line.batch.granules(i) for i in range(b))


def walk(line, part):
    """As Line.walk, which the DSL compiles."""
    shares = Shares.create(total(line), line.parts)
    x, last, base, nth = shares.first(part), shares.first(part + 1), 0, 0
    while x < last:
        b = max(i for i in range(line.batch.given.batch) if start_of(line, i) <= x)
        s, at = line.batch.sequence(b), x - start_of(line, b)
        upto = at + 1 if line.by_granule else min(last - start_of(line, b), s.count)
        piece = line.piece(b, s, at, upto, part, x, base, nth)
        if piece.count > 0:
            yield piece
        base, nth, x = base + piece.count, nth + min(piece.count, 1), start_of(line, b) + upto


def slots_merged(line, b):
    """As Merge.run and Merge.slot, of all that a sequence's merges look at."""
    first, count = start_of(line, b), line.batch.sequence(b).count
    runs = [(first, count)]
    if not line.by_granule:
        shares = Shares.create(total(line), line.parts)
        edges = [shares.first(part) for part in range(line.parts.divisor)]
        inside = [
            part for part in range(1, line.parts.divisor) if first <= edges[part] - 1 and edges[part] < first + count
        ]
        items = [part - 1 for part in inside if edges[part - 1] <= first]
        runs = [(item, shares.part_of(first + count - 1) - item + 1) for item in items]
    return [line.slot(at + n, at + n, int(n == 0)) for at, many in runs for n in range(many)]


def draw(seed):
    """A line, and how many partial results it has room for."""
    pick = random.Random(seed)
    batch, tile_n, capacity = pick.randint(1, 5), pick.choice(TILES_N), pick.choice([0, 100, 1000, 5000])
    lengths = [pick.choice([0, 1, 64, 65, *(pick.randint(-5, capacity + 50) for _ in "abcd")]) for _ in range(batch)]
    cu_q = [0]
    for _ in range(batch):
        cu_q.append(cu_q[-1] + pick.choice([0, 1, 2, 5, 70]))
    left, none = [pick.choice([0, 0, 3, 500]) for _ in range(batch)], [0] * (batch + 1)
    given = Given(lengths, none, left, none, none, cu_q, 1, 0, pick.randint(0, 1), 0, 0, 1, 0, 9, capacity, batch)
    keys = Window(pick.choice([FAR, 0, 5, 200]), pick.choice([FAR, 0, 0, 7]))
    size = pick.choice([None, None, 1, 64, 100, FAR])
    parts = pick.choice([1, 2, 5, 16, 132])
    granule, splits, room = pick.choice(
        [(None, None, 2 * parts)] * 8
        + [(0, n, batch * n) for n in (1, 2, 3, 7, 300)]
        + [(n * tile_n, 1, batch * max(-(-capacity // (n * tile_n)), 1)) for n in (1, 2, 16)]
    )
    ratio, row = pick.choice([1, 4]), pick.choice([0, 0, 64])
    return Line(
        Batch(given, Chunk(keys, size) if size else keys, tile_n, granule, splits), Parts(parts), Parts(ratio), row
    ), room


@pytest.mark.parametrize("seed", range(4))
def test_every_key_is_taken_once_and_every_part_has_a_place(seed):
    for case in range(CASES):
        line, room = draw(CASES * seed + case)
        by_sequence = [[] for _ in range(line.batch.given.batch)]
        for part in range(line.parts.divisor):
            blocks = 0
            for nth, piece in enumerate(walk(line, part)):
                assert (piece.base, piece.nth) == (blocks, nth)  # places in rings
                blocks += piece.count
                by_sequence[piece.batch].append(piece)
        partial = [x.slot for taken in by_sequence for x in taken if not x.whole]
        assert len(set(partial)) == len(partial) and max(partial, default=0) < room
        for b, taken in enumerate(by_sequence):
            check_sequence(line, b, sorted(taken, key=lambda x: x.first))


def check_sequence(line, b, taken):
    s, tile_n = line.batch.sequence(b), line.batch.tile_n
    if line.row >= s.q * line.ratio.divisor:
        assert not taken
        return
    seen = [line.batch.window.interval(row, Lengths(s.q, s.k)) for row in range(s.q)]
    seen = [x for x in seen if x[0] < x[1]]
    assert all(s.first <= first and end <= s.end for first, end in seen)
    edges = [s.first, *(x.end for x in taken)]
    assert edges[-1] == s.end and [x.first for x in taken] == edges[:-1]
    for x in taken:
        assert 0 <= x.n_block * tile_n <= max(x.first, 0) and x.end <= (x.n_block + x.count) * tile_n
    slots = slots_merged(line, b)
    if len(taken) == 1:
        assert taken[0].whole and len(slots) <= 1
    else:
        assert sorted(slots) == sorted(x.slot for x in taken) and not any(x.whole for x in taken)
