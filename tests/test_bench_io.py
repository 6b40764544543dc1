"""The memory and traffic suites without a GPU: fits and formulas by hand, ncu's output as it is documented, records."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import memory, traffic
from bench.host import output_bytes
from bench.machine import NoDevice, open_machine
from bench.naive import naive
from bench.records import FIELDS, MORE_FIELDS, append, record
from bench.regression import Run
from bench.shapes import Shape
from fa3.kernels.forward.config import SHARED_BYTES
from fa3.reference import attention

ROOT = Path(__file__).parent.parent
SMALL = Shape("", 2, 96, 96, 4, 4, 32, 32, False)


def inputs(shape):
    torch.manual_seed(0)
    return [torch.randn(shape.batch, shape.seqlen_q, shape.heads, shape.head_dim, dtype=torch.float64) for _ in "qkv"]


def test_naive_is_attention():
    q, k, v = inputs(SMALL)
    assert torch.allclose(naive(q, k, v, False), attention(q, k, v)[0], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="without a mask"):
        naive(q, k, v, True)


# Memory


def test_a_fit_of_a_power_is_that_power():
    quadratic = memory.fit([(s, 7 * s * s) for s in (1024, 2048, 8192)])
    assert quadratic.slope == pytest.approx(2.0) and quadratic.factor == pytest.approx(7.0)
    assert quadratic.bytes(100) == pytest.approx(70_000)
    steps = memory.fit([(1, 1), (2, 4), (4, 4)])  # logarithms 0 2 2 at 0 1 2: through (1, 4 / 3) with slope 1
    assert steps.slope == pytest.approx(1.0) and steps.factor == pytest.approx(2 ** (1 / 3))
    for few in ([], [(1024, 5)], [(1024, 5), (1024, 6)]):
        with pytest.raises(ValueError, match="two lengths"):
            memory.fit(few)


def test_the_limit_counts_inputs_and_call():
    assert memory.input_bytes(1024) == 3 * 1024 * 16 * 128 * 2
    linear = memory.Fit(1.0, 4096.0)  # with 12288 bytes of inputs: 16384 a token
    assert memory.fitted_limit(linear, 16384 * 5000) == 5000
    assert memory.fitted_limit(linear, 16384 * 5000 - 1) == 4999
    scores = memory.Fit(2.0, 2 * 16 * 2.0)  # two matrices a head
    longest = memory.fitted_limit(scores, 80 * 2**30)
    needed = [64 * s * s + 12288 * s for s in (longest, longest + 1)]
    assert needed[0] <= 80 * 2**30 < needed[1]


def test_the_longest_is_found_by_bisection():
    asked = []

    def runs(seqlen):
        asked.append(seqlen)
        return seqlen <= 41_000

    assert memory.largest(runs, 30 * 1024, 50 * 1024, 1024) == 40 * 1024
    assert all(s % 1024 == 0 for s in asked) and len(asked) <= 5
    assert memory.largest(lambda s: True, 0, 4, 1) == 3  # the upper end is taken not to run


def test_live_bytes_grow_and_shrink_with_tensors():
    live = memory.Live()
    a, b = torch.zeros(100), torch.zeros(50)
    live.add((a, None, b))
    live.add(a.view(10, 10))  # the same memory
    assert (live.now, live.most) == (600, 600)
    del a
    assert (live.now, live.most) == (200, 600)
    live.add(c := torch.zeros(25))
    assert (live.now, live.most) == (300, 600) and c.numel() == 25


def test_a_call_of_naive_attention_holds_two_matrices_and_ours_its_outputs():
    machine = open_machine("cpu", "abc")
    for seqlen in (256, 512):  # where O is smaller than the scores
        shape = memory.shape_of(seqlen)
        scaled_q = seqlen * 16 * 128 * 2
        assert memory.measured(naive, shape, machine) == 2 * 16 * seqlen**2 * 2 + scaled_q
    import fa3

    ours = memory.measured(lambda q, k, v, causal: fa3.flash_attn_func(q, k, v), shape, machine)
    assert ours == output_bytes(shape)


def test_memory_on_the_cpu_writes_records_and_slopes(tmp_path, capsys):
    assert memory.main(["--device", "cpu", "--seqlens", "512", "1024", "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "cpu" / "memory.jsonl").read_text().splitlines()]
    assert [(r["impl"], r["seqlen_k"], r["case"]) for r in lines] == [
        ("naive", 512, "call"), ("ours", 512, "call"), ("naive", 1024, "call"), ("ours", 1024, "call"),
    ]  # fmt: skip
    assert all(tuple(r) == FIELDS + MORE_FIELDS["memory"] for r in lines)
    assert lines[2]["extra_bytes"] == 2 * 16 * 1024**2 * 2 + 1024 * 16 * 128 * 2
    text = capsys.readouterr().out
    assert "naive: slope 1.918" in text and "ours: slope 1.000" in text and "71,303,168" in text


def test_memory_refuses_one_length_and_the_folder_of_the_measurements(capsys):
    for arguments, words in ((["--seqlens", "64", "64"], "two lengths"), (["--device", "cpu"], "--out")):
        with pytest.raises(SystemExit):
            memory.main(arguments)
        assert words in capsys.readouterr().err


def given(folder, **more):
    return SimpleNamespace(out=folder, check=False, record=False, **more)


class Gpu:
    """A machine of so many bytes: naive attention runs where inputs and 64 S^2 fit."""

    def __init__(self, monkeypatch, free):
        self.free = free
        monkeypatch.setattr(memory, "measured", self.measured)
        monkeypatch.setattr(memory, "free_bytes", lambda machine: free)
        monkeypatch.setattr(memory, "load", lambda names: ({"ours": "ours"}, {}))

    def measured(self, attention, shape, machine):
        s = shape.seqlen_q
        extra = output_bytes(shape) if attention == "ours" else 64 * s * s
        return extra if memory.input_bytes(s) + extra <= self.free else None


def test_the_limit_is_fitted_and_tried(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(memory, "open_machine", lambda *_: open_machine("cpu", "abc"))
    free = 64 * 20_000**2 + 12288 * 20_000 + 1000  # the fit is not exact
    Gpu(monkeypatch, free)
    assert memory.main(["--try", "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "cpu" / "memory.jsonl").read_text().splitlines()]
    limits = {(r["impl"], r["case"]): r for r in lines if r["case"] != "call"}
    assert limits["naive", "limit, fitted"]["seqlen_q"] == 20_000
    assert limits["naive", "limit, fitted"]["config"] == {"slope": 2.0, "free_bytes": free}
    assert limits["naive", "limit, tried"]["seqlen_q"] == 19 * 1024
    assert limits["ours", "limit, fitted"]["seqlen_q"] == free // (12288 + 16 * (128 * 2 + 4))
    assert ("ours", "limit, tried") not in limits
    assert [r["seqlen_q"] for r in lines if r["impl"] == "naive" and r["case"] == "call"] == [
        2**i for i in range(10, 15)
    ]
    text = capsys.readouterr().out
    assert "naive at 32768: out of memory" in text and "naive: S 19,456 ran, 20,480 did not" in text


def test_nothing_is_claimed_where_the_longest_lies_elsewhere(monkeypatch, tmp_path, capsys):
    machine = open_machine("cpu", "abc")
    Gpu(monkeypatch, 64 * 20_000**2)
    from bench.report import console

    for near in (10_000, 40_000):
        memory._try(naive, near, 1, machine, Run("memory", machine, given(tmp_path)), console())
    assert capsys.readouterr().out.count("its longest S is not between") == 2 and not list(tmp_path.iterdir())


# Traffic: the formulas


def test_naive_moves_four_matrices():
    shape = Shape("", 1, 8192, 8192, 1, 1, 64, 64, False)
    operand = 8192 * 64 * 2
    assert traffic.score_bytes(shape) == 2 * 8192**2 == 134_217_728
    assert traffic.dram_formula("naive", shape) == 4 * 2 * 8192**2 + 6 * operand
    assert traffic.l2_formula("naive", shape) is None


@pytest.mark.parametrize("rows, tiles", [("64", 128), ("128", 64), ("192", 43)])
def test_ours_streams_keys_once_a_query_tile(rows, tiles):
    shape = traffic.shape_of(8192)
    stream = 16 * tiles * 8192 * (64 + 64) * 2
    assert traffic.kv_stream_bytes(shape, int(rows)) == stream
    assert traffic.l2_formula(rows, shape) == stream + 16 * 8192 * 64 * 2
    assert traffic.dram_formula(rows, shape) == 16 * 8192 * (4 * 64 * 2 + 4)


def test_the_kernels_differ_in_their_rows_alone():
    spec = traffic.spec_of(traffic.shape_of(8192), "bfloat16")
    assert {name: c.tile_m for name, c in traffic.CONFIGS.items()} == {"64": 64, "128": 128, "192": 192}
    assert {(c.tile_n, c.stages, c.persistent) for c in traffic.CONFIGS.values()} == {(128, 2, False)}
    assert all(c.shared_bytes(spec) <= SHARED_BYTES for c in traffic.CONFIGS.values())


# Traffic: ncu

NAMES = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","device__attribute_display_name",' + ",".join(f'"{metric}"' for metric in traffic.METRICS)
)
PLACE = '"1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","NVIDIA H200"'
SAID = f"""==PROF== Connected to process 4242 (/usr/bin/python3.11)
==PROF== Profiling "scale" - 0: 0%....50%....100% - 2 passes
==PROF== Disconnected from process 4242
{NAMES}
"","","","","","","","","","","","","byte","byte","byte","sector","byte"
"0","4242","python3","127.0.0.1","void scale<float, 4>(int, ""x"")",{PLACE},"1,000","2,000","3,000","90","n/a"
"1","4242","python3","127.0.0.1","product",{PLACE},"40000","50000","60000.5","1,800","7"
"""  # by hand, in the format of ncu's documentation; the numbers mean nothing


def test_ncus_table_is_read():
    scale, product = traffic.parse(SAID)
    assert scale == dict(zip(traffic.METRICS, (1000, 2000, 3000, 90)))  # the last is n/a
    assert product == dict(zip(traffic.METRICS, (40000, 50000, 60000.5, 1800, 7)))
    assert traffic.counted([scale, product]) == (1000 + 2000 + 40000 + 50000, 63000.5)
    assert traffic.checks([scale, product]) == {"l2_sector_bytes": 32 * 1890, "tma_bytes": None}
    assert traffic.checks([product]) == {"l2_sector_bytes": 32 * 1800, "tma_bytes": 7}


def test_larger_units_are_made_bytes_and_unknown_ones_refused():
    scaled = SAID.replace('"byte","byte","byte","sector"', '"Kbyte","byte","Mbyte","sector"')
    assert traffic.counted(traffic.parse(scaled)) == (41_000_000 + 52_000, 63_000_500_000)
    with pytest.raises(ValueError, match=r"dram__bytes_read.sum is in 'furlong'"):
        traffic.parse(SAID.replace('"byte","byte","byte","sector"', '"furlong","byte","byte","sector"'))


def test_a_metric_that_is_missing_and_output_without_a_table_are_errors():
    with pytest.raises(ValueError, match=r"counted no l1tex__m_xbar2l1tex_read_bytes.sum"):
        traffic.counted(traffic.parse(SAID.replace('"3,000"', '"n/a"')))
    with pytest.raises(ValueError, match=r"counted no dram__bytes_read.sum"):
        traffic.counted([])
    with pytest.raises(ValueError, match="no table in ncu's output: ==WARNING== No kernels were profiled."):
        traffic.parse("==PROF== Connected\n==WARNING== No kernels were profiled.\n")


def test_the_command_asks_for_every_metric_of_one_call():
    found = traffic.command("/opt/ncu", "128", 8192)
    assert found[0] == "/opt/ncu" and found[-4:] == ["-m", "bench.one_call", "128", "8192"]
    assert found[found.index("--metrics") + 1].split(",") == list(traffic.METRICS)
    for words in (("--page", "raw"), ("--print-units", "base"), ("--profile-from-start", "off")):
        assert tuple(found[found.index(words[0]) :][:2]) == words
    assert "--csv" in found


def finished(returncode, stdout):
    return lambda *_, **__: subprocess.CompletedProcess([], returncode, stdout, "")


def test_ncus_own_words_are_the_reason(monkeypatch):
    words = "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission to access counters.\nbye\n"
    monkeypatch.setattr(subprocess, "run", finished(1, words))
    with pytest.raises(RuntimeError, match="^ERR_NVGPUCTRPERM - no permission to access counters.$"):
        traffic.profile("ncu", "naive", 64)


def test_a_run_writes_what_was_counted_beside_the_formulas(monkeypatch, tmp_path, capsys):
    ahead = []
    monkeypatch.setattr(traffic, "compile_ahead", lambda kernels, jobs: ahead.extend(c.tile_m for _, c in kernels))
    monkeypatch.setattr(subprocess, "run", finished(0, SAID))
    args = given(tmp_path, seqlen=8192, impl=traffic.NAMES)
    assert traffic.run(args, open_machine("cpu", "abc"), "ncu") == 0
    assert ahead == [64, 128, 192]
    lines = [json.loads(line) for line in (tmp_path / "cpu" / "traffic.jsonl").read_text().splitlines()]
    assert all(tuple(r) == FIELDS + MORE_FIELDS["traffic"] for r in lines)
    assert [(r["impl"], r["config"].get("warpgroups"), r["dram_bytes"], r["l2_bytes"]) for r in lines] == [
        ("naive", None, 93000, 63000), ("ours", 1, 93000, 63000), ("ours", 2, 93000, 63000), ("ours", 3, 93000, 63000),
    ]  # fmt: skip
    assert [r["l2_formula"] for r in lines] == [
        None,
        *(traffic.l2_formula(n, traffic.shape_of(8192)) for n in traffic.CONFIGS),
    ]
    assert lines[0]["config"] == {"kernels": 2, "l2_sector_bytes": 60480, "tma_bytes": None}
    text = capsys.readouterr().out
    assert "ours, 192 rows" in text and "8,690.6" in text and "1,459.6" in text
    monkeypatch.setattr(subprocess, "run", finished(1, "==ERROR== no counters\n"))
    assert traffic.run(args, open_machine("cpu", "abc"), "ncu") == 1
    assert "64: no counters" in capsys.readouterr().out


def test_records_of_both_suites_take_their_fields_and_no_others(tmp_path):
    origin = open_machine("cpu", "abc").origin
    line = record(origin, "memory", "naive", "bfloat16", memory.shape_of(1024))
    with pytest.raises(ValueError, match="case, extra_bytes"):
        append(line, tmp_path)
    append({**line, "case": "call", "extra_bytes": 1}, tmp_path)
    assert (tmp_path / "cpu" / "memory.jsonl").exists()


# The commands


@pytest.mark.parametrize("module", ["memory", "traffic"])
def test_without_a_gpu_both_say_so_and_end_with_2(module):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{module}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"bench.{module}: this benchmark needs a CUDA GPU and torch sees none here.\n"


def test_without_ncu_the_traffic_suite_says_so(monkeypatch):
    monkeypatch.setattr(traffic, "open_machine", lambda *_: open_machine("cpu", "abc"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoDevice, match="needs Nsight Compute's ncu on the PATH"):
        traffic.main([])
