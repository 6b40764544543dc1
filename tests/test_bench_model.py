"""The model of the forward kernel: numbers worked out by hand, counts against the kernel's SASS and schedule."""

import dataclasses
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from bench import model
from bench.model import Terms, chip_of, instructions, terms
from bench.peers import FP8, config_of, fp8_kernel_of, spec_of
from bench.recorded import Records, read
from bench.records import PROBLEM, Origin, append, record
from bench.shapes import GRID, NAMED, Shape
from fa3 import heuristics
from fa3.kernels import compile, sass
from fa3.kernels.algo.blocks import first_row, key_blocks
from fa3.kernels.algo.seqlen import Lengths
from fa3.kernels.forward.config import Config, Spec

ROOT = Path(__file__).parent.parent
H200 = chip_of("NVIDIA H200")
MHZ = model.clock_mhz(H200)
BF16 = Spec("bfloat16", 128, 128, False)


def kernel_of(name, dtype="bfloat16"):
    shape = NAMED[name]
    if dtype == FP8:
        return *fp8_kernel_of(shape, "accurate", 132), shape
    return spec_of(shape, dtype), config_of(shape, dtype, 132), shape


# The chip


def test_the_datasheets_peak_is_4096_flops_a_clock_at_the_boost_clock():
    assert pytest.approx(1830, abs=1) == MHZ
    assert 4 * 512 * 2 * 132 * MHZ / 1e6 == pytest.approx(989.5)  # 4 tensor cores of 512 fused multiply-adds
    assert model.clock_mhz(chip_of("NVIDIA H100 PCIe")) == pytest.approx(1619, abs=1)
    for unknown in ("NVIDIA A100-SXM4-80GB", "NVIDIA H20"):
        with pytest.raises(ValueError, match="no model of"):
            chip_of(unknown)


# The terms


def test_one_wave_of_full_attention_by_hand():
    """132 tiles of 128 rows, 2 blocks of 128 keys each: a tile for every multiprocessor."""
    shape = Shape("", 1, 128, 256, 132, 132, 128, 128, False)
    t = terms(BF16, Config(2, 128), shape, H200, mhz=1000.0)  # a cycle is a nanosecond
    assert t.balance == 1.0
    # A warpgroup and block: 4 * 64 * 128 * 128 / 4096 = 1024 cycles of the tensor cores, 128 * (64 + 2) / 16 = 528 of
    # the exponentials.
    assert t.tensor == pytest.approx(2 * 2 * 1.024)
    assert t.exp == pytest.approx(2 * 2 * 0.528)
    assert t.issue == pytest.approx(2 * 2 * instructions(BF16, Config(2, 128)).total / 1e3)
    # Bytes of a block: Q, K, V read by both warpgroups, K and V written once; of a tile: Q written, O written and read.
    block = 2 * (64 + 128 + 128) * 256 + 2 * 128 * 256
    assert t.shared == pytest.approx((2 * block + 3 * 128 * 256) / 128 / 1e3)
    assert t.l2 == pytest.approx(132 * (128 + 2 * 256) * 256 / 5120 / 1e3)
    assert t.dram == pytest.approx(132 * ((2 * 128 + 2 * 256) * 256 + 128 * 4) / 4.8e6)
    assert (t.launch, t.limit) == (2.0, "dram")
    assert t.bound == pytest.approx(t.dram + 2.0)
    assert t.serial == pytest.approx(t.tensor + t.exp + t.issue + 2.0)


@pytest.mark.parametrize("seqlen_k, searched, masked", [(1024, 1, 0), (1000, 1, 1)])
def test_an_optimistic_kernel_looks_for_the_maxima_of_its_first_and_of_masked_blocks(seqlen_k, searched, masked):
    """132 tiles of 8 blocks; causal with as many queries as keys: half the blocks, those on the diagonal masked."""
    guess, search = Config(2, 128, optimistic=True), Config(2, 128)
    shape = Shape("", 1, 128, seqlen_k, 132, 132, 128, 128, False)
    t = terms(BF16, guess, shape, H200, mhz=1000.0)
    assert t.exp == pytest.approx(2 * ((8 - searched) * 0.512 + searched * 0.528))
    per_block = [instructions(BF16, c).total for c in (guess, search)]
    of_mask = masked * model.masking(guess)
    assert t.issue == pytest.approx(2 * ((8 - searched) * per_block[0] + searched * per_block[1] + of_mask) / 1e3)
    causal = dataclasses.replace(shape, seqlen_q=1024, seqlen_k=1024, causal=True)
    t, plain = (terms(dataclasses.replace(BF16, causal=True), c, causal, H200, mhz=1000.0) for c in (guess, search))
    assert (plain.exp - t.exp) * t.balance == pytest.approx(2 * (36 - 8) * 0.016)
    assert (plain.tensor, plain.shared) == (t.tensor, t.shared)


@pytest.mark.parametrize(
    "head_dim, dtype, instructions, cycles",  # as in the docs
    [
        (64, "bfloat16", 325, (1536, 1536, 975, 1216)),
        (128, "bfloat16", 341, (2048, 1024, 682, 1792)),
        (256, "bfloat16", 277, (2560, 640, 554, 2432)),
        (64, FP8, 468, (768, 1584, 1404, 608)),
        (128, FP8, 494, (1024, 1056, 988, 896)),
        (256, FP8, 606, (2048, 1056, 1212, 1792)),
    ],
)
def test_cycles_of_a_block(head_dim, dtype, instructions, cycles):
    spec, config, _ = kernel_of(f"hd{head_dim}-16k-full", dtype)
    assert model.instructions(spec, config).total == instructions
    assert model.block_cycles(spec, config) == cycles


def test_the_bound_is_the_largest_term_and_the_launch():
    t = Terms(3.0, 4.0, 2.0, 1.0, 0.5, 0.25, 2.0, 1.0)
    assert (t.limit, t.bound, t.serial) == ("exp", 6.0, 11.0)
    assert dataclasses.replace(t, l2=9.0).bound == 11.0


@pytest.mark.parametrize(
    "name, dtype, limit, exp_over_tensor",
    [
        ("hd64-16k-full", "bfloat16", "exp", (64 + 2 / 128) / 64),  # the maxima of one block of 128 are looked for
        ("hd128-16k-full", "bfloat16", "tensor", (64 + 2 / 128) / 128),
        ("hd256-16k-full", "bfloat16", "tensor", (40 + 2 / 205) / 160),
        ("hd64-16k-full", FP8, "exp", 66 / 32),
        ("hd128-16k-full", FP8, "exp", 66 / 64 * 256 / 257),  # 128 blocks a tile, and half a block for nobody
        ("hd256-16k-full", FP8, "tensor", 66 / 128),
    ],
)
def test_what_bounds_long_full_attention(name, dtype, limit, exp_over_tensor):
    t = terms(*kernel_of(name, dtype), H200)
    assert t.limit == limit
    assert t.exp / t.tensor == pytest.approx(exp_over_tensor)


def test_the_tensor_term_is_the_papers_flops_where_nothing_is_padded():
    spec, config, shape = kernel_of("hd128-16k-full")
    t = terms(spec, config, shape, H200)
    assert t.tensor * t.balance == pytest.approx(shape.flops / 989.5e6)
    odd = dataclasses.replace(shape, seqlen_q=16383, seqlen_k=16383)  # computes what 16384 computes
    assert terms(spec, config, odd, H200).tensor == t.tensor
    assert terms(spec, config, odd, H200).issue > t.issue  # the last block is masked


@pytest.mark.parametrize("warpgroups, at_128_rows", [(1, 2.0), (2, 1.0), (3, 2 / 3)])
def test_keys_are_streamed_from_l2_once_a_query_tile(warpgroups, at_128_rows):
    shape = dataclasses.replace(NAMED["hd64-4k-full"], seqlen_q=3 * 4096)
    spec = spec_of(shape, "bfloat16")
    t, two = (terms(spec, Config(w, 128), shape, H200) for w in (warpgroups, 2))
    q = shape.batch * shape.heads * shape.seqlen_q * 128 / (5120 * MHZ)
    assert (t.l2 - q) / (two.l2 - q) == pytest.approx(at_128_rows)
    assert t.dram == two.dram


def test_a_dynamic_grid_launches_one_kernel_more():
    spec, config, shape = kernel_of("hd128-16k-full")
    assert config.dynamic and terms(spec, config, shape, H200).launch == 4.0
    assert terms(spec, dataclasses.replace(config, dynamic=False), shape, H200).launch == 2.0


def test_twice_the_clock_is_half_the_time_but_for_dram():
    t, fast = (terms(*kernel_of("hd128-4k-causal"), H200, mhz) for mhz in (1000.0, 2000.0))
    assert [getattr(t, n) / getattr(fast, n) for n in model.TERMS] == pytest.approx([2, 2, 2, 2, 2, 1])


# Tiles


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q, k", [(1, 1), (1000, 1000), (4096, 4096), (100, 900), (900, 100), (577, 577)])
@pytest.mark.parametrize("config", [Config(3, 128), Config(2, 80), Config(1, 64)], ids=["192x128", "128x80", "64x64"])
def test_tiles_are_the_kernels(causal, q, k, config):
    at, m, n = Lengths(q, k), config.tile_m, config.tile_n
    found = model.tiles(dataclasses.replace(BF16, causal=causal), config, q, k)
    kernels = [key_blocks(first_row(i, at, m, causal), at, m, n, causal) for i in range(-(-q // m))]
    assert [t.blocks for t in found] == [b.count for b in kernels]
    if causal:
        assert [t.masked for t in found] == [b.masked for b in kernels]
    else:
        assert {t.masked for t in found} == {int(k % n > 0)}
    assert [t.keys for t in found] == [min(b.count * n, k) for b in kernels]


def test_balance():
    full, causal = BF16, dataclasses.replace(BF16, causal=True)
    one, fixed, dynamic = heuristics.ROWS[128, 128].schedules(4096, False)
    assert model.balance(full, dynamic, 16384, 16384, 16, 132) == pytest.approx(2048 / 132 / 16)
    assert model.balance(full, one, 128, 128, 66, 132) == 0.5
    assert model.balance(causal, fixed, 4096, 4096, 64, 132) == heuristics.balance(32, 64, 132)
    # 3 tiles of 1, 2 and 3 blocks: on two multiprocessors 3 and 3, on three as long as the longest.
    assert model.balance(causal, one, 384, 384, 1, 2) == 1.0
    assert model.balance(causal, one, 384, 384, 1, 3) == pytest.approx(2 / 3)
    assert 0.99 < model.balance(causal, dynamic, 16384, 16384, 16, 132) <= 1.0


# Records


def test_a_record_is_judged_by_the_config_that_it_ran_with():
    spec, config, shape = kernel_of("hd128-16k-full")
    record = {
        "impl": "ours", "dtype": "bfloat16", "gpu": "NVIDIA H200", "graph_us": 3000.0,
        "config": dataclasses.asdict(config), **{name: getattr(shape, name) for name in PROBLEM},
    }  # fmt: skip
    assert model.of_record(record) == terms(spec, config, shape, H200)
    assert model.utilization(record) == pytest.approx(terms(spec, config, shape, H200).bound / 3000)
    slow = {**record, "config": {"warpgroups": 1, "tile_n": 128}}  # as of an older commit: with fewer keys
    assert model.of_record(slow).shared > model.of_record(record).shared
    assert model.utilization({**record, "graph_us": None}) is None
    gone = {**record["config"], "lookahead": True}
    for other in ({"impl": "fa3"}, {"dtype": "float32"}, {"config": None}, {"config": gone}):
        with pytest.raises(ValueError, match="no model of"):
            model.of_record({**record, **other})


def keep(folder, commit, shapes=GRID, gpu="NVIDIA H100 80GB HBM3", us=3000.0, dtype="bfloat16", **choices):
    """Records of ours, with the Config that fa3 takes and these choices."""
    suite = "fp8" if dtype == FP8 else "forward"
    for shape in shapes:
        config = dataclasses.asdict(kernel_of(shape.name, dtype)[1]) | choices
        append(record(Origin(gpu, "2.11.0", commit), suite, "ours", dtype, shape, graph_us=us, config=config), folder)


def test_the_records_are_of_one_commit_and_of_this_chip(tmp_path, capsys):
    keep(tmp_path, "whole")
    keep(tmp_path, "whole", dtype=FP8)
    keep(tmp_path, "part", GRID[:3], us=1.0)
    keep(tmp_path, "card", gpu="NVIDIA H100 PCIe", us=1.0)
    keep(tmp_path, "fast", us=1.0, dtype=FP8, promotion=0)  # another answer
    found = model.points("h100", results=tmp_path)
    counted = [(p.record["commit"], p.record["graph_us"]) for p in found if p.record]
    assert counted == [("whole", 3000.0)] * 48
    assert model.main(["--gpu", "h100", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("record: of commit whole") == 2
    assert {p.record["commit"] for p in model.points("h100-pcie", results=tmp_path) if p.record} == {"card"}


def test_the_model_reads_what_the_documents_show():
    shown, found = Records("h200"), model.points("h200")
    assert [p.record for p in found if p.dtype != FP8] == [p.by_name["ours"] for p in shown.forward]
    assert [p.record for p in found if p.dtype == FP8] == [p.by_name["accurate"] for p in shown.fp8]


def test_why_there_is_no_share_is_said(tmp_path, capsys):
    keep(tmp_path, "part", GRID[:3])
    assert model.main(["--gpu", "h100", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "no record: no commit has all 24 shapes with ours" in printed and "of commit part" not in printed
    keep(tmp_path, "old", lookahead=True)
    found = [p for p in model.points("h100", results=tmp_path) if p.dtype != FP8]
    assert {(p.record, p.why) for p in found} == {(None, "no model of a config with lookahead, which commit old ran")}
    assert found[0].terms == terms(*kernel_of(found[0].shape.name), chip_of("NVIDIA H100 80GB HBM3"))


def test_the_table_has_the_grid_in_both_types(tmp_path, capsys):
    found = model.points("h200", results=tmp_path)
    assert len(found) == 48 and all(p.record is None for p in found)
    assert all(0 < p.terms.bound < p.terms.serial + p.terms.dram for p in found)
    assert model.main(["--gpu", "h100", "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3, 132 multiprocessors at 1830 MHz, 3.35 TB/s" in text
    assert text.count("hd128-4k-full") == 2 and "573.0" in text and "577.0" in text


def test_the_model_needs_no_torch():
    program = (
        "import sys, bench.model as m; m.points('h200'); print([x for x in ('torch', 'cutlass') if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_record_in_the_repository_beats_the_bound_at_the_highest_clock():
    """An H200 clocks at 1980 MHz at most: a faster kernel would mean that the model counts too much."""
    shares = [p.terms.bound / p.record["graph_us"] for p in model.points("h200", 1980.0) if p.record]
    assert len(shares) == 48 and all(0.2 < share < 1 for share in shares)


def test_the_ablation_lies_between_bound_and_serial():
    records = [r for r in read("h200", "ablation") if r["head_dim"] == 128]
    assert len(records) >= 24
    for r in records:
        t = model.of_record(r)
        assert t.bound < r["graph_us"] < t.serial


# The instructions


LINE = re.compile(r"^(?:(?P<label>\.L\w+):|\s+/\*[0-9a-f]{4,}\*/.*?\b(?P<branch>BRA)\b.*?(?P<target>\.L\w+))", re.M)


def loops(code: str):
    """Opcodes of every loop: from a label to a branch back to it, as many as there are."""
    labels = {}
    for match in LINE.finditer(code):
        if match["label"]:
            labels[match["label"]] = match.start()
        elif match["target"] in labels:
            end = code.index("\n", match.start()) + 1
            yield Counter(name for name, _ in sass.INSTRUCTION.findall(code[labels[match["target"]] : end]))


def count(opcodes: Counter, *families: str) -> int:
    return sum(n for name, n in opcodes.items() if name.split(".")[0] in families or name in families)


def test_loops_are_found():
    lines = [".L_x_1:", " /*0010*/ MUFU.EX2 R1, R2 ;", ".L_x_2:", " /*0020*/ @P1 FADD R1, R2, R3 ;"]
    lines += [" /*0030*/ @!P0 BRA `(.L_x_2) ;", " /*0040*/ BRA `(.L_x_1) ;", " /*0050*/ BRA `(.L_x_9) ;", ""]
    inner, outer = loops("\n".join(lines))
    assert inner == {"FADD": 1, "BRA": 1} and outer == {"MUFU.EX2": 1, "FADD": 1, "BRA": 2}
    assert count(outer, "MUFU.EX2", "FADD") == 2 and count(outer, "MUFU") == 1


def where_guesses_hold(code: str) -> str:
    """Without what a warp runs that computes scores anew: from the branch behind its vote to that branch's target."""
    return re.sub(r"(\bVOTE\.ANY\b.*?\bBRA\b[^\n]*?(\.L\w+)[^\n]*\n).*?(?=^\2:)", r"\1", code, flags=re.S | re.M)


def test_scores_anew_are_left_out():
    lines = [".L_x_1:", " /*0010*/ VOTE.ANY P0, P0 ;", " /*0020*/ F2FP R1, R2 ;", " /*0030*/ @!P0 BRA `(.L_x_2) ;"]
    lines += [" /*0040*/ HMMA R1, R2 ;", ".L_x_2:", " /*0050*/ FADD R1, R2, R3 ;", " /*0060*/ BRA `(.L_x_1) ;", ""]
    (loop,) = loops(where_guesses_hold("\n".join(lines)))
    assert loop == {"VOTE.ANY": 1, "F2FP": 1, "BRA": 2, "FADD": 1}
    assert where_guesses_hold(" /*0010*/ VOTEU.ALL UP0, P2 ;\n") == " /*0010*/ VOTEU.ALL UP0, P2 ;\n"


@pytest.mark.parametrize(
    "name, dtype, choices",
    [
        ("hd64-16k-full", "bfloat16", {}),
        ("hd64-16k-full", "bfloat16", {"stages": 2}),
        ("hd128-16k-full", "bfloat16", {}),
        ("hd256-16k-full", "bfloat16", {}),
        ("hd128-16k-full", "bfloat16", {"optimistic": False}),
        ("hd256-16k-full", "bfloat16", {"optimistic": False, "rescale_early": True}),
        ("hd64-16k-full", FP8, {}),
        ("hd128-16k-full", FP8, {}),
    ],
)
def test_the_loop_over_key_blocks_has_the_instructions_that_the_model_counts(name, dtype, choices):
    spec, config, _ = kernel_of(name, dtype)
    config = dataclasses.replace(config, **choices)
    assert config.optimistic == (dtype != FP8 and choices.get("optimistic", True))
    a, b = "QGMMA" if spec.is_fp8 else "HGMMA", instructions(spec, config)
    code = where_guesses_hold(sass.disassemble(compile.inspect(spec, config).cubin))
    turns = 2 if config.alternate else 1  # blocks of a turn
    whole = [x for x in loops(code) if count(x, a) >= turns * b.wgmma and count(x, "MUFU.EX2") >= turns * b.ex2]
    loop = min(whole, key=Counter.total)
    assert count(loop, "MUFU.EX2") == turns * b.ex2 and count(loop, "MUFU") == turns * b.ex2
    assert count(loop, a) == turns * b.wgmma and count(loop, "HMMA") == 0
    assert count(loop, "F2FP") == turns * b.convert
    assert count(loop, "FMNMX") == turns * b.max
    assert count(loop, "FFMA", "FMUL", "FADD") == pytest.approx(turns * b.fp32, abs=turns)
    assert loop.total() == pytest.approx(turns * b.total, rel=0.04)


@pytest.mark.parametrize("choices", [{}, {"optimistic": False}], ids=["guessed", "searched"])
def test_a_masked_block_has_the_instructions_that_the_model_adds(choices):
    """A causal kernel has the loop twice: with a mask, and without. Where there is a mask nothing is guessed."""
    spec, config, _ = kernel_of("hd128-16k-causal")
    config = dataclasses.replace(config, **choices)
    b, search = instructions(spec, config), instructions(spec, model.searching(config))
    code = where_guesses_hold(sass.disassemble(compile.inspect(spec, config).cubin))
    free, masked, *_ = sorted((x for x in loops(code) if count(x, "HGMMA") == b.wgmma), key=Counter.total)
    assert count(free, "MUFU.EX2") == b.ex2 and count(masked, "MUFU.EX2") == search.ex2
    assert free.total() == pytest.approx(b.total, rel=0.04)
    assert count(free, "ISETP") == 0 and count(masked, "ISETP") == config.tile_n // 2
    assert count(masked, "FSEL") - count(free, "FSEL") == pytest.approx(config.tile_n // 2, abs=2)  # -inf checks
    assert masked.total() - search.total == pytest.approx(model.masking(config), abs=5)


def test_instructions_grow_with_scores_and_columns():
    wide, narrow = instructions(BF16, Config(2, 128)), instructions(BF16, Config(2, 64))
    assert (wide.ex2, wide.convert, wide.wgmma) == (66, 32, 16) and (narrow.ex2, narrow.wgmma) == (34, 12)
    spec = Spec(FP8, 256, 256, False, "bfloat16")
    assert instructions(spec, Config(2, 128, promotion=1, chunk=64)).wgmma == 8 + 4 * 4
    assert instructions(spec, Config(2, 128)).wgmma == 8 + 4
    for a, b in pairwise([instructions(BF16, Config(2, n)).total for n in (64, 96, 128, 176)]):
        assert a < b
