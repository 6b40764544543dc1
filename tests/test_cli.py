"""The command line: what it accepts, what it prints, its exit status, and that --help is fast."""

import io
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from fa3 import __version__, cli

ROOT = Path(__file__).parent.parent


def fa3(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr of the command line, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = cli.main(arguments)
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
            err.write("" if isinstance(stop.code, int) else str(stop.code))
    return status, out.getvalue(), err.getvalue()


def test_help_names_every_command_and_imports_no_torch():
    program = "import sys; from fa3.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert time.perf_counter() - start < 2
    assert done.returncode == 0 and done.stdout.strip().endswith("False")
    for command in ("demo", "info", "bench", "check", "compile"):
        assert f"\n    {command} " in done.stdout


def test_version():
    assert fa3("--version") == (0, f"fa3 {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "the following arguments are required: COMMAND"),
        (("train",), "argument COMMAND: invalid choice: 'train'"),
        (("compile",), "compile: give --all, --preset, or some of --dtype"),
        (("compile", "--all", "--head-dim", "64"), "compile: give --all, --preset, or some of --dtype"),
        (("compile", "--all", "--preset", "vit"), "compile: give --all, --preset, or some of --dtype"),
        (("compile", "--preset", "vit", "--head-dim", "64"), "compile: a preset has its head dims"),
        (("compile", "--preset", "gpt2"), "argument --preset: invalid choice: 'gpt2'"),
        (("compile", "--head-dim-v", "64"), "compile: --head-dim-v needs --head-dim"),
        (("compile", "--all", "--jobs", "0"), "argument --jobs: '0' is not a whole number of at least 1"),
        (("check", "--device", "tpu"), "argument --device: invalid choice: 'tpu'"),
        (("check", "--examples", "-1"), "argument --examples: '-1' is not a whole number of at least 1"),
        (("check", "--examples", "many"), "argument --examples: 'many' is not a whole number of at least 1"),
    ],
)
def test_wrong_arguments_exit_with_2_and_say_what_is_allowed(arguments, said):
    status, out, err = fa3(*arguments)
    assert status == 2 and out == "" and f"error: {said}" in err


def test_module_runs():
    done = subprocess.run([sys.executable, "-m", "fa3", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"fa3 {__version__}\n"


def test_missing_rich_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    status, out, err = fa3("demo")
    assert status == 1 and out == ""
    assert err.count("\n") == 0 and "pip install rich" in err


class TestInfo:
    def test_says_versions_cache_and_what_works(self, monkeypatch, tmp_path):
        monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))
        status, out, err = fa3("info")
        assert status == 0 and err == ""
        rows = dict(line.strip().split(None, 1) for line in out.splitlines() if line.startswith("  "))
        assert rows["torch"] == torch.__version__ and rows["fa3"] == __version__
        assert rows["folder"] == str(tmp_path)
        assert rows["kernels"].startswith("0 in 0 bytes; 0 of the ")
        assert "sm_90a" in out and "host CPU" in out
        assert "calls on CPU tensors" in out

    def test_says_why_cuda_tensors_do_not_work(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        _, out, _ = fa3("info")
        (line,) = (line for line in out.splitlines() if "calls on CUDA tensors" in line)
        assert " no: CUDA is not available" in line

    def test_says_which_gpu_does_not_work(self, monkeypatch):
        from fa3 import device, info

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        chips = [device.named("NVIDIA H100 80GB HBM3", 132, (9, 0)), device.named("NVIDIA A100-SXM4-40GB", 108, (8, 0))]
        monkeypatch.setattr(device, "chip", chips.__getitem__)
        first, second = info.gpus()
        assert first[1].endswith("9.0: works")
        assert second[0] == "cuda:1" and "8.0: does not work" in second[1] and "9.0" in second[1]

    def test_counts_kernels_and_bytes(self, monkeypatch, tmp_path):
        from fa3.kernels import cache
        from fa3.kernels.forward.config import Config, Spec

        monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))
        path = cache.write("0" * 64, Spec("bfloat16", 64, 64, False), Config(2, 64), b"x" * 1000)
        _, out, _ = fa3("info")
        assert f"1 in {path.stat().st_size:,} bytes" in out


class TestCompile:
    @pytest.fixture(autouse=True)
    def own_cache(self, monkeypatch, tmp_path):
        monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))

    def test_no_two_kernels_are_described_alike(self):
        from fa3.heuristics import all_configs
        from fa3.kernels.forward.config import TILES
        from fa3.precompile import describe
        from fa3.quant.listing import all_kernels
        from fa3.serving_kernels import all_kernels as around
        from fa3.serving_kernels import decode_kernels

        everything = [*all_configs(), *all_kernels(TILES), *decode_kernels(), *around()]
        assert len({describe(*kernel) for kernel in everything}) == len(everything)

    def test_selects_by_what_a_call_has(self):
        from fa3.heuristics import all_configs
        from fa3.kernels.forward.config import FP8, TILES
        from fa3.kernels.quantize.config import PackSpec, ScalesSpec
        from fa3.precompile import select
        from fa3.quant.listing import all_kernels
        from fa3.serving_kernels import all_kernels as around
        from fa3.serving_kernels import decode_kernels

        everything = list(all_configs())
        assert list(select()) == [*everything, *all_kernels(TILES), *decode_kernels(), *around()]
        assert list(select(decode=False)) == [*everything, *all_kernels(TILES), *around()]
        fp8 = list(select(FP8, 80, 112))
        assert {s.dtype_o for s, _ in fp8 if hasattr(s, "dtype_o")} == {"bfloat16", "float16"}
        made = {(s.head_dim, s.head_dim_v) for s, _ in fp8 if hasattr(s, "head_dim")}
        assert made == {(128, 128), (80, 112)} and {PackSpec(112), ScalesSpec()} < {s for s, _ in fp8}
        assert {s.dtype for s, _ in select(None, 72)} == {"bfloat16", "float16"}  # no multiple of 16
        chosen = list(select("float16", 80, None, True, False))
        assert chosen and all(
            (s.dtype, s.head_dim, s.head_dim_v, s.causal) == ("float16", 96, 96, True) for s, _ in chosen
        )
        assert list(select("float16", 80, None, False, False)) != chosen
        assert list(select("float16", 80, None, True)) == [*chosen, *decode_kernels("float16", (96, 96))]
        assert {s.dtype for s, _ in decode_kernels("float16", (96, 96))} == {"float16"}
        assert {(s.head_dim, s.head_dim_v) for s, _ in select("float16", 192, 128)} == {(192, 128)}
        halves = {*select(causal=True), *select(causal=False)}
        assert halves == {*everything, *all_kernels(TILES), *decode_kernels(), *around()}
        assert {s.dtype_o if hasattr(s, "dtype_o") else s.dtype for s, _ in around("float16")} == {"float16"}
        assert set(around("float16")) < set(select("float16")) and not around("float8_e4m3fn")

    def test_unserved_head_dim_is_one_sentence(self):
        status, _, err = fa3("compile", "--head-dim", "512")
        assert status == 1 and "512" in err and err.count("\n") == 0
        status, _, err = fa3("compile", "--head-dim", "72", "--dtype", "float8_e4m3fn")
        assert status == 1 and "72" in err and "multiples of 16" in err

    def test_fills_an_empty_cache_then_finds_it(self):
        from fa3.kernels import compile as kernels
        from fa3.precompile import select

        arguments = ("compile", "--dtype", "bfloat16", "--head-dim", "64", "--no-causal", "--no-decode", "--jobs", "2")
        chosen = list(select("bfloat16", 64, None, False, False))
        status, out, _ = fa3(*arguments)
        assert status == 0, out
        assert f"{len(chosen)} compiled" in out and "0 already there, 0 failed" in " ".join(out.split())
        assert {kernels.state(spec, config) for spec, config in chosen} == {"disk"}
        assert len(kernels.entries()) == len(chosen)
        status, out, _ = fa3(*arguments)
        assert status == 0 and f"0 compiled, {len(chosen)} already there" in " ".join(out.split())

    @pytest.mark.parametrize("driver, libraries, guess", [(None, 2, True), (13, 2, False), (None, 1, False)])
    def test_a_guessed_flavour_is_said(self, driver, libraries, guess, monkeypatch):
        from fa3 import precompile
        from fa3.kernels import key

        found = [Path(f"/x/cu{n}/lib/{key.RUNTIME}") for n in (13, 12)][:libraries]
        monkeypatch.setattr(key, "_runtime_libraries", lambda: found)
        monkeypatch.setattr(key, "_driver_major", lambda: driver)
        monkeypatch.setattr(precompile.kernels, "state", lambda *kernel: "disk")
        _, out, _ = fa3("compile", "--head-dim", "192", "--head-dim-v", "128")
        assert "CUDA flavour cu13" in " ".join(out.split())
        assert ("driver is older than cu13 will not find these kernels" in " ".join(out.split())) == guess

    def test_a_failure_is_named_and_the_others_go_on(self, monkeypatch):
        from fa3 import precompile

        def prepare(spec, config):
            if getattr(spec, "causal", False):
                raise OSError("no room on the disk [/full]")

        monkeypatch.setattr(precompile.kernels, "prepare", prepare)
        status, out, _ = fa3("compile", "--head-dim", "128", "--dtype", "float16")
        flat = " ".join(out.split())
        causal, full = (set(precompile.select("float16", 128, None, causal)) for causal in (True, False))
        assert status == 1 and "no room on the disk [/full]" in flat
        assert f"{len(full)} compiled" in flat and f"{len(causal - full)} failed" in flat


class TestDemo:
    def test_recorded_data_is_attention_of_a_real_model(self):
        from fa3.demo import recorded

        layers = recorded()
        assert [layer.name for layer in layers] == ["layer0", "layer2", "layer5"]
        for layer in layers:
            assert layer.q.shape == layer.k.shape == layer.v.shape == (1, 512, 6, 32)
            q, k, _ = layer.tensors(torch.float64, "cpu")
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 32**-0.5
            # A trained model attends: far more peaked than 512 equal weights of 0.002, and different in every head.
            assert scores.softmax(-1).amax(-1).mean() > 0.02
            assert torch.isfinite(scores).all()

    def test_errors_are_shown_and_a_wrong_result_fails(self, monkeypatch):
        import fa3 as package
        from fa3 import demo
        from fa3.console import console

        right = package.flash_attn_func
        out = io.StringIO()
        with redirect_stdout(out):
            assert demo.show_errors(console(), demo.recorded()[:1], "cpu")
            monkeypatch.setattr(package, "flash_attn_func", lambda q, k, v: right(q, k, v) * 1.01)
            assert not demo.show_errors(console(), demo.recorded()[:1], "cpu")
        assert out.getvalue().count("float16") >= 2 and "NO" in out.getvalue()

    def test_tflops_of_the_standard_shape(self):
        from fa3.demo import tflops

        assert tflops(1000.0, causal=False) == pytest.approx(2199.0, rel=1e-4)  # 4 * 2048 * 16384^2 FLOP
        assert tflops(1000.0, causal=True) == pytest.approx(1099.5, rel=1e-4)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="the demo measures speed where there is a GPU")
    def test_whole_without_a_gpu(self):
        status, out, _ = fa3("demo")
        assert status == 0, out
        assert "No kernel runs here" in out and out.count("float16") >= 6
        assert "sm_90a" in out and "registers" in out


@pytest.mark.gpu
def test_demo_on_a_gpu():
    status, out, _ = fa3("demo")
    assert status == 0, out
    assert "TFLOP/s" in out and "causal" in out


class TestCheck:
    def test_passes_with_few_examples(self):
        status, out, _ = fa3("check", "--examples", "2", "--device", "cpu")
        assert status == 0, out
        from fa3.testing import fp8, properties

        number = len(properties.PROPERTIES) + len(fp8.PROPERTIES)
        assert f"{number} of {number} properties hold; 2 examples each" in out and "NO" not in out
        assert "Properties of FP8 on cpu" in out and "v_descale" in out

    def test_a_wrong_attention_fails(self, monkeypatch):
        import fa3 as package
        from fa3.testing import fp8

        monkeypatch.setattr(fp8, "PROPERTIES", ())
        right = package.flash_attn_func
        monkeypatch.setattr(
            package,
            "flash_attn_func",
            lambda *args, **named: tuple(x * 1.01 for x in right(*args, **named)),
        )
        status, out, _ = fa3("check", "--examples", "2", "--device", "cpu")
        assert status == 1, out
        assert "error (max error <= 2x" in out and "fails for Case(" in out

    def test_a_wrong_fp8_attention_fails(self, monkeypatch):
        import fa3 as package
        from fa3.testing import fp8, properties

        right = package.flash_attn_quantized_func
        monkeypatch.setattr(
            package, "flash_attn_quantized_func", lambda *args, **named: tuple(-x for x in right(*args, **named))
        )
        monkeypatch.setattr(properties, "PROPERTIES", ())
        monkeypatch.setattr(fp8, "PROPERTIES", tuple(p for p in fp8.PROPERTIES if p.name in ("error", "scales")))
        status, out, _ = fa3("check", "--examples", "2", "--device", "cpu")
        assert status == 1, out
        assert "1 of 2 properties hold" in out and "error (" in out and "fails for Case(" in out
