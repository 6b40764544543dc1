"""Suite decode without a GPU: what its cases count, how outputs are checked, what is recorded, shown and asked for."""

import argparse
import contextlib
import dataclasses
import json
import math
from functools import partial

import pytest
import torch

from bench import decode, goals, recorded, records, regression, serving_plots, serving_tables
from bench.decode_cases import BANDWIDTH, CURVE, DEFAULT, GROUPS, NAMED, PAGED, QUERIES, SHOWN, UNEQUAL, WINDOW
from bench.machine import Machine, open_machine
from bench.measure import Contender, Outcome, Pace
from bench.recorded import NotWhole, Records, points
from bench.serving_peers import DECODERS, keys_of
from bench.shapes import select_of
from fa3 import cli
from fa3.reference import attention
from fa3.testing.timing import Spread, Timing

ORIGIN = records.Origin("NVIDIA H200", "2.11.0", "abc", 989.5)
H200 = Machine("cuda", 132, 0, ORIGIN)
CPU = open_machine("cpu", "abc")
TINY, TINY_DENSE, TINY_WINDOW = NAMED["tiny"], NAMED["tiny-dense"], NAMED["tiny-window"]
PACE = Pace(rounds=1, seconds=1e-4, rest=0.0)
NAIVE = DECODERS["naive"]()


def timing(us, has_graph=True):
    spread = Spread(us, us, us, us, us, Pace.rounds)
    return Timing(spread if has_graph else None, spread, spread, graph_calls=20 if has_graph else None)


def decoded(case, us, impl="ours", cold_us=None, has_graph=True):
    made = Outcome(Contender(impl, "bfloat16", NAIVE), case.shape, timing(us, has_graph), 1.0)
    cold = timing(us if cold_us is None else cold_us, has_graph)
    return decode.Decoded(case, made, cold, {"read": 4.6, "copy": 4.0})


def row(case, us, impl="ours", second=0, **more):
    made = decoded(NAMED[case] if isinstance(case, str) else case, us, impl, **more).record(H200)
    return {**made, "date": f"2026-11-29T15:{second // 60:02}:{second % 60:02}+00:00"}


# Cases


def test_the_cases_are_those_that_are_asked_for():
    assert len(SHOWN) == len({case.name for case in SHOWN}) == 29
    for batch, keys, heads in ((16, 8192, 32), (64, 8192, 32), (128, 2048, 64)):
        pages = {c.page_size for c in SHOWN if (c.shape.batch, c.shape.seqlen_k, c.shape.heads) == (batch, keys, heads)}
        assert pages == {None, 1, 16, 64, 128}
    assert {(c.shape.batch, c.shape.seqlen_k) for c in GROUPS["latency"]} == {(1, 1024), (1, 4096), (1, 65536)}
    mha = {(c.shape.batch, c.shape.seqlen_k, c.page_size) for c in SHOWN if c.shape.heads == c.shape.heads_kv}
    assert mha == {(16, 2048, 8), (16, 2000, 8), (16, 2000, 64), (16, 2000, None)}
    assert {(c.shape.head_dim, c.shape.head_dim_v, c.shape.heads_kv) for c in SHOWN if c not in GROUPS["mha"]} == {
        (128, 128, 8)
    }
    assert [c.name for c in SHOWN if c.captured_at] == ["b1-64k-replayed"] and NAMED["b1-64k-replayed"].captured_at == 1
    assert "curve" not in DEFAULT and all(serving_plots.is_plain(case) for case in CURVE)


def test_cases_are_chosen_by_group_name_or_start():
    def chosen(*names):
        return [case.name for case in select_of(names, GROUPS, NAMED)]

    assert chosen("latency") == ["b1-1k", "b1-4k", "b1-64k"]
    assert chosen("b128-2k-page64", "queries") == ["b128-2k-page64", "b32-8k", "b32-8k-q4"]
    assert chosen("b16-8k") == ["b16-8k", *(f"b16-8k-page{page}" for page in (1, 16, 64, 128))]
    with pytest.raises(ValueError, match="no shape named 'b2'; there are latency, replayed, bandwidth, pages"):
        chosen("b2")


@pytest.mark.parametrize(
    "name, kv_bytes",
    [
        ("b1-1k", 2 * 1024 * 8 * 128 * 2),
        ("b64-8k", 2 * 64 * 8192 * 8 * 128 * 2),
        ("b64-8k-page1", 2 * 64 * 8192 * 8 * 128 * 2),
        ("b128-2k", 2 * 128 * 2048 * 8 * 128 * 2),
        ("mha16-2000-page64", 2 * 16 * 2000 * 32 * 128 * 2),  # not the rest of the last page
        ("b32-8k-q4", 2 * 32 * 8192 * 8 * 128 * 2),
        ("b16-32k-window512", 2 * 16 * 512 * 8 * 128 * 2),
        ("b64-ragged", 2 * (65536 + 63 * 512) * 8 * 128 * 2),
        ("tiny-window", 2 * 2 * 24 * 2 * 64 * 2),
    ],
)
def test_the_bytes_are_those_of_the_keys_that_are_seen(name, kv_bytes):
    assert NAMED[name].kv_bytes == kv_bytes
    assert NAMED[name].tb_per_s(kv_bytes / 4e6) == pytest.approx(4.0)


def test_what_is_set_beside_one_another_reads_as_much():
    for case, beside in (QUERIES, WINDOW, UNEQUAL):
        assert case.kv_bytes == beside.kv_bytes and case.shape.batch == beside.shape.batch
    assert WINDOW[0].window_size == (511, 0) and WINDOW[1].window_size == (-1, -1)
    assert dataclasses.replace(TINY_DENSE, window=24).seen(40) == 25  # the second of two queries sees one key more
    ragged, equal = (case.shape for case in UNEQUAL)
    flops = sum(dataclasses.replace(ragged, batch=1, seqlen_k=keys).flops for keys in UNEQUAL[0].keys)
    assert ragged.flops == equal.flops == flops


# Inputs and their check


def test_pages_are_shuffled_and_all_there_and_hold_the_keys_of_a_sequence():
    (cache,) = decode.make_caches(TINY, CPU)
    assert cache.k.shape == cache.v.shape == (8, 16, 2, 64) and cache.lengths.tolist() == [64, 40]
    assert sorted(cache.page_table.flatten().tolist()) == list(range(8))
    assert cache.page_table.flatten().tolist() != list(range(8)) and cache.page_table.dtype == torch.int32
    table = cache.page_table.tolist()
    k, v = keys_of(cache, TINY, 1)
    assert k.shape == (1, 40, 2, 64)
    for position in (0, 15, 16, 39):
        page, place = table[1][position // 16], position % 16
        assert torch.equal(k[0, position], cache.k[page, place]) and torch.equal(v[0, position], cache.v[page, place])


def test_a_contiguous_cache_is_zero_past_the_keys():
    (cache,) = decode.make_caches(TINY_DENSE, CPU)
    assert cache.page_table is None and cache.k.shape == (2, 64, 2, 64)
    assert cache.k[1, 40:].eq(0).all() and cache.v[1, 40:].eq(0).all() and cache.k[1, :40].ne(0).any()
    assert torch.equal(keys_of(cache, TINY_DENSE, 1)[0], cache.k[1:, :40])
    (windowed,) = decode.make_caches(TINY_WINDOW, CPU)
    assert torch.equal(keys_of(windowed, TINY_WINDOW, 0)[1], windowed.v[:1, 40:])  # the last 24 of 64


def test_caches_that_l2_could_hold_come_in_as_many_as_it_cannot():
    caches = decode.make_caches(TINY, dataclasses.replace(CPU, l2_bytes=TINY.kv_bytes))
    assert len(caches) == 3 and not torch.equal(caches[0].k, caches[1].k)
    assert all(cache.page_table is caches[0].page_table and cache.lengths is caches[0].lengths for cache in caches)


@pytest.mark.parametrize("case", [TINY, TINY_DENSE, TINY_WINDOW], ids=lambda case: case.name)
def test_an_output_is_held_to_float32_and_to_every_sequence(case):
    (cache,) = decode.make_caches(case, CPU)
    check, out = decode.Check(case, cache), NAIVE(cache, case)()
    assert check.sequences == [0, 1] and out.shape == (2, case.shape.seqlen_q, 4, 64)
    assert check.ratio(out) <= 1.0 and check.ratio((out, None)) <= 1.0
    exact = attention(cache.q[1:].float(), *(x.float() for x in keys_of(cache, case, 1)), causal=True)[0]
    assert (out[1:].float() - exact).abs().max() < 0.02
    longer = dataclasses.replace(case, lengths=tuple(keys - 1 for keys in case.keys))
    assert check.ratio(NAIVE(cache, longer)()) > 2.0  # one key is missing
    broken = out.clone()
    broken[1, 0, 3, 63] = math.nan
    assert check.ratio(broken) == math.inf


# Measuring


def half(cache, case):
    """Wrong: half of the output."""
    return lambda: NAIVE(cache, case)() / 2


def refusing(cache, case):
    raise ValueError("takes no such case")


def test_what_is_wrong_or_refuses_is_not_timed_and_stops_nobody():
    made = decode.measure({"naive": NAIVE, "fa3": half, "fa4": refusing}, TINY, CPU, PACE)
    right, wrong, refused = (of.outcome for of in made)
    assert right.timing is not None and right.problem == "" and right.error <= 1.0
    assert wrong.timing is None and wrong.problem.startswith("wrong: ") and wrong.error > 2.0
    assert refused.timing is None and refused.problem == "ValueError: takes no such case"
    assert decode.cell(made[1]) == "[red]wrong[/red]" and decode.cell(made[2]) == "-"


def test_cold_calls_go_through_all_caches_and_the_others_through_one(monkeypatch):
    seen = {}

    def compare(contenders, **options):
        seen.update(contenders, alone=options["alone"])
        return {name: timing(10.0 if name == "naive" else 30.0) for name in contenders}

    monkeypatch.setattr(decode, "compare", compare)
    machine = dataclasses.replace(CPU, l2_bytes=TINY.kv_bytes)
    (made,) = decode.measure({"naive": NAIVE}, TINY, machine, PACE, is_alone=True)
    assert (len(seen["naive"]), len(seen["naive cold"])) == (1, 3) and seen["alone"] == {"naive", "naive cold"}
    outs = [call() for call in seen["naive cold"]]
    assert not torch.equal(outs[0], outs[1]) and torch.equal(outs[0], seen["naive"][0]())
    config = made.record(machine)["config"]
    assert made.outcome.us == 10.0 and config["cold_us"] == 30.0
    assert config["tb_per_s"] == pytest.approx(3 * config["cold_tb_per_s"], abs=1e-3)
    (made,) = decode.measure({"naive": NAIVE}, TINY, CPU, PACE)  # one cache is as cold as many
    assert made.cold is made.outcome.timing


class OnDevice:
    """Lengths of a captured graph: what a tensor on a GPU does of them."""

    is_cuda = True

    def __init__(self, values):
        self.values = torch.tensor(values)

    def clone(self):
        return self.values.clone()

    def fill_(self, value):
        self.values.fill_(value)

    def copy_(self, values):
        self.values.copy_(values)


def test_lengths_are_short_only_within_the_capture():
    lengths, entered = OnDevice([64]), []

    @contextlib.contextmanager
    def own():
        entered.append(lengths.values.tolist())
        yield

    def bind(cache, case):
        raise AssertionError

    case = dataclasses.replace(TINY, captured_at=1)
    with pytest.raises(ValueError, match="its graph is of the lengths that it was captured with"):
        decode._around(bind, case, lengths)
    bind.reads_lengths, bind.around = True, own
    with pytest.raises(ValueError, match="needs a CUDA graph"):
        decode._around(bind, case, torch.zeros(1))
    shortened = decode._around(bind, case, lengths)
    assert lengths.values.tolist() == [64]
    with shortened():
        assert lengths.values.tolist() == [1] and entered == [[1]]
    assert lengths.values.tolist() == [64]
    assert decode._around(bind, TINY, lengths) is own


@pytest.mark.parametrize("follows", [True, False])
def test_a_replay_must_give_what_a_call_with_all_keys_gives(follows, monkeypatch):
    lengths = torch.tensor([8.0])

    class Graph:
        """Replays on the lengths of that time, or on those of its capture."""

        def __init__(self, calls, num_calls):
            self.call, self.graph, self.captured = calls[0], self, lengths.clone()

        def replay(self):
            self.output = self.call() if follows else self.captured * 2

    @contextlib.contextmanager
    def shortened():
        lengths.fill_(1.0)
        yield
        lengths.fill_(8.0)

    monkeypatch.setattr(decode, "Graph", Graph)
    if follows:
        assert decode._replayed(lambda: lengths * 2, shortened).item() == 16.0
    else:
        with pytest.raises(RuntimeError, match="captured with few keys and replayed with all differs"):
            decode._replayed(lambda: lengths * 2, shortened)


# Records


def test_a_record_has_the_keys_of_forward_and_two_more_and_speeds_in_its_config(tmp_path):
    case = NAMED["b64-8k-page16"]
    made = decoded(case, 500.0, cold_us=510.0).record(H200)
    assert tuple(made) == (*records.FIELDS, "page_size", "mode") and (made["page_size"], made["mode"]) == (16, None)
    assert records.append(made, tmp_path) == tmp_path / "h200" / "decode.jsonl"
    assert made["graph_us"] == 500.0 and made["tflops"] == pytest.approx(case.shape.flops / 5e8, abs=0.01)
    assert made["config"] == {
        "case": "b64-8k-page16", "kv_bytes": case.kv_bytes, "tb_per_s": 4.295, "of_measured": 0.9337,
        "of_datasheet": 0.8948, "cold_us": 510.0, "cold_tb_per_s": 4.2108, "read_tb_per_s": 4.6, "copy_tb_per_s": 4.0,
    }  # fmt: skip
    assert json.loads(json.dumps(made)) == made and decoded(BANDWIDTH[1], 1.0).record(H200)["page_size"] is None


def test_a_window_has_no_flops_a_replay_no_eager_time_and_eager_time_no_bandwidth():
    windowed = row(WINDOW[0], 10.0)
    assert (windowed["tflops"], windowed["peak_fraction"]) == (None, None) and windowed["config"]["tb_per_s"] > 3
    replayed = row("b1-64k-replayed", 66.0)
    assert replayed["eager_us"] is None and replayed["graph_us"] == 66.0 and row("b1-64k", 66.0)["eager_us"] == 66.0
    eager = row("b1-1k", 20.0, has_graph=False)
    assert {eager["config"][name] for name in ("tb_per_s", "of_measured", "of_datasheet", "cold_us")} == {None}


def test_cases_of_one_size_are_points_of_their_own():
    rows = [row(f"b16-8k-page{page}", 100.0 + page, impl) for page in (1, 16) for impl in ("ours", "fa3")]
    first, second = points(rows, "bfloat16")
    assert (first.name, second.name) == ("b16-8k-page1", "b16-8k-page16")
    assert first.by_name.keys() == second.by_name.keys() == {"ours", "fa3"} and second.time("ours") == 116.0


def test_a_case_that_became_slower_is_named(tmp_path):
    records.append(row("b16-8k-page1", 150.0, cold_us=150.0), tmp_path)
    records.append(row("b1-1k", 6.0, cold_us=8.0), tmp_path)
    args = argparse.Namespace(tolerance=0.05, against="figure")
    known = regression.baseline(H200, "decode", tmp_path)
    assert regression.check([row("b16-8k-page1", 155.0), row("b1-1k", 6.2, cold_us=8.1)], known, args).holds
    verdict = regression.check([row("b1-1k", 6.0, cold_us=9.0)], known, args)
    assert not verdict.holds and "b1-1k ours bfloat16, 9.0 us from DRAM, recorded 8.0 (abc)" in verdict.lines[-1]
    other = regression.check([row("b16-8k-page16", 100.0)], known, args)
    assert not other.holds and "b16-8k-page16" in other.lines[1]


# What is asked for


def judged(rows, what):
    (goal,) = (goal for goal in goals.GOALS["decode"] if goal.what.startswith(what))
    found = goal.figure(points(rows, "bfloat16"))
    return found and (goal.is_met(found.value), pytest.approx(found.value, rel=1e-3), found.where)


@pytest.mark.parametrize(
    "what, name, limit", [("b1-1k", "b1-1k", 6.6), ("b1-4k", "b1-4k", 9.0), ("b1-64k", "b1-64k", 63.0),
                          ("MHA", "mha16-2k-page8", 125.0)],
)  # fmt: skip
def test_microseconds(what, name, limit):
    assert judged([row(name, limit)], what) == (True, limit, name)
    assert judged([row(name, limit + 0.01)], what)[0] is False and judged([row(name, limit, "fa3")], what) is None


@pytest.mark.parametrize("page, limit", [(None, 4.5), (1, 3.6), (16, 4.25), (64, 4.35), (128, 4.35)])
def test_bandwidth_is_that_of_the_worst_of_three(page, limit):
    what = f"shuffled pages of {page}:" if page else "contiguous"
    cases = PAGED[page] if page else BANDWIDTH
    for share, fits in ((1.001, True), (0.999, False)):
        speeds = [limit * 1.1, limit * share, limit * 1.05]
        rows = [row(case, case.kv_bytes / speed / 1e6) for case, speed in zip(cases, speeds, strict=True)]
        assert judged(rows, what) == (fits, limit * share, f"{cases[1].name}; 3 of 3")


@pytest.mark.parametrize(
    "what, name, beside, limit",
    [
        ("a graph captured", "b1-64k-replayed", "b1-64k", 1.1),
        ("4 queries", "b32-8k-q4", "b32-8k", 1.25),
        ("window", "b16-32k-window512", "b16-512", 1.15),
        ("one sequence", "b64-ragged", "b64-1528", 1.1),
    ],
)
def test_ratios(what, name, beside, limit):
    for times, fits in ((limit - 0.005, True), (limit + 0.005, False)):
        assert judged([row(beside, 100.0), row(name, 100.0 * times)], what) == (fits, times, name)
    assert judged([row(name, 100.0)], what) is None


# Tables and plots


def test_the_table_is_of_the_newest_commit_with_all_cases(tmp_path):
    assert serving_tables.BLOCKS["decode"](Records("h200", tmp_path)) == (
        "Not measured yet: `python -m fa3 bench decode`."
    )
    for n, case in enumerate(SHOWN):
        us = case.kv_bytes / 4.4e6
        records.append(row(case, us, second=12 * n, cold_us=us * 1.1), tmp_path)
        if not case.page_size:
            records.append(row(case, us * 1.2, "cudnn", second=12 * n + 1), tmp_path)
    text = serving_tables.BLOCKS["decode"](Records("h200", tmp_path))
    assert "`python -m fa3 bench decode`; commit abc in `bench/results/h200/decode.jsonl`." in text
    assert text.count("\n|") == 2 + 29 and text.count("| - | - |") == 15
    assert "| b64-8k | 488.1 | 4.40 | 95.7% | 91.7% | 536.9 | 4.00 | cuDNN 585.7 | 1.200 |" in text
    with pytest.raises(NotWhole, match="no commit has all 29 cases with ours"):
        records.append(row("b1-1k", 6.0), tmp_path / "one")
        print(Records("h200", tmp_path / "one").decode)


def test_the_plots_are_of_plain_cases_by_batch():
    rows = [row(case, 10.0 * i + us, impl) for i, case in enumerate(CURVE) for impl, us in (("ours", 5), ("cudnn", 7))]
    rows += [row("b16-8k-page1", 1.0), row("b32-8k-q4", 1.0), row("b64-ragged", 1.0)]
    times, speeds = serving_plots.of_run(points(rows, "bfloat16"))
    assert (times.name, times.y, speeds.y) == ("decode-us", "us", "TB/s of K and V")
    assert [panel.title for panel in times.panels] == [f"batch {b}, 32/8 heads" for b in (1, 16, 64)]
    assert [series.look for series in times.panels[0].series] == ["ours", "cudnn"]
    assert times.panels[0].series[1].points[:2] == ((1024.0, 7.0), (2048.0, 17.0))
    assert speeds.panels[0].series[0].points[0] == (1024.0, pytest.approx(CURVE[0].tb_per_s(5.0), abs=1e-3))
    assert serving_plots.of_run(points(rows[-3:], "bfloat16")) == []


# The command


def test_it_runs_on_a_cpu_and_keeps_records(tmp_path, capsys):
    given = ["--device", "cpu", "--shapes", "tiny", "--impl", "naive", "--quick", "--out", str(tmp_path)]
    assert cli.main(["bench", "decode", *given]) == 0
    lines = [json.loads(line) for line in (tmp_path / "cpu" / "decode.jsonl").read_text().splitlines()]
    assert [line["config"]["case"] for line in lines] == ["tiny", "tiny-dense", "tiny-window"]
    assert recorded.case_of(lines[1]) == "tiny-dense" and lines[0]["page_size"] == 16
    assert "tiny-window: naive " in capsys.readouterr().out


def test_ours_missing_or_wrong_is_status_1(tmp_path, monkeypatch, capsys):
    given = ["--device", "cpu", "--shapes", "tiny-window", "--quick", "--out", str(tmp_path)]

    def missing():
        raise ImportError("no such function")

    for loader, said in (
        (missing, "ours is not here: ImportError: no such function"),
        (lambda: half, "ours bf16: wrong"),
    ):
        monkeypatch.setitem(DECODERS, "ours", loader)
        assert cli.main(["bench", "decode", *given, "--impl", "ours"]) == 1
        assert said in capsys.readouterr().out
    monkeypatch.setitem(DECODERS, "ours", partial(lambda: NAIVE))
    assert cli.main(["bench", "decode", *given, "--impl", "ours"]) == 0


def test_help_lists_the_groups_and_an_unknown_case_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "decode", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and "a group (latency, replayed, bandwidth, pages" in printed
    assert all(option in printed for option in ("--quick", "--check", "--plot", "--budget-seconds", "flashinfer"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "decode", "--device", "cpu", "--out", "x", "--shapes", "b3"])
    assert stop.value.code == 2 and "no shape named 'b3'" in capsys.readouterr().err
