"""The host half of a compiled kernel: what a CPU must have to run it."""

import platform
import re
import shutil
import subprocess

import pytest

from fa3.kernels import compile, process
from fa3.kernels.key import ARCH, HOST_TARGETS
from tests.toy_process import TESTS

# Instructions that not every CPU of a kind has, and registers of theirs, in a line of the disassembly.
NEWER = {
    "x86_64": re.compile(
        r"\tv[a-z]|%[yz]mm|%k[0-7]\b|%xmm(1[6-9]|2|3)|\t(popcnt|[lt]zcnt|andn|bextr|blsr|movbe|sarx|shlx)"
    ),
    "aarch64": re.compile(r"\t(cas|ldadd|ldset|ldclr|swp|ldapr)|\b[zp]\d+[./]"),
}


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.syspath_prepend(str(TESTS))
    from toy_kernel import Threads, Toy

    return Toy(), Threads()


def build_for(target, spec, config):
    """What the compiler's process runs: `compile.build` for another CPU."""
    HOST_TARGETS[platform.machine()] = target
    return compile.build(spec, config, look=False)


def newer(target, toy, tmp_path):
    """Lines of the disassembly with instructions that not every CPU has."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("reading the host's machine code needs objdump, of binutils")
    built, _ = process.run(build_for, target, *toy, environment={"CUTE_DSL_ARCH": ARCH}, notice=lambda: None)
    file = tmp_path / "kernel.o"
    file.write_bytes(built.code)
    done = subprocess.run([objdump, "-d", "--no-show-raw-insn", file], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if re.match(r" +[0-9a-f]+:\t", line)]
    assert len(lines) > 300
    return [line for line in lines if NEWER[platform.machine()].search(line)]


def test_every_cpu_of_its_kind_can_run_it(toy, tmp_path):
    assert newer(HOST_TARGETS[platform.machine()], toy, tmp_path) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="what another target gives is known for x86_64")
def test_newer_instructions_are_seen(toy, tmp_path):
    """So that the test above would see them."""
    assert newer(("x86-64-v3", "+avx2"), toy, tmp_path)
