"""The paged forward kernel on the PTX machine: as forward_machine.py has it for dense ones."""

import numpy as np
import torch

from fa3.heuristics import ragged_tiles
from fa3.kernels.prims.tma import ADDRESSES, LONGEST
from fa3.reference import LOG2_E
from tests.forward_machine import BLANK, Memory, param_sizes, ptx_of, tensor_map, view, words
from tests.paged import Paged
from tests.ptx_machine import Cta
from tests.ptx_program import Tensor, TensorMap, parse


def ragged_map(placed: Tensor, t: torch.Tensor, row_bytes: int) -> TensorMap:
    """Of (total, h, d), as prims.tma.ragged makes it."""
    box = tensor_map(placed, t[None], (3, 1, 2, 0), 64, row_bytes).box
    total, heads, columns = t.shape
    step, head, _ = (stride * t.element_size() for stride in t.stride())
    shape = columns, LONGEST, heads, total + 1, LONGEST + 1
    return TensorMap(placed, t.element_size(), shape, (2, step, head, step, ADDRESSES // LONGEST - step), box)


def forward(spec, config, x: Paged, scale: float, *, num_sms=4, numbers=None, edit=lambda ptx: ptx, trace=None):
    """out, lse of the kernel; both were NaN."""
    memory = Memory()
    total, heads, _ = x.q.shape
    _, page_size, heads_kv, head_dim_v = x.v.shape
    out = torch.full((total, heads, head_dim_v), torch.nan, dtype=x.q.dtype)
    lse = torch.full((1, heads, total), torch.nan)
    placed = [memory.place(t) for t in (x.q, x.k, x.v, out)]
    dense, qk_bytes, v_bytes = (3, 1, 2, 0), 2 * spec.head_dim, 2 * spec.head_dim_v
    maps = {
        0: ragged_map(placed[0], x.q, qk_bytes),
        2: tensor_map(placed[1], x.k, dense, config.box, qk_bytes),
        4: tensor_map(placed[2], x.v, dense, config.box, v_bytes),
        6: ragged_map(placed[3], out, v_bytes),
    }
    batch = x.used_k.shape[0]
    used_q = x.used_k if x.used_q is None else x.used_q
    cu_q, used_q, used_k = (view(memory.place(t), t, 1, 0) for t in (x.cu_q, used_q, x.used_k))
    table, counts = view(memory.place(x.table), x.table, 2, 2), words(int(x.used_q is not None))
    tickets = np.array([memory.place(torch.zeros(1, dtype=torch.int32)).address], np.int64).view(np.uint8)
    slots = total // config.tile_m + batch
    params = [BLANK] * 8 + [view(memory.place(lse), lse, 3, 2), tickets, BLANK, BLANK]
    params += [words(float(np.float32(scale * LOG2_E))), cu_q, used_q, counts, table, used_k, words(page_size)]
    params += [words(heads // heads_kv), words(slots), words(heads), cu_q, used_q, counts, words(batch)]
    params += [words(config.tile_m)]
    if numbers is not None:
        *values, sink = numbers
        params += [words(value) for value in values] + ([] if sink is None else [view(memory.place(sink), sink, 1, 1)])
    ptx = ptx_of(spec, config)
    for size, raw in zip(param_sizes(ptx), params, strict=True):
        assert size == len(raw) or raw is BLANK
    cta = Cta(parse(edit(ptx)), params, maps, memory.tensors, config.threads, trace)
    ctas = min(ragged_tiles(total, config.tile_m, heads, batch), num_sms)
    for number in range(ctas):
        cta.run(number, ctas)
    return out, lse[0]
