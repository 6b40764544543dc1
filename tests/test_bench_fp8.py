"""The FP8 benchmarks without a GPU, stand-ins for kernels: what is checked, written and judged; no time is asserted."""

import json
import math
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

import fa3
from bench import accuracy, fp8, options, peers, records
from bench.machine import open_machine
from bench.measure import Pace, make_inputs
from bench.shapes import NAMED, select
from fa3.kernels.forward.config import Config
from fa3.quant.reference import dequantize_qkv, quantize_qkv
from fa3.reference import attention

TINY = NAMED["tiny"]
QUICK = Pace(rounds=1, seconds=0.001, rest=0.0)
HOPPER = records.Origin("NVIDIA H200", "2.11.0", "abc", peak_tflops=989.5, cublas_tflops=800.0)


def on_quantized(x, softmax_scale=None, causal=False, accumulation="accurate", return_lse=False):
    out, lse = attention(*dequantize_qkv(x), softmax_scale, causal)
    return (out.to(x.dtype), lse.float()) if return_lse else out.to(x.dtype)


def whole_call(q, k, v, softmax_scale=None, causal=False, rotate=True):
    return on_quantized(quantize_qkv(q, k, v, rotate=rotate), softmax_scale, causal)


@pytest.fixture
def no_kernels(monkeypatch):
    """Attention to the dequantised tensors in the place of ours, at once."""
    monkeypatch.setattr(fa3, "flash_attn_quantized_func", on_quantized)
    monkeypatch.setattr(fa3, "flash_attn_fp8_func", whole_call)
    monkeypatch.setattr(fa3, "flash_attn_func", lambda q, k, v, causal=False: attention(q, k, v, causal=causal)[0])
    monkeypatch.setattr(options, "QUICK", QUICK)


def read_records(folder, suite):
    return [json.loads(line) for line in (folder / "cpu" / f"{suite}.jsonl").read_text().splitlines()]


# Speed: the check


def entry(out, kind="fp8", impl="ours"):
    """Of what answers `out(q, k, v, causal)`."""
    return fp8.Entry(impl, peers.FP8, lambda *inputs: partial(out, *inputs), kind)


def measured(out, kind="fp8"):
    return fp8.measure({"one": entry(out, kind)}, TINY, open_machine("cpu", "abc"), QUICK)["one"]


def right(q, k, v, causal):
    return whole_call(q, k, v, None, causal)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v, causal: right(q, k, v, not causal),
        lambda q, k, v, causal: right(q, k, v, causal).roll(1, 2),
        lambda q, k, v, causal: right(q, k, v, causal) * 1.3,
        lambda q, k, v, causal: right(q, k, v, causal) * math.nan,
        lambda q, k, v, causal: whole_call(q, k, v, 1.0, causal),
    ],
    ids=["mask", "heads", "scale of V", "NaN", "scale"],
)
def test_what_is_wrong_is_not_timed(wrong):
    found = measured(wrong)
    assert found.timing is None and found.problem.startswith("wrong:")


def test_what_is_right_is_timed_and_what_raises_is_named():
    found = measured(right)
    assert found.timing is not None and 0.3 < found.error < fp8.ROOM

    def refuses(*inputs):
        raise RuntimeError("no such shape\nsecond line")

    found = measured(refuses)
    assert found.timing is None and found.problem == "RuntimeError: no such shape"


def test_quantised_tensors_are_held_to_their_steps(monkeypatch):
    checks = fp8.Checks(TINY, *make_inputs(TINY, "bfloat16", open_machine("cpu", "abc"))[0])
    error, allowed = checks.error("quantized", None)
    assert 0.7 < error < 1.3 < allowed
    for wrong in ("k_scale", "v_scale"):
        monkeypatch.setattr(
            "fa3.quant.interface.quantize_qkv",
            lambda *x, wrong=wrong, **options: (lambda y: replace(y, **{wrong: getattr(y, wrong) * 1.2}))(
                quantize_qkv(*x, **options)
            ),
        )
        assert checks.error("quantized", None)[0] > allowed


def test_fa3_gets_one_scale_for_each_kv_head(monkeypatch):
    seen = {}

    def flash_attn_func(q, k, v, softmax_scale, causal, **descales):
        seen.update(descales)
        return q, "lse"

    monkeypatch.setitem(
        __import__("sys").modules, "fa3_fwd_interface", type("m", (), {"flash_attn_func": flash_attn_func})
    )
    q, k, v = (torch.randn(2, 70, heads, 64).bfloat16() for heads in (6, 2, 2))
    x = peers.per_head(q, k, v)
    assert peers.fa3_fp8()(x, False)() is x.q
    assert {name: tuple(scale.shape) for name, scale in seen.items()} == dict.fromkeys(seen, (2, 2)) and len(seen) == 3
    back = dequantize_qkv(x)
    for one, got in zip((q, k, v), back, strict=True):
        assert (got - one.double()).abs().max() <= 2.0**-4 * one.double().abs().max()
    torch.testing.assert_close(seen["q_descale"], q.float().abs().view(2, 70, 2, 3, 64).amax((1, 3, 4)) / 448)


# Speed: the command


def test_a_run_writes_a_record_for_each_contender(no_kernels, tmp_path, capsys):
    names = ["accurate", "fast", "call", "quantize", "copy", "bf16"]
    arguments = ["--device", "cpu", "--shapes", "tiny", "--quick", "--out", str(tmp_path), "--impl", *names, "fa3"]
    assert fp8.main(arguments) == 0
    rows = read_records(tmp_path, "fp8")
    assert all(tuple(r) == records.FIELDS and r["eager_us"] > 0 and r["graph_us"] is None for r in rows)
    assert [(r["impl"], r["dtype"]) for r in rows] == [
        ("ours", peers.FP8), ("ours", peers.FP8), ("ours_call", peers.FP8), ("ours_quantize", peers.FP8),
        ("copy", "bfloat16"), ("ours", "bfloat16"),
    ]  # fmt: skip
    assert rows[3]["config"]["bytes"] == rows[4]["config"]["bytes"] == 3 * 2 * 128 * (4 + 2 + 2) * 64
    printed = capsys.readouterr().out
    assert "fa3 is not here: ModuleNotFoundError" in printed and "cudnn fp8 is left out" in printed


def test_ours_that_fails_fails_the_run(no_kernels, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fa3, "flash_attn_fp8_func", lambda q, k, v, causal, rotate: q * 0)
    arguments = ["--device", "cpu", "--shapes", "tiny", "--quick", "--out", str(tmp_path), "--impl", "call", "copy"]
    assert fp8.main(arguments) == 1
    assert "wrong:" in capsys.readouterr().out
    assert [r["impl"] for r in read_records(tmp_path, "fp8")] == ["copy"]


def test_records_do_not_mix_with_those_of_a_gpu(capsys):
    for module in (fp8, accuracy):
        with pytest.raises(SystemExit):
            module.main(["--device", "cpu"])
        assert "give it an --out" in capsys.readouterr().err


def test_records_know_the_peak_of_fp8_and_what_is_no_attention():
    shape = NAMED["hd128-16k-full"]
    half, eight, copy = (
        records.record(HOPPER, "fp8", impl, dtype, shape, graph_us=2000.0)
        for impl, dtype in (("ours", "bfloat16"), ("ours_call", peers.FP8), ("copy", "bfloat16"))
    )
    assert half["tflops"] == eight["tflops"] == 1099.51 and copy["tflops"] is copy["peak_fraction"] is None
    assert half["peak_fraction"] == 1.1112 and eight["peak_fraction"] == 0.5556
    assert eight["cublas_fraction"] == half["cublas_fraction"] == 1.3744


# Accuracy

SMALL = accuracy.Sizes((1, 1, 128, 64), 2, (64, 256), (64,), 16)


def test_accuracy_writes_a_record_for_each_figure(no_kernels, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(accuracy.SIZES, "cpu", SMALL)
    assert accuracy.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = read_records(tmp_path, "accuracy")
    assert all(tuple(r) == records.FIELDS + ("case", "rmse", "rel_error") for r in rows)
    assert all((r["rmse"] is None) != (r["rel_error"] is None) for r in rows)
    assert {r["case"] for r in rows} == set(accuracy.CASES) and {r["impl"] for r in rows} == {"reference"}
    paper = [(r["config"] or {}).get("scales") for r in rows if r["case"] == "paper"]
    assert paper == [*accuracy.quantizers(), "block, rotated", None] and len(paper) == 8
    assert {r["seqlen_k"] for r in rows if r["case"] == "length"} == {64, 256}
    assert {r["config"]["at"] for r in rows if r["case"] == "needle"} == set(accuracy.PLACES)
    assert all(r["rmse"] < 0.1 for r in rows if r["rmse"] is not None)
    printed = capsys.readouterr().out
    assert "length: hd64, 256 keys" in printed and "paper: RMSE" not in printed  # not the paper's sizes


def test_a_wrong_attention_is_not_within_the_limits(no_kernels, monkeypatch, tmp_path):
    def wrong(*arguments, **options):
        out, lse = on_quantized(*arguments, **options)
        return out * 1.02, lse

    monkeypatch.setattr(fa3, "flash_attn_quantized_func", wrong)
    monkeypatch.setitem(accuracy.SIZES, "cpu", SMALL)
    assert accuracy.main(["--device", "cpu", "--case", "length", "flat", "--out", str(tmp_path)]) == 1


def figure(case, scales, error, shape=NAMED["hd128-4k-full"], **detail):
    method = accuracy.Method(scales, "ours", config={"scales": scales, "accumulation": "accurate"})
    return accuracy.Figure(case, method, shape, error, "rmse" if case == "paper" else "rel_error", detail)


def test_accuracy_goals():
    shape = replace(NAMED["hd128-4k-full"], batch=2, heads=8, heads_kv=8)
    figures = [
        figure("paper", "block, rotated", 8.0e-3, shape),
        figure("paper", "tensor", 1.5e-2, shape),
        figure("length", "block, rotated", 2e-3),
        figure("length", "block, rotated, fast", 0.5),
        figure("needle", "block, rotated", 0.02, at=0.5),
        figure("flat", "block, rotated", math.inf),
    ]
    goals = accuracy.must_show(figures)
    assert [fits for fits, _ in goals] == [True, False, True, False, False]
    assert "[red]0.533[/]; at most 0.5" in goals[1][1]
    assert accuracy.must_show(figures[3:4]) == []


def test_accuracy_records_hold_the_config_of_the_kernel(monkeypatch):
    config = Config(2, 128, promotion=1)
    monkeypatch.setattr(accuracy, "fp8_kernel_of", lambda shape, accumulation, num_sms: ("spec", config))
    line = accuracy.as_record(figure("needle", "block, rotated", 0.1, at=0.5), open_machine("cpu", "abc"))
    assert line["config"] == {"scales": "block, rotated", "accumulation": "accurate", "at": 0.5, **asdict(config)}
    assert (line["rel_error"], line["rmse"], line["graph_us"]) == (0.1, None, None)
    plain = accuracy.Figure("paper", accuracy.Method("bf16", "ours", plain=right), TINY, 0.1, "rmse", {"seeds": 2})
    assert accuracy.as_record(plain, open_machine("cpu", "abc"))["config"] == {"seeds": 2}


def test_every_kernel_that_is_timed_is_one_that_fa3_chooses():
    from fa3.heuristics import all_configs

    known = set(all_configs())
    for shape in select(["grid"]):
        accurate, fast = (peers.fp8_kernel_of(shape, a, 132) for a in ("accurate", "fast"))
        assert {accurate, fast} <= known and accurate[0] == fast[0]
        assert accurate[1].promotion == 1 and (fast[1].promotion == 0 or fast == accurate)
