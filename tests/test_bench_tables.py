"""Tables of the groups of shapes, of memory and of traffic from made-up records, and the plots of a run."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import accuracy, forward, fp8, goals, group_tables, io_tables, memory, performance, plots, records, tables
from bench.machine import Machine, open_machine
from bench.measure import Contender, Outcome
from bench.model import of_record
from bench.peers import FP8, config_of, fp8_kernel_of
from bench.plots import LOOKS
from bench.recorded import BOTH, Records, points
from bench.shapes import DIMS_PAIRS, GRID, GROUPS, NAMED, ODD_PAIRS
from fa3.testing.timing import Spread, Timing

ROOT = Path(__file__).parent.parent
ORIGIN = records.Origin("NVIDIA H200", "2.11.0", "abc", 989.5, 800.0)


def keep(folder, suite, impl, us, shape, second=0, dtype="bfloat16", config=None, **more):
    made = records.record(ORIGIN, suite, impl, dtype, shape, graph_us=us, graph_calls=us and 20, config=config)
    date = f"2026-11-29T15:{second // 60:02}:{second % 60:02}+00:00"
    records.append({**made, "date": date, **dict.fromkeys(records.MORE_FIELDS.get(suite, ())), **more}, folder)


def keep_group(folder, name, ours, **peers):
    """Speeds in TFLOP/s; `ours` is of the shape."""
    for n, shape in enumerate(GROUPS[name]):
        config = asdict(config_of(shape, "bfloat16", 132))
        keep(folder, "forward", "ours", shape.flops / ours(shape) / 1e6, shape, 12 * n, config=config)
        for impl, speed in peers.items():
            keep(folder, "forward", impl, shape.flops / speed / 1e6, shape, 12 * n)
    return Records("h200", folder)


# Groups


@pytest.mark.parametrize("name", ["models", "odd", "dims", "grid-more", "fp8-models", "fp8-more"])
def test_what_is_not_recorded_says_what_records_it(tmp_path, name):
    (tmp_path / "h200").mkdir()
    text = group_tables.BLOCKS[name](Records("h200", tmp_path))
    words = re.fullmatch(r"Not measured yet: `python -m fa3 bench (forward|fp8) (.*)`\.", text)
    assert words
    module = {"forward": forward, "fp8": fp8}[words[1]]
    args = module.parser().parse_args(words[2].split())
    assert set(args.shapes) <= GROUPS.keys()  # the command is one that there is


def test_models_have_their_sizes_shares_and_the_fastest_peer(tmp_path):
    found = keep_group(tmp_path, "models", lambda shape: 600, cudnn=400, fa3=500)
    text = group_tables.BLOCKS["models"](found)
    point = next(p for p in found.group("models") if p.name == "deepseek-v3-4k")
    share = of_record(point.by_name["ours"]).bound / point.time("ours")
    assert (
        "| deepseek-v3-4k | 1 | 4K x 4K | 128, 128 | 192/128 causal | 600 | 60.6% | 75.0% | "
        f"{share:.1%} | FlashAttention-3 500 | 1.200 |"
    ) in text
    assert "| llama3-8b-chunk | 1 | 2K x 32K | 32, 8 | 128 causal | 600 |" in text
    assert text.count("\n|") == 2 + len(GROUPS["models"])
    assert "`python -m fa3 bench forward --shapes models`; commit abc in" in text


def test_a_shape_that_no_peer_takes_has_dashes(tmp_path):
    found = keep_group(tmp_path, "models", lambda shape: 600)
    assert group_tables.models(found).count("| - | - |\n") == len(GROUPS["models"]) - 1


def test_odd_lengths_show_their_time_over_the_next_multiple(tmp_path):
    found = keep_group(tmp_path, "odd", lambda shape: 500 if shape.seqlen_q % 128 else 512)
    text = group_tables.BLOCKS["odd"](found)
    odd, even = ODD_PAIRS[1]
    ratio = odd.flops / 500 / (even.flops / 512)
    assert "| head_dim, mask | S 197 | 577 | 1000 | 4095 | 4097 |" in text
    assert f"500, {ratio:.3f}" in text and 0.8 < ratio < 0.9
    assert text.count("500, ") == 20


def test_pairs_are_of_one_run(tmp_path):
    """A later point of the grid, at another clock, is not what an odd length is set beside."""
    found = keep_group(tmp_path, "odd", lambda shape: 500)
    before = group_tables.odd(found), group_tables.must_show(found)
    for n, shape in enumerate(GRID):
        keep(tmp_path, "forward", "ours", shape.flops / 4e8, shape, 700 + 12 * n)
    found = Records("h200", tmp_path)
    assert group_tables.odd(found) == before[0]
    of_odd = [
        line for text in (before[1], group_tables.must_show(found)) for line in text.splitlines() if "odd" in line
    ]
    assert len(of_odd) == 2 and of_odd[0] == of_odd[1] and "20 of 20 | met" in of_odd[0]
    keep(tmp_path, "forward", "ours", 1.0, GROUPS["odd"][0], 1200)  # a run that was cut short
    assert group_tables.odd(Records("h200", tmp_path)) == before[0]


def test_head_dims_show_their_speed_over_that_of_128(tmp_path):
    found = keep_group(tmp_path, "dims", lambda shape: 5 * shape.head_dim)
    text = group_tables.BLOCKS["dims"](found)
    assert "| 96 | 480, 0.75 | 480, 0.75 |" in text and "| 192 | 960, 1.50 | 960, 1.50 |" in text
    assert text.count("\n| ") == 1 + len(DIMS_PAIRS) // 2


def test_the_wider_grid_has_a_line_a_point(tmp_path):
    found = keep_group(tmp_path, "grid-more", lambda shape: 600, fa3=500)
    text = group_tables.BLOCKS["grid-more"](found)
    assert "| 192/128 causal 16K | 600 | 60.6% | 75.0% |" in text and "| 96 full 512 | 600 |" in text
    assert text.count("FlashAttention-3 500 | 1.200 |") == 24


def test_fp8_of_a_group_is_beside_bf16_and_flashattention_3(tmp_path):
    for n, shape in enumerate(GROUPS["models"]):
        config = asdict(fp8_kernel_of(shape, "accurate", 132)[1])
        keep(tmp_path, "fp8", "ours", shape.flops / 9e8, shape, 12 * n, FP8, config)
        keep(tmp_path, "fp8", "ours", shape.flops / 6e8, shape, 12 * n)
        if shape.head_dim == shape.head_dim_v:
            keep(tmp_path, "fp8", "fa3", shape.flops / 8e8, shape, 12 * n, FP8)
    text = group_tables.BLOCKS["fp8-models"](Records("h200", tmp_path))
    assert re.search(r"\| phi3-mini-4k \| 900 \| \d\d\.\d% \| 1\.500 \| 800 \| 1\.125 \|", text)
    assert re.search(r"\| deepseek-v3-4k \| 900 \| \d\d\.\d% \| 1\.500 \| - \| - \|", text)


def test_what_must_be_shown_is_judged_by_the_records_that_are_shown(tmp_path):
    found = keep_group(tmp_path, "grid", lambda shape: 500, cudnn=520)
    text = group_tables.BLOCKS["must-show"](found)
    start = "| forward: BF16: our time over the fastest peer's | at most 1.02 | 1.040 | hd"
    assert start in text and "; 24 of 24 | **missed** |" in text.split(start)[1].splitlines()[0]
    assert "| forward: head dim 128, 16K full: share of cuBLAS | at least 0.93 | 0.625 |" in text
    assert "| forward: odd lengths: time over the next multiple of 128's | at most 1.03 | not measured | | |" in text
    others = sum(len(goals.GOALS[suite]) for suite in ("fp8", "decode", "ragged"))
    assert others > 24 and text.count("not measured") == 4 + others  # four of forward


# FP16 beside BF16


def test_fp16_is_of_the_run_that_has_both_types(tmp_path):
    for n, shape in enumerate(GRID):
        times = 1.04 if shape.name == "hd128-4k-full" else 1.01
        for dtype, us in (("bfloat16", 100.0), ("float16", 100.0 * times)):
            keep(tmp_path, "forward", "ours", us, shape, 12 * n, dtype)
        keep(tmp_path, "forward", "ours", 50.0, shape, 12 * n + 600)  # a later run of one type
    found = Records("h200", tmp_path)
    speed = NAMED["hd128-4k-full"].flops / 1e8
    assert tables.fp16_worst(found).startswith(
        f"FP16 takes up to 1.040 times BF16's time (128 full 4K: {speed / 1.04:.0f} against {speed:.0f} TFLOP/s; "
    )
    text = tables.fp16(found)
    assert f"{speed / 1.04:.0f}, 1.040 |" in text and text.count(", 1.010 |") == 23


def test_a_point_of_both_types_names_fp16_by_its_type(tmp_path):
    shape = NAMED["hd64-4k-full"]
    rows = [
        records.record(ORIGIN, "forward", impl, dtype, shape, graph_us=us)
        for impl, dtype, us in (("ours", "bfloat16", 1.0), ("ours", "float16", 2.0), ("fa3", "float16", 3.0))
    ]
    (point,) = points(rows, BOTH)
    assert {name: point.time(name) for name in point.by_name} == {"ours": 1.0, "ours float16": 2.0, "fa3 float16": 3.0}
    assert point.name == "hd64-4k-full" and point.label == "64 full 4K"


# Memory and traffic


def test_the_memory_table_has_megabytes_slopes_and_limits(tmp_path):
    for impl, factor, power in (("naive", 64, 2), ("ours", 4160, 1)):
        for seqlen in (1024, 2048):
            size = factor * seqlen**power
            keep(tmp_path, "memory", impl, None, memory.shape_of(seqlen), case="call", extra_bytes=size)
    text = io_tables.memory(Records("h200", tmp_path))
    assert "| S | 1K | 2K | slope |" in text
    assert "| naive | 67 | 268 | 2.000 |" in text and "| ours | 4.3 | 8.5 | 1.000 |" in text
    assert "GiB hold" not in text
    for impl, seqlen in (("naive", 48_535), ("ours", 9_100_000)):
        config = {"slope": 1.0, "free_bytes": 139 * 2**30}
        shape = memory.shape_of(seqlen)
        keep(tmp_path, "memory", impl, None, shape, config=config, case="limit, fitted", extra_bytes=1)
    tried = {"step": 1024, "free_bytes": 1}
    keep(tmp_path, "memory", "naive", None, memory.shape_of(48_128), config=tried, case="limit, tried", extra_bytes=1)
    assert (
        "The GPU's 139 GiB hold naive attention of S 48,535 by the fit; 48,128 ran and 49,152 did not. "
        "Of ours they would hold 9.1 million."
    ) in io_tables.memory(Records("h200", tmp_path))


def test_the_traffic_table_has_what_was_counted_and_the_formula(tmp_path):
    shape = NAMED["hd64-4k-full"]
    bytes_of = {"dram_bytes": 8.643e9, "dram_formula": 8.691e9, "l2_bytes": 6.192e9, "l2_formula": None}
    keep(tmp_path, "traffic", "naive", None, shape, config={"kernels": 4}, **bytes_of)
    bytes_of = {"dram_bytes": 60.96e6, "dram_formula": 67.6e6, "l2_bytes": 4.3117e9, "l2_formula": 4.3e9}
    keep(tmp_path, "traffic", "ours", None, shape, config={"warpgroups": 1}, **bytes_of)
    text = io_tables.traffic(Records("h200", tmp_path))
    assert "| naive | 8643 / 8691 | 6192 |" in text and "| ours, 64 rows | 61.0 / 67.6 | 4311.7 / 4300.0 |" in text


def test_the_memory_plot_is_in_megabytes_on_two_logarithms(tmp_path):
    found = {"naive": {2048: 4_000_000, 1024: 1_000_000}, "ours": {1024: 500_000, 2048: 1_000_000}}
    source = plots.Source("NVIDIA H200", "2.11.0", "abc", "2026-11-29", "about", "command")
    plot = plots.memory("memory", "title", found, source)
    (panel,) = plot.panels
    assert [series.look for series in panel.series] == ["naive", "ours"] and set(found) <= LOOKS.keys()
    assert panel.series[0].points == ((1024.0, 1.0), (2048.0, 4.0)) and plot.log_y and plot.ticks == (1024.0, 2048.0)
    plots.draw(plot, tmp_path / "memory.png")
    assert plots.digest_in(tmp_path / "memory.png") == plot.digest


# What a run draws


def test_forward_draws_what_it_measured_without_the_whole_grid(monkeypatch, tmp_path, capsys):
    def measured(contenders, shape, machine, pace):
        s = Spread(100.0, 99.0, 101.0, 98.0, 102.0, 4)
        timing = Timing(s, s, s, graph_calls=20)
        return [Outcome(c, shape, timing, 1.0, cublas_tflops=700.0) for c in contenders]

    monkeypatch.setattr(forward, "open_machine", lambda *_: Machine("cpu", 132, 0, ORIGIN))
    monkeypatch.setattr(forward, "measure", measured)
    given = ["--device", "cpu", "--impl", "ours", "naive", "--dtype", "bfloat16", "float16"]
    given += ["--out", str(tmp_path / "records"), "--plot", str(tmp_path / "plots"), "--shapes"]
    assert forward.main([*given, "hd64-4k-full", "hd192v128-1k-causal"]) == 0
    names = ["forward-fp16.png", "forward.png", "roofline-fp16.png", "roofline.png"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == names
    printed = capsys.readouterr().out
    assert all(str(tmp_path / "plots" / name) in printed.replace("\n", "") for name in names)
    assert "cuBLAS bf16 8192^3, in turn with the others: 700 TFLOP/s" in printed
    assert "met    FP16: time over BF16's: 1.000 (hd64-4k-full; 1 of 24); at most 1.05" in printed
    lines = [json.loads(x) for x in (tmp_path / "records" / "h200" / "forward.jsonl").read_text().splitlines()]
    assert {(r["graph_us"], r["graph_lower_us"], r["graph_upper_us"], r["graph_calls"]) for r in lines} == {
        (100.0, 99.0, 101.0, 20)
    }
    assert forward.main([*given, "vit-l16-197"]) == 0  # a model is no point of a curve
    assert "Nothing to plot" in capsys.readouterr().out


def test_panels_of_a_run_are_by_both_head_dims():
    rows = [
        records.record(ORIGIN, "forward", "ours", "bfloat16", NAMED[name], graph_us=100.0)
        for name in ("hd192v128-4k-full", "hd192v128-1k-full", "hd192-4k-full")
    ]
    speed, roof = performance.of_run("forward", {"BF16": points(rows, "bfloat16")})
    assert [panel.title for panel in speed.panels] == ["head dim 192/128, full", "head dim 192, full"]
    assert [x for x, _ in speed.panels[0].series[0].points] == [1024, 4096] and speed.columns == 2
    assert roof.name == "roofline" and "python -m fa3 bench forward" in speed.caption
    assert [plot.peak for plot in performance.of_run("fp8", {"FP8": points(rows, "bfloat16")})] == [2 * 989.5]
    assert performance.of_run("forward", {"BF16": []}) == []


def test_one_call_a_graph_is_for_the_whole_fp8_call_or_for_all(monkeypatch, tmp_path):
    alone = []

    def timed(calls, machine, pace, alone):
        alone_of.append((set(calls), alone))
        return {}, None

    alone_of: list = alone
    monkeypatch.setattr(fp8, "timed", timed)
    machine = open_machine("cpu", "abc")
    given = ["--device", "cpu", "--shapes", "tiny", "--impl", "call", "copy", "--out", str(tmp_path)]
    for more, names in (([], {"call"}), (["--one-call"], {"call", "copy"})):
        args = fp8.parser().parse_args([*given, *more])
        fp8.measure(fp8._made(args, NAMED["tiny"], machine, {}), NAMED["tiny"], machine, fp8.Pace(rounds=1))
        assert alone_of[-1] == ({"call", "copy"}, names)
    assert Contender("ours", FP8, len).is_alone is False


def test_fp8_leaves_out_head_dims_that_it_does_not_take():
    shapes, (line,) = fp8.served(GROUPS["dims"])
    assert {shape.head_dim for shape in shapes} == {80, 96, 128, 160, 192}
    assert line.endswith("multiples of 16: hd72-4k-full, hd72-4k-causal") and fp8.served(GRID) == (GRID, [])


def test_accuracy_draws_the_errors_at_growing_length(tmp_path):
    made = [
        {**records.record(ORIGIN, "accuracy", "ours", FP8, NAMED["hd64-4k-full"], config={"accumulation": "fast"}),
         "case": case, "rmse": None, "rel_error": 0.01}
        for case in ("length", "flat")
    ]  # fmt: skip
    (plot,) = performance.of_run_accuracy(made)
    assert [series.points for series in plot.panels[0].series] == [((4096.0, 1.0),)]
    assert performance.of_run_accuracy(made[1:]) == performance.of_run_memory([]) == []
    assert accuracy.parser().parse_args(["--plot", str(tmp_path)]).plot == tmp_path


def test_the_readme_gives_no_number_of_kernels_that_could_go_stale():
    text = (ROOT / "README.md").read_text()
    assert not re.search(r"\d+ kernels\b", text)
    assert "planned" not in next(
        line for line in (ROOT / "docs" / "design.md").read_text().splitlines() if line.startswith("quant/")
    )
