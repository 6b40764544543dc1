"""Documents and plots from records: which records count, what the tables say, what a plot shows; made-up times."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import documents, performance, plots, recorded, records, suites, tables
from bench.model import of_record
from bench.peers import FP8, PEERS
from bench.plots import LOOKS, Panel, Plot, Series, Source
from bench.recorded import NotRecorded, Records, newest, points
from bench.shapes import GRID, NAMED
from fa3.device import HOPPER, named
from fa3.kernels.forward.config import Config

ROOT = Path(__file__).parent.parent
ORIGIN = records.Origin("NVIDIA H200", "2.11.0", "abc", 989.5, 800.0)
FULL, CAUSAL = NAMED["hd128-4k-full"], NAMED["hd128-4k-causal"]


def row(impl, us, shape=FULL, commit="abc", second=0, dtype="bfloat16", suite="forward", config=None, **more):
    made = records.record(ORIGIN, suite, impl, dtype, shape, graph_us=us, config=config)
    return {**made, "commit": commit, "date": f"2026-11-29T15:{second // 60:02}:{second % 60:02}+00:00", **more}


# Which records count


def test_what_was_measured_together_is_a_point_and_a_later_run_another():
    rows = [
        row("ours", 100.0),
        row("fa3", 110.0, second=1),
        row("ours", 90.0, second=30),
        row("ours", 50.0, CAUSAL, second=31),
    ]
    first, second, causal = points(rows, "bfloat16")
    assert (first.time("ours"), first.time("fa3")) == (100.0, 110.0)
    assert second.by_name.keys() == {"ours"} and second.time("ours") == 90.0
    assert causal.shape.causal and causal.label == "128 causal 4K"
    assert first.tflops("ours") == pytest.approx(FULL.flops / 1e8) and first.cublas == pytest.approx(800.0, rel=1e-3)


def test_a_point_is_of_one_type_and_has_kernel_times_only():
    rows = [row("ours", 100.0), row("ours", 90.0, dtype="float16"), row("fa4", None)]
    (point,) = points(rows, "bfloat16")
    assert point.by_name.keys() == {"ours"} and point.time("ours") == 100.0
    assert points(rows, "float16")[0].time("ours") == 90.0


def test_the_names_of_fp8_say_the_accumulation():
    rows = [
        row("ours", 100.0, dtype=FP8, config={"promotion": 1}),
        row("ours", 80.0, dtype=FP8, config={"promotion": 0}),
        row("ours_call", 120.0, dtype=FP8, config={"promotion": 1}),
        row("ours", 150.0),
        row("fa3", 90.0, dtype=FP8),
    ]
    (point,) = points(rows, FP8)
    times = {name: point.time(name) for name in point.by_name}
    assert times == {"accurate": 100.0, "fast": 80.0, "ours_call": 120.0, "bf16": 150.0, "fa3": 90.0}
    twice = [row("ours", us, dtype=FP8, config={"promotion": 1}) for us in (100.0, 99.0)]  # one kernel serves both
    (point,) = points(twice, FP8)
    assert (point.time("accurate"), point.time("fast")) == (100.0, 99.0)


def test_the_newest_commit_that_is_whole_is_taken():
    def run(commit, second, impls, shapes=(FULL, CAUSAL)):
        return [row(i, 100.0 + second, s, commit, second + 10 * n) for n, s in enumerate(shapes) for i in impls]

    rows = run("old", 0, ["ours", "fa3"]) + run("whole", 60, ["ours", "fa3"])
    rows += run("whole", 120, ["ours"]) + run("alone", 180, ["ours"]) + run("half", 240, ["ours", "fa3"], (FULL,))
    chosen = newest(rows, (FULL, CAUSAL), "bfloat16", ("ours",), PEERS)
    assert [(p.commit, p.time("ours"), p.shape.causal) for p in chosen] == [
        ("whole", 160.0, False),
        ("whole", 160.0, True),
    ]
    assert newest(rows, (FULL, CAUSAL), "bfloat16", ("ours",))[0].commit == "alone"
    assert newest(rows, (FULL,), "bfloat16", ("ours",), PEERS)[0].commit == "half"
    with pytest.raises(NotRecorded, match="no commit has all 1 shapes with ours in float16"):
        newest(rows, (FULL,), "float16", ("ours",))


# Documents


BLOCKS = {"speed": lambda: "fast"}
MARKED = "a\n<!-- begin speed: python -m fa3 bench report -->\nold\n\n<!-- end speed -->\nb <!-- a comment -->\n"


def test_only_what_is_between_the_markers_is_replaced():
    new = documents.filled(MARKED, BLOCKS)
    assert new == MARKED.replace("\nold\n", "\n\nfast\n")
    assert documents.filled(new, BLOCKS) == new


@pytest.mark.parametrize(
    "text",
    [
        MARKED.replace("speed", "sped"),
        MARKED.replace("<!-- end speed -->", ""),
        MARKED.replace("<!-- end speed", "<!-- end other"),
        MARKED.replace("bench report", "bench forward"),
    ],
)
def test_a_part_that_nobody_makes_or_a_marker_alone_is_an_error(text):
    with pytest.raises(ValueError, match="part"):
        documents.filled(text, BLOCKS)


def test_the_documents_and_plots_are_what_the_records_say():
    assert performance.main(["--check-docs"]) == 0


@pytest.fixture
def copied(tmp_path):
    for name in performance.DOCUMENTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / performance.FIGURES, tmp_path / performance.FIGURES)
    return tmp_path


def test_a_changed_number_and_a_missing_plot_are_found_and_made_again(copied, capsys):
    records_here = Records(performance.GPU)
    assert performance.check_documents(records_here, copied) == 0
    page = copied / "README.md"
    good = page.read_text()
    page.write_text(re.sub(r"(\| 64 full \| )\d+", r"\g<1>999", good, count=1))
    assert page.read_text() != good
    (copied / performance.FIGURES / "fp8.png").unlink()
    shutil.copy(copied / performance.FIGURES / "forward.png", copied / performance.FIGURES / "roofline.png")
    assert performance.check_documents(records_here, copied) == 1
    printed = capsys.readouterr().out
    assert [line.split(" ")[0] for line in printed.splitlines()] == [
        "README.md", "docs/figures/roofline.png", "docs/figures/fp8.png",
    ]  # fmt: skip
    assert performance.write_documents(records_here, copied) == 0
    assert page.read_text() == good and performance.check_documents(records_here, copied) == 0


# Tables


@pytest.fixture
def made_up(tmp_path):
    """Ours at 500 TFLOP/s, cuDNN at 550 at the longest and 400 elsewhere, FlashAttention-2 at 250."""
    for n, shape in enumerate(GRID):
        speeds = {"ours": 500, "cudnn": 550 if shape.seqlen_q == 16384 else 400, "fa2": 250}
        for impl, tflops in speeds.items():
            records.append(row(impl, shape.flops / tflops / 1e6, shape, second=10 * n), tmp_path)
    return Records("h200", tmp_path)


def test_the_forward_tables_say_shares_speed_ups_and_the_worst_points(made_up):
    text = tables.forward_points(made_up)
    assert "| 128 full 16K | 500 | 50.5% | 62.5% | | cuDNN 550 | 0.909 | 250 | 25.3% | 2.00x |" in text
    assert "| 64 causal 512 | 500 | 50.5% | 62.5% | | cuDNN 400 | 1.250 | 250 | 25.3% | 2.00x |" in text
    mean = (1.25**18 * (500 / 550) ** 6) ** (1 / 24)
    assert f"Fastest at 18 of 24 points; geometric mean of the fastest peer's time over ours {mean:.3f}." in text
    assert "commit abc in `bench/results/h200/forward.jsonl`" in text
    assert "fa3 is 2.00 to 2.00 times as fast as FlashAttention-2, which reaches 25.3% to 25.3% of the peak." in text
    short = tables.forward_grid(made_up)
    assert "| 64 full | 500 / 400 | 500 / 400 | 500 / 400 | 500 / 550 |" in short
    assert "from 4K on takes 1.10 times" in short and "the worst below it 0.80 times" in short
    assert "Beside cuDNN and FlashAttention-2: " in short


def test_a_suite_that_is_not_recorded_is_named_and_the_others_are_drawn(made_up, tmp_path, capsys):
    assert performance.main(["--results", str(tmp_path), "--figures", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["forward.png", "roofline.png"]
    printed = capsys.readouterr().out
    assert "fp8: no commit has all 24 shapes with accurate, fa3" in printed
    assert "accuracy: no commit has the whole of suite accuracy" in printed
    assert performance.main(["--results", str(tmp_path), "--gpu", "h100", "--figures", str(tmp_path / "none")]) == 1
    assert performance.main(["--results", str(tmp_path), "--check-docs"]) == 1


def test_a_damaged_line_and_an_unknown_gpu_are_named(tmp_path, capsys):
    assert recorded.read("h200", "forward", tmp_path) == []
    folder = tmp_path / "h200"
    folder.mkdir()
    (folder / "forward.jsonl").write_text(json.dumps(row("ours", 1.0)) + '\n{"suite": "forw')
    damaged = f"{folder / 'forward.jsonl'}, line 2 is no record: mend or remove it"
    with pytest.raises(NotRecorded, match=re.escape(damaged)):
        recorded.read("h200", "forward", tmp_path)
    assert performance.main(["--results", str(tmp_path), "--check-docs"]) == 1
    assert damaged in capsys.readouterr().out
    assert suites.main(["model", "--results", str(tmp_path)]) == 2
    assert f"bench.model: {damaged}" in capsys.readouterr().err
    assert performance.main(["--results", str(tmp_path), "--gpu", "h300"]) == 1
    assert f"nothing is recorded of h300 in {tmp_path}; recorded GPUs: h200" in capsys.readouterr().out


def test_the_datasheets_are_known_by_name():
    text = tables.peaks(Records("h200"))
    assert "| H100 SXM | 989.5 | 1979 | 3.35 | 295.4 |" in text
    assert "| H100 PCIe | 756 | 1512 | 2 | 378 |" in text
    assert "| H200 | 989.5 | 1979 | 4.8 | 206.1 |" in text


def test_fast_has_a_line_where_it_is_another_kernel(tmp_path):
    for n, shape in enumerate(recorded.LONGEST):
        fast = {"promotion": 0 if shape.head_dim == 256 else 1}
        kinds = [
            ("ours", 500, {"promotion": 1}),
            ("ours", 800, fast),
            ("ours_call", 450, {"promotion": 1}),
            ("fa3", 600, None),
        ]
        for impl, tflops, config in kinds:
            us = shape.flops / tflops / 1e6
            records.append(row(impl, us, shape, second=10 * n, dtype=FP8, suite="fp8", config=config), tmp_path)
        records.append(row("ours", shape.flops / 4e8, shape, second=10 * n, suite="fp8"), tmp_path)
    text = tables.fp8_longest(Records("h200", tmp_path))
    assert "| 128 | 500 / 500 | 450 / 450 | 400 / 400 | 600 / 600 |" in text
    assert '| 256, `accumulation="fast"` | 800 / 800 | | | |' in text and text.count("fast") == 1


def test_the_fp8_points_are_shares_of_twice_the_peak(tmp_path):
    ran = asdict(Config(2, 128, promotion=1, chunk=64, overlap=False))
    for n, shape in enumerate(GRID):
        for impl, tflops, config in (("ours", 900, ran), ("fa3", 1000, None)):
            us = shape.flops / tflops / 1e6
            records.append(row(impl, us, shape, second=10 * n, dtype=FP8, suite="fp8", config=config), tmp_path)
    found = Records("h200", tmp_path)
    text = tables.fp8_points(found)
    point = next(p for p in found.fp8 if p.label == "256 causal 1K")
    share = of_record(point.by_name["accurate"]).bound / point.time("accurate")
    assert 0.3 < share < 0.7 and text.count("| 0.900 |") == 24
    assert f"| 256 causal 1K | 900 | 45.5% | 112.5% | {share:.1%} | 1000 | 0.900 |" in text


@pytest.mark.parametrize("gpu, gone", [("NVIDIA H20", {}), ("NVIDIA H200", {"lookahead": True})])
def test_what_has_no_model_has_an_empty_cell(tmp_path, gpu, gone):
    ran = asdict(Config(2, 128, promotion=1)) | gone
    for n, shape in enumerate(GRID):
        for impl in ("ours", "cudnn"):
            records.append(row(impl, shape.flops / 5e8, shape, second=10 * n, gpu=gpu, config=ran), tmp_path)
        made = row("ours", shape.flops / 9e8, shape, second=10 * n, dtype=FP8, suite="fp8", gpu=gpu, config=ran)
        records.append(made, tmp_path)
    found = Records(records.short_name(gpu), tmp_path)
    assert (
        len(re.findall(r"\| \d\S+ \w+ \d+K? \| 500 \| \S+% \| 62.5% \| \| cuDNN", tables.forward_points(found))) == 24
    )
    assert tables.fp8_points(found).count("112.5% | |\n") == 23  # and the last line
    assert tables.model(found).count(" - | - | - | - |") == 12


def test_a_point_without_a_matrix_product_is_named():
    (point,) = points([row("ours", 100.0, cublas_fraction=None)], "bfloat16")
    with pytest.raises(NotRecorded, match="no matrix product was measured beside 128 full 4K of commit abc"):
        print(point.cublas)


def test_the_host_table_is_of_the_newest_whole_commit(tmp_path):
    def host(impl, us, commit, **config):
        records.append({**row(impl, None, commit=commit, suite="host", config=config or None), "cpu_us": us}, tmp_path)

    for commit, us in (("old", 30.0), ("new", 18.25)):
        for impl, times in (("ours", 1), ("fa3", 5), ("fa2", 3)):
            host(impl, us * times, commit)
        host("ours", None, commit, extra_bytes=1512, o_lse_bytes=1000)
    host("ours", 1.0, "half")
    host("ours", 20.5, "new", gradients="on")
    for cache, seconds in (("cold", (9.5, 6.8, 8.47)), ("filled", (0.345, 0.375))):
        for value in seconds:
            made = row("ours", None, suite="startup", config={"cache": cache})
            records.append({**made, "cpu_us": value * 1e6}, tmp_path)
    text = tables.host(Records("h200", tmp_path))
    assert (
        "| 18.2 us (with gradients on 20.5); FA2 through SDPA 54.8, FA3 91.2 |" in text
        and "Of commits new and abc" in text
    )
    assert "| O and LSE; 512 bytes more where" in text
    assert "empty cache | 8.5 s (6.8 to 9.5, 3 processes) |" in text
    assert "kernel in the cache | 0.36 s (0.34 to 0.38, 2 processes) |" in text


# Plots

SOURCE = Source("NVIDIA H200", "2.11.0", "abc", "2026-11-29", "about", "command")


def small(ys=(1.0, 2.0)):
    series = Series("ours", ((512.0, ys[0]), (1024.0, ys[1])))
    return Plot(
        "small", "title", "x", "TFLOP/s", (Panel("one", (series,)),), 1, "caption", peak=4.0, ticks=(512.0, 1024.0)
    )


def test_every_peer_has_a_look_of_its_own():
    assert {"ours", *PEERS} <= LOOKS.keys()
    apart = {name: look for name, look in LOOKS.items() if name != "accurate"}  # ours too
    assert (
        len({colour for _, colour, _ in apart.values()}) == len({marker for *_, marker in apart.values()}) == len(apart)
    )
    assert LOOKS["accurate"][1:] == LOOKS["ours"][1:]


def test_a_png_carries_the_digest_of_what_it_shows_and_draws_it(tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "new" / "small.png"
    plots.draw(small(), path)
    assert plots.digest_in(path) == small().digest != small((1.0, 2.1)).digest
    pixels = imread(path)[..., :3]
    red, green, blue = (int(LOOKS["ours"][1][i : i + 2], 16) / 255 for i in (1, 3, 5))
    drawn = (abs(pixels - (red, green, blue)) < 0.02).all(axis=-1)
    assert 200 < drawn.sum() < 0.1 * drawn.size
    path.write_bytes(path.read_bytes()[:20])
    assert plots.digest_in(path) is None and plots.digest_in(tmp_path / "none.png") is None


def test_the_speed_plot_has_a_panel_for_each_head_dim_and_mask(made_up):
    plot = performance.plot_forward(made_up)
    assert [panel.title for panel in plot.panels] == [
        f"head dim {dim}, {mask}" for mask in ("full", "causal") for dim in (64, 128, 256)
    ]
    assert plot.columns == 3 and plot.peak == 989.5
    for panel in plot.panels:
        assert [series.look for series in panel.series] == ["ours", "cudnn", "fa2"]
        assert [x for x, _ in panel.series[0].points] == [512, 1024, 4096, 16384]
        assert [round(y) for _, y in panel.series[1].points] == [400, 400, 400, 550]
    assert all(word in plot.caption for word in ("NVIDIA H200", "commit abc", "2026-11-29", "bench forward --grid"))


def test_the_roof_is_the_bandwidth_below_the_ridge_and_the_peak_above(made_up):
    chip = named("NVIDIA H200", 132, HOPPER)
    full = performance.plot_roofline(made_up).panels[1]
    roof, cublas, ours = full.series[:3]
    assert (roof.look, cublas.look, ours.look) == ("roof", "cublas", "ours")
    assert [x for x, _ in ours.points] == [256, 512, 2048, 8192]  # S / 2
    ridge = 989.5 / 4.8
    assert roof.points == ((64, pytest.approx(64 * 4.8)), (pytest.approx(ridge), 989.5), (16384, 989.5))
    assert [round(y) for _, y in cublas.points] == [800, 800]
    unknown = plots.roofline("r", "t", made_up.forward, SOURCE, named("GPU", 1, HOPPER))
    assert chip.bandwidth == 4.8 and unknown.panels[0].series[0].look == "cublas"


def test_the_error_plot_is_in_percent_and_shows_fast_where_it_is_another_kernel():
    errors = {
        (dim, keys, look): 0.002 for dim in (64, 256) for keys in (1024, 8192) for look in ("accurate", "fast", "fa3")
    }
    errors |= {(256, keys, "fast"): 0.1 for keys in (1024, 8192)}
    plot = plots.error("e", "t", errors, SOURCE)
    assert [[series.look for series in panel.series] for panel in plot.panels] == [
        ["accurate", "fa3"],
        ["accurate", "fast", "fa3"],
    ]
    assert plot.panels[1].series[1].points == ((1024, pytest.approx(10)), (8192, pytest.approx(10)))


def test_errors_in_the_repository_grow_in_the_peer_only():
    errors = tables.errors_of(Records("h200").lengths)
    longest = max(keys for _, keys, _ in errors)
    assert errors[128, longest, "accurate"] < 0.003 < 0.3 < errors[128, longest, "fa3"]
    raw = [json.loads(line) for line in (records.RESULTS / "h200" / "accuracy.jsonl").read_text().splitlines()]
    assert recorded.read("h200", "accuracy") == raw and recorded.read("h200", "nothing") == []
