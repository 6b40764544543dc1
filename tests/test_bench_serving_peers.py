"""Those who are measured against a KV cache and over ragged sequences, the real ones behind stand-ins."""

import dataclasses
import sys
from types import ModuleType

import pytest
import torch

import fa3
from bench import decode, ragged
from bench.decode_cases import NAMED
from bench.machine import open_machine
from bench.peers import around, load_of
from bench.ragged_cases import NAMED as RAGGED
from bench.ragged_cases import _case
from bench.serving_peers import DECODERS, VARLEN, keys_of
from fa3.reference import attention, ragged_attention

CPU = open_machine("cpu", "abc")
TINY, TINY_DENSE, TINY_WINDOW = NAMED["tiny"], NAMED["tiny-dense"], NAMED["tiny-window"]
EQUAL = dataclasses.replace(TINY_WINDOW, window=None)


def stand_in(monkeypatch, name, **functions):
    module = ModuleType(name)
    for attribute, function in functions.items():
        setattr(module, attribute, function)
    parts = name.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setitem(sys.modules, name, module)


def loaded(loaders, name):
    found, missing = load_of(loaders, [name])
    assert not missing, missing
    return found[name]


def with_kvcache(q, k, v, *, cache_seqlens, page_table, causal, window_size):
    """As the documentation of FlashAttention-3's says, with windows to the left alone."""
    assert causal and cache_seqlens.dtype == torch.int32 and window_size[1] in (-1, 0)
    outs = []
    for b, keys in enumerate(cache_seqlens.tolist()):
        of_b = (x[b] if page_table is None else x[page_table[b].long()].flatten(0, 1) for x in (k, v))
        first = 0 if window_size[0] < 0 else keys - window_size[0] - 1
        outs.append(attention(q[b : b + 1], *(x[None, first:keys] for x in of_b), causal=True)[0])
    return torch.cat(outs), None


@pytest.mark.parametrize("case", [TINY, TINY_DENSE, TINY_WINDOW], ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["ours", "fa3", "fa3 of the small build"])
def test_ours_and_flashattention_3_get_the_same_arguments(name, case, monkeypatch):
    if name == "ours":
        monkeypatch.setattr(fa3, "flash_attn_with_kvcache", with_kvcache, raising=False)
    else:
        module = "flash_attn_interface" if name == "fa3" else "fa3_fwd_interface"
        monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
        stand_in(monkeypatch, module, flash_attn_with_kvcache=with_kvcache)
    bind = loaded(DECODERS, name.split()[0])
    (cache,) = decode.make_caches(case, CPU)
    assert decode.Check(case, cache).ratio(bind(cache, case)()) <= 1.0 and bind.reads_lengths


@pytest.mark.parametrize("name", ["cudnn", "fa2"])
def test_sdpa_takes_one_query_and_equal_lengths(name):
    bind = loaded(DECODERS, name)
    (cache,) = decode.make_caches(EQUAL, CPU)
    assert decode.Check(EQUAL, cache).ratio(bind(cache, EQUAL)()) <= 2.0  # PyTorch's own on a CPU
    assert around(bind).func.__name__ == "sdpa_kernel" and not hasattr(bind, "reads_lengths")
    two = dataclasses.replace(EQUAL, shape=dataclasses.replace(EQUAL.shape, seqlen_q=2))
    for case, why in (
        (TINY, "takes no pages"), (TINY_DENSE, "takes one length"), (TINY_WINDOW, "has no window"), (two, "top-left"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            bind(cache, case)


def test_flashattention_4_gets_a_window_where_there_is_one(monkeypatch):
    seen = []

    def flash_attn_func(q, k, v, causal, **options):
        seen.append(options)
        return attention(q, k, v, causal=causal)

    stand_in(monkeypatch, "flash_attn.cute.interface", flash_attn_func=flash_attn_func)
    bind = loaded(DECODERS, "fa4")
    (cache,) = decode.make_caches(EQUAL, CPU)
    assert decode.Check(EQUAL, cache).ratio(bind(cache, EQUAL)()) <= 1.0
    bind(cache, TINY_WINDOW)()
    assert seen == [{}, {"window_size": (23, 0)}]
    with pytest.raises(ValueError, match="takes no pages"):
        bind(cache, TINY)


class Wrapper:
    """Answers as the documentation of FlashInfer's BatchDecodeWithPagedKVCacheWrapper says."""

    plans = 0

    def __init__(self, workspace, kv_layout, use_tensor_cores):
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD" and use_tensor_cores

    def plan(self, indptr, indices, last_page_len, heads, heads_kv, head_dim, page_size, *, window_left, **options):
        Wrapper.plans += 1
        assert all(x.dtype == torch.int32 for x in (indptr, indices, last_page_len)) and heads == 2 * heads_kv
        self.queries = options.pop("q_len_per_req", 1)
        assert set(options.values()) == {torch.bfloat16}
        self.pages, self.page_size, self.window_left = (indptr, indices, last_page_len), page_size, window_left

    def run(self, q, kv):
        indptr, indices, last = (x.tolist() for x in self.pages)
        outs = []
        for b, length_of_last in enumerate(last):
            pages = indices[indptr[b] : indptr[b + 1]]
            keys = (len(pages) - 1) * self.page_size + length_of_last
            first = 0 if self.window_left < 0 else keys - self.window_left - 1
            k, v = (x[pages].flatten(0, 1)[None, first:keys] for x in kv)
            of_b = q[None, b * self.queries : (b + 1) * self.queries]
            outs.append(attention(of_b, k, v, causal=True)[0][0])
        return torch.cat(outs)


@pytest.mark.parametrize("case", [TINY, TINY_DENSE, TINY_WINDOW], ids=lambda case: case.name)
def test_flashinfer_gets_one_plan_for_all_caches(case, monkeypatch):
    stand_in(monkeypatch, "flashinfer", BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    bind, before = loaded(DECODERS, "flashinfer"), Wrapper.plans
    caches = decode.make_caches(case, dataclasses.replace(CPU, l2_bytes=case.kv_bytes))
    assert len(caches) == 3
    for cache in caches:
        assert decode.Check(case, cache).ratio(bind(cache, case)()) <= 1.0
    assert Wrapper.plans == before + 1


def test_a_peer_that_is_not_here_is_named(monkeypatch):
    for name in ("flashinfer", "flash_attn", "flash_attn_interface", "fa3_fwd_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    found, missing = load_of(DECODERS, ["fa3", "fa4", "flashinfer", "naive"])
    assert found.keys() == {"naive"} and missing.keys() == {"fa3", "fa4", "flashinfer"}
    assert load_of(VARLEN, ["fa3", "fa4"])[1].keys() == {"fa3", "fa4"}


# Over ragged sequences


def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    """As the documentation of all three says."""
    assert cu_seqlens_q.dtype == torch.int32 and max_seqlen_q == cu_seqlens_q.diff().max() == max_seqlen_k
    starts, of_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rows = [(range(*starts[i : i + 2]), range(*of_k[i : i + 2])) for i in range(len(starts) - 1)]
    return ragged_attention(q, k, v, rows, causal=causal)


@pytest.mark.parametrize("name, module", [("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute.interface")])
def test_peers_get_ragged_sequences(name, module, monkeypatch):
    stand_in(monkeypatch, module, flash_attn_varlen_func=varlen)
    case = RAGGED["tiny-causal"]
    tensors = ragged.make_tensors(case.lengths, case.shape, CPU)
    checks = ragged.Checks(case.lengths, case.shape, tensors)
    assert checks.ratio(loaded(VARLEN, name)(tensors, case)()) <= 1.0


def test_paged_keys_are_the_contiguous_ones_shuffled(monkeypatch):
    def paged(q, k, v, *, cu_seqlens_k, seqused_k, page_table, **options):
        assert cu_seqlens_k is None and seqused_k.tolist() == [32, 32] and page_table.shape == (2, 4)
        assert page_table.dtype == torch.int32 and k.shape[1] == 8
        assert page_table.flatten().tolist() != list(range(8))
        k, v = (x[page_table.flatten().long()].flatten(0, 1) for x in (k, v))
        return varlen(q, k, v, cu_seqlens_k=options["cu_seqlens_q"], **options)

    monkeypatch.setattr(fa3, "flash_attn_varlen_func", paged)
    case = _case("two", [32, 32], True, page_size=8)
    tensors = ragged.make_tensors(case.lengths, case.shape, CPU)
    checks = ragged.Checks(case.lengths, case.shape, tensors)
    assert checks.ratio(loaded(VARLEN, "ours")(tensors, case)()) <= 1.0
    odd = _case("odd", [33, 32], True, page_size=8)
    with pytest.raises(ValueError, match="multiples of the page, 8"):
        loaded(VARLEN, "ours")(ragged.make_tensors(odd.lengths, odd.shape, CPU), odd)


def test_keys_of_a_window_are_the_last_ones():
    (cache,) = decode.make_caches(TINY_WINDOW, CPU)
    wanted = cache.k[1:, 64 - 24 : 64]
    assert torch.equal(keys_of(cache, TINY_WINDOW, 1)[0], wanted)
