"""Which kernels take a call on a cache: flash_attn_with_kvcache with many queries goes to the ragged forward, a cache
without pages as pages; flash_attn_varlen_func with few queries in pages goes to the decode kernel.

The forward is that of the CPU here; what it is handed must give what the call means.
"""

import pytest
import torch

from fa3 import launch_paged, launch_prefill
from fa3.interface_variant import varlen
from fa3.problem_variant import Extras
from fa3.problem_varlen import Sequences
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


class Calls(list):
    def take(self, name):
        def forward(*arguments):
            self.append((name, arguments))
            return name, name

        return forward


@pytest.fixture
def calls(monkeypatch):
    made = Calls()
    monkeypatch.setattr(launch_paged.launch_decode, "forward", made.take("decode"))
    monkeypatch.setattr(launch_paged.launch_varlen, "forward", made.take("forward"))
    return made


@pytest.mark.parametrize(
    ("max_q", "page_size", "num_splits", "used_q", "wanted"),
    [
        (1, 16, 0, False, "decode"),
        (1, 16, 1, False, "decode"),
        (127, 64, 1, False, "decode"),
        (128, 64, 1, False, "forward"),
        (128, 64, 0, False, "forward"),
        (128, 64, 2, False, "decode"),  # it splits
        (4096, 24, 1, False, "decode"),  # of any page size
        (1, 16, 1, True, "forward"),  # queries that do not count
        (2**14, 16, 1, False, "forward"),
    ],
)
def test_queries_in_pages(calls, max_q, page_size, num_splits, used_q, wanted):
    q, k = torch.zeros(300, 4, 64).bfloat16(), torch.zeros(9, page_size, 2, 64).bfloat16()
    edges, used, table = ints([0, 150, 300]), ints([3, 5]), torch.zeros(2, 7, dtype=torch.int32)
    variant, sink = Variant(True, 9), torch.zeros(4)
    sequences = Sequences(edges, None, ints([1, 2]) if used_q else None, used, max_q, 99)
    extras = Extras(variant, sink, table, num_splits)
    assert launch_paged.forward(q, k, k, sequences, None, None, extras) == (wanted, wanted)
    ((name, arguments),) = calls
    if name == "decode":
        serving = Serving(
            **LISTS | dict(lengths=used, page_table=table, cu_seqlens_q=edges, max_seqlen_q=min(max_q, 300))
        )
        assert arguments[3:] == (serving, 0.125, variant, sink, num_splits, 0, None)
    else:
        assert arguments[3:] == (sequences, None, True, None, extras)


def test_errors_name_what_the_caller_gave(calls):
    q, k = torch.zeros(2, 3, 64).bfloat16(), torch.zeros(9, 16, 2, 64).bfloat16()
    sequences = Sequences(ints([0, 1, 2]), None, None, ints([3, 5]), 1, 99)
    with pytest.raises(ValueError, match="got q 3 and k, v 2"):
        launch_paged.forward(q, k, k, sequences, None, None, Extras(Variant(), None, torch.zeros(2, 7).int()))
    with pytest.raises(ValueError, match="seqused_k must be given"):
        launch_paged.forward(
            q[:, :2],
            k,
            k,
            sequences._replace(seqused_k=None),
            None,
            None,
            Extras(Variant(), None, torch.zeros(2, 7).int()),
        )
    assert not calls
