"""kernels/compile.py and its cache: one compile a key, in any number of processes, whatever befalls the files."""

import errno
import hashlib
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import filelock
import pytest
import torch

from fa3.kernels import cache, compile, key, process
from tests.toy_process import PREPARE, TESTS, compiles, python, ran


@pytest.fixture(autouse=True)
def workshop(tmp_path, monkeypatch):
    """An empty cache, an empty memory, and a log of the compiles."""
    monkeypatch.syspath_prepend(str(TESTS))
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    for name in ("FA3_QUIET", "TOY_SLEEP", "TOY_FAIL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compile, "_linked", {})
    monkeypatch.setattr(compile, "_told", set())


@pytest.fixture
def toy():
    from toy_kernel import Threads, Toy

    return Toy(), Threads()


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """A folder in which the toy is compiled, for tests that do not compile."""
    folder = tmp_path_factory.mktemp("shelf")
    ran(python(PREPARE, FA3_CACHE_DIR=str(folder)))
    return folder


@pytest.fixture
def kept(shelf, toy):
    """The toy's file in this test's own cache."""
    shutil.copytree(shelf, compile.directory())
    return cache.path(key.key(*toy))


def refuses_a_cpu_tensor(function):
    """The linked code runs up to the check of its arguments, which is as far as it goes without a GPU."""
    with pytest.raises(ValueError, match="device_type=cuda"):
        function(torch.ones(4), 4)


# From memory, from disk, from the compiler


def test_absent_then_compiled_then_in_memory_then_on_disk(toy, monkeypatch):
    assert compile.state(*toy) == "absent"
    function = compile.load(*toy)
    refuses_a_cpu_tensor(function)
    assert (compile.state(*toy), compiles()) == ("memory", 1)
    monkeypatch.setattr(compile, "_linked", {})
    assert compile.state(*toy) == "disk"
    refuses_a_cpu_tensor(compile.load(*toy))
    assert compiles() == 1


def test_a_hit_in_memory_asks_nobody(toy, kept, monkeypatch):
    function = compile.load(*toy)
    kept.unlink()
    monkeypatch.setattr(compile, "key", None)
    assert compile.load(*toy) is function


def test_a_file_is_linked_without_the_compiler(kept):
    code = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "cutlass":
            raise ImportError(f"{name} is forbidden here")
sys.meta_path.insert(0, Forbid())
import torch
from fa3.kernels import compile
from toy_kernel import *
try:
    compile.load(Toy(), Threads())(torch.ones(4), 4)
except ValueError as error:
    print("device_type=cuda" in str(error), "cutlass" in sys.modules)
try:
    compile.load(Toy(3.0), Threads())
except compile.CompilerMissing as error:
    print(error)
"""
    out, _ = ran(python(code))
    first, second = out.splitlines()
    assert first == "True False" and compiles() == 0
    assert "forbidden here" in second and "pip install 'nvidia-cutlass-dsl" in second


def test_without_the_loader_the_message_names_it(toy, kept, monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm_ffi_orcjit", None)
    with pytest.raises(compile.LoaderMissing, match="pip install .*apache-tvm-ffi-orcjit"):
        compile.load(*toy)


def test_without_the_compiler_the_message_names_it(toy, monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass", None)
    for call in (compile.load, compile.prepare, compile.inspect):
        with pytest.raises(compile.CompilerMissing, match="pip install 'nvidia-cutlass-dsl"):
            call(*toy)


def test_without_any_package_of_the_compiler(toy, monkeypatch):
    monkeypatch.setattr(key, "_runtime_libraries", lambda: [])
    assert key.toolkit() == "absent"
    assert compile.state(*toy) == "absent"
    with pytest.raises(compile.CompilerMissing, match="pip install 'nvidia-cutlass-dsl"):
        compile.load(*toy)


def test_inspect_compiles_past_the_cache(toy, kept):
    seen = compile.inspect(*toy)
    assert seen.cubin[:4] == b"\x7fELF" and ".target sm_90a" in seen.ptx
    assert "0 bytes spill stores" in seen.remarks and 0 < seen.seconds < 60
    assert compiles() == 1


# Many at once


def test_eight_processes_compile_once():
    together = [python(PREPARE, TOY_SLEEP="2") for _ in range(8)]
    files = {ran(p)[0] for p in together}
    assert len(files) == 1 and Path(files.pop()).is_file()
    assert compiles() == 1


def test_threads_compile_once(toy):
    found = []
    threads = [threading.Thread(target=lambda: found.append(compile.load(*toy))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(f is found[0] for f in found)
    assert compiles() == 1


def test_a_killed_process_blocks_nobody():
    victim = python(PREPARE, TOY_SLEEP="60")
    try:
        deadline = time.monotonic() + 30
        while not compiles() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(victim.pid, signal.SIGKILL)  # in mid-compile; its compiler lives on, with no one to report to
        victim.wait()
        start = time.monotonic()
        ran(python(PREPARE))
        assert time.monotonic() - start < 20
    finally:
        os.killpg(victim.pid, signal.SIGKILL)
        victim.communicate()
    assert compiles() == 2
    assert [e.entry for e in compile.entries()] == ["toy_kernel"]
    assert not list(compile.directory().glob("*.tmp"))


def test_a_lock_that_is_never_released_is_waited_for_only_so_long(toy, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.2)
    compile.directory().mkdir()
    with filelock.FileLock(compile.directory() / f"{key.key(*toy)}.lock"):
        assert compile.prepare(*toy).is_file()


def test_a_file_system_without_locks(toy, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert compile.prepare(*toy).is_file()


def test_after_a_fork(kept):
    """In the child: what was in memory, what must be compiled, and what a thread of the parent was about to load."""
    code = """
import os, threading, time
import torch
from fa3.kernels import compile
from toy_kernel import *
first = compile.load(Toy(), Threads())
os.environ["TOY_SLEEP"] = "1"
busy = threading.Thread(target=compile.load, args=(Toy(7.0), Threads()))
busy.start()
time.sleep(0.5)
child = os.fork()
if child == 0:
    ok = compile.load(Toy(), Threads()) is first
    for scale in (7.0, 8.0):
        try:
            compile.load(Toy(scale), Threads())(torch.ones(4), 4)
        except ValueError as error:
            ok = ok and "device_type=cuda" in str(error)
    os._exit(0 if ok else 1)
busy.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    out, _ = ran(python(code), seconds=60)
    assert out == "0" and compiles() == 2


# What can befall the files


@pytest.mark.parametrize("length", [0, 5, 80, 500, -1])
def test_a_truncated_file_is_rebuilt(toy, kept, length):
    whole = kept.read_bytes()
    kept.write_bytes(whole[:length])
    assert compile.state(*toy) == "absent" and compile.entries() == []
    if length == -1:
        compile.prepare(*toy)
        assert kept.read_bytes() == whole and compiles() == 1


@pytest.mark.parametrize("at", [0, 40, 300, -1])
def test_one_wrong_byte_is_noticed(toy, kept, at):
    content = bytearray(kept.read_bytes())
    content[at] ^= 1
    kept.write_bytes(content)
    assert cache.read(key.key(*toy)) is None


def test_a_foreign_file_is_rebuilt(toy, kept):
    kept.write_bytes(os.urandom(10000))
    refuses_a_cpu_tensor(compile.load(*toy))
    assert compiles() == 1


@pytest.mark.parametrize("about", [b"[]", b'"text"', b"{}", b'{"key": "0"}'])
def test_a_sound_file_that_says_something_else_is_rebuilt(toy, kept, about):
    body = about + b"\n" + b"code"
    kept.write_bytes(cache.MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert compile.state(*toy) == "absent" and compile.entries() == []


def test_a_folder_in_the_place_of_a_kernel_is_left_alone(toy, kept):
    kept.unlink()
    kept.mkdir()
    refuses_a_cpu_tensor(compile.load(*toy))
    compile.clear()
    assert kept.is_dir()


def test_a_cache_folder_of_nobody_is_named(monkeypatch):
    monkeypatch.setenv("FA3_CACHE_DIR", "~nobody-of-this-name/cache")
    with pytest.raises(ValueError, match="FA3_CACHE_DIR is '~nobody-of-this-name/cache'"):
        compile.directory()


def test_a_kernel_under_another_name_is_not_taken(toy, kept):
    other = (type(toy[0])(3.0), toy[1])
    shutil.copy(kept, cache.path(key.key(*other)))
    assert compile.state(*other) == "absent"


def test_a_copied_and_touched_cache_still_hits(toy, kept, tmp_path, monkeypatch):
    moved = tmp_path / "elsewhere"
    shutil.copytree(kept.parent, moved)
    shutil.rmtree(kept.parent)
    for file in moved.iterdir():
        os.utime(file, (2e9, 2e9))
    monkeypatch.setenv("FA3_CACHE_DIR", str(moved))
    assert compile.state(*toy) == "disk"
    refuses_a_cpu_tensor(compile.load(*toy))
    assert compiles() == 0


def test_a_folder_that_cannot_be_made(toy, tmp_path, monkeypatch, capsys):
    """As for a read-only one, which root does not have: kernels are used from memory, and that is said once."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("FA3_QUIET", "1")
    for scale in (2.0, 3.0):
        refuses_a_cpu_tensor(compile.load(type(toy[0])(scale), toy[1]))
    notices = capsys.readouterr().err.splitlines()
    assert len(notices) == 1 and "cannot be kept" in notices[0] and str(tmp_path) in notices[0]
    with pytest.raises(OSError):
        compile.prepare(*toy)


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_full_disk(toy, step, monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("FA3_QUIET", "1")
    monkeypatch.setattr(*((os, "replace") if step == "replace" else (Path, "write_bytes")), full)
    refuses_a_cpu_tensor(compile.load(*toy))
    assert "No space left" in capsys.readouterr().err
    assert {p.suffix for p in compile.directory().iterdir()} <= {".lock"}


def test_leftovers_of_the_killed_go_and_strangers_stay(toy, kept):
    old, new = kept.with_suffix(".a.tmp"), kept.with_suffix(".b.tmp")
    strangers = [kept.parent / "notes.kernel", kept.parent / "notes.lock"]
    for file in (old, new, *strangers):
        file.touch()
    os.utime(old, (1e9, 1e9))
    cache.write(key.key(*toy), *toy, b"code")
    assert not old.exists() and new.exists()
    assert compile.clear() == 1
    assert sorted(kept.parent.iterdir()) == sorted(strangers)


def test_entries_say_what_is_there(toy, kept):
    (entry,) = compile.entries()
    assert (entry.entry, entry.spec, entry.config) == ("toy_kernel", "Toy(scale=2.0)", "Threads(threads=128)")
    assert (entry.path, entry.key) == (kept, kept.stem)
    assert entry.bytes == len(cache.read(entry.key)) > 5000


# Sources and entries


def test_an_entry_that_does_not_exist(toy):
    class Lost(type(toy[0])):
        entry = "no_such_module"

    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        compile.load(Lost(), toy[1])


def test_sources_that_change_during_a_compile_are_not_kept(tmp_path, monkeypatch):
    (tmp_path / "shifting.py").write_text(
        "import toy_kernel\n"
        "class Shifting(toy_kernel.Toy):\n"
        "    entry = 'shifting'\n"
        "def signature(spec, config):\n"
        "    with open(__file__, 'a') as f: f.write('# edited\\n')\n"
        "    return toy_kernel.signature(spec, config)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from shifting import Shifting
    from toy_kernel import Threads

    with pytest.raises(OSError, match="sources changed while it was compiled"):
        compile.prepare(Shifting(), Threads())
    refuses_a_cpu_tensor(compile.load(Shifting(), Threads()))
    assert compile.entries() == []


# The process of the compiler


def test_the_users_environment_changes_nothing(toy, kept, tmp_path):
    """Not the code made, nor is the environment or an imported compiler of the user's touched."""
    code = """
import os
import cutlass
from cutlass.cutlass_dsl import CuTeDSL
before = dict(os.environ)
from fa3.kernels import compile
from toy_kernel import *
print(compile.prepare(Toy(), Threads()))
assert os.environ == before
assert CuTeDSL._get_dsl().envar.arch == "sm_100a"
"""
    dump = tmp_path / "dump"
    dump.mkdir()
    out, _ = ran(
        python(
            code,
            FA3_CACHE_DIR=str(tmp_path / "other"),
            CUTE_DSL_ARCH="sm_100a",
            CUTE_DSL_LINEINFO="1",
            CUTE_DSL_KEEP="ptx,cubin",
            CUTE_DSL_DUMP_DIR=str(dump),
            PYTHONWARNINGS="error::DeprecationWarning",
            PYTHONOPTIMIZE="2",
        )
    )
    assert Path(out).name == kept.name and Path(out).read_bytes() == kept.read_bytes()
    assert compiles() == 1 and not list(dump.iterdir())


def test_a_compile_that_fails(toy, monkeypatch):
    monkeypatch.setenv("TOY_FAIL", "raise")
    with pytest.raises(compile.CompileError, match="toy_kernel.py(.|\n)*ValueError: the toy is broken"):
        compile.load(*toy)
    monkeypatch.setenv("TOY_FAIL", "die")
    with pytest.raises(compile.CompileError, match="ended with status -9"):
        compile.load(*toy)
    monkeypatch.delenv("TOY_FAIL")
    refuses_a_cpu_tensor(compile.load(*toy))


def test_the_working_directory_is_nobodys(toy, tmp_path, monkeypatch):
    """A file there that has the name of a module is not what the compiler's process imports."""
    monkeypatch.chdir(tmp_path)
    for module in ("pickle", "cutlass", "toy_kernel"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('the wrong file')")
    assert compile.prepare(*toy).is_file()


def test_no_interpreter(toy, monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(compile.CompileError, match="needs a Python interpreter"):
        compile.load(*toy)


@pytest.mark.parametrize("quiet, lines", [("", 1), ("0", 1), ("1", 0)])
def test_one_line_for_a_long_compile(toy, quiet, lines, monkeypatch, capsys):
    monkeypatch.setenv("FA3_QUIET", quiet)
    monkeypatch.setenv("TOY_SLEEP", "1")
    compile.prepare(*toy)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all("compiling Toy(scale=2.0) Threads(threads=128)" in line for line in said)


def test_no_line_for_a_short_one(toy, monkeypatch, capsys):
    monkeypatch.setattr(process, "NOTICE_SECONDS", 60.0)
    compile.prepare(*toy)
    assert capsys.readouterr().err == ""


def test_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("FA3_CACHE_DIR", "~/kernels of mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compile.directory() == tmp_path / "kernels of mine"
    monkeypatch.delenv("FA3_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compile.directory() == tmp_path / "xdg" / "fa3"
