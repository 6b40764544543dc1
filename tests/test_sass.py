"""What ptxas made of the kernels: every Config that heuristics can return, compiled for sm_90a, and the reader itself.

Needs no GPU. Compiles run in processes of their own, two at a time; under xdist every worker compiles its own share.
"""

import importlib.util
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fa3.heuristics import all_configs
from fa3.kernels import compile, sass
from fa3.kernels.forward.config import SHARED_BYTES

REGISTER_FILE = 65536  # 32-bit registers of an SM
# Of FP8 with O in FP16, where nothing but the store differs, one schedule. Of ragged kernels one type.
CASES = [
    (s, c)
    for s, c in all_configs()
    if (s.dtype_o != "float16" or (c.persistent and not c.dynamic)) and (not s.ragged or s.dtype == "bfloat16")
]
MASKS = {False: "full", True: "causal"}
NAMES = [
    f"{s.dtype}{s.dtype_o}-{s.head_dim}-{s.head_dim_v}-{MASKS[s.causal]}{'-ragged' * s.ragged}-{c.tile_n}"
    for s, c in CASES
]
SHUFFLES = 24  # row maxima and sums, and a ticket to the other lanes; of P there are none
RAGGED = 4  # more where a tile's place is three numbers


def look(spec, config):
    seen = compile.inspect(spec, config)
    return seen, sass.read(seen.cubin, seen.remarks, seen.shared_bytes)


@pytest.fixture(scope="module")
def account(request):
    """look(*CASES[i]) as a function of i; without xdist all that were selected are started at once."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    with ThreadPoolExecutor(2 if alone else 1) as pool:
        selected = [i.callspec.params["case"] for i in request.session.items if "account" in i.fixturenames]
        futures = {case: pool.submit(look, *CASES[case]) for case in selected if alone}
        yield lambda case: (futures.pop(case, None) or pool.submit(look, *CASES[case])).result()
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def toys(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import toy_kernel

    return toy_kernel


def test_there_are_configs():
    assert len(set(CASES)) == len(CASES) >= 24 + 48  # 6 tiles, 2 types, 2 masks; of FP8 2 accumulations too


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_every_config(account, case):
    spec, config = CASES[case]
    seen, found = account(case)
    # Tensor cores and TMA are what runs, and nothing older, but where a warp computes its scores anew.
    k_steps = (spec.head_dim + config.tile_n) // spec.step
    used, other = ("QGMMA", "HGMMA") if spec.is_fp8 else ("HGMMA", "QGMMA")
    assert found.count(used) >= k_steps and found.count(other) == 0
    assert (found.count("HMMA") > 0) == config.optimistic and found.count("IMMA") == 0
    assert found.count("SHFL") <= SHUFFLES + RAGGED * spec.ragged
    assert found.count("UTMALDG") >= 3 and found.count("LDGSTS") == 0
    # The producer gave its registers away and the consumers got them.
    assert sorted(set(found.setmaxnreg)) == sorted(config.registers(spec))
    producer, consumer = config.registers(spec)
    # No more than the CTA begins with: for more a warpgroup would wait for ever.
    assert 128 * (producer + config.warpgroups * consumer) <= found.registers * config.threads <= REGISTER_FILE
    # Everything stays in registers, WGMMAs run one after the other without waiting, and it fits an SM.
    assert not found.spills and found.stack_bytes == 0 and found.spill_bytes == 0
    assert found.count("LDL") == found.count("STL") == 0
    assert found.warnings == ()
    assert 0 < found.shared_bytes <= config.shared_bytes(spec) <= SHARED_BYTES
    # The same facts by another way.
    assert f"Used {found.registers} registers" in seen.remarks and "0 bytes stack frame" in seen.remarks
    assert ".target sm_90a" in seen.ptx and "wgmma.mma_async" in seen.ptx


# The reader


def test_a_kernel_with_a_stack_is_caught(toys):
    """Device printf takes a stack: the checks above must see it."""
    seen, found = look(toys.Noisy(), toys.Threads())
    assert found.spills and found.stack_bytes > 0 and found.count("STL") > 0
    assert f"{found.stack_bytes} bytes stack frame" in seen.remarks
    assert found.count("HGMMA") == found.count("UTMALDG") == 0 and found.setmaxnreg == ()
    assert sass.resources(seen.cubin) == sass.Resources(found.registers, found.stack_bytes)
    for damaged in (b"", b"text", seen.cubin[:3000]):
        with pytest.raises(ValueError):
            sass.resources(damaged)
    with pytest.raises(Exception, match="cannot assign"):
        found.registers = 0


LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P1 BRA `(.L_x_0) ;
        /*0020*/              @!UP0 USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
        /*0030*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
        /*0040*/              @!PT HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0 ;
        /*0050*/                   UTMALDG.4D [UR32], [UR14], desc[URZ] ;
        /*1f0060*/                 LDL.LU R2, [R1+0x4] ;
        /*0070*/                   LDLX R0 ;
.L_x_0:
"""


def test_instructions_are_counted_by_family(monkeypatch):
    monkeypatch.setattr(sass, "disassemble", lambda cubin: LISTING)
    monkeypatch.setattr(sass, "resources", lambda cubin: sass.Resources(168, 0))
    remarks = (
        "\x1b[96mremark\x1b[0m ptxas . 0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info : (\x1b[1mC7510\x1b[0m) Potential Performance Loss: wgmma.mma_async are serialized due to ...\n"
        "ptxas info : Used 168 registers, used C75 barriers\n"
    )
    found = sass.read(b"", remarks, 1024)
    assert dict(found.opcodes) == {
        "LDC": 1,
        "BRA": 1,
        "USETMAXREG.DEALLOC.CTAPOOL": 1,
        "USETMAXREG.TRY_ALLOC.CTAPOOL": 1,
        "HGMMA.64x128x16.F32.BF16": 1,
        "UTMALDG.4D": 1,
        "LDL.LU": 1,
        "LDLX": 1,
    }
    assert (found.count("LDL"), found.count("USETMAXREG"), found.count("HGMMA"), found.count("GMMA")) == (1, 2, 1, 0)
    assert found.setmaxnreg == (24, 240)
    assert found.spill_bytes == 20 and found.spills
    assert len(found.warnings) == 1 and found.warnings[0].startswith("ptxas info : (C7510)")
    assert (found.registers, found.shared_bytes) == (168, 1024)


@pytest.mark.parametrize(
    "change",
    [{"stack_bytes": 8}, {"spill_bytes": 4}, {"opcodes": {"LDL.64": 1}}, {"opcodes": {"STL": 1}}, {}],
)
def test_what_counts_as_a_spill(change):
    clean = dict(registers=168, stack_bytes=0, shared_bytes=0, setmaxnreg=(), opcodes={}, spill_bytes=0, warnings=())
    assert sass.Sass(**clean | change).spills == bool(change)


def launch(size):
    return f"""
    %17 = llvm.mlir.constant(5 : i64) : i64
  }}
    %17 = {size} : i64
    %362 = llvm.getelementptr %356[0, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.{sass.LAUNCH}
    llvm.store %17, %362 : i64, !llvm.ptr
    """


def test_shared_memory_of_the_launch():
    assert sass.launch_shared_bytes(launch("llvm.mlir.constant(163920 : i64)")) == 163920
    assert sass.launch_shared_bytes(launch("llvm.mlir.zero")) == 0
    two = launch("llvm.mlir.constant(2048 : i64)") + launch("llvm.mlir.constant(1024 : i64)")
    assert sass.launch_shared_bytes(two) == 2048
    with pytest.raises(ValueError, match="no constant"):
        sass.launch_shared_bytes(launch("llvm.add %1, %2").replace("constant(5", "undef(5"))
    with pytest.raises(ValueError, match="no launch"):
        sass.launch_shared_bytes("llvm.return")


def test_the_disassembler_is_looked_for_in_the_packages_and_on_the_path(tmp_path, monkeypatch):
    class Package:
        submodule_search_locations = [str(tmp_path)]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Package())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(sass.DisassemblerMissing, match="pip install 'nvidia-cuda-nvdisasm<14'"):
        sass.disassemble(b"")
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/env")
    assert sass.disassembler() == Path("/usr/bin/env")
    tools = [tmp_path / f"cu{n}" / "bin" / "nvdisasm" for n in (12, 13)]
    for tool in tools:
        tool.parent.mkdir(parents=True)
        tool.touch(mode=0o755)
    assert sass.disassembler() == tools[1]
    tools[1].chmod(0o644)
    assert sass.disassembler() == tools[0]
