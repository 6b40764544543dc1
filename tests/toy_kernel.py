"""The smallest kernel that goes all the way: x *= scale, for the tests of the compile cache.

What the tests need to see or to provoke comes by the environment, because the compiler runs in a process of its own:
TOY_LOG names a file that gets a line a compile, TOY_SLEEP is how long one takes, TOY_FAIL how it ends.
"""

import os
import signal
import time
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Toy:
    entry: ClassVar[str] = "toy_kernel"
    scale: float = 2.0


class Noisy(Toy):
    """Prints from the device, for which ptxas needs a stack."""


@dataclass(frozen=True)
class Threads:
    threads: int = 128


def signature(spec: Toy, config: Threads):
    """fn(x, n) on the current stream: the first n <= threads elements of x (float32, CUDA) times scale."""
    with open(os.environ.get("TOY_LOG", os.devnull), "a") as log:
        log.write(f"{spec} {config}\n")
    time.sleep(float(os.environ.get("TOY_SLEEP", "0")))
    if os.environ.get("TOY_FAIL") == "raise":
        raise ValueError("the toy is broken")
    if os.environ.get("TOY_FAIL") == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return _kernel(spec, config)


def _kernel(spec, config):
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    class Scale:
        @cute.jit
        def __call__(self, x: cute.Tensor, n: cutlass.Int32, stream):
            self.kernel(x, n).launch(grid=(1, 1, 1), block=(config.threads, 1, 1), stream=stream)

        @cute.kernel
        def kernel(self, x: cute.Tensor, n: cutlass.Int32):
            i, _, _ = cute.arch.thread_idx()
            if cutlass.const_expr(isinstance(spec, Noisy)):
                cute.printf("%d", i)
            if i < n:
                x[i] = x[i] * spec.scale

    x = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    return Scale(), (x, cutlass.Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True))
