"""Processes that compile the toy kernel, for tests of what several of them do to one cache, or one to a bad disk."""

import os
import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
PREPARE = "from fa3.kernels import compile; from toy_kernel import *; print(compile.prepare(Toy(), Threads()))"


def python(code, before=(), **environment):
    """A Python process that runs `code`; `before` is a command that starts another one."""
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [*before, sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def ran(started, seconds=120):
    """Its output and its stderr, after it ended well."""
    try:
        out, err = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        raise
    assert started.returncode == 0, err
    return out.strip(), err


def compiles():
    """How many there were, by the toy's log."""
    log = Path(os.environ["TOY_LOG"])
    return len(log.read_text().splitlines()) if log.exists() else 0
