"""The decode kernel's own instructions, and those of its merge, run on the PTX machine: numbers without a GPU.

Whatever no query may see is NaN: rows past a sequence's end and before its first, pages of nobody, parts and LSE before
they are written. Numbers of pages past a sequence's own are no pages, and the machine refuses to load such a one.
"""

import math
import re
from dataclasses import replace

import pytest
import torch

from fa3 import launch_decode
from fa3.heuristics_decode import config_for
from fa3.kernels.decode.config import Spec
from fa3.variant import Variant
from tests import decode_machine
from tests.kvcache import assert_is, formula, ints, make
from tests.test_decode_launch import serving

TOLERANCE = 2.0**-7  # P and O are rounded to bfloat16
SIZES = dict(ratio=4, head_dim=64, head_dim_v=64, dtype=torch.bfloat16, ragged=False)
BLOCK = config_for(Spec("bfloat16", 64, 64)).tile_n  # keys
LENGTHS = (3 * BLOCK + 16, 0, BLOCK + 12, 5)  # 4, 1, 2 and 1 blocks: 6 multiprocessors cut the first and the third


def cache(lengths=LENGTHS, queries=None, **options):
    return make(queries or [1] * len(lengths), lengths, **SIZES | options)


def attend(x, sink=None, num_splits=0, split_size=0, out=None, serving_=None, **mask):
    window = [-1 if side is None else side for side in mask.get("window_size", (-1, -1))]
    variant = Variant(mask.get("causal", False), *window, mask.get("attention_chunk", 0), mask.get("softcap", 0.0))
    changes = {"lengths": ints([len(k) for k in x.keys])} if "kv_indptr" in x.lists else {}
    call = x.q, x.k_cache, x.v_cache, serving(x, **changes, **(serving_ or {})), x.q.shape[-1] ** -0.5, variant
    out = torch.full((*x.q.shape[:-1], x.v_cache.shape[3]), torch.nan, dtype=x.q.dtype) if out is None else out
    return launch_decode.forward(*call, sink, num_splits, split_size, out)


def check(x, sink=None, num_splits=0, split_size=0, **mask):
    got = attend(x, sink, num_splits, split_size, **mask)
    assert_is(x, got, formula(x, learnable_sink=sink, **mask), TOLERANCE)
    return got


@pytest.fixture
def used(monkeypatch):
    return decode_machine.replace(monkeypatch)


# Caches


@pytest.mark.parametrize(
    ("options", "pages"),
    [
        (dict(), 0),
        (dict(leftpad=(3, 0, 10, 1), permuted=True), 0),
        (dict(page_size=16), 16),
        (dict(page_size=48, csr=True), 16),
        (dict(page_size=64), 64),
        (dict(page_size=1), 1),
        (dict(page_size=24, csr=True), 1),
    ],
    ids=["dense", "leftpad", "pages of 16", "48, csr", "64", "row by row", "24, csr"],
)
def test_caches(used, options, pages):
    check(cache(**options))
    ((spec, config, arguments),) = used
    assert spec.pages == pages and spec.splits and config.tile_n == BLOCK and arguments[-1] == 6


def test_a_whole_sequence_of_every_cta(used):
    """As many heads as multiprocessors: nothing is split, and there is no second kernel."""
    check(cache((70, 0, 130), heads_kv=6, ratio=1, page_size=16))
    ((spec, _, arguments),) = used
    assert not spec.splits and arguments[-1] == 1 and arguments[5] is None


@pytest.mark.parametrize("page_size", [0, 1])
def test_rings_come_round(monkeypatch, page_size):
    """One CTA takes more blocks, and more sequences, than there are stages."""
    used = decode_machine.replace(monkeypatch, num_sms=1)
    check(cache((BLOCK * 3 + 5, 70, 1, BLOCK + 2), ratio=1, page_size=page_size))
    ((spec, config, arguments),) = used
    assert arguments[-1] == 1 and not spec.splits and config.stages < 4 + 1 + 1 + 2 and config.q_stages < 4


@pytest.mark.parametrize("page_size", [16, 1])
def test_many_sequences(used, page_size):
    """More than a warp looks at in one step."""
    lengths = [130, 0, 0, 3] + [i % 5 for i in range(28)] + [300, 2]
    check(cache(lengths, ratio=1, page_size=page_size))
    assert len(used) == 1 and len(lengths) > 32


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "page_size"), [(80, 40, 16), (128, 128, 64), (192, 128, 0), (256, 256, 1)]
)
def test_head_dims(used, head_dim, head_dim_v, page_size):
    check(cache((150, 20), head_dim=head_dim, head_dim_v=head_dim_v, page_size=page_size, dtype=torch.float16))


# Queries


@pytest.mark.parametrize("page_size", [0, 1])
def test_ragged_queries(used, page_size):
    """Sequences without queries, without keys, with more queries than keys; rows of nobody keep what they hold."""
    x = cache((100, 30, 0, 2, 150), [3, 0, 2, 4, 1], ragged=True, page_size=page_size)
    x.q = torch.cat([x.q, x.q[:2]])
    out = torch.full_like(x.q, 7.0)
    made, lse = attend(x, causal=True, out=out)
    assert made is out and (out[10:] == 7.0).all() and lse[:, 10:].isnan().all()
    x.q = x.q[:10]
    assert_is(x, (out[:10], lse[:, :10]), formula(x, causal=True), TOLERANCE)


def test_more_rows_than_a_tile_has(used):
    x = cache((150, 20, 90), [20, 20, 20], ratio=4)
    check(x, causal=True)
    assert used[0][2][-2] == 2  # tiles of 64 rows
    ragged = cache((150, 20, 90), [20, 1, 17], ragged=True)
    check(ragged, causal=True)


def test_several_heads_of_keys(used):
    check(cache((100, 20), heads_kv=3, ratio=2, page_size=16))
    assert used[0][2][-1] == 2


# Masks


@pytest.mark.parametrize(
    ("mask", "page_size"),
    [
        (dict(causal=True), 0),
        (dict(window_size=(50, 0)), 0),
        (dict(window_size=(50, 1)), 16),
        (dict(window_size=(50, 0)), 1),
        (dict(window_size=(0, 0)), 0),
        (dict(window_size=(0, 0)), 16),
        (dict(window_size=(100, 1), softcap=3.0), 0),
        (dict(attention_chunk=60, causal=True), 16),
    ],
    ids=str,
)
def test_masks(used, mask, page_size):
    check(cache((200, 3, 70), [3, 3, 3], page_size=page_size), **mask)


def test_sinks(used):
    """Counted once, whether a sequence is split or not; the LSE where there is no key."""
    sink = torch.tensor([0.5, -2.0, 4.0, -math.inf])
    _, lse = check(cache(), sink=sink)
    assert torch.equal(lse[1, :, 0], sink)
    check(cache(), sink=sink, num_splits=3)


# Parts


@pytest.mark.parametrize(
    "options", [dict(num_splits=1), dict(num_splits=3), dict(num_splits=50), dict(split_size=64), dict(split_size=128)]
)
def test_splits_that_are_given(used, options):
    check(cache((400, 0, 130, 64)), **options)
    check(cache((400, 0, 130, 64), [3] * 4), **options, window_size=(90, 0))
    assert used[0][0].granules


def test_more_parts_than_a_merge_takes_at_once(monkeypatch):
    decode_machine.replace(monkeypatch, num_sms=50)
    check(cache((BLOCK * 40 - 5, 100), ratio=1))


def test_a_split_changes_only_the_rounding(used):
    """And of a sequence in one part, where the others lie does not change a bit."""
    x = cache()
    whole, lse = attend(x, num_splits=1)
    split, split_lse = attend(x)
    torch.testing.assert_close(split.float(), whole.float(), rtol=2.0**-7, atol=2.0**-9)
    torch.testing.assert_close(split_lse, lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(split[3], whole[3]) and torch.equal(split_lse[3], lse[3])


@pytest.mark.parametrize("sequences", [(13,), (5, 9, 0, 2), (1,) * 4, (0, 0, 0, 7)])
def test_shares_are_equal(monkeypatch, sequences):
    """In blocks, of which a sequence without keys has one as well."""
    blocks: list = []
    used = decode_machine.replace(monkeypatch, blocks=blocks)
    check(cache([BLOCK * n for n in sequences], ratio=1))
    (taken,) = blocks
    total = sum(max(1, n) for n in sequences)
    each, longer = divmod(total, len(taken))
    assert taken == [each + 1] * longer + [each] * (len(taken) - longer) and len(taken) == used[0][2][-1]


@pytest.mark.parametrize("page_size", [16, 1])
def test_pages_before_the_window_are_nobodys(used, page_size):
    """The numbers of those that no query sees a key of are not read, though they are of blocks that are taken."""
    x = cache((200, 90), page_size=page_size)
    for row, length in zip(x.lists["page_table"], (200, 90), strict=True):
        row[: (length - 1 - 40) // page_size] = 2**31 - 1
    check(x, window_size=(40, 0))


def test_only_blocks_in_the_window_are_taken(monkeypatch):
    blocks: list = []
    decode_machine.replace(monkeypatch, blocks=blocks)
    check(cache((BLOCK * 10,), ratio=1), window_size=(BLOCK + 6, 0))
    assert sum(blocks[0]) == 2


# The machine sees what is wrong


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("page_size", [0, 1])
def test_in_any_order(monkeypatch, seed, page_size):
    """Of warps and loads."""
    x = cache((300, 70), page_size=page_size)
    decode_machine.replace(monkeypatch)
    wanted = attend(x)
    decode_machine.replace(monkeypatch, seed=seed)
    for got, want in zip(attend(x), wanted, strict=True):
        assert torch.equal(got, want)


def two_consumers(monkeypatch):
    """Kernels that `config_for` does not choose yet: see docs/tuning.md."""
    chosen = launch_decode.config_for
    monkeypatch.setattr(launch_decode, "config_for", lambda *x: replace(chosen(*x), consumers=2))


@pytest.mark.parametrize("seed", [0, 2])
def test_no_warpgroup_is_two_phases_ahead(monkeypatch, seed):
    """One place for Q, two warpgroups, and a first piece with as many blocks as there are stages."""
    two_consumers(monkeypatch)
    used = decode_machine.replace(monkeypatch, num_sms=1, seed=seed)
    check(cache((256, 70), ratio=1, head_dim=192, head_dim_v=128))
    assert (used[0][1].stages, used[0][1].consumers) == (4, 2)


@pytest.mark.parametrize("options", [dict(), dict(page_size=16), dict(page_size=5)], ids=str)
def test_two_warpgroups_take_pieces_in_turn(monkeypatch, options):
    two_consumers(monkeypatch)
    used = decode_machine.replace(monkeypatch, num_sms=2)
    check(cache((70, 3, 0, 150, 20, 64), **options))
    assert used[0][1].consumers == 2


def without(pattern, count=1):
    def edit(ptx):
        edited, number = re.subn(pattern, "", ptx)
        assert number >= count
        return edited

    return edit


def test_values_of_no_key_are_cleaned(monkeypatch):
    decode_machine.replace(monkeypatch, edit=without(r"st\.shared\.v4\.b32[^;]*;"))
    out, _ = attend(cache((70, 20)))
    assert out.isnan().any()


def test_a_page_of_nobody_is_seen(used):
    x = cache((70, 20), page_size=16)
    x.lists["page_table"][1, 1] = 2**31 - 1
    with pytest.raises(AssertionError, match="no page or head"):
        attend(x)
