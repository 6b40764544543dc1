"""What ptxas makes of kernels with windows, soft caps, sinks and pages: no spills, registers as asked for."""

import pytest

from fa3.heuristics import config_for, ragged_config_for
from fa3.kernels import sass
from fa3.kernels.compile import inspect
from fa3.kernels.forward.config import Spec

KERNELS = {
    "window, hd64": Spec("bfloat16", 64, 64, False, local="window"),
    "window and sink, hd128, ragged": Spec("bfloat16", 128, 128, False, local="window", sink="bfloat16", ragged=True),
    "chunks, cap and sink, hd256": Spec("bfloat16", 256, 256, False, local="chunk", softcap=True, sink="float32"),
    "cap, hd64, causal": Spec("float16", 64, 64, True, softcap=True),
    "pages, hd128, causal": Spec("bfloat16", 128, 128, True, ragged=True, paged=True),
    "window of pages, hd192": Spec("bfloat16", 192, 128, False, ragged=True, paged=True, local="window"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name):
    spec = KERNELS[name]
    config = ragged_config_for(spec, 8192, 8192, 16) if spec.ragged else config_for(spec, 8192, 8192, 16, 4, 132)
    found = inspect(spec, config)
    code = sass.read(found.cubin, found.remarks, found.shared_bytes)
    assert not code.spills and not code.warnings
    assert code.setmaxnreg == config.registers(spec)
    assert code.shared_bytes <= config.shared_bytes(spec)
    scores = 64 * config.warpgroups * config.tile_n // (128 * config.warpgroups)  # of a thread and block
    tanhs = code.opcodes.get("MUFU.TANH", 0)
    assert tanhs % scores == 0 and (tanhs > 0) == spec.softcap
    assert ("STS.64" in code.opcodes) == spec.paged  # zeros behind the last key
