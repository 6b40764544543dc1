"""What ptxas made of the decode kernels: of every tile, block and kind of cache one, and of every variant one.

Needs no GPU. Compiles run in processes of their own, two at a time, as in test_sass.py.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from fa3.heuristics_decode import all_configs, config_for
from fa3.kernels import compile, sass
from fa3.kernels.decode.config import BOXES, GATHER, SHARED_BYTES, Spec
from fa3.kernels.forward.config import TILES

REGISTER_FILE = 65536  # 32-bit registers of an SM, given to a warp by 8 a thread
PAGES = (0, *BOXES, GATHER)
PLAIN = Spec("bfloat16", 64, 64)
# Of every tile all kinds of cache, with splits but one in turn; of BF16, as FP16 differs in nothing else.
ALL = list(all_configs())
TURNS = {(tile, PAGES[i % len(PAGES)]) for i, tile in enumerate(TILES)}
CASES = [
    (s, c) for s, c in ALL if s.dtype == "bfloat16" and (s.splits != (((s.head_dim, s.head_dim_v), s.pages) in TURNS))
]
VARIANTS = [
    PLAIN,
    replace(PLAIN, dtype="float16"),
    replace(PLAIN, granules=True),
    replace(PLAIN, granules=True, splits=False),
    replace(PLAIN, chunk=True),
    replace(PLAIN, softcap=True),
    replace(PLAIN, sink="float32"),
    replace(PLAIN, sink="bfloat16", splits=False),
    Spec("float16", 128, 128, GATHER, granules=True, chunk=True, softcap=True, sink="float16"),
    Spec("bfloat16", 128, 128, 16, granules=True, chunk=True, softcap=True, sink="float16"),
]
CASES += [(s, config_for(s)) for s in VARIANTS if (s, config_for(s)) not in CASES]


def name_of(spec, config) -> str:
    extras = [x for x in ("granules", "chunk", "softcap", "sink") if getattr(spec, x)]
    kind = {0: "dense", GATHER: "gather"}.get(spec.pages, f"box{spec.pages}")
    words = [spec.dtype, spec.head_dim, spec.head_dim_v, kind, "split" if spec.splits else "whole", config.tile_n]
    return "-".join(map(str, [*words, *extras]))


@pytest.fixture(scope="module")
def account(request):
    """What ptxas made of CASES[i], as a function of i; without xdist all that were selected are started at once."""

    def look(case):
        seen = compile.inspect(*CASES[case])
        return seen, sass.read(seen.cubin, seen.remarks, seen.shared_bytes)

    alone = "PYTEST_XDIST_WORKER" not in os.environ
    with ThreadPoolExecutor(2 if alone else 1) as pool:
        selected = [i.callspec.params["case"] for i in request.session.items if "account" in i.fixturenames]
        futures = {case: pool.submit(look, case) for case in selected if alone}
        yield lambda case: (futures.pop(case, None) or pool.submit(look, case)).result()
        pool.shutdown(cancel_futures=True)


def test_every_kernel_is_listed_and_each_kind_is_compiled():
    assert len(set(ALL)) == len(ALL)
    listed = {(s.dtype, s.head_dim, s.head_dim_v, s.pages, s.splits) for s, _ in ALL}
    assert len(listed) == 2 * len(TILES) * len(PAGES) * 2
    assert not any(s.granules or s.chunk or s.softcap or s.sink for s, _ in ALL)
    kinds = {(s.head_dim, s.head_dim_v, s.pages, c) for s, c in ALL}
    assert {(s.head_dim, s.head_dim_v, s.pages, c) for s, c in CASES} >= kinds
    assert {s.pages for s, _ in CASES if not s.splits} == set(PAGES)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[name_of(*x) for x in CASES])
def test_every_config(account, case):
    spec, config = CASES[case]
    seen, found = account(case)
    gathers = spec.pages == GATHER
    # Everything stays in registers, WGMMAs run one after the other without waiting, and it fits an SM.
    assert not found.spills and found.stack_bytes == 0 and found.spill_bytes == 0
    assert found.count("LDL") == found.count("STL") == 0 and found.warnings == ()
    assert -(-found.registers // 8) * 8 * config.threads(spec) <= REGISTER_FILE
    assert 0 < found.shared_bytes <= config.shared_bytes(spec) <= SHARED_BYTES
    # Tensor cores: Q K^T before the loop and in it, P V in it and behind.
    assert found.count("HGMMA") >= 2 * (spec.head_dim + config.tile_n) // 16 and found.count("HMMA") == 0
    # Q comes row by row, 16 bytes a lane; K and V too, or box by box and group by group.
    kv_copies = sum(copies(config.tile_n, width, config.loaders(spec)) for width in (spec.head_dim, spec.head_dim_v))
    boxes = config.tile_n // (spec.pages or config.tile_n)
    groups = sum(width // (64 if width % 64 == 0 else 32) for width in (spec.head_dim, spec.head_dim_v))
    if gathers:
        assert found.count("LDGSTS") > kv_copies and found.count("UTMALDG") == 0
    else:
        assert found.count("LDGSTS") > 0 and found.count("UTMALDG") >= boxes * groups
    # Each kernel waits for the one before it. With splits the merge comes up early, and what follows the merge.
    assert found.count("ACQBULK") == 1 + spec.splits
    assert (found.count("PREEXIT") >= 2) == spec.splits
    check_order(sass.disassemble(seen.cubin), spec.splits)
    # The same facts by another way.
    assert f"Used {found.registers} registers" in seen.remarks and "0 bytes stack frame" in seen.remarks
    assert ".target sm_90a" in seen.ptx and seen.ptx.count(".entry") == 1 + spec.splits


def check_order(listing: str, splits: bool) -> None:
    """Nothing is read before the kernel before it has ended; by the merge nothing but lists, number by number."""
    functions = [text for text in listing.split(".section\t.text.")[1:] if "ACQBULK" in text]
    assert len(functions) == 1 + splits
    for text in functions:
        before, after = text.split("ACQBULK")
        reads = re.findall(r"\b(?:LDG|LDGSTS|UTMALDG|LD|STG|ATOMG|RED)\b[.\w]*", before)
        if "HGMMA" in text:
            assert reads == [] and "LDG" in after
        else:
            assert set(reads) <= {"LDG.E.CONSTANT"} and after.count("LDG.E.64") >= 4


def copies(rows: int, columns: int, warps: int) -> int:
    """Instructions of 16 bytes a lane."""
    return rows * columns // 8 // (32 * warps)
