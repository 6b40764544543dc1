"""The first call of a process, alone: prints its seconds as JSON. Run by bench.startup, one process a sample.

The clock starts after `import torch, fa3`, the CUDA context and the inputs, and stops when the output is there. With
`forbidden`, importing cutlass fails, and so does starting the process that kernels are compiled in: the kernel must
come from the cache.
"""

import json
import sys
import time

COMPILER = "fa3.kernels.process"  # named in the command of a process that compiles


class Forbidden:
    """A finder that refuses the compiler."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "cutlass":
            raise ImportError(f"{name} is forbidden here")


def refuse_compiler(event: str, args: tuple) -> None:
    """An audit hook."""
    if event == "subprocess.Popen" and COMPILER in str(args[1]):
        raise RuntimeError("a compiler was started: the kernel is not in the cache")


def main(mode: str) -> None:
    if mode == "forbidden":
        sys.meta_path.insert(0, Forbidden())
        sys.addaudithook(refuse_compiler)
    import torch

    import fa3

    q, k, v = (torch.randn(1, 1024, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = fa3.flash_attn_func(q, k, v)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert out.isfinite().all().item()
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1])
