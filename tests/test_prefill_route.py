"""flash_attn_with_kvcache with many queries: the ragged forward takes the call, a cache without pages as pages.

The forward is that of the CPU here; what it is handed must give what the call means.
"""

import pytest
import torch

from fa3 import launch_prefill
from fa3.interface_variant import varlen
from fa3.serving import Serving
from fa3.variant import Variant
from tests.kvcache import assert_is, formula, ints, make

LISTS = dict(lengths=None, added=0, cu_seqlens_k_new=None, leftpad=None, batch_idx=None, page_table=None, indptr=None,
             cu_seqlens_q=None, max_seqlen_q=0)  # fmt: skip


@pytest.fixture
def on_cpu(monkeypatch):
    def forward(q, k, v, sequences, softmax_scale, causal, out, extras):
        assert extras.variant.causal == causal
        return varlen(q, k, v, sequences, softmax_scale, extras, out)

    monkeypatch.setattr(launch_prefill.launch_varlen, "forward", forward)


CASES = {
    "contiguous": dict(spare=6, ragged=False),
    "another place in the cache": dict(spare=6, ragged=False, permuted=True),
    "pages": dict(page_size=16, ragged=False),
    "ragged queries": dict(page_size=16),
}


@pytest.mark.parametrize("out", [False, True], ids=["new", "given"])
@pytest.mark.parametrize("case", CASES)
def test_what_the_forward_is_handed(on_cpu, case, out):
    options = CASES[case]
    of_q = [5, 5, 5] if "ragged" in options else [5, 0, 9]
    x = make(of_q, [10, 7, 3], heads_kv=2, ratio=2, dtype=torch.float32, **options)
    lists, variant = x.lists, Variant(True, 4, softcap=3.0)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    serving = Serving(
        **LISTS
        | dict(lengths=lists["cache_seqlens"] - 1, added=1, batch_idx=lists.get("cache_batch_idx"))
        | dict(page_table=lists.get("page_table"), cu_seqlens_q=lists.get("cu_seqlens_q"))
        | dict(max_seqlen_q=lists.get("max_seqlen_q", 0))
    )
    place = torch.full((*x.q.shape[:-1], x.v_cache.shape[3]), 7.0) if out else None
    got = launch_prefill.forward(x.q, x.k_cache, x.v_cache, serving, 0.3, variant, sink, place)
    assert place is None or got[0] is place
    wanted = formula(x, 0.3, softcap=3.0, learnable_sink=sink, causal=True, window_size=(4, -1))
    assert_is(x, got, wanted, 1e-5)


def test_lengths_that_are_one_number_or_differ(on_cpu):
    x = make([5, 5], [10, 10], heads_kv=1, dtype=torch.float32, spare=6, ragged=False)
    variant = Variant(True)
    for lists in (dict(added=10), dict(lengths=ints([4, 9]), cu_seqlens_k_new=ints([0, 6, 7]))):
        got = launch_prefill.forward(x.q, x.k_cache, x.v_cache, Serving(**LISTS | lists), 0.25, variant, None, None)
        assert_is(x, got, formula(x, 0.25, causal=True), 1e-5)


def test_which_calls_the_forward_takes():
    plain, some = Serving(**LISTS), torch.zeros(2, dtype=torch.int32)
    assert launch_prefill.suits(128, 16, plain, 0, 0) and launch_prefill.suits(4096, 65536, plain, 1, 0)
    assert not launch_prefill.suits(127, 16, plain, 0, 0)
    assert not launch_prefill.suits(128, 24, plain, 0, 0)
    assert not launch_prefill.suits(128, 16, plain, 2, 0) and not launch_prefill.suits(128, 16, plain, 0, 64)
    assert not launch_prefill.suits(128, 16, plain._replace(leftpad=some), 0, 0)
    assert not launch_prefill.suits(128, 16, plain._replace(indptr=some), 0, 0)
