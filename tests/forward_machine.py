"""The forward kernel on the PTX machine: tensors in, O and LSE out, no GPU."""

import functools
import re

import numpy as np
import torch

from fa3.kernels.compile import inspect
from fa3.kernels.forward.config import Config, Spec
from fa3.reference import LOG2_E
from tests.ptx_machine import Cta
from tests.ptx_program import Tensor, TensorMap, parse

GAP = 1 << 32  # between the addresses of tensors
L2_BYTES = 32 * 2**20
BLANK = np.zeros(128, np.uint8)  # a parameter that the machine does not read: descriptors are its maps
PARAM = r"\.param (?:\.align \d+ )?\.(b8|u32|f32|u64) \w+_param_(\d+)(?:\[(\d+)\])?"


@functools.lru_cache(maxsize=32)
def ptx_of(spec: Spec, config: Config) -> str:
    return inspect(spec, config).ptx


class Memory:
    """Places tensors in the machine's address space."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def place(self, t: torch.Tensor) -> Tensor:
        """The tensor's own memory, from its first to its last element."""
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
        raw = torch.as_strided(t, (last,), (1,)).view(torch.uint8).numpy()
        self.tensors.append(Tensor(GAP * (1 + len(self.tensors)), raw))
        return self.tensors[-1]


def tensor_map(placed: Tensor, t: torch.Tensor, order: tuple[int, ...], rows: int, row_bytes: int) -> TensorMap:
    """The TMA of a (b, s, h, d) or packed tensor: its dimensions innermost first, and boxes as wide as the swizzle."""
    size = t.element_size()
    span = next(s for s in (128, 64, 32) if row_bytes % s == 0)
    shape = tuple(t.shape[i] for i in order)
    strides = tuple(t.stride(i) * size for i in order)
    return TensorMap(placed, size, shape, strides, (span // size, rows))


def words(*values: int | float) -> np.ndarray:
    arrays = [np.array([v], np.float32 if isinstance(v, float) else np.int32) for v in values]
    return np.concatenate([array.view(np.uint8) for array in arrays])


def view(placed: Tensor, t: torch.Tensor, sizes: int, strides: int) -> np.ndarray:
    """A tensor as a kernel parameter: pointer, leading sizes, leading strides; the others are compiled in."""
    raw = [np.array([placed.address], np.int64).view(np.uint8), words(*t.shape[:sizes])]
    if sizes % 2:
        raw.append(np.zeros(4, np.uint8))
    return np.concatenate([*raw, np.array(t.stride()[:strides], np.int64).view(np.uint8)])


def forward(
    spec, config, q, k, v, scale, *, num_sms=4, scales=None, v_channel=None, numbers=None, seed=None,
    edit=lambda ptx: ptx, trace=None,
):  # fmt: skip
    """out, lse of the kernel. v as the kernel takes it; scales (q_scale, kv, v_max, q_rows) of FP8; numbers of a
    variant, whose softmax has the scale `scale`; edit changes the kernel before it runs; seed draws the order of its
    warps; trace takes what it did.
    """
    memory = Memory()
    batch, seqlen_q, heads, _ = q.shape
    head_dim_v = v.shape[2] if spec.is_fp8 else v.shape[3]
    out = torch.full((batch, seqlen_q, heads, head_dim_v), torch.nan, dtype=getattr(torch, spec.dtype_o or spec.dtype))
    lse = torch.full((batch, heads, seqlen_q), torch.nan)
    maps = tensor_maps(memory, spec, config, q, k, v, out)
    params = [BLANK] * 8 + [view(memory.place(lse), lse, 3, 2)]
    if scales is not None:
        q_scale, kv, v_max, q_rows = scales
        params += [view(memory.place(q_scale), q_scale, 3, 3), view(memory.place(kv), kv, 3, 2)]
        params += [view(memory.place(v_max), v_max, 2, 2), words(q_rows)]
    if v_channel is not None:
        params.append(view(memory.place(v_channel), v_channel, 3, 3))
    if config.dynamic:
        tickets = torch.zeros(1, dtype=torch.int32)
        params.append(np.array([memory.place(tickets).address], np.int64).view(np.uint8))
    tiles, sizes = launch_sizes(spec, config, q, k)
    params += [BLANK, BLANK, words(float(np.float32(scale * LOG2_E))), *(words(size) for size in sizes)]
    if numbers is not None:
        *values, sink = numbers
        params += [words(value) for value in values]
        params += [] if sink is None else [view(memory.place(sink), sink, 1, 1)]
    ptx = ptx_of(spec, config)
    for size, raw in zip(param_sizes(ptx), params, strict=True):
        assert size == len(raw) or raw is BLANK
    cta = Cta(parse(edit(ptx)), params, maps, memory.tensors, config.threads, trace)
    ctas = min(tiles, num_sms) if config.persistent else tiles
    for number in range(ctas):
        cta.run(number, ctas, seed)
    return out, lse


def tensor_maps(memory: Memory, spec, config, q, k, v, out) -> dict[int, TensorMap]:
    """By the number of the kernel's parameter."""
    dense, packed = (3, 1, 2, 0), (3, 2, 1, 0)
    v_rows, v_bytes = (spec.head_dim_v, config.tile_n) if spec.is_fp8 else (config.tile_n, 2 * spec.head_dim_v)
    qk_bytes = spec.element_bytes * spec.head_dim
    return {
        0: tensor_map(memory.place(q), q, dense, 64, qk_bytes),
        2: tensor_map(memory.place(k), k, dense, config.tile_n, qk_bytes),
        4: tensor_map(memory.place(v), v, packed if spec.is_fp8 else dense, v_rows, v_bytes),
        6: tensor_map(memory.place(out), out, dense, 64, 2 * spec.head_dim_v),
    }


def launch_sizes(spec, config, q, k) -> tuple[int, list[int]]:
    """Work tiles, and what the host half of the kernel passes on: lengths, head ratio, grid, section of an order."""
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, heads_kv = k.shape[1], k.shape[2]
    m_blocks, sequences = -(-seqlen_q // config.tile_m), heads * batch
    sizes = [seqlen_q, seqlen_k, heads // heads_kv, m_blocks, heads, sequences]
    if spec.causal and (config.dynamic or not config.persistent):
        kv_bytes = seqlen_k * spec.element_bytes * (spec.head_dim + spec.head_dim_v)
        sizes.append(min(max(L2_BYTES // kv_bytes, 1) * (heads // heads_kv), sequences))
    return m_blocks * sequences, sizes


def param_sizes(ptx: str) -> list[int]:
    """Of the kernel's parameters."""
    sizes = {}
    for kind, number, array in re.findall(PARAM, ptx):
        sizes[int(number)] = int(array) if kind == "b8" else {"u32": 4, "f32": 4, "u64": 8}[kind]
    return [sizes[i] for i in range(len(sizes))]
