"""Run a function in a fresh Python process: how the compiler is kept out of the caller's.

The compiler reads its target and many switches from the environment when it is imported, keeps them for good, and
brings half a gigabyte along. In a process of its own it gets the environment that the cache key assumes, whatever the
user's process has set or imported; it cannot take that process down, and it can be called after a fork.
"""

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

# What a user may have set for other programs and what would change the code made, or how the child starts.
FOREIGN = ("CUTE_DSL_", "CUTE_EXPERIMENTAL_DSL_", "PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONWARNINGS", "PYTHONOPTIMIZE")
START = """
import sys
sys.path[:] = filter(None, sys.path)  # "": the working directory, where a file may have the name of a module
import pickle
sys.path[:] = pickle.load(sys.stdin.buffer)
import {module} as process
process.serve()
"""
NOTICE_SECONDS = 1.0


class CompileError(RuntimeError):
    """The compiler refused a kernel or died; the message has its traceback."""


class CompilerMissing(CompileError):
    """A kernel has to be compiled and nvidia-cutlass-dsl cannot be imported; the message says what to install."""


def run(
    function: Callable[..., Any], *args: Any, environment: dict[str, str], notice: Callable[[], None]
) -> tuple[Any, str]:
    """function(*args) in a new process: its result and what it wrote to stdout and stderr.

    `function`, `args` and the result must be picklable by import. `environment` is added to the caller's, less FOREIGN.
    `notice` is called once if it takes over a second. Raises CompileError, or its subclass that `function` raised.
    """
    if not sys.executable:
        raise CompileError("the compiler needs a Python interpreter to run in, and sys.executable names none here")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    command = [sys.executable, "-W", "ignore", "-c", START.format(module=__name__)]
    job = pickle.dumps(sys.path) + pickle.dumps((function, args))
    with subprocess.Popen(
        command,
        env=inherited | {"PYTHONHASHSEED": "0"} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        try:
            try:
                reply, written = child.communicate(job, timeout=NOTICE_SECONDS)
            except subprocess.TimeoutExpired:
                notice()
                reply, written = child.communicate()
        except BaseException:
            child.kill()
            raise
    text = written.decode(errors="replace")
    if child.returncode != 0 or not reply:
        raise CompileError(f"the compiler's process ended with status {child.returncode}:\n{text[-4000:]}")
    result = pickle.loads(reply)
    if isinstance(result, CompileError):
        raise result
    return result, text


def serve() -> None:
    """The other end of `run`. The reply has stdout for itself: what the compiler prints goes to stderr."""
    reply = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.modules["torch"] = None  # type: ignore[assignment]  # NOTE: tvm_ffi imports it if it can: 1.2 s for nothing here
    try:
        function, args = pickle.load(sys.stdin.buffer)
        result = function(*args)
    except CompileError as error:
        result = error
    except Exception:
        result = CompileError(traceback.format_exc())
    with reply:
        pickle.dump(result, reply)
