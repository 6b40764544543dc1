"""The benchmarks without a GPU: what they count, what they write, in which order they measure; no time is asserted."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import ablation, forward, measure, options, peers, records, report, sweep
from bench.check import LIMIT, Check, parts
from bench.machine import Machine, NoDevice, open_machine
from bench.measure import Contender, Outcome, Pace
from bench.model import of_record
from bench.peers import config_of
from bench.shapes import NAMED, Shape, select
from fa3.kernels.forward.config import Config, Spec
from fa3.reference import attention
from fa3.testing import timing

ROOT = Path(__file__).parent.parent
KEYS = {
    "suite", "impl", "dtype",
    "head_dim", "head_dim_v", "causal", "batch", "seqlen_q", "seqlen_k", "heads", "heads_kv", "pass",
    "graph_us", "graph_lower_us", "graph_upper_us", "graph_calls",
    "eager_us", "cpu_us", "rounds", "tflops", "peak_fraction", "cublas_fraction",
    "config", "gpu", "torch", "date", "commit",
}  # fmt: skip
VARIANTS = records.RESULTS / "h200" / "variants.jsonl"  # searches, in keys of their own
FP8_VARIANTS = records.RESULTS / "h200" / "fp8_variants.jsonl"
VARIANT = re.compile(r"b(?P<hd>\d+)_(?P<dv>\d+)(?P<mask>[cf])_\dx\d+s\dop?[PD]?e?Q?(-\w+)?")
HOPPER = records.Origin("NVIDIA H200", "2.11.0", "abc", peak_tflops=989.5, cublas_tflops=800.0)
TINY = NAMED["tiny"]


def square(**changes):
    return dataclasses.replace(Shape("x", 2, 8, 8, 4, 2, 64, 64, False), **changes)


# Records


def test_a_record_has_exactly_the_keys_and_the_derived_numbers():
    shape = NAMED["hd128-16k-full"]
    config = Config(warpgroups=2, tile_n=128)
    r = records.record(
        HOPPER, "forward", "ours", "bfloat16", shape,
        graph_us=3141.592653, eager_us=3200.0, cpu_us=20.0, rounds=4, config=config,
    )  # fmt: skip
    assert set(r) == KEYS and tuple(r) == records.FIELDS
    assert r["graph_us"] == 3141.593 and r["tflops"] == 699.97  # 2.199023e12 / 3.141593e-3
    assert r["peak_fraction"] == 0.7074 and r["cublas_fraction"] == 0.875
    assert r["config"] == dataclasses.asdict(config) and r["rounds"] == 4
    assert (r["head_dim"], r["batch"], r["seqlen_k"], r["heads_kv"], r["pass"]) == (128, 1, 16384, 16, "fwd")


def test_a_record_has_the_quartiles_of_the_kernel_time():
    quartiles = timing.spread([100.0, 104.0, 102.0, 110.0, 101.0])
    r = records.record(HOPPER, "forward", "ours", "bfloat16", TINY, graph=quartiles, graph_calls=20, rounds=5)
    assert (r["graph_us"], r["graph_lower_us"], r["graph_upper_us"], r["graph_calls"]) == (102.0, 101.0, 104.0, 20)
    alone = dataclasses.replace(outcome("ours", 5.0), cublas_tflops=700.0)
    alone = dataclasses.replace(alone, timing=dataclasses.replace(alone.timing, graph_calls=1))
    r = alone.record(open_machine("cpu", "abc"), "forward")
    assert (r["graph_us"], r["graph_lower_us"], r["graph_calls"]) == (5.0, 5.0, 1)
    assert r["cublas_fraction"] == pytest.approx(r["tflops"] / 700.0, abs=1e-3)


def test_a_record_without_kernel_time_has_no_speed():
    r = records.record(HOPPER, "forward", "fa4", "float16", TINY, eager_us=10.0)
    assert (r["graph_us"], r["tflops"], r["peak_fraction"], r["cublas_fraction"], r["config"]) == (None,) * 5


def test_records_are_appended_below_the_gpu_and_the_suite(tmp_path):
    r = records.record(HOPPER, "forward", "cudnn", "bfloat16", TINY, graph_us=1.0, eager_us=2.0, cpu_us=3.0)
    assert records.append(r, tmp_path) == records.append(r, tmp_path) == tmp_path / "h200" / "forward.jsonl"
    lines = (tmp_path / "h200" / "forward.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [r, r]
    with pytest.raises(ValueError, match="a record has the keys"):
        records.append({**r, "extra": 1}, tmp_path)
    with pytest.raises(ValueError, match="impl must be one of"):
        records.record(HOPPER, "forward", "flash", "bfloat16", TINY)


@pytest.mark.parametrize(
    "gpu, short",
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GH200 480GB", "gh200"), ("cpu", "cpu")],
)
def test_short_name_of_a_gpu(gpu, short):
    assert records.short_name(gpu) == short


def test_the_commit_is_given_or_of_the_environment_or_of_git(monkeypatch):
    monkeypatch.setenv("FA3_COMMIT", "fromenv")
    assert records.commit("given") == "given" and records.commit() == "fromenv"
    monkeypatch.delenv("FA3_COMMIT")
    monkeypatch.setattr(records, "ROOT", Path("/"))
    assert records.commit() == "unknown"


def test_results_in_the_repository_are_records():
    for path in set(records.RESULTS.rglob("*.jsonl")) - {VARIANTS, FP8_VARIANTS}:
        for line in path.read_text().splitlines():
            r = json.loads(line)
            assert {*r, *records.ADDED_FIELDS} == KEYS | set(records.MORE_FIELDS.get(r["suite"], ())), path
            assert r["impl"] in (*peers.IMPLS, *peers.OTHERS)
            assert (records.short_name(r["gpu"]), r["suite"]) == (path.parent.name, path.stem)
            if r["tflops"] is not None:
                shape = Shape("", **{name: r[name] for name in records.PROBLEM})
                assert r["tflops"] == pytest.approx(shape.flops / r["graph_us"] / 1e6, rel=1e-3, abs=0.006)


def test_the_fp8_searches_in_the_repository():
    rows = [json.loads(line) for line in FP8_VARIANTS.read_text().splitlines()]
    assert {r["run"] for r in rows} == set(range(1, 25))
    places = [(r["run"], r["kernels"], r["shape"], r["name"]) for r in rows]
    assert len(set(places)) == len(places)
    for r in rows:
        assert set(r) - {"problem"} == {"run", "kernels", "shape", "name", "tflops", "commit"}
        assert r["shape"] in NAMED and 0 < r["tflops"] < 2 * HOPPER.peak_tflops


def test_the_searches_in_the_repository_are_named_as_docs_tuning_says():
    points = [json.loads(line) for line in VARIANTS.read_text().splitlines()]
    assert len({(r["run"], r["hd"], r["dv"], r["causal"], r["S"]) for r in points}) == len(points)
    commits = {2: "c08f74b", 4: None, 8: None, 10: "e0268b3", 21: None, 22: None, 23: None}
    assert {(r["run"], r["commit"]) for r in points} == set(commits.items())
    for r in points:
        assert set(r) == {"hd", "dv", "S", "causal", "tf", "run", "commit"}
        assert all(0 < tflops < HOPPER.peak_tflops for tflops in r["tf"].values())
        for name in r["tf"].keys() - {"FA4", "FA3", "cuDNN"}:
            found = VARIANT.fullmatch(name)
            assert found, name
            assert (int(found["hd"]), int(found["dv"]), found["mask"] == "c") == (r["hd"], r["dv"], r["causal"])


# The check


def test_parts_are_again_bottom_right_problems():
    first, middle, last = parts(square(batch=3, seqlen_q=1000, seqlen_k=1200, causal=True))
    assert (first.batch, first.head, first.start, first.stop, first.num_keys) == (0, 0, 0, 256, 456)
    assert (middle.start, middle.stop, middle.num_keys) == (372, 628, 828)
    assert (last.batch, last.head, last.start, last.stop, last.num_keys) == (2, 3, 744, 1000, 1200)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(700, 700), (300, 900), (600, 400)])
def test_the_check_passes_what_is_right_and_nothing_else(causal, seqlen_q, seqlen_k):
    shape = square(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 64, dtype=torch.bfloat16) for n, h in ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2)))
    check = Check(shape, q, k, v)
    right = attention(q.double(), k.double(), v.double(), causal=causal)[0]
    assert check.ratio(right) < 1e-9
    assert check.ratio(attention(q, k, v, causal=causal)[0]) == pytest.approx(1.0, rel=0.01)
    if causal or seqlen_q != seqlen_k:
        assert check.ratio(attention(q, k, v, causal=not causal)[0]) > LIMIT
    wrong_head = right[:, :, [0, 1, 2, 0]]
    assert check.ratio(wrong_head) > LIMIT
    unwritten = right.clone()
    unwritten[1, -1, 3, 5] = float("nan")
    assert check.ratio(unwritten) == float("inf")


def contenders_on_cpu():
    def broken(q, k, v, causal):
        raise RuntimeError("no such head dim\nsecond line")

    return [
        Contender("naive", "bfloat16", peers.load(["naive"])[0]["naive"]),
        Contender("cudnn", "bfloat16", broken),
        Contender("fa2", "bfloat16", lambda q, k, v, causal: torch.zeros_like(q)),
    ]


def test_what_fails_or_is_wrong_is_named_and_not_timed():
    machine = open_machine("cpu", "abc")
    naive, refused, wrong = measure.measure(contenders_on_cpu(), TINY, machine, Pace(1, 0.001, 0.0))
    assert naive.timing is not None and naive.error == pytest.approx(1.0, rel=0.01)
    assert refused.timing is None and refused.problem == "RuntimeError: no such head dim"
    assert wrong.timing is None and wrong.problem.startswith("wrong:") and wrong.error > LIMIT
    assert refused.us == float("inf")
    assert set(naive.record(machine, "forward")) == KEYS


# The table


def outcome(impl, us, dtype="bfloat16", shape=NAMED["hd128-4k-full"], graph=True):
    s = timing.Spread(us, us, us, us, us, 1)
    return Outcome(Contender(impl, dtype, None), shape, timing.Timing(s if graph else None, s, s), 1.0)


def test_the_ratio_is_to_the_best_peer_of_the_same_type():
    point = [
        outcome("ours", 105.0),
        outcome("cudnn", 120.0),
        outcome("fa3", 100.0),
        outcome("naive", 1.0),
    ]
    assert report.ratio([*point, outcome("fa4", 10.0, "float16")], "bfloat16") == pytest.approx(1.05)
    assert report.ratio(point, "float16") is None


def test_the_table_prints_speeds_and_stars(capsys):
    point = [outcome("ours", 1000.0), outcome("cudnn", 1100.0, graph=False)]
    out = report.console()
    out.print(report.points_table([point], ["ours", "cudnn"]))
    text = capsys.readouterr().out
    assert "550 ±0" in text and "500 ±0*" in text and "0.909*" in text  # 5.498e11 FLOP in a millisecond


def test_the_terminal_shows_ours_as_a_share_of_the_peak_of_cublas_and_of_the_model(capsys):
    point = outcome("ours", 800.0, shape=NAMED["hd128-4k-full"])
    config = config_of(point.shape, "bfloat16", 132)
    point = dataclasses.replace(
        point, contender=dataclasses.replace(point.contender, config=config), cublas_tflops=750.0
    )
    machine = Machine("cuda", 132, 0, dataclasses.replace(HOPPER, cublas_tflops=None))
    bound = of_record(point.record(machine, "forward")).bound
    report.console().print(report.utilization_table([[point, outcome("cudnn", 900.0)]], machine, "forward"))
    cells = capsys.readouterr().out.splitlines()[-2].split()
    assert cells == ["hd128-4k-full", "bf16", "800.0", "800.0", "69.5%", "91.6%", f"{bound / 800:.1%}"]
    (line,) = report.product([point, dataclasses.replace(outcome("ours", 1.0, shape=TINY), cublas_tflops=700.0)])
    assert line == "cuBLAS bf16 8192^3, in turn with the others: 725 TFLOP/s (700 to 750 by shape)"
    assert report.product([outcome("ours", 1.0)]) == []


def test_the_matrix_product_takes_turns_and_is_no_contender(monkeypatch):
    asked = []

    def compare(calls, **options):
        asked.append((list(calls), options["alone"], options["rest"]))
        times = {name: 1000.0 if name == measure.PRODUCT else 50.0 for name in calls}
        return {name: timing.Timing(None, *[timing.Spread(us, us, us, us, us, 1)] * 2) for name, us in times.items()}

    monkeypatch.setattr(measure, "compare", compare)
    monkeypatch.setattr(measure, "matrix_product", lambda: len)
    found, cublas = measure.timed(
        {"ours": [list]}, dataclasses.replace(open_machine("cpu"), device="cuda"), Pace(), {"ours"}
    )
    assert asked == [(["ours", "cublas"], {"ours"}, Pace.rest)]
    assert found.keys() == {"ours"} and cublas == pytest.approx(2 * 8192**3 / 1e9)  # in a millisecond
    assert measure.timed({}, open_machine("cpu"), Pace()) == ({}, None)


# Sweep, ablation, host


def test_the_ablation_changes_nothing_but_its_switches():
    config = Config(warpgroups=3, tile_n=96, stages=3, persistent=True)
    named = ablation.variants(config)
    assert {(c.overlap, c.pingpong, c.optimistic) for c in named.values()} == {
        (False, False, False),
        (False, True, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    }
    assert {dataclasses.replace(c, overlap=True, pingpong=True, optimistic=False) for c in named.values()} == {config}


def test_the_sweep_tries_every_combination_that_fits():
    args = sweep.parser().parse_args(
        ["--tile-n", "64", "128", "32", "--stages", "2", "3", "--warpgroups", "2", "--overlap", "on", "off"]
    )
    configs = sweep.candidates(args)
    assert len(configs) == len(set(configs)) == 3 * 2 * 2 * 2 * 2
    spec = Spec("bfloat16", 128, 128, False)
    assert sweep.fits(spec, Config(2, 176)) and sweep.fits(spec, Config(2, 128, 3, persistent=True))
    assert not sweep.fits(spec, Config(2, 192, 3))  # 337 KB
    assert not sweep.fits(spec, Config(3, 176))  # 64 + 88 + 44 fragments in 160 registers
    assert not sweep.fits(spec, Config(1, 64)) and sweep.fits(spec, Config(1, 64, pingpong=False))
    assert not sweep.fits(Spec("bfloat16", 256, 256, False), Config(3, 80))


def test_the_sweep_drops_what_spills_or_does_not_compile(monkeypatch):
    from fa3.kernels import compile as compiler
    from fa3.kernels import sass

    def inspect(spec, config):
        if config.tile_n == 96:
            raise ValueError("no such tile")
        return SimpleNamespace(cubin=config.tile_n)

    monkeypatch.setattr(compiler, "inspect", inspect)
    monkeypatch.setattr(sass, "resources", lambda cubin: SimpleNamespace(stack_bytes=168 if cubin == 176 else 0))
    spec = Spec("bfloat16", 128, 128, False)
    kernels = [(spec, Config(2, n)) for n in (64, 96, 176)]
    good, dropped = sweep.without_spills(kernels, jobs=2)
    assert good == kernels[:1]
    assert [line.split(": ", 1)[1] for line in dropped] == ["ValueError: no such tile", "spills: 168 bytes of stack"]


def test_the_first_call_is_refused_the_compiler():
    code = (
        "import sys, subprocess\nfrom bench import first_call as f\nfrom fa3.kernels import process\n"
        "sys.meta_path.insert(0, f.Forbidden()); sys.addaudithook(f.refuse_compiler)\n"
        "compiler = lambda: process.run(len, (), environment={}, notice=print)\n"
        "for action in (lambda: __import__('cutlass.cute'), compiler):\n"
        "    try: action()\n"
        "    except (ImportError, RuntimeError) as e: print(e)\n"
        "print(subprocess.run([sys.executable, '-c', '']).returncode)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    words = ["cutlass is forbidden here", "a compiler was started: the kernel is not in the cache", "0"]
    assert done.stdout.splitlines() == words


# The commands


def read_records(folder, suite):
    return [json.loads(line) for line in (folder / "cpu" / f"{suite}.jsonl").read_text().splitlines()]


@pytest.fixture
def no_kernels(monkeypatch):
    """Kernels compile at once and are plain PyTorch on the CPU; the one with 96 keys to a block does not load."""

    def kernel(spec, config, shape, num_sms):
        if config.tile_n == 96:
            raise RuntimeError("no such kernel")
        return lambda q, k, v, causal: attention(q, k, v, causal=causal)[0]

    for module in (ablation, sweep):
        monkeypatch.setattr(module, "compile_ahead", lambda kernels, jobs: {})
        monkeypatch.setattr(module, "open_machine", lambda device, commit: open_machine("cpu", "abc"))
    monkeypatch.setattr(measure, "kernel", kernel)


def test_the_ablation_records_every_order(no_kernels, tmp_path, capsys):
    assert ablation.main(["--shapes", "tiny", "--rounds", "1", "--out", str(tmp_path)]) == 0
    rows = read_records(tmp_path, "ablation")
    switches = [tuple(r["config"][name] for name in ("overlap", "pingpong", "optimistic")) for r in rows]
    assert switches == list(ablation.SWITCHES.values())
    assert all(set(r) == KEYS and r["impl"] == "ours" for r in rows)
    assert "(1.000x)" in capsys.readouterr().out


def test_the_sweep_records_what_loads_and_names_the_rest(no_kernels, tmp_path, capsys):
    arguments = [
        "--shapes",
        "tiny",
        "--tile-n",
        "64",
        "128",
        "32",
        "--warpgroups",
        "2",
        "--keep-spills",
        "--rounds",
        "1",
    ]
    assert sweep.main([*arguments, "--pingpong", "on", "--persistent", "off", "--out", str(tmp_path)]) == 0
    assert [r["config"]["tile_n"] for r in read_records(tmp_path, "sweep")] == [64, 128]
    out = capsys.readouterr().out
    assert "3 kernels compiled, 0 dropped" in out and "best 2 of 3" in out and "RuntimeError: no such kernel" in out


def run(module, *args):
    command = [sys.executable, "-m", f"bench.{module}", *args]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("module", ["forward", "ablation", "sweep", "startup", "host", "fp8", "accuracy"])
def test_without_a_gpu_every_command_says_so_and_ends_with_2(module):
    done = run(module)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"bench.{module}: this benchmark needs a CUDA GPU and torch sees none here.\n"


def test_help_needs_no_gpu():
    done = run("forward", "--help")
    assert done.returncode == 0 and "--budget-seconds" in done.stdout and done.stderr == ""


def test_a_cpu_run_writes_a_record_for_each_type(tmp_path):
    assert (
        forward.main(
            ["--device", "cpu", "--shapes", "tiny", "--impl", "naive", "reference", "--quick", "--out", str(tmp_path)]
        )
        == 0
    )
    lines = [json.loads(line) for line in (tmp_path / "cpu" / "forward.jsonl").read_text().splitlines()]
    assert [r["impl"] for r in lines] == ["naive", "reference"]
    assert all(set(r) == KEYS and r["rounds"] == options.QUICK.rounds for r in lines)
    assert all(r["graph_us"] is None and r["eager_us"] > 0 and r["cpu_us"] > 0 for r in lines)


def test_a_missing_peer_is_a_line_and_missing_ours_a_failure(monkeypatch, tmp_path, capsys):
    def gone():
        raise ImportError("no such wheel")

    monkeypatch.setitem(peers._LOADERS, "fa4", gone)
    base = ["--device", "cpu", "--shapes", "tiny", "--quick", "--out", str(tmp_path), "--impl", "naive"]
    assert forward.main([*base, "fa4"]) == 0
    assert "fa4 is not here: ImportError: no such wheel" in capsys.readouterr().out
    monkeypatch.setitem(peers._LOADERS, "ours", gone)
    assert forward.main([*base, "ours"]) == 1


def test_no_shape_begins_that_would_end_past_the_budget(monkeypatch, tmp_path, capsys):
    done = []
    monkeypatch.setattr(
        forward,
        "measure",
        lambda contenders, shape, *_: done.append(shape.name) or time.sleep(0.2) or [outcome("naive", 1.0)],
    )
    arguments = [
        "--device",
        "cpu",
        "--shapes",
        "hd64",
        "--impl",
        "naive",
        "--out",
        str(tmp_path),
        "--budget-seconds",
        "0.5",
    ]
    assert forward.main(arguments) == 0
    assert 1 <= len(done) <= 2
    assert f"Not measured, the time was up: {select(['hd64'])[len(done)].name}" in capsys.readouterr().out


def test_the_cpu_has_no_peak_and_no_device_has_no_machine(monkeypatch):
    assert open_machine("cpu").origin.peak_tflops is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoDevice, match="needs a CUDA GPU"):
        open_machine("cuda")
