"""The peers, the real ones behind stand-ins: how they are called."""

import contextlib
import sys
from types import ModuleType

import pytest
import torch

from bench import peers
from fa3.reference import attention


def test_sdpa_refuses_the_mask_that_it_aligns_otherwise():
    q, k = torch.zeros(1, 2, 1, 8), torch.zeros(1, 3, 1, 8)
    with pytest.raises(ValueError, match="top-left: Sq 2, Sk 3"):
        peers.sdpa(q, k, k, True)


def test_sdpa_runs_on_the_backend_that_is_entered_around_it():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    loaded, _ = peers.load(["cudnn", "fa2"])
    assert {name: peers.around(a).args for name, a in loaded.items()} == {
        "cudnn": (SDPBackend.CUDNN_ATTENTION,), "fa2": (SDPBackend.FLASH_ATTENTION,),
    }  # fmt: skip
    assert peers.around(loaded["fa2"]).func is sdpa_kernel and peers.around(len) is contextlib.nullcontext
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 6, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    want = attention(q, k, v, causal=True)[0]
    torch.testing.assert_close(peers.sdpa(q, k, v, True), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_flashinfer_gets_flat_tensors_and_one_plan_a_problem(monkeypatch, causal):
    plans = []

    class Wrapper:
        """Answers as the documentation of BatchPrefillWithRaggedKVCacheWrapper says."""

        def __init__(self, workspace, kv_layout, backend):
            assert workspace.dtype == torch.uint8 and (kv_layout, backend) == ("NHD", "fa3")

        def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, *, head_dim_vo, causal, **types):
            assert set(types.values()) == {torch.bfloat16} and qo_indptr.dtype == torch.int32
            self.starts, self.causal = (qo_indptr.tolist(), kv_indptr.tolist()), causal
            plans.append((num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal))

        def run(self, q, k, v):
            outs = []
            for i in range(len(self.starts[0]) - 1):
                of_q, of_k = (slice(starts[i], starts[i + 1]) for starts in self.starts)
                outs.append(attention(q[None, of_q], k[None, of_k], v[None, of_k], causal=self.causal)[0][0])
            return torch.cat(outs)

    stand_in = ModuleType("flashinfer")
    stand_in.BatchPrefillWithRaggedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    loaded, missing = peers.load(["flashinfer"])
    assert not missing
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, n, h, d, dtype=torch.bfloat16) for n, h, d in ((5, 4, 64), (9, 2, 64), (9, 2, 32)))
    want = attention(q, k, v, causal=causal)[0]
    for _ in range(2):
        torch.testing.assert_close(loaded["flashinfer"](q, k, v, causal), want, rtol=0, atol=0)
    assert plans == [(4, 2, 64, 32, causal)]
    loaded["flashinfer"](q, k, v, not causal)
    assert len(plans) == 2


def test_a_missing_flashinfer_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    loaded, missing = peers.load(["flashinfer"])
    assert not loaded and missing["flashinfer"].startswith("ModuleNotFoundError: ")
