"""What --check finds, without a GPU: which records count, what is worse, what is kept."""

import argparse
import dataclasses
import json

import pytest

from bench import accuracy, forward, fp8, memory, options, peers, records, regression, traffic
from bench.machine import Machine, open_machine
from bench.measure import Contender, Outcome, Pace
from bench.shapes import NAMED
from fa3.kernels.forward.config import Config
from fa3.testing.timing import Spread, Timing

H200 = Machine("cuda", 132, 0, records.Origin("NVIDIA H200", "2.11.0", "now", 989.5))
POINT = NAMED["hd128-4k-full"]


def outcome(us, shape=POINT, impl="ours", dtype="bfloat16", config=None, graph=True, rounds=Pace.rounds, cublas=800.0):
    spread = Spread(us, us, us, us, us, rounds)
    timing = Timing(spread if graph else None, spread, spread, graph_calls=20 if graph else None)
    return Outcome(Contender(impl, dtype, None, config), shape, timing, 1.0, cublas_tflops=cublas)


def keep(outcome, folder, suite="forward", gpu="NVIDIA H200", commit="then"):
    origin = dataclasses.replace(H200.origin, gpu=gpu, commit=commit)
    return records.append(outcome.record(dataclasses.replace(H200, origin=origin), suite), folder)


def asked(*given, is_of_speed=True):
    parser = argparse.ArgumentParser()
    regression.add_check(parser, is_of_speed=is_of_speed)
    return parser.parse_args(["--check", *given])


def check(outcomes, folder, *given, suite="forward"):
    now = [o.record(H200, suite) for o in outcomes if o.timing]
    return regression.check(now, regression.baseline(H200, suite, folder), asked(*given))


def test_a_point_that_is_slower_by_more_than_the_tolerance_is_named(tmp_path):
    other = NAMED["hd64-1k-full"]
    keep(outcome(100.0), tmp_path)
    keep(outcome(200.0, other), tmp_path)
    assert check([outcome(104.9), outcome(190.0, other)], tmp_path).holds
    verdict = check([outcome(106.0), outcome(190.0, other)], tmp_path)
    slower = [line for line in verdict.lines if line.startswith("worse")]
    assert not verdict.holds and len(slower) == 1
    assert (
        "hd128-4k-full ours bfloat16, 106.0 us, recorded 100.0 (then); 1.060 times by time, 1.05 allowed" in slower[0]
    )
    assert check([outcome(106.0)], tmp_path, "--tolerance", "0.07").holds
    assert "Checked 2 of 2 against then by kernel time" in verdict.lines[0]


def test_records_of_the_same_gpu_type_and_shape_count(tmp_path):
    keep(outcome(100.0), tmp_path)
    keep(outcome(50.0, graph=False), tmp_path)
    keep(outcome(50.0), tmp_path, gpu="NVIDIA H200 NVL")
    keep(outcome(50.0, dtype="float16"), tmp_path)
    keep(outcome(50.0, impl="fa3"), tmp_path)
    keep(outcome(50.0, NAMED["hd128-4k-causal"]), tmp_path)
    assert check([outcome(101.0)], tmp_path).holds
    assert not check([outcome(106.0)], tmp_path).holds
    assert check([outcome(101.0), outcome(500.0, impl="fa3")], tmp_path).holds  # a peer's time is not ours to keep


def test_a_little_slower_every_time_is_found_by_the_best_of_the_newest(tmp_path):
    """Each is 3 % slower than the one before: within 5 % of the newest, not of the best; what is long ago is let go."""
    times = [100.0 * 1.03**n for n in range(regression.NEWEST + 1)]
    keep(outcome(times[0]), tmp_path, commit="first")
    keep(outcome(times[1]), tmp_path)
    assert not check([outcome(times[2])], tmp_path).holds
    assert "recorded 100.0 (first)" in check([outcome(times[2])], tmp_path).lines[-1]
    for us in times[2:]:
        keep(outcome(us), tmp_path)
    assert check([outcome(times[2])], tmp_path).holds  # the best of the newest is times[1]
    assert not check([outcome(times[3])], tmp_path).holds


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
    (line,) = (line for line in both(101.0, 60.0).lines if line.startswith("worse"))
    assert "float8_e4m3fn fast, 60.0 us" in line


def test_against_cublas_takes_the_clock_out(tmp_path):
    path = keep(outcome(100.0), tmp_path)
    ten_percent = outcome(100.0 / 0.9)
    with_clock = outcome(100.0 / 0.9, cublas=720.0)
    assert not check([with_clock], tmp_path).holds
    assert check([with_clock], tmp_path, "--against", "cublas").holds
    assert not check([ten_percent], tmp_path, "--against", "cublas").holds
    # A product that ran alone, before the others, is not what it is compared with.
    old = {key: value for key, value in json.loads(path.read_text()).items() if key not in records.ADDED_FIELDS}
    path.write_text(json.dumps(old) + "\n")
    assert not check([with_clock], tmp_path, "--against", "cublas").holds
    assert check([outcome(100.0)], tmp_path).holds


def test_what_cannot_be_compared_is_no_success(tmp_path):
    keep(outcome(100.0), tmp_path)
    for mine in ([outcome(100.0, NAMED["tiny"])], [outcome(100.0, graph=False)], []):
        assert not check(mine, tmp_path).holds
    verdict = check([outcome(100.0), outcome(1.0, NAMED["tiny"])], tmp_path)
    assert verdict.holds and "Not recorded yet, or without the figure: tiny ours bfloat16" in verdict.lines


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


# Other suites


def line(suite, impl, shape=POINT, config=None, gpu="NVIDIA H200", **figures):
    origin = dataclasses.replace(H200.origin, gpu=gpu, commit="then")
    dtype = peers.FP8 if suite == "accuracy" else "bfloat16"
    cpu_us = figures.pop("cpu_us", None)
    made = records.record(origin, suite, impl, dtype, shape, config=config, cpu_us=cpu_us)
    return {**made, **dict.fromkeys(records.MORE_FIELDS.get(suite, ())), **figures}


CASES = {
    "host time": (line("host", "ours", cpu_us=20.0), {"cpu_us": 22.0}, "22.0 us of the host, recorded 20.0"),
    "host memory": (
        line("host", "ours", config={"extra_bytes": 4000}), {"config": {"extra_bytes": 5000}},
        "5,000 bytes, recorded 4,000",
    ),
    "memory": (line("memory", "ours", case="call", extra_bytes=1000), {"extra_bytes": 1100}, "1,100 bytes, recorded"),
    "traffic": (
        line("traffic", "ours", config={"warpgroups": 2}, dram_bytes=60e6, l2_bytes=2e9), {"l2_bytes": 2.2e9},
        "2,200,000,000 bytes from L2",
    ),
    "accuracy": (
        line("accuracy", "ours", config={"scales": "block", "accumulation": "accurate"}, case="paper", rmse=8e-3),
        {"rmse": 9e-3}, "9.000e-03 RMSE, recorded 8.000e-03",
    ),
}  # fmt: skip


@pytest.mark.parametrize("before, now, words", CASES.values(), ids=CASES)
def test_every_figure_of_ours_is_compared(tmp_path, before, now, words):
    suite = before["suite"]
    records.append(before, tmp_path)
    recorded = regression.baseline(H200, suite, tmp_path)
    args = asked(is_of_speed=False)
    assert regression.check([before], recorded, args).holds
    verdict = regression.check([{**before, **now}], recorded, args)
    assert not verdict.holds and words in verdict.lines[-1], verdict.lines
    assert verdict.lines[0] == "Checked 1 of 1 against then."
    assert not regression.check([{**before, "impl": "naive"}], recorded, args).holds  # nothing of ours


def test_what_differs_in_more_than_the_problem_is_compared_with_its_like(tmp_path):
    for warpgroups, l2 in ((1, 4e9), (3, 1e9)):
        records.append(
            line("traffic", "ours", config={"warpgroups": warpgroups}, dram_bytes=6e7, l2_bytes=l2), tmp_path
        )
    for at, error in ((0.0, 1e-3), (1.0, 5e-3)):
        config = {"scales": "block", "accumulation": "accurate", "at": at}
        records.append(line("accuracy", "ours", config=config, case="needle", rel_error=error), tmp_path)
    args = asked(is_of_speed=False)
    for suite in ("traffic", "accuracy"):
        recorded = regression.baseline(H200, suite, tmp_path)
        assert [len(found) for found in recorded.values()] == [1, 1]
        now = [found[0] for found in recorded.values()]
        assert regression.check(now, recorded, args).holds
    swapped = {**now[1], "config": {**now[1]["config"], "at": 0.0}}
    (worse,) = (words for words in regression.check([swapped], recorded, args).lines if words.startswith("worse"))
    assert "needle block 0.0, 5.000e-03 relative error, recorded 1.000e-03" in worse


def test_the_longest_that_fits_is_no_cost(tmp_path):
    fitted = line("memory", "ours", case="limit, fitted", extra_bytes=10)
    records.append(fitted, tmp_path)
    recorded = regression.baseline(H200, "memory", tmp_path)
    assert recorded == {} and not regression.check([fitted], recorded, asked(is_of_speed=False)).holds
    assert regression.check([fitted], recorded, asked(is_of_speed=False)).lines[0] == "Checked 0 of 0 against nothing."


def test_memory_ends_with_1_where_a_call_takes_more(monkeypatch, tmp_path, capsys):
    """The first run is the baseline of the second, which takes 6 % more."""
    from bench.recorded import read

    monkeypatch.setattr(regression, "read", lambda gpu, suite, _: read(gpu, suite, tmp_path))
    monkeypatch.setattr(memory, "open_machine", lambda *_: open_machine("cpu", "abc"))
    more, given = [1.0], ["--device", "cpu", "--seqlens", "64", "128", "--out", str(tmp_path)]
    monkeypatch.setattr(memory, "measured", lambda attention, shape, machine: int(1000 * shape.seqlen_q * more[0]))
    assert memory.main(given) == memory.main([*given, "--check"]) == 0
    more[0] = 1.06
    assert memory.main([*given, "--check"]) == 1 and memory.main([*given, "--check", "--tolerance", "0.1"]) == 0
    assert "worse: 128 full 64 ours bfloat16 call, 67,840 bytes, recorded 64,000 (abc)" in capsys.readouterr().out
    assert len(read("cpu", "memory", tmp_path)) == 4  # of the first


@pytest.mark.parametrize("module", [accuracy, forward, fp8, memory, traffic])
def test_what_is_compared_is_of_this_suite(module):
    assert module.SUITE in regression.FIGURES
