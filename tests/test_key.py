"""kernels/key.py: what a compiled kernel depends on changes its key, and nothing else does."""

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from fa3.kernels import key

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from toy_kernel import Threads, Toy

    return Toy(), Threads()


def test_every_part_of_the_key_counts(toy, monkeypatch):
    from toy_kernel import Threads, Toy

    class Elsewhere(Toy):
        entry = "test_layering"

    Elsewhere.__qualname__ = "Toy"
    keys = [key.key(*toy), key.key(Toy(3.0), Threads()), key.key(Toy(), Threads(64)), key.key(Elsewhere(), Threads())]
    version = importlib.metadata.version
    for package in key.PACKAGES:
        with monkeypatch.context() as patch:
            patch.setattr(importlib.metadata, "version", lambda n, p=package: "9.9" if n == p else version(n))
            keys.append(key.key(*toy))
    for name, value in (("toolkit", lambda: "cu99"), ("ARCH", "sm_100a"), ("platform.machine", lambda: "riscv64")):
        with monkeypatch.context() as patch:
            patch.setattr(f"{key.__name__}.{name}", value)
            keys.append(key.key(*toy))
    assert len(set(keys)) == len(keys) == 11
    assert key.key(Toy(), Threads()) == keys[0]


def test_sources_count_by_content_and_not_by_age(tmp_path):
    """On a copy of the sources, linked as in the repository."""
    (tmp_path / "fa3").mkdir()
    for name in ("kernels", "quant"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / "fa3" / name).symlink_to(f"../{name}")
    spec = importlib.util.spec_from_file_location("key_of_the_copy", tmp_path / "fa3" / "kernels" / "key.py")
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    here, edited = copy.sources("toy_kernel"), tmp_path / "kernels" / "prims" / "ring.py"
    assert here == key.sources("toy_kernel") != key.sources("test_layering")
    original = edited.read_bytes()

    edited.write_bytes(original.replace(b"e", b"f", 1))
    os.utime(edited, (1e9, 1e9))
    assert copy.sources("toy_kernel") != here
    edited.write_bytes(original)
    os.utime(edited, (2e9, 2e9))
    assert copy.sources("toy_kernel") == here

    (tmp_path / "quant" / "new.py").touch()
    assert copy.sources("toy_kernel") != here
    (tmp_path / "quant" / "new.py").unlink()
    edited.rename(edited.with_name("gnir.py"))
    assert copy.sources("toy_kernel") != here


def test_the_machine_does_not_count(toy, monkeypatch, tmp_path):
    """A copied cache is found: by another model of CPU, by another user, in another folder."""
    here = key.key(*toy)
    read_text = Path.read_text
    cpuinfo = "flags\t\t: fpu sse2\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **k: cpuinfo if self.match("/proc/*") else read_text(self, **k))
    monkeypatch.setattr(key.platform, "processor", lambda: "another")
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert key.key(*toy) == here


@pytest.mark.parametrize("driver, taken", [(None, "cu13"), (13, "cu13"), (12, "cu12"), (11, "cu12")])
def test_which_of_two_flavours(driver, taken, monkeypatch):
    libraries = [Path(f"/x/cu{n}/lib/{key.RUNTIME}") for n in (13, 12)]
    monkeypatch.setattr(key, "_runtime_libraries", lambda: libraries)
    monkeypatch.setattr(key, "_driver_major", lambda: driver)
    assert key.toolkit() == taken
    assert key.runtime_library().parts[2] == taken
    assert key.toolkit_is_a_guess() == (driver is None)
    monkeypatch.setattr(key, "_runtime_libraries", lambda: libraries[:1])
    assert key.toolkit() == "cu13" and not key.toolkit_is_a_guess()
