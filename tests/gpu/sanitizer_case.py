"""A few small calls for compute-sanitizer: `compute-sanitizer --tool memcheck python tests/gpu/sanitizer_case.py`.

The results are checked on the CPU, so that the attention kernel is nearly all that runs under the tool.
"""

import torch

from fa3 import flash_attn_fp8_func, flash_attn_func
from fa3.quant.reference import quantize_qkv
from fa3.testing.fp8_bound import predicted_rmse
from fa3.testing.inputs import Case, Inputs, make
from fa3.testing.tolerance import exact, expected, rmse

CASES = (
    Case("bfloat16", 1, 130, 200, 2, 2, 64, 64, True, layout="padded"),
    Case("float16", 2, 65, 257, 1, 3, 128, 128, False),
    Case("bfloat16", 1, 300, 129, 1, 1, 128, 128, True),  # queries without a key
    Case("bfloat16", 1, 77, 333, 2, 1, 256, 256, True, layout="transposed"),
    Case("float16", 1, 200, 190, 1, 2, 192, 128, True),
    Case("bfloat16", 1, 1, 97, 1, 4, 72, 104, False, layout="misaligned"),
    Case("bfloat16", 11, 300, 300, 6, 4, 128, 128, True),  # persistent grids: each CTA takes several tiles
    Case("float16", 4, 200, 130, 6, 4, 256, 256, False),
    Case("bfloat16", 4, 130, 130, 70, 1, 256, 256, True),  # a dynamic grid
    Case("float16", 3, 390, 700, 5, 4, 64, 64, False, scale=4.0),  # scores beyond the max of the blocks before
    Case("bfloat16", 3, 300, 500, 5, 4, 128, 128, True, scale=4.0),
)
FP8_CASES = (  # quantised and attended to
    Case("bfloat16", 1, 300, 129, 2, 2, 128, 128, True, layout="padded"),  # queries without a key
    Case("float16", 4, 130, 190, 35, 2, 256, 256, False),  # a dynamic grid, O in chunks
)
FP8_ROOM = 2.0  # over the RMSE that the steps of the quantisation predict


def main() -> None:
    for case in FP8_CASES:
        x = make(case, "cpu")
        out = flash_attn_fp8_func(*on_gpu(x), causal=case.causal)
        predicted = predicted_rmse(quantize_qkv(*x), case.softmax_scale, case.causal)
        error = rmse(out.cpu(), exact(*x, None, case.causal)[0])
        assert error <= FP8_ROOM * predicted, f"{case}: {error} where {predicted} is predicted"
        print("ok", case, flush=True)
    for case in CASES:
        x = make(case, "cpu")
        out, lse = flash_attn_func(*on_gpu(x), softmax_scale=case.scale, causal=case.causal, return_lse=True)
        want = expected(*x, case.scale, case.causal)
        want.assert_out(out.cpu(), str(case))
        want.assert_lse(lse.cpu(), str(case))
        print("ok", case, flush=True)


def on_gpu(x: Inputs) -> Inputs:
    return Inputs(*(t.new_empty(0, device="cuda").set_(*moved(t)) for t in x))


def moved(t: torch.Tensor) -> tuple:
    """The whole storage on the GPU, and the view's place in it: a plain copy would lose strides and surroundings."""
    return t.untyped_storage().cuda(), t.storage_offset(), t.shape, t.stride()


if __name__ == "__main__":
    main()
