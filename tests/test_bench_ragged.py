"""Suite ragged without a GPU: equal sequences with the same FLOPs, how outputs are checked, what is asked for."""

import dataclasses
import inspect
import json
import math

import pytest
import torch

import fa3
from bench import goals, ragged, records, serving_tables
from bench.machine import Machine, open_machine
from bench.measure import Contender, Outcome, Pace
from bench.ragged_cases import GROUPS, NAMED, ONE_LONG, PAGED, SHOWN, UNIFORM
from bench.recorded import Records, points
from bench.serving_peers import VARLEN
from fa3 import cli
from fa3.testing.timing import Spread, Timing

H200 = Machine("cuda", 132, 0, records.Origin("NVIDIA H200", "2.11.0", "abc", 989.5))
CPU = open_machine("cpu", "abc")
TINY = NAMED["tiny-causal"]


def row(case, us, impl="ours", second=0):
    spread = Spread(us, us, us, us, us, Pace.rounds)
    outcome = Outcome(
        Contender(impl, "bfloat16", None), case.shape, Timing(spread, spread, spread, graph_calls=2), 1.0,
        cublas_tflops=700.0,
    )  # fmt: skip
    made = ragged.Ragged(case, outcome).record(H200)
    return {**made, "date": f"2026-11-29T15:{second // 60:02}:{second % 60:02}+00:00"}


def judged(rows, what):
    (goal,) = (goal for goal in goals.GOALS["ragged"] if goal.what.startswith(what))
    found = goal.figure(points(rows, "bfloat16"))
    return found and (goal.is_met(found.value), pytest.approx(found.value, rel=1e-3), found.where)


# Cases


@pytest.mark.parametrize("case", NAMED.values(), ids=lambda case: case.name)
def test_equal_sequences_have_the_flops_of_the_ragged_ones(case):
    sizes = ((dataclasses.replace(case.shape, batch=1, seqlen_q=n, seqlen_k=n)).flops for n in case.lengths)
    allowed = 2e-2 if "tiny" in case.name else 5e-4  # a length is whole
    assert case.shape.flops == pytest.approx(sum(sizes), rel=allowed)
    assert case.shape.batch == len(case.lengths) and case.shape.seqlen_q == case.shape.seqlen_k


def test_the_cases_are_those_that_are_asked_for():
    drawn = UNIFORM[0].lengths
    assert len(drawn) == 64 and 1 <= min(drawn) < 500 and 7700 < max(drawn) <= 8192 and UNIFORM[1].lengths == drawn
    assert 3500 < sum(drawn) / 64 < 4700
    assert ONE_LONG[0].lengths == (65536, *[512] * 63)
    assert {case.shape.causal for case in UNIFORM} == {case.shape.causal for case in ONE_LONG} == {True, False}
    assert {(page, *case.lengths) for page, cases in PAGED.items() for case in cases} == {
        (page, 16384) for page in (16, 64, 128)
    }
    assert all((case.shape.heads, case.shape.head_dim) == (16, 128) for case in NAMED.values())
    assert set(GROUPS) == {"uniform", "one-long", "paged"} and not any(case.page_size for case in SHOWN)


# Measuring


def test_an_output_is_held_to_parts_of_the_first_the_longest_and_the_last_sequence():
    tensors = ragged.make_tensors(TINY.lengths, TINY.shape, CPU)
    assert tensors.starts.tolist() == [0, 40, 41, 41, 105] and tensors.most == 64
    checks = ragged.Checks(TINY.lengths, TINY.shape, tensors)
    assert checks.rows == [slice(0, 40), slice(41, 105)]
    out = VARLEN["naive"]()(tensors, TINY)()
    assert checks.ratio(out) <= 1.0 and checks.ratio((out, None)) <= 1.0
    full = dataclasses.replace(TINY, shape=dataclasses.replace(TINY.shape, causal=False))
    assert checks.ratio(VARLEN["naive"]()(tensors, full)()) > 2.0
    for place in (0, 40, 104):  # 40 is of a sequence that no part is of
        broken = out.clone()
        broken[place, 15, 127] = math.nan
        assert checks.ratio(broken) == math.inf


def test_every_implementation_gets_its_sequences_and_what_is_wrong_is_not_timed():
    def wrong(tensors, case):
        return lambda: torch.zeros_like(tensors.q)

    def refusing(tensors, case):
        raise ValueError("no such case")

    pace = Pace(rounds=1, seconds=1e-4, rest=0.0)
    seen = {}

    def noting(name):
        def bind(tensors, case):
            seen[name] = tensors.starts.tolist()
            return VARLEN["naive"]()(tensors, case)

        return bind

    binds = {"ours": noting("ours"), "ours_dense": noting("ours_dense"), "fa3": wrong, "fa4": refusing}
    made = {of.outcome.contender.impl: of.outcome for of in ragged.measure(binds, TINY, CPU, pace)}
    assert seen == {"ours": [0, 40, 41, 41, 105], "ours_dense": [0, 38, 76, 114, 152]}
    assert made["ours"].timing and made["ours_dense"].timing and not made["fa3"].timing
    assert made["fa3"].problem.startswith("wrong: ") and made["fa4"].problem == "ValueError: no such case"


@pytest.mark.parametrize("name", ["ours_equal", "ours_dense"])
def test_ours_on_equal_sequences_answers_as_the_check_wants(name):
    lengths = (TINY.shape.seqlen_q,) * TINY.shape.batch
    tensors = ragged.make_tensors(lengths, TINY.shape, CPU)
    call = VARLEN[name]()(tensors, TINY)
    assert ragged.Checks(lengths, TINY.shape, tensors).ratio(call()) <= 2.0


# Records, goals, tables


def test_a_record_has_two_keys_more_and_the_sequences_in_its_config(tmp_path):
    made = row(UNIFORM[0], 9000.0)
    assert tuple(made) == (*records.FIELDS, "page_size", "mode")
    drawn = UNIFORM[0].lengths
    assert made["config"] == {"case": "uniform-8k-causal", "tokens": sum(drawn), "longest": max(drawn)}
    assert made["tflops"] == pytest.approx(UNIFORM[0].shape.flops / 9e9, abs=0.01)
    assert made["cublas_fraction"] == pytest.approx(made["tflops"] / 700.0, abs=1e-4)
    assert row(PAGED[64][0], 1.0)["page_size"] == 64
    assert records.append(row(UNIFORM[0], 1.0, "ours_equal"), tmp_path).name == "ragged.jsonl"


def test_lengths_are_held_to_the_dense_batch_and_the_long_one_to_equal_ones():
    for share, fits in ((0.925, True), (0.915, False)):
        rows = [row(UNIFORM[0], 100.0 / share), row(UNIFORM[0], 100.0, "ours_dense"), row(UNIFORM[1], 900.0)]
        assert judged(rows, "lengths of 1 to 8K") == (fits, share, "uniform-8k-causal")
    assert judged(rows[:1], "lengths of 1 to 8K") is None
    for times, fits in ((1.095, True), (1.105, False)):
        rows = [row(case, us, impl) for case, slow in zip(ONE_LONG, (1.0, times), strict=True)
                for impl, us in (("ours", 100.0 * slow), ("ours_equal", 100.0))]  # fmt: skip
        assert judged(rows, "one sequence of 64K") == (fits, times, "one-64k-full; 2 of 2")


def test_pages_are_held_to_contiguous_and_to_dense():
    for share, fits in ((0.955, True), (0.945, False)):
        case = PAGED[64][1]
        rows = [row(case, 100.0), row(case, 100.0 * share, "ours_equal"), row(case, 97.0, "ours_dense")]
        assert judged(rows, "16K in pages: TFLOP/s over contiguous") == (fits, share, f"{case.name}; 1 of 6")
        assert judged(rows, "16K in pages: TFLOP/s over dense") == (True, 0.97, f"{case.name}; 1 of 6")


def test_the_tables_are_there_once_all_cases_are(tmp_path):
    for name, command in (("ragged", ""), ("ragged-paged", " --shapes paged")):
        wanted = f"Not measured yet: `python -m fa3 bench ragged{command}`."
        assert serving_tables.BLOCKS[name](Records("h200", tmp_path)) == wanted
    for n, case in enumerate(SHOWN):
        for impl, speed in (("ours", 600), ("ours_equal", 625), ("ours_dense", 650), ("fa3", 500)):
            records.append(row(case, case.shape.flops / speed / 1e6, impl, 12 * n), tmp_path)
    text = serving_tables.BLOCKS["ragged"](Records("h200", tmp_path))
    assert "| one-64k-full | 600 | 625 | 650 | 0.960 | 0.923 | FlashAttention-3 500 | 1.200 |" in text
    assert text.count("\n|") == 2 + 4
    assert serving_tables.BLOCKS["ragged-paged"](Records("h200", tmp_path)).startswith("Not measured yet")


# The command


def test_it_runs_on_a_cpu_and_keeps_records(tmp_path, capsys):
    given = ["--device", "cpu", "--shapes", "tiny-causal", "--quick", "--out", str(tmp_path)]
    assert cli.main(["bench", "ragged", *given, "--impl", "ours_dense", "naive"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "cpu" / "ragged.jsonl").read_text().splitlines()]
    assert [(line["impl"], line["config"]["case"], line["seqlen_k"]) for line in lines] == [
        ("ours_dense", "tiny-causal", 38), ("naive", "tiny-causal", 38),
    ]  # fmt: skip
    assert "tiny-causal: ours_dense " in capsys.readouterr().out


@pytest.mark.parametrize("is_there", [False, True])
def test_paged_cases_wait_for_the_argument(is_there, monkeypatch, tmp_path, capsys):
    def without(q): ...
    def with_pages(q, page_table): ...

    monkeypatch.setattr(fa3, "flash_attn_varlen_func", with_pages if is_there else without)
    assert ragged.takes_pages() is is_there
    measured = []
    monkeypatch.setattr(ragged, "measure", lambda binds, case, *_: measured.append((case.name, [*binds])) or [])
    monkeypatch.setattr(ragged, "table_of", lambda *_: "")
    given = ["--device", "cpu", "--out", str(tmp_path), "--shapes", "paged-16k-page16-causal", "tiny-causal"]
    assert cli.main(["bench", "ragged", *given, "--impl", "ours", "naive"]) == 0
    said = "Not there yet, flash_attn_varlen_func takes no page_table: paged-16k-page16-causal"
    assert (said in capsys.readouterr().out) is not is_there
    assert measured == [
        *([("paged-16k-page16-causal", ["ours"])] if is_there else []),
        ("tiny-causal", ["ours", "naive"]),
    ]
    assert "page_table" not in inspect.signature(without).parameters


def test_ours_missing_or_wrong_is_status_1(tmp_path, monkeypatch, capsys):
    given = ["--device", "cpu", "--shapes", "tiny-causal", "--quick", "--out", str(tmp_path), "--impl", "ours_dense"]

    def missing():
        raise ImportError("no such function")

    def wrong(tensors, case):
        return lambda: torch.zeros_like(tensors.q)

    for loader, said in ((missing, "ours_dense is not here: ImportError"), (lambda: wrong, "ours_dense bf16: wrong")):
        monkeypatch.setitem(VARLEN, "ours_dense", loader)
        assert cli.main(["bench", "ragged", *given]) == 1
        assert said in capsys.readouterr().out
