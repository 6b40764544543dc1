"""The wheel and the sdist hold the kernels and the demo's data; pyproject.toml and constraints.txt agree."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = {
    "fa3/kernels/forward/config.py",
    "fa3/data/minilm_qkv.npz",
    "fa3/py.typed",
    "fa3/__main__.py",
    "fa3/quant/__init__.pyi",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy to build in: a build leaves folders behind, and a stale one would hide a missing file."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("fa3", "kernels", "quant"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def build(hook: str, folder: Path, output: Path) -> Path:
    program = f"from setuptools import build_meta; build_meta.{hook}({str(output)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, check=True)
    (built,) = output.iterdir()
    return built


def python_files(folder: Path, package: str) -> set[str]:
    return {f"{package}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}


def test_wheel_holds_every_file(checkout, tmp_path):
    with zipfile.ZipFile(build("build_wheel", checkout, tmp_path)) as wheel:
        names = set(wheel.namelist())
    assert names >= NEEDED
    assert names >= python_files(checkout / "kernels", "fa3/kernels") | python_files(checkout / "quant", "fa3/quant")
    assert {name.split("/")[0] for name in names} == {"fa3", "fa3-0.1.0.dist-info"}


def test_sdist_builds_the_same_wheel(checkout, tmp_path):
    (tmp_path / "sdist").mkdir()
    (tmp_path / "wheel").mkdir()
    with tarfile.open(build("build_sdist", checkout, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    with zipfile.ZipFile(build("build_wheel", tmp_path / "fa3-0.1.0", tmp_path / "wheel")) as wheel:
        names = set(wheel.namelist())
    assert names >= NEEDED | python_files(checkout / "kernels", "fa3/kernels")


def test_installed_wheel_finds_its_kernels_and_data(checkout, tmp_path):
    (tmp_path / "wheel").mkdir()
    with zipfile.ZipFile(build("build_wheel", checkout, tmp_path / "wheel")) as wheel:
        wheel.extractall(tmp_path / "site")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import fa3; "
        "from fa3.kernels.forward.config import Spec, tile_for; "
        "from fa3.demo import recorded; "
        "print(fa3.__file__, tile_for(80, 80), recorded()[0].q.shape, fa3.quant.quantize_qkv.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split(" ", 1)[0].startswith(str(tmp_path / "site"))
    assert "(96, 96)" in done.stdout and "(1, 512, 6, 32)" in done.stdout and "fa3.quant.interface" in done.stdout


def test_demo_data_is_small():
    size = sum(path.stat().st_size for path in (ROOT / "fa3/data").iterdir())
    assert 0 < size < 2_000_000


def test_constraints_name_versions_and_no_index():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    entry = re.compile(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*( ; python_version >= \"3\.\d+\")?")
    assert [line for line in lines if not entry.fullmatch(line)] == []
    pinned = {re.split("==", line)[0].lower().replace("_", "-") for line in lines}
    project = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", project, re.S | re.M)
    assert block
    required = set(re.findall(r"\"([a-z0-9-]+)", block[1]))
    assert len(required) == 7 and required <= pinned
    assert "torch==2.13.0" in lines


def test_version_is_the_same_everywhere():
    import fa3

    assert f'\nversion = "{fa3.__version__}"\n' in (ROOT / "pyproject.toml").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", fa3.__version__)
