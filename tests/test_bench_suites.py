"""The command around the benchmarks without a GPU: how suites are found and options passed on; no time is asserted."""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import forward, fp8, machine, options, records, suites
from bench.machine import Machine, NoDevice
from bench.shapes import GRID, NAMED
from fa3 import cli

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
    assert "no suite named 'speed'; there are forward, fp8, decode, ragged, accuracy, host" in capsys.readouterr().err


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
