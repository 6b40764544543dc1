"""Which kernel a decode call gets, and over how many CTAs its keys are spread."""

import pytest

from fa3.heuristics_decode import CONFIGS, all_configs, config_for, pages_of, shares_for
from fa3.kernels.decode.config import GATHER, SHARED_BYTES, Config, Spec
from fa3.kernels.forward.config import TILES

ALL = list(all_configs())


def spec_of(head_dim, head_dim_v=None, **others):
    return Spec("bfloat16", head_dim, head_dim_v or head_dim, **others)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "config"),
    [
        (64, 64, Config(128, 4, 2)),
        (96, 96, Config(64, 6, 2)),
        (128, 128, Config(64, 4, 2)),
        (192, 128, Config(64, 4, 1)),
        (192, 192, Config(64, 4, 1)),
        (256, 256, Config(64, 3, 1)),
    ],
)
def test_blocks_and_stages(head_dim, head_dim_v, config):
    spec = spec_of(head_dim, head_dim_v)
    assert config_for(spec) == config and (spec, config) in ALL
    # Where a sequence is cut, a block ends; in flight is as much.
    for split_size in (64, 128, 192, 256):
        found = config_for(spec, split_size)
        assert split_size % found.tile_n == 0 and found.tile_n * found.stages == config.tile_n * config.stages
        assert (found.q_stages, found.consumers) == (config.q_stages, config.consumers)


def test_every_tile_fits():
    assert set(CONFIGS) == set(TILES) and len(set(ALL)) == len(ALL)
    for spec, config in ALL:
        assert config.shared_bytes(spec) <= SHARED_BYTES and config.stages >= 2 and config.q_stages >= 1
        # Rings, barriers and what it takes to begin at a multiple of 1024 bytes.
        kv = config.stages * config.tile_n * (spec.head_dim + spec.head_dim_v) * 2
        barriers = 2 * (config.q_stages + 2 * config.stages) * 8
        assert config.shared_bytes(spec) == config.q_stages * 64 * spec.head_dim * 2 + kv + barriers + 1024
        assert config.threads(spec) == 128 * config.consumers + (128 if spec.pages == GATHER else 32)


@pytest.mark.parametrize(
    ("page_size", "pages"),
    [
        (None, 0),
        (1, 1),
        (8, 1),
        (15, 1),
        (24, 1),
        (16, 16),
        (32, 16),
        (48, 16),
        (80, 16),
        (64, 64),
        (128, 64),
        (192, 64),
    ],
)
def test_boxes_of_a_page(page_size, pages):
    assert pages_of(page_size) == pages
    assert pages_of(page_size, leftpad=True) == (0 if page_size is None else GATHER)


@pytest.mark.parametrize(
    ("units", "blocks", "shares"),
    [
        (1, 10**6, 132),  # one long sequence: a share a multiprocessor
        (8, 10**6, 16),  # 128 of 132 are busy
        (2, 10**6, 66),
        (32, 10**6, 4),
        (44, 10**6, 3),
        (132, 10**6, 1),
        (64, 10**6, 2),
        (8, 5, 5),  # no more than blocks
        (1, 1, 1),
        (1, 0, 1),  # no room for a key
    ],
)
def test_a_share_a_multiprocessor(units, blocks, shares):
    assert shares_for(units, blocks, 132) == shares


def test_shares_leave_few_idle():
    """Three of four multiprocessors at work at the end; nearly all where up to 8 shares can do it."""

    def busy(units, n):
        return units * n / (-(-units * n // 132) * 132)

    for units in range(1, 1200):
        shares, one_each = shares_for(units, 10**6, 132), max(1, 132 // units)
        reached = [busy(units, n) for n in range(1, 9)]
        if busy(units, one_each) >= 0.75:
            assert shares == one_each
        else:  # the fewest that do
            wanted = min(0.95, max(reached))
            assert shares == 1 + next(i for i, x in enumerate(reached) if x >= wanted)
        assert busy(units, shares) >= 0.75


def test_other_numbers_of_multiprocessors():
    assert [shares_for(8, 10**6, sms) for sms in (78, 114, 132)] == [9, 14, 16]
    assert shares_for(8, 100, 1) == 1
