"""FlashAttention-3's own grids of ragged calls and of calls on a cache, by its rule: tests/fa3_grids.py has both.

What runs is a sample, the same every time. In bf16 with head dim 128 it holds every value of every parameter and every
pair of values of two parameters that may meet: heads, causal, local, chunks, soft cap, lengths; of caches new rows
(none, as many as queries, fewer), rotary fraction, pairs and positions, pages (none, 1, 4, 16, 128), left padding,
batch indices, ragged queries; and each case of a cache runs with num_splits 1, 3 and 0, the last without and with
metadata. fp16, other head dims and, on caches, soft caps meet every value of a smaller grid. Pages do not have to
divide the length, as they have to in FlashAttention-3's test.

Not here because `fa3` does not take it yet: qv, FP8, splits and pack_gqa of ragged calls, left padding or batch indices
with pages, head_dim_v 512.

    pytest -m gpu -n 14 tests/gpu/test_fa3_grids_gpu.py
    FA3_GRID=2000 pytest ..   2000 cases drawn from each whole grid
    FA3_GRID=all pytest ..    all of them: 2736 ragged, 53940 on caches
"""

import os
import random

import pytest

from tests.fa3_grids import (
    KVCACHE,
    KVCACHE_KINDS,
    VARLEN,
    VARLEN_KINDS,
    check_kvcache,
    check_varlen,
    kvcache_allows,
    name_of,
    pairwise,
    varlen_allows,
    whole,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SHARE = os.environ.get("FA3_GRID", "pairs")  # "pairs", "all", or a number of cases


def cases(grids, allows):
    if SHARE == "pairs":
        return [case for axes in grids for case in pairwise(axes, allows)]
    everything = [case for axes in grids for case in whole(axes, allows)]
    return everything if SHARE == "all" else random.Random(0).sample(everything, min(int(SHARE), len(everything)))


@pytest.mark.parametrize("case", cases((VARLEN, VARLEN_KINDS), varlen_allows), ids=name_of)
def test_varlen(case):
    check_varlen(case, DEVICE)


@pytest.mark.parametrize("case", cases((KVCACHE, KVCACHE_KINDS), kvcache_allows), ids=name_of)
def test_kvcache(case):
    check_kvcache(case, DEVICE)
