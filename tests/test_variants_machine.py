"""Kernels with windows, chunks, soft caps and sinks, run on a machine for their PTX."""

import math

import pytest
import torch

from fa3.kernels.forward.config import Config, Spec, tile_for
from fa3.problem_variant import numbers_of, simplified
from fa3.reference import LOG2_E
from fa3.testing.inputs import Case, make
from fa3.variant import Variant
from tests.forward_machine import forward
from tests.ptx_program import Trace
from tests.variants import expected

DYNAMIC = {"persistent": True, "dynamic": True}
SINK = torch.tensor([0.5, -2.0, 300.0, -math.inf])

CASES = {
    "window": (Case("bfloat16", 1, 300, 400, 1, 1, 64, 64), Variant(True, 100), None, Config(2, 64)),
    "both sides, optimistic": (
        Case("float16", 1, 200, 500, 1, 2, 64, 64, scale=1.0),
        Variant(False, 150, 140),
        None,
        Config(2, 64, optimistic=True, **DYNAMIC),
    ),
    "narrower than a block, more queries than keys": (
        Case("bfloat16", 1, 200, 90, 1, 1, 64, 64),
        Variant(False, 7, 3),
        None,
        Config(2, 128, optimistic=True),
    ),
    "the own key alone": (Case("bfloat16", 1, 130, 200, 1, 1, 64, 64), Variant(True, 0), None, Config(2, 64)),
    "chunks": (Case("float16", 1, 200, 300, 1, 1, 64, 64), Variant(True, -1, -1, 96), None, Config(2, 64)),
    "chunks in both directions, more queries": (
        Case("float16", 1, 250, 200, 1, 1, 64, 64),
        Variant(False, -1, -1, 100),
        None,
        Config(2, 64, optimistic=True, **DYNAMIC),
    ),
    "soft cap, optimistic": (
        Case("float16", 1, 130, 400, 1, 1, 64, 64, True, scale=1.0),
        Variant(True, softcap=20.0),
        None,
        Config(2, 64, optimistic=True),
    ),
    "soft cap, in turn": (
        Case("bfloat16", 1, 70, 100, 1, 1, 64, 64),
        Variant(softcap=3.0),
        None,
        Config(2, 64, overlap=False),
    ),
    "sinks": (Case("bfloat16", 1, 200, 150, 2, 2, 64, 64, True), Variant(True), SINK, Config(2, 64, optimistic=True)),
    "sinks of bfloat16, window, three warpgroups": (
        Case("bfloat16", 1, 200, 150, 2, 2, 64, 64),
        Variant(True, 40),
        SINK.bfloat16(),
        Config(3, 64),
    ),
    "everything, O over V": (
        Case("bfloat16", 1, 200, 300, 1, 2, 256, 256),
        Variant(True, 90, -1, 128, 30.0),
        SINK[:2],
        Config(2, 80, **DYNAMIC),
    ),
}


def run(case, variant, sink, config, **others):
    x = make(case, "cpu")
    found = simplified(variant)
    is_local = found[1:4] != (-1, -1, 0)
    spec = Spec(
        case.dtype,
        *tile_for(case.head_dim, case.head_dim_v),
        found.causal,
        local="" if not is_local else "chunk" if found.attention_chunk else "window",
        softcap=found.softcap > 0,
        sink="" if sink is None else str(sink.dtype).removeprefix("torch."),
    )
    (*values, sink), scale_log2 = numbers_of(found, case.softmax_scale, sink)
    return x, forward(spec, config, *x, scale_log2 / LOG2_E, numbers=(*values, sink), **others)


@pytest.mark.parametrize("name", CASES)
def test_variant(name):
    case, variant, sink, config = CASES[name]
    x, (out, lse) = run(case, variant, sink, config)
    want = expected(*x, case.scale, variant, sink)
    want.assert_out(out)
    want.assert_lse(lse)
    if name == "sinks":  # 50 queries without a key
        assert (out[:, :50] == 0).all() and torch.equal(lse[0, :, :50], SINK[:, None].expand(4, 50))


def test_blocks_outside_of_the_window_are_not_loaded():
    """128 queries at the end of 1024 keys, blocks of 64: 2 blocks of the diagonal and 0, 1 or 2 before, of all 16."""
    case, config = Case("bfloat16", 1, 128, 1024, 1, 1, 64, 64), Config(2, 64)
    copies = {}
    for left, blocks in ((0, 2), (64, 3), (65, 4), (1022, 16)):
        run(case, Variant(True, left), None, config, trace=(trace := Trace()))
        copies[blocks] = trace.executed["cp"]
    others = copies[2] - 2 * 2  # those of Q and O
    assert copies == {blocks: others + 2 * blocks for blocks in copies}  # K and V


def test_an_endless_sink_takes_all():
    case = Case("bfloat16", 1, 70, 100, 1, 2, 64, 64)
    _, (out, lse) = run(case, Variant(), torch.tensor([math.inf, 0.0]), Config(2, 64))
    assert (out[:, :, 0] == 0).all() and (lse[:, 0] == math.inf).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[:, 1]).all()
