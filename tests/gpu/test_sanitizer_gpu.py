"""compute-sanitizer finds no bad access and no race in a few small calls."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.sanitizer_case import CASES, FP8_CASES

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("sanitizer_case.py")
FOUND = 86  # exit status of the tool when it has something to say
TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not on PATH nor in /usr/local/cuda/bin")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_found(tool):
    root = Path(__file__).parents[2]
    search = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Without torch's cache every tensor is an allocation of its own, whose ends the tool knows.
    environment = {**os.environ, "PYTHONPATH": search, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [TOOL, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, str(SCRIPT)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{tool} exit {done.returncode}:\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert done.stdout.count("ok Case(") == len(CASES) + len(FP8_CASES)
