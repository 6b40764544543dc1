"""fa3/presets.py: a preset has every kernel that a call of its models can ask for, and no others."""

import pytest

from bench.shapes import GRID, MODELS
from fa3.heuristics import DTYPES, config_for
from fa3.kernels.decode.config import BOXES, GATHER
from fa3.kernels.decode.config import Spec as DecodeSpec
from fa3.kernels.forward.config import FP8, Spec, tile_for
from fa3.precompile import of_presets, select
from fa3.presets import PRESETS
from fa3.quant import listing
from fa3.serving_kernels import decode_kernels
from tests.test_cli import fa3

MODEL_OF = {"llama3": "llama3", "qwen": "qwen", "gemma": "gemma2", "deepseek": "deepseek", "phi": "phi3"}
MODEL_OF |= {"nemotron": "nemotron4", "vit": "vit", "grid": "hd"}


@pytest.mark.parametrize("name", PRESETS)
def test_has_what_its_models_ask_for(name):
    shapes = [shape for shape in (*MODELS, *GRID) if shape.name.startswith(MODEL_OF[name])]
    shapes = [s for s in shapes if name != "grid" or s in GRID]
    kernels = set(of_presets([name]))
    assert shapes
    for s in shapes:
        for dtype in PRESETS[name].dtypes:
            spec = Spec(dtype, *tile_for(s.head_dim, s.head_dim_v), s.causal)
            for batch in (1, 2, 7, 64):
                for seqlen_q in {1, 100, s.seqlen_q}:
                    for seqlen_k in {seqlen_q, s.seqlen_k}:
                        found = config_for(spec, seqlen_q, seqlen_k, s.heads, batch, 132)
                        assert (spec, found) in kernels


def test_every_model_that_is_measured_has_one():
    prefixes = tuple(MODEL_OF.values())
    assert set(MODEL_OF) == set(PRESETS)
    assert not [shape.name for shape in MODELS if not shape.name.startswith(prefixes)]


def test_has_no_others():
    assert set(of_presets(["deepseek"])) == set(select("bfloat16", 192, 128, decode=False))
    assert {spec.causal for spec, _ in of_presets(["vit"])} == {False}
    assert {spec.dtype for spec, _ in of_presets(["vit"])} == set(DTYPES)
    tiles = {(spec.head_dim, spec.head_dim_v) for spec, _ in of_presets(["vit"])}
    assert tiles == {(64, 64), (96, 96), (128, 128)}
    both = of_presets(["llama3", "gemma"])
    assert set(both) == {*of_presets(["llama3"]), *of_presets(["gemma"])} and len(set(both)) == len(both)


def test_attention_to_a_cache():
    """With language models, unless it is said otherwise; its kernels serve both masks."""
    decode = {(d, d): set(decode_kernels("bfloat16", (d, d))) for d in (64, 128)}
    wanted = decode[64, 64] | decode[128, 128]
    for causal in (None, True, False):
        assert wanted == {x for x in of_presets(["llama3"], causal=causal) if isinstance(x[0], DecodeSpec)}
    assert set(of_presets(["llama3"])) - wanted == set(of_presets(["llama3"], decode=False))
    assert {s.pages for s, _ in wanted} == {0, GATHER, *BOXES} and {s.splits for s, _ in wanted} == {True, False}
    assert {name for name, preset in PRESETS.items() if not preset.decodes} == {"deepseek", "vit", "grid"}
    added = set(of_presets(["vit"], decode=True)) - set(of_presets(["vit"]))
    assert added == {x for t in ((64, 64), (96, 96), (128, 128)) for x in decode_kernels(None, t)}
    assert not decode_kernels(FP8) and len(decode_kernels("float16")) == len(decode_kernels("bfloat16")) >= 48


def test_another_type_and_one_mask():
    assert set(of_presets(["deepseek"], "float16", True)) == set(select("float16", 192, 128, True, False))
    assert set(of_presets(["llama3"], FP8)) == {*select(FP8, 64), *select(FP8, 128)}
    served = {(spec.head_dim, spec.head_dim_v) for spec, _ in of_presets(["vit"], FP8) if type(spec) is listing.Spec}
    assert served == {(64, 64), (80, 80)}


def test_the_command(monkeypatch):
    from fa3 import precompile

    made = []
    monkeypatch.setattr(precompile.kernels, "prepare", lambda *kernel: made.append(kernel))
    monkeypatch.setattr(precompile.kernels, "state", lambda *kernel: "absent")
    status, out, _ = fa3("compile", "--preset", "deepseek", "phi", "--jobs", "1")
    assert status == 0 and made == of_presets(["deepseek", "phi"])
    assert f"{len(made)} compiled" in out and "for sm_90a, CUDA flavour cu" in " ".join(out.split())
    status, _, err = fa3("compile", "--preset", "vit", "--causal")
    assert status == 1 and err == "no kernel of vit is causal"


def test_what_there_is_is_said():
    _, out, _ = fa3("compile", "--help")
    status, _, err = fa3("compile", "--preset", "gpt2")
    assert status == 2
    for name, preset in PRESETS.items():
        assert f"  {name} " in out and preset.models in out
        assert name in err
