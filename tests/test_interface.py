"""The public functions on CPU tensors: FlashAttention-3's arguments and conventions; what explain and why_not say."""

import inspect
import math

import pytest
import torch

import fa3
from fa3 import explanation, interface
from fa3.device import ASSUMED, named
from fa3.launch import config_of
from fa3.problem import problem_of
from fa3.reference import attention, tiled_attention
from fa3.testing.inputs import Case, make

FUNC = [
    *["q", "k", "v", ("softmax_scale", None), ("causal", False), ("qv", None), ("q_descale", None)],
    *[("k_descale", None), ("v_descale", None), ("window_size", (-1, -1)), ("attention_chunk", 0), ("softcap", 0.0)],
    *[("num_splits", 1), ("pack_gqa", None), ("deterministic", False), ("sm_margin", 0), ("return_attn_probs", False)],
]
PACKED = [
    *["qkv", ("softmax_scale", None), ("causal", False), ("q_descale", None), ("k_descale", None), ("v_descale", None)],
    *[("window_size", (-1, -1)), ("attention_chunk", 0), ("softcap", 0.0), ("deterministic", False)],
    *[("num_heads_q", None), ("sm_margin", 0), ("return_attn_probs", False)],
]


@pytest.mark.parametrize(("function", "wanted"), [(fa3.flash_attn_func, FUNC), (fa3.flash_attn_qkvpacked_func, PACKED)])
def test_signature_is_flash_attention_3_s(function, wanted):
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name if p.default is p.empty else (p.name, p.default) for p in positional] == wanted
    ours = [] if function is fa3.flash_attn_qkvpacked_func else ["learnable_sink", "s_aux"]
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["return_lse", *ours]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (1, 300), (200, 130), (3, 0)])
def test_float64_is_the_formula(causal, seqlen_q, seqlen_k):
    case = Case(dtype="float64", batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_kv=2, ratio=3, head_dim_v=40)
    q, k, v = make(case, "cpu")
    out, lse = fa3.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    wanted_out, wanted_lse = attention(q, k, v, causal=causal)
    torch.testing.assert_close(out, wanted_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-12, atol=1e-12)
    seen = seqlen_k - seqlen_q if causal else 0
    unseeing = seqlen_q if seqlen_k == 0 else max(0, -seen)  # the first rows see no key
    assert torch.equal(out[:, :unseeing], torch.zeros_like(out[:, :unseeing]))
    assert torch.isneginf(lse[:, :, :unseeing]).all() and torch.isfinite(lse[:, :, unseeing:]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", ["contiguous", "packed", "transposed", "misaligned"])
def test_cpu_tensors_run_the_tiles_of_the_kernel(dtype, layout):
    case = Case(dtype=dtype, seqlen_q=150, seqlen_k=300, heads_kv=2, ratio=2, head_dim=80, layout=layout, causal=True)
    q, k, v = make(case, "cpu")
    config = config_of(problem_of(q, k, v, 0.1, True), ASSUMED.num_sms)
    out, lse = fa3.flash_attn_func(q, k, v, 0.1, True, return_lse=True)
    wanted, wanted_lse = tiled_attention(q, k, v, 0.1, True, tile_m=config.tile_m, tile_n=config.tile_n)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32 and out.dtype == q.dtype
    exact, _ = attention(q.double(), k.double(), v.double(), 0.1, True)
    assert (out.double() - exact).abs().max() < {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5}[dtype]


def test_default_scale_is_one_over_the_root_of_the_head_dim_of_q():
    q, k, v = make(Case(dtype="float64", seqlen_q=4, seqlen_k=9, head_dim=96, head_dim_v=32), "cpu")
    assert torch.equal(fa3.flash_attn_func(q, k, v), fa3.flash_attn_func(q, k, v, softmax_scale=96**-0.5))
    assert not torch.equal(fa3.flash_attn_func(q, k, v), fa3.flash_attn_func(q, k, v, softmax_scale=32**-0.5))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_scale_zero_weighs_the_keys_that_are_seen_alike(causal, dtype):
    q, k, v = make(Case(dtype=dtype, seqlen_q=6, seqlen_k=6), "cpu")
    for scale in (0.0, 0):
        out, lse = fa3.flash_attn_func(q, k, v, scale, causal, return_lse=True)
        seen = torch.arange(1, 7) if causal else torch.full((6,), 6)
        torch.testing.assert_close(lse[0, 0], seen.to(lse.dtype).log())
        wanted = torch.stack([v[0, :n, 0].double().mean(0) for n in seen])
        torch.testing.assert_close(out[0, :, 0].double(), wanted, rtol=0, atol=1e-2 if dtype == "bfloat16" else 1e-12)


@pytest.mark.parametrize("seqlen_k", [1, 17, 255, 257, 1024])
def test_lse_is_a_natural_logarithm(seqlen_k):
    """q = 0 gives ln Sk, and the mean of V."""
    q, k, v = make(Case(dtype="float16", seqlen_q=2, seqlen_k=seqlen_k), "cpu")
    out, lse = fa3.flash_attn_func(torch.zeros_like(q), k, v, return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(seqlen_k)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out[0, 0, 0].float(), v[0, :, 0].float().mean(0), rtol=0, atol=2e-3)


def test_what_is_returned():
    q, k, v = make(Case(seqlen_q=3, seqlen_k=4), "cpu")
    out = fa3.flash_attn_func(q, k, v)
    pair = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    assert isinstance(out, torch.Tensor) and isinstance(pair, tuple) and len(pair) == 2
    for other in (pair, fa3.flash_attn_func(q, k, v, return_lse=True)):
        assert torch.equal(other[0], out) and torch.equal(other[1], pair[1])
    assert torch.equal(fa3.flash_attn_func(q, k, v, deterministic=True), out)


def test_packed_is_flash_attn_func_on_the_slices():
    qkv = torch.randn(2, 9, 3, 4, 64, dtype=torch.bfloat16)
    wanted = fa3.flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], 0.3, True, return_lse=True)
    got = fa3.flash_attn_qkvpacked_func(qkv, 0.3, True, return_attn_probs=True)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, 0.3, True, num_heads_q=4), wanted[0])
    heads = torch.randn(2, 9, 6 + 2 * 2, 64, dtype=torch.bfloat16)
    wanted = fa3.flash_attn_func(heads[:, :, :6], heads[:, :, 6:8], heads[:, :, 8:], return_lse=True)
    got = fa3.flash_attn_qkvpacked_func(heads, num_heads_q=6, return_lse=True)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    with pytest.raises(ValueError, match="at least 1 head, got q 6"):
        fa3.flash_attn_qkvpacked_func(heads[:, :, :6], num_heads_q=6)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *[(name, torch.ones(1), "None") for name in ("qv", "q_descale", "k_descale", "v_descale")],
        ("num_splits", 2, "1"),
        ("num_splits", None, "1"),
        ("pack_gqa", True, "None or False"),
        ("sm_margin", 4, "0"),
    ],
)
def test_arguments_whose_work_comes_later_raise_by_name(name, value, allowed):
    q, k, v = make(Case(seqlen_q=3, seqlen_k=4), "cpu")
    with pytest.raises(NotImplementedError, match=f"{name}.*allowed: {allowed}"):
        fa3.flash_attn_func(q, k, v, **{name: value})
    if name in inspect.signature(fa3.flash_attn_qkvpacked_func).parameters:
        with pytest.raises(NotImplementedError, match=name):
            fa3.flash_attn_qkvpacked_func(torch.stack((q, q, q), 2), **{name: value})


def test_neutral_values_are_taken_and_unknown_names_are_not():
    q, k, v = make(Case(seqlen_q=3, seqlen_k=4), "cpu")
    neutral = dict(qv=None, q_descale=None, window_size=[-1, -1], attention_chunk=0, softcap=0, num_splits=1)
    out = fa3.flash_attn_func(q, k, v, pack_gqa=False, sm_margin=0, **neutral)
    assert torch.equal(out, fa3.flash_attn_func(q, k, v))
    for name in ("dropout_p", "alibi_slopes", "block_table"):
        with pytest.raises(TypeError, match=name):
            fa3.flash_attn_func(q, k, v, **{name: 0.0})


@pytest.mark.parametrize("which", range(3))
def test_a_call_that_needs_gradients_raises(which):
    inputs = list(make(Case(seqlen_q=3, seqlen_k=4), "cpu"))
    wanted = fa3.flash_attn_func(*inputs)
    inputs[which].requires_grad_(True)
    with pytest.raises(NotImplementedError, match="gradient.*no_grad"):
        fa3.flash_attn_func(*inputs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out, lse = fa3.flash_attn_func(*inputs, return_lse=True)
        assert torch.equal(out, wanted) and not out.requires_grad and not lse.requires_grad


def test_explain_says_what_a_kernel_would_do():
    meta = make(Case(batch=2, seqlen_q=1000, seqlen_k=900, heads_kv=2, ratio=4, head_dim=120, causal=True), "cpu")
    q, k, v = (x.to("meta") for x in meta)
    found = fa3.explain(q, k, v, causal=True)
    config = found.config
    assert found.runs == "kernel" and found.problem.heads == 8 and found.spec.head_dim == 128 and found.spec.causal
    assert found.tile == (config.tile_m, config.tile_n) and found.threads == config.threads
    assert found.num_tiles == 2 * 8 * math.ceil(1000 / config.tile_m)
    assert found.num_ctas == (min(found.num_tiles, 132) if config.persistent else found.num_tiles)
    assert found.shared_bytes == config.shared_bytes(found.spec) and found.registers == config.registers(found.spec)
    assert found.cache in ("memory", "disk", "absent") and found.copies == ()
    text = str(found)
    for words in ("kernel on meta", "bfloat16", "causal", "8 / 2", f"{config.tile_m} queries", found.cache, "none"):
        assert words in text
    with pytest.raises(AttributeError):
        found.runs = "x"


def test_explain_counts_the_ctas_of_a_persistent_grid(monkeypatch):
    from dataclasses import replace

    chosen = replace(config_of(problem_of(*make(Case(), "cpu"), 0.1, False), 132), persistent=True)
    monkeypatch.setattr(explanation, "config_of", lambda problem, num_sms: chosen)
    q, k, v = (x.to("meta") for x in make(Case(batch=300), "cpu"))
    found = fa3.explain(q, k, v)
    assert found.num_tiles >= 300 and found.num_ctas == 132 and "persistent" in found.schedule


def test_explain_names_the_inputs_that_would_be_copied():
    q, k, v = make(Case(seqlen_q=3, seqlen_k=4, heads_kv=2), "cpu")
    odd = torch.empty(1, 3, 2, 65, dtype=torch.bfloat16, device="meta")[..., 1:]
    (reason,) = fa3.explain(odd, k.to("meta"), v.to("meta")).copies
    assert reason == "q: stride 130 of dimension 1 is not a multiple of 8 elements"
    with torch._subclasses.FakeTensorMode():
        strides = [(6 * width, 2 * width, width, 1) for width in (64, 72, 68)]
        fakes = [torch.empty_strided((1, 3, 2, 64), s, dtype=torch.float16, device="cuda") for s in strides]
    found = fa3.explain(*fakes)
    assert found.runs == "kernel" and [reason[:2] for reason in found.copies] == ["v:"]
    assert found.spec.dtype == "float16"


def test_explain_of_cpu_and_of_empty_tensors():
    q, k, v = make(Case(dtype="float32", seqlen_q=3, seqlen_k=4), "cpu")
    found = fa3.explain(q, k, v)
    assert found.runs == "reference (CPU)" and found.device == "cpu" and found.copies == ()
    empty = [x.to("meta") for x in make(Case(seqlen_k=0), "cpu")]
    assert fa3.explain(*empty).runs == "nothing"


def test_explain_raises_what_the_call_raises():
    q, k, v = make(Case(seqlen_q=3, seqlen_k=4, heads_kv=2), "cpu")
    with pytest.raises(ValueError, match="q 2 and k, v 1|k 1, v 2"):
        fa3.explain(q, k[:, :, :1], v)
    with pytest.raises(TypeError, match="softmax_scale"):
        fa3.explain(q, k, v, "0.1")
    with pytest.raises(ValueError, match="softmax_scale is -1"):
        fa3.explain(q, k, v, -1.0)
    with pytest.raises(TypeError, match="q must be a torch.Tensor"):
        fa3.explain(None, k, v)


def test_why_not_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not fa3.is_available() and "CUDA is not available" in fa3.why_not()
    assert torch.__version__ in fa3.why_not()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    chips = [ASSUMED, named("NVIDIA A100-SXM4-40GB", 108, (8, 0))]
    monkeypatch.setattr(interface, "chip", chips.__getitem__)
    assert not fa3.is_available() and not fa3.is_available(1) and fa3.is_available(0)
    assert "A100" in fa3.why_not() and "sm_80" in fa3.why_not() and "sm_90" in fa3.why_not()
    assert fa3.why_not(0) is None

    for missing, package in interface.REQUIRED.items():
        monkeypatch.setattr("importlib.util.find_spec", lambda name, missing=missing: name != missing or None)
        assert not fa3.is_available(0) and f"pip install {package}" in fa3.why_not(0)
