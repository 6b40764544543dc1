"""The command around the benchmarks without a GPU: how suites are found and options passed on, what --check finds, and
FlashInfer behind a stand-in; no time is asserted."""

import argparse
import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bench import forward, fp8, machine, options, peers, records, regression, suites
from bench.machine import Machine, NoDevice
from bench.measure import Contender, Outcome, Pace
from bench.shapes import GRID, NAMED
from fa3 import cli
from fa3.kernels.forward.config import Config
from fa3.reference import attention
from fa3.testing.timing import Spread, Timing

ROOT = Path(__file__).parent.parent
H200 = Machine("cuda", 132, 0, records.Origin("NVIDIA H200", "2.11.0", "now", 989.5, 800.0))
POINT = NAMED["hd128-4k-full"]


def modules_with_a_suite():
    """Of bench/, so that nobody forgets to list one."""
    return {f"bench.{path.stem}" for path in (ROOT / "bench").glob("*.py") if "\nSUITE = " in path.read_text()}


# The command


def test_every_suite_is_listed_with_a_line(capsys):
    assert modules_with_a_suite() | {"bench.model", "bench.performance"} == {
        module for module, _ in suites.SUITES.values()
    }
    assert cli.main(["bench", "--help"]) == 0
    printed = capsys.readouterr().out
    for name, (module, summary) in suites.SUITES.items():
        assert f"\n  {name} " in printed and summary in printed
        assert callable(importlib.import_module(module).main)


def test_options_go_to_the_suite_that_is_named_or_to_forward(monkeypatch):
    called = []
    monkeypatch.setattr(forward, "main", lambda argv: called.append(("forward", argv)) or 0)
    monkeypatch.setattr(fp8, "main", lambda argv: called.append(("fp8", argv)) or 1)
    assert cli.main(["bench", "fp8", "--grid", "--rounds", "3"]) == 1
    assert cli.main(["bench", "--shapes", "tiny"]) == cli.main(["bench"]) == 0
    assert cli.main(["bench", "forward", "--help"]) == 0
    assert called == [
        ("fp8", ["--grid", "--rounds", "3"]),
        ("forward", ["--shapes", "tiny"]),
        ("forward", []),
        ("forward", ["--help"]),
    ]


def test_an_unknown_suite_is_one_sentence(capsys):
    assert cli.main(["bench", "speed"]) == 2
    assert "no suite named 'speed'; there are forward, fp8, accuracy, host" in capsys.readouterr().err


def test_a_suite_runs_by_the_command(tmp_path, capsys):
    given = ["--device", "cpu", "--shapes", "tiny", "--impl", "naive", "--quick", "--out", str(tmp_path)]
    assert cli.main(["bench", "forward", *given]) == 0
    (line,) = (tmp_path / "cpu" / "forward.jsonl").read_text().splitlines()
    assert json.loads(line)["impl"] == "naive"


def test_without_a_gpu_the_command_says_what_the_suite_says(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "forward"]) == 2
    assert capsys.readouterr().err == "bench.forward: this benchmark needs a CUDA GPU and torch sees none here.\n"


def test_outside_a_clone_it_says_what_to_do(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "bench.suites")
    monkeypatch.setitem(sys.modules, "bench", None)
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "forward"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "clone it" in error and "[bench]" in error


@pytest.mark.parametrize(
    "package, arguments",
    [
        ("rich", ["forward", "--device", "cpu", "--shapes", "tiny", "--impl", "naive"]),
        ("matplotlib", ["report"]),
    ],
)
def test_a_missing_package_of_the_extra_is_one_sentence(package, arguments, tmp_path):
    option = "--figures" if package == "matplotlib" else "--out"
    code = f"import sys; sys.modules[{package!r}] = None; from fa3.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "bench", *arguments, option, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f': {package} is not installed: pip install -e ".[bench]"' in done.stderr


def test_other_missing_modules_are_not_explained_away(monkeypatch):
    def broken():
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    def gone():
        raise NoDevice("no")

    with pytest.raises(ModuleNotFoundError):
        machine.status("bench.forward", broken)
    assert machine.status("bench.forward", gone) == 2


def test_usage_says_what_was_typed(capsys):
    for name in suites.SUITES:
        with pytest.raises(SystemExit) as stop:
            cli.main(["bench", name, "--help"])
        printed = capsys.readouterr().out
        assert stop.value.code == 0 and printed.startswith(f"usage: python -m fa3 bench {name} ")
        assert "python -m bench" not in printed


# Options


WHOLE, SHARE = "is not a whole number of at least 1", "is not a share: a number of at least 0, as 0.05 for 5 %"


@pytest.mark.parametrize(
    "given, allowed",
    [
        ("forward --rounds 0", WHOLE),
        ("fp8 --rounds 2.5", WHOLE),
        ("forward --check --tolerance nan", SHARE),
        ("forward --check --tolerance inf", SHARE),
        ("forward --check --tolerance x", SHARE),
        ("fp8 --check --tolerance -1", SHARE),
        ("ablation --rounds -1", WHOLE),
        ("accuracy --seeds 0", WHOLE),
        ("accuracy --paper 2 8 4096 0", WHOLE),
        ("host --rounds nan", WHOLE),
        ("memory --seqlens 1024 0", WHOLE),
        ("model --mhz 0", WHOLE),
        ("model --mhz -1", WHOLE),
        ("startup --repeats 0", WHOLE),
        ("sweep --warpgroups 2 0", WHOLE),
        ("sweep --tile-n 64 192 0", WHOLE),
        ("sweep --stages 0", WHOLE),
        ("sweep --top 0", WHOLE),
        ("sweep --rounds x", WHOLE),
        ("sweep --jobs 0", WHOLE),
        ("traffic --seqlen 0", WHOLE),
    ],
)
def test_an_odd_number_is_a_usage_error_that_says_what_is_allowed(given, allowed, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    name, *arguments = given.split()
    option = next(word for word in reversed(arguments) if word.startswith("--"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", name, *arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.endswith(f"fa3 bench {name}: error: argument {option}: {arguments[-1]!r} {allowed}\n")


@pytest.mark.parametrize("module, default", [(forward, 24), (fp8, 6)])
def test_grid_and_shapes_add_up_and_neither_is_the_default(module, default):
    def chosen(*given):
        parser = module.parser()
        return options.shapes_of(parser, parser.parse_args([*given]))

    assert len(chosen()) == default
    assert chosen("--grid") == GRID
    assert [shape.name for shape in chosen("--shapes", "tiny")] == ["tiny"]
    assert len(chosen("--grid", "--shapes", "tiny")) == 25


def test_quick_rounds_and_budget_make_the_pace():
    args = argparse.Namespace(quick=True, rounds=None, budget_seconds=None)
    assert options.pace_of(args, 5.0) == options.QUICK
    slow = options.pace_of(argparse.Namespace(quick=False, rounds=9, budget_seconds=10.0), 5.0)
    assert (slow.rounds, slow.seconds, slow.deadline) == (9, 0.06, 15.0)


# --check


def outcome(us, shape=POINT, impl="ours", dtype="bfloat16", config=None, graph=True, rounds=Pace.rounds):
    spread = Spread(us, us, us, us, us, rounds)
    return Outcome(Contender(impl, dtype, None, config), shape, Timing(spread if graph else None, spread, spread), 1.0)


def keep(outcome, folder, suite="forward", gpu="NVIDIA H200", cublas=800.0, commit="then"):
    origin = dataclasses.replace(H200.origin, gpu=gpu, commit=commit, cublas_tflops=cublas)
    records.append(outcome.record(dataclasses.replace(H200, origin=origin), suite), folder)


def asked(*given):
    parser = argparse.ArgumentParser()
    regression.add_check(parser)
    return parser.parse_args(["--check", *given])


def check(outcomes, folder, *given, suite="forward", machine=H200):
    args = asked(*given)
    return regression.check(outcomes, regression.baseline(machine, suite, args, folder), machine, suite, args)


def test_a_point_that_is_slower_by_more_than_the_tolerance_is_named(tmp_path):
    other = NAMED["hd64-1k-full"]
    keep(outcome(100.0), tmp_path)
    keep(outcome(200.0, other), tmp_path)
    assert check([outcome(104.9), outcome(190.0, other)], tmp_path).holds
    verdict = check([outcome(106.0), outcome(190.0, other)], tmp_path)
    slower = [line for line in verdict.lines if line.startswith("slower")]
    assert not verdict.holds and len(slower) == 1
    assert (
        "hd128-4k-full ours bfloat16, 106.0 us, recorded 100.0 (then); 1.060 times by time, 1.05 allowed" in slower[0]
    )
    assert check([outcome(106.0)], tmp_path, "--tolerance", "0.07").holds
    assert "Checked 2 of 2 against then by kernel time" in verdict.lines[0]


def test_the_newest_record_of_the_same_gpu_type_and_shape_counts(tmp_path):
    keep(outcome(50.0), tmp_path, commit="old")
    keep(outcome(100.0), tmp_path)
    keep(outcome(50.0, graph=False), tmp_path)
    keep(outcome(50.0), tmp_path, gpu="NVIDIA H200 NVL")
    keep(outcome(50.0, dtype="float16"), tmp_path)
    keep(outcome(50.0, impl="fa3"), tmp_path)
    keep(outcome(50.0, NAMED["hd128-4k-causal"]), tmp_path)
    assert check([outcome(101.0)], tmp_path).holds
    assert not check([outcome(106.0)], tmp_path).holds
    assert check([outcome(101.0), outcome(500.0, impl="fa3")], tmp_path).holds  # a peer's time is not ours to keep


def test_a_run_with_fewer_rounds_is_no_baseline(tmp_path):
    keep(outcome(100.0), tmp_path)
    keep(outcome(50.0, rounds=options.QUICK.rounds), tmp_path, commit="quick")
    keep(outcome(50.0, rounds=Pace.rounds - 1), tmp_path, commit="cut short")
    assert "against then by" in check([outcome(101.0)], tmp_path).lines[0]
    assert check([outcome(101.0, rounds=2)], tmp_path).holds
    (path,) = tmp_path.rglob("*.jsonl")
    old = {key: value for key, value in json.loads(path.read_text().splitlines()[0]).items() if key != "rounds"}
    path.write_text(path.read_text() + json.dumps({**old, "graph_us": 90.0, "commit": "says nothing"}) + "\n")
    verdict = check([outcome(101.0)], tmp_path)
    assert not verdict.holds and "against says nothing by" in verdict.lines[0]


def test_quick_says_how_many_rounds_by_itself(capsys):
    with pytest.raises(SystemExit):
        forward.parser().parse_args(["--quick", "--rounds", "9"])
    assert "argument --rounds: not allowed with argument --quick" in capsys.readouterr().err


def test_accurate_and_fast_are_held_to_their_own_records(tmp_path):
    accurate, fast = Config(2, 128, promotion=1), Config(2, 128)
    keep(outcome(100.0, dtype=peers.FP8, config=accurate), tmp_path, "fp8")
    keep(outcome(50.0, dtype=peers.FP8, config=fast), tmp_path, "fp8")

    def both(accurate_us, fast_us):
        mine = [outcome(accurate_us, dtype=peers.FP8, config=accurate), outcome(fast_us, dtype=peers.FP8, config=fast)]
        return check(mine, tmp_path, suite="fp8")

    assert both(101.0, 51.0).holds
    (line,) = (line for line in both(101.0, 60.0).lines if line.startswith("slower"))
    assert "float8_e4m3fn fast, 60.0 us" in line


def test_against_cublas_takes_the_clock_out(tmp_path):
    keep(outcome(100.0), tmp_path)
    slow = dataclasses.replace(H200, origin=dataclasses.replace(H200.origin, cublas_tflops=720.0))
    ten_percent = outcome(100.0 / 0.9)
    assert not check([ten_percent], tmp_path, machine=slow).holds
    assert check([ten_percent], tmp_path, "--against", "cublas", machine=slow).holds
    assert not check([ten_percent], tmp_path, "--against", "cublas").holds


def test_what_cannot_be_compared_is_no_success(tmp_path):
    keep(outcome(100.0), tmp_path)
    for mine in ([outcome(100.0, NAMED["tiny"])], [outcome(100.0, graph=False)], []):
        assert not check(mine, tmp_path).holds
    verdict = check([outcome(100.0), outcome(1.0, NAMED["tiny"])], tmp_path)
    assert verdict.holds and "Not recorded yet, or without kernel time: tiny ours bfloat16" in verdict.lines


@pytest.mark.parametrize(
    "now, record, status, written", [(104.0, [], 0, 0), (106.0, [], 1, 0), (106.0, ["--record"], 1, 1)]
)
def test_forward_ends_with_1_where_it_is_slower_and_keeps_nothing(monkeypatch, tmp_path, now, record, status, written):
    from bench.recorded import read

    keep(outcome(100.0), tmp_path / "before")
    monkeypatch.setattr(regression, "read", lambda gpu, suite, _: read(gpu, suite, tmp_path / "before"))
    monkeypatch.setattr(forward, "open_machine", lambda device, commit: dataclasses.replace(H200, device="cpu"))
    monkeypatch.setattr(forward, "measure", lambda *_: [outcome(now)])
    given = ["--device", "cpu", "--shapes", POINT.name, "--impl", "ours", "--out", str(tmp_path / "after"), "--check"]
    assert forward.main([*given, *record]) == status
    assert len(read("h200", "forward", tmp_path / "after")) == written


def test_a_run_that_is_recorded_is_not_held_to_itself(monkeypatch, tmp_path):
    from bench.recorded import read

    keep(outcome(100.0), tmp_path)
    monkeypatch.setattr(regression, "read", lambda gpu, suite, _: read(gpu, suite, tmp_path))
    monkeypatch.setattr(forward, "open_machine", lambda device, commit: dataclasses.replace(H200, device="cpu"))
    monkeypatch.setattr(forward, "measure", lambda *_: [outcome(200.0)])
    given = ["--device", "cpu", "--shapes", POINT.name, "--impl", "ours", "--out", str(tmp_path), "--check", "--record"]
    assert forward.main(given) == 1
    assert [r["graph_us"] for r in read("h200", "forward", tmp_path)] == [100.0, 200.0]


@pytest.mark.parametrize("record, written", [([], False), (["--record"], True)])
def test_fp8_without_anything_to_compare_fails_too(tmp_path, capsys, record, written):
    given = ["--device", "cpu", "--shapes", "tiny", "--impl", "bf16", "--quick", "--check", "--out", str(tmp_path)]
    assert fp8.main([*given, *record]) == 1
    assert (tmp_path / "cpu" / "fp8.jsonl").exists() == written
    assert "Checked 0 of 1 against nothing" in capsys.readouterr().out


# FlashInfer


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
