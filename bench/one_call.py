"""One call for a profiler to look at: python -m bench.one_call IMPL SEQLEN

IMPL is naive, or the rows of our kernel's query tile. A call before it, which loads the kernels, lies outside of
cudaProfilerStart and cudaProfilerStop.
"""

import sys


def main(argv: list[str]) -> int:
    import torch

    from bench.machine import open_machine
    from bench.measure import make_inputs
    from bench.traffic import attention_of, shape_of

    impl, shape = argv[0], shape_of(int(argv[1]))
    machine = open_machine("cuda")
    tensors = make_inputs(shape, "bfloat16", machine)[0]
    attention = attention_of(impl, shape, machine.num_sms)
    with torch.no_grad():
        attention(*tensors, shape.causal)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        attention(*tensors, shape.causal)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
