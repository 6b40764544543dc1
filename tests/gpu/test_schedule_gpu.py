"""Who computes which tile changes no bit: one CTA a tile, persistent by the fixed rule, and dynamic agree."""

import itertools

import pytest
import torch

from fa3 import explain, flash_attn_func
from fa3.heuristics import all_configs
from fa3.kernels.compile import load
from fa3.launch import config_of
from fa3.problem import problem_of
from fa3.reference import LOG2_E
from fa3.testing.inputs import Case, make
from fa3.testing.tolerance import expected

pytestmark = pytest.mark.gpu

NUM_SMS = 132
SIXTEEN_BIT = [
    pair for pair in all_configs() if not (pair[0].is_fp8 or pair[0].ragged)
]  # others: test_fp8_gpu.py and test_varlen_gpu.py
KERNELS = [(spec, list(group)) for spec, group in itertools.groupby(SIXTEEN_BIT, key=lambda pair: pair[0])]


def run(spec, config, q, k, v):
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype, device="cuda")
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, device="cuda")
    tickets = torch.zeros(1, dtype=torch.int32, device="cuda") if config.dynamic else None
    load(spec, config)(q, k, v, out, lse, None, None, None, None, tickets, q.shape[3] ** -0.5 * LOG2_E, NUM_SMS)
    return out, lse


@pytest.mark.parametrize(("spec", "kernels"), KERNELS, ids=lambda x: str(x) if not isinstance(x, list) else "")
def test_schedules_agree(spec, kernels):
    """Several tiles a CTA, the tile that is not full among them, and key blocks that a tile may not see."""
    for batch, seqlen_q, seqlen_k, heads_kv, ratio in ((3, 333, 257, 30, 2), (2, 700, 900, 7, 9), (1, 50, 300, 200, 1)):
        sizes = dict(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_kv=heads_kv, ratio=ratio)
        case = Case(spec.dtype, head_dim=spec.head_dim, head_dim_v=spec.head_dim_v, causal=spec.causal, **sizes)
        x = make(case, "cuda")
        want = expected(*x, None, spec.causal)
        found = {}
        for _, config in kernels:
            out, lse = run(spec, config, *x)
            want.assert_out(out, f"{config} out")
            want.assert_lse(lse, f"{config} lse")
            first = found.setdefault((config.tile_m, config.tile_n), (out, lse))
            assert torch.equal(out, first[0]) and torch.equal(lse, first[1]), config


def dynamic_case(causal: bool):
    x = make(Case("bfloat16", 4, 1100, 1100, 40, 1, 64, 64, causal), "cuda")
    assert (
        config_of(problem_of(*x, 0.125, causal), NUM_SMS).dynamic and "dynamic" in explain(*x, causal=causal).schedule
    )
    return x


@pytest.mark.parametrize("causal", [False, True])
def test_a_dynamic_grid_in_a_graph_starts_anew_with_every_replay(causal):
    q, k, v = dynamic_case(causal)
    want, _ = flash_attn_func(q, k, v, causal=causal, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)


def test_dynamic_grids_on_several_streams_do_not_share_a_counter():
    q, k, v = dynamic_case(True)
    want = flash_attn_func(q, k, v, causal=True)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(25):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(flash_attn_func(q, k, v, causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)
