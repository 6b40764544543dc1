"""The paged forward kernel, run on a machine for its PTX. What no sequence holds is NaN, in memory and in stages."""

import re

import pytest
import torch

from fa3.kernels.forward.config import Config, Spec
from fa3.problem_variant import numbers_of
from fa3.reference import LOG2_E
from fa3.variant import Variant
from tests import paged
from tests.paged_machine import forward

DRAWN = {"persistent": True, "dynamic": True}

CASES = {
    "pages of 16, causal": (
        ([70, 0, 130], [150, 40, 131], 16, dict(heads_kv=1, ratio=2)),
        Variant(True),
        Config(2, 64, box=16, optimistic=True, **DRAWN),
    ),
    "pages of 48, full, no keys": (
        ([5, 60, 3], [200, 0, 49], 48, dict(heads_kv=2, head_dim=56, head_dim_v=40)),
        Variant(),
        Config(2, 128, box=16, **DRAWN),
    ),
    "a block a page, K and V in one pool": (
        ([100, 90], [64, 193], 64, dict(layout="interleaved")),
        Variant(),
        Config(2, 64, box=64, optimistic=True, **DRAWN),
    ),
    "pages of 128, O over V": (
        ([10, 70], [90, 200], 128, dict(head_dim=256, head_dim_v=256)),
        Variant(True),
        Config(2, 80, box=16, **DRAWN),
    ),
    "three warpgroups, heads first": (
        ([10, 200], [90, 300], 96, dict(head_dim=96, head_dim_v=96, layout="heads first", dtype="float16")),
        Variant(True),
        Config(3, 96, box=96, **DRAWN),
    ),
    "in turn": (([10], [33], 32, {}), Variant(), Config(2, 64, box=32, overlap=False, **DRAWN)),
    "window": (
        ([40, 130], [300, 131], 32, {}),
        Variant(False, 50, 0),
        Config(2, 64, box=32, optimistic=True, **DRAWN),
    ),
}


def run(name, **others):
    (of_q, of_k, page_size, options), variant, config = CASES[name]
    x = paged.make(of_q, of_k, page_size, **options)
    head_dim = next(d for d in (64, 96, 128, 256) if x.q.shape[2] <= d)
    local = "window" if variant.window_left >= 0 else ""
    dtype = str(x.q.dtype).removeprefix("torch.")
    spec = Spec(dtype, head_dim, head_dim, variant.causal, ragged=True, paged=True, local=local)
    numbers, scale_log2 = numbers_of(variant, x.q.shape[2] ** -0.5, None)
    got = forward(spec, config, x, scale_log2 / LOG2_E, numbers=numbers if local else None, **others)
    return x, variant, got


@pytest.mark.parametrize("name", CASES)
def test_pages(name):
    x, variant, got = run(name)
    x.assert_right(got, variant)


def test_without_zeros_behind_the_last_key_out_is_nan():
    x, variant, (out, lse) = run("pages of 16, causal", edit=lambda ptx: re.sub(r"st\.shared\.b64 [^;]*;", "", ptx))
    assert out.isnan().any() and not lse.isnan().any()
    assert not torch.isnan(run("pages of 16, causal")[2][0]).any()
