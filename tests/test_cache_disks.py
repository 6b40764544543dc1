"""The kernel cache and the compiler on disks that are full, read-only or not TMPDIR's, and after a kill -9.

The disks are mounted in a namespace of the test's own, which some machines and containers do not allow: skipped there.
"""

import contextlib
import functools
import hashlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from fa3.kernels import cache, compile, key
from tests.toy_process import PREPARE, TESTS, compiles, python, ran

PAGE = "mount -t tmpfs -o size=4k tmpfs"  # takes a byte, so that Python thinks it usable, but no object file
LOAD = """
import os
import torch
from fa3.kernels import compile
from toy_kernel import *
for scale in (2.0, 3.0):
    try:
        compile.load(Toy(scale), Threads())(torch.ones(4), 4)
    except ValueError as error:  # the linked code runs up to the check of its arguments
        print("device_type=cuda" in str(error), compile.state(Toy(scale), Threads()))
print(sorted({name.rpartition(".")[2] for name in os.listdir(compile.directory())}))
"""


@pytest.fixture(autouse=True)
def workshop(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TESTS))
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FA3_QUIET", "1")
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    for name in ("cache", "temporary"):
        (tmp_path / name).mkdir()


@functools.cache
def why_no_mounts():
    try:
        command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


def mounted(mounts, code, **environment):
    """A process that runs `code` where these mounts, lines of shell, are made for it alone."""
    if why_no_mounts():
        pytest.skip(f"no mount namespaces here: {why_no_mounts()}")
    script = "\n".join(["set -e", *mounts, 'exec "$@"'])
    return python(code, before=("unshare", "-rm", "sh", "-c", script, "sh"), **environment)


def test_an_empty_folder_that_is_read_only(tmp_path):
    """Kernels are used from memory, which is said once, and filling it ends at once with a sentence."""
    mounts = [f"mount -t tmpfs -o ro tmpfs {tmp_path}/cache"]
    out, err = ran(mounted(mounts, LOAD))
    assert out.splitlines() == ["True memory", "True memory", "[]"] and compiles() == 2
    assert len(err.splitlines()) == 1 and f"cannot be kept in {tmp_path}/cache (Read-only file system)" in err
    fill = mounted(mounts, "import sys; from fa3.cli import main; sys.exit(main(['compile', '--preset', 'deepseek']))")
    assert (fill.communicate()[1].strip(), fill.returncode) == (
        f"kernels cannot be kept in {tmp_path}/cache: Read-only file system",
        1,
    )


def test_a_filled_folder_that_is_read_only(tmp_path):
    ran(python(PREPARE))
    ran(python(PREPARE.replace("Toy()", "Toy(3.0)")))
    folder = tmp_path / "cache"
    for file in folder.glob("*.lock"):
        file.unlink()
    mounts = [f"mount --bind {folder} {folder}", f"mount -o remount,bind,ro {folder}", f"! touch {folder}/x 2>&-"]
    out, err = ran(mounted(mounts, LOAD))
    assert out.splitlines() == ["True memory", "True memory", "['kernel']"]
    assert err == "" and compiles() == 2


def test_a_full_disk_under_the_cache(tmp_path):
    out, err = ran(mounted([f"{PAGE} {tmp_path}/cache"], LOAD))
    assert out.splitlines() == ["True memory", "True memory", "['lock']"] and compiles() == 2
    assert len(err.splitlines()) == 1 and "(No space left on device)" in err


LOOK = """
import os
from fa3.kernels import compile
from toy_kernel import *
compile.prepare(Toy(), Threads())
print(compile.state(Toy(), Threads()), compile.inspect(Toy(), Threads()).cubin[:4], os.listdir("/dev/shm"))
"""


@pytest.mark.parametrize("memory", ["mount -t tmpfs tmpfs /dev/shm", f"{PAGE} /dev/shm"])
def test_a_full_disk_under_the_compiler(tmp_path, memory):
    """Its files go to memory, and where that is full too, beside the kernels."""
    mounts = [f"{PAGE} {tmp_path}/temporary", memory]
    out, _ = ran(mounted(mounts, LOOK, TMPDIR=str(tmp_path / "temporary")))
    assert out == "disk b'\\x7fELF' []"
    assert {file.suffix for file in (tmp_path / "cache").iterdir()} == {".kernel", ".lock"}
    assert list((tmp_path / "temporary").iterdir()) == []


def test_no_room_anywhere(tmp_path):
    code = """
from fa3.kernels import compile
from toy_kernel import *
for call in (compile.load, compile.prepare, compile.inspect):
    try:
        call(Toy(), Threads())
    except compile.CompileError as error:
        print(error)
"""
    full = [f"{tmp_path}/temporary", "/dev/shm", f"{tmp_path}/cache"]
    out, _ = ran(mounted([f"{PAGE} {place}" for place in full], code, TMPDIR=full[0]))
    places = ", ".join(f"{place} (No space left on device)" for place in full)
    sentence = f"the compiler needs 1 MB for its files and found no room in {places}: set TMPDIR to a folder with room"
    assert out.splitlines() == [sentence] * 3 and compiles() == 0


def test_no_folder_for_temporary_files(monkeypatch):
    def refuse():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setenv("TMPDIR", "/no/such/folder")
    with compile._workplace() as folder:
        assert os.listdir(folder) == [] and not folder.startswith("/no")


def other_disk(tmp_path):
    """A folder on another disk than the test's."""
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK) or place.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one disk here only")
    return tempfile.TemporaryDirectory(prefix="fa3-cache-", dir=place)


@pytest.mark.parametrize("killed", ["with their compilers", "without their compilers"])
def test_eight_processes_again_after_a_kill(tmp_path, monkeypatch, killed):
    """The cache is on another disk than TMPDIR, so that a file cannot be renamed from one to the other."""
    monkeypatch.syspath_prepend(str(TESTS))
    from toy_kernel import Threads, Toy

    with other_disk(tmp_path) as folder:
        monkeypatch.setenv("FA3_CACHE_DIR", folder)
        monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
        first = [python(PREPARE, TOY_SLEEP="60") for _ in range(8)]
        try:
            deadline = time.monotonic() + 60
            while not compiles() and time.monotonic() < deadline:
                time.sleep(0.05)
            for process in first:
                (os.killpg if killed == "with their compilers" else os.kill)(process.pid, signal.SIGKILL)
            for process in first:
                process.wait()
            name = key.key(Toy(), Threads())
            cache.path(name).write_bytes(b"fa3-kernel-1 0")  # as a disk that lost power may leave it
            (Path(folder) / f"{name}.00.tmp").write_bytes(b"fa3-kernel-1 0")
            tell = "; import hashlib; from fa3.kernels import cache, key; "
            tell += "print(hashlib.sha256(cache.read(key.key(Toy(), Threads()))).hexdigest())"
            answers = {ran(process)[0] for process in [python(PREPARE + tell) for _ in range(8)]}
        finally:
            for process in first:
                with contextlib.suppress(ProcessLookupError):  # most had none
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        digest = hashlib.sha256(cache.read(name)).hexdigest()
        assert answers == {f"{cache.path(name)}\n{digest}"}
        assert compiles() == 2 and [entry.key for entry in compile.entries()] == [name]
