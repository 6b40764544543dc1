"""The decode kernel and the one that merges its parts on the PTX machine, in the place of the compiled function."""

import functools
import re
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from fa3 import launch_decode
from fa3.device import HOPPER, named
from fa3.kernels.compile import inspect
from fa3.kernels.decode.config import GATHER
from tests.forward_machine import BLANK, Memory, param_sizes, tensor_map, view, words
from tests.plain_machine import PlainWarp, divisor, tensor
from tests.ptx_machine import Cta
from tests.ptx_numbers import floats
from tests.ptx_program import Trace, parse
from tests.ptx_warp import LANES

ENTRY = ".visible .entry"
MERGE_THREADS = 128
ptx_of = functools.lru_cache(maxsize=32)(lambda spec, config: inspect(spec, config).ptx)


class DecodeCta(Cta):
    grid = (1, 1, 1)
    place = (0, 0, 0)

    def copy(self, m, first, shared, store):
        assert all(0 <= c < size for c, size in zip(first[2:], m.shape[2:], strict=True)), f"no page or head: {first}"
        return super().copy(m, first, shared, store)


@dataclass
class DecodeWarp(PlainWarp):
    """What other kernels do not use."""

    copies: list = field(default_factory=list)  # cp.async that no barrier waits for yet

    def value(self, x, kind="b32"):
        if found := re.match(r"%(n?)ctaid\.([xyz])", x):
            axis = "xyz".index(found[2])
            return np.full(32, (self.cta.grid if found[1] else self.cta.place)[axis], np.uint32)
        return super().value(x, kind)

    def op_shfl(self, a, rest, kind, mask):
        if rest[1] != "up":
            return super().op_shfl(a, rest, kind, mask)
        value, b = self.value(a[1]), self.value(a[2]).astype(np.int64)
        source = LANES - b
        self.put(a[0].split("|")[0], np.where(source >= 0, value[np.maximum(source, 0)], value), mask)

    def op_setp(self, a, rest, kind, mask):
        if rest[0] != "nan":
            return super().op_setp(a, rest, kind, mask)
        x, y = (floats(self.value(name)) for name in a[1:])
        self.put(a[0], np.isnan(x) | np.isnan(y), mask)

    def op_mov(self, a, rest, kind, mask):
        if a[0].startswith("{_"):
            whole = self.value(a[1], "b64")
            self.put(a[0][1:-1].split(",")[1].strip(), (whole >> np.uint64(32)).astype(np.uint32), mask)
        else:
            super().op_mov(a, rest, kind, mask)

    def op_cp(self, a, rest, kind, mask):
        """cp.async and what tells a barrier of it: late, as TMA's loads are."""
        if rest[:2] == ["async", "cg"]:
            to, source, size = self.address(a[0]), self.address(a[1]), self.value(a[3])
            for lane in np.flatnonzero(mask):
                self.copies.append(partial(self.copy, int(to[lane]), int(source[lane]), int(size[lane])))
        elif rest[:2] == ["async", "mbarrier"]:
            assert "noinc" in rest
            address = self.address(a[0])
            barriers = [self.cta.barriers[int(address[lane])] for lane in np.flatnonzero(mask)]
            self.cta.late.append(partial(self.arrive, self.copies, barriers))
            self.copies = []
        else:
            super().op_cp(a, rest, kind, mask)

    def copy(self, to: int, source: int, size: int) -> None:
        assert size in (0, 16)
        if size:
            self.cta.bytes(to, 16, self.cta.shared)[:] = self.cta.bytes(source, 16, None)
        else:
            self.cta.bytes(to, 16, self.cta.shared)[:] = 0

    def arrive(self, copies: list, barriers: list) -> None:
        for copy in copies:
            copy()
        for barrier in barriers:
            barrier.pending -= 1
            assert barrier.pending >= 0, "more arrivals than the barrier counts"
            barrier.settle()


def run(
    spec, config, q, k, v, out, lse, parts, table, sink, lists, window, granule, splits, scale_log2, cap, tiles, shares,
    *, seed=None, edit=lambda ptx: ptx, blocks=None,
):  # fmt: skip
    """As the compiled function, on an LSE and parts that are NaN. seed draws the order of warps and loads; edit changes
    the kernels before they run; blocks takes how many key blocks each CTA took.
    """
    for x in (q, k, v):
        if x.data_ptr() % 16 or any(stride % 8 for stride in x.stride()[:-1]):
            raise ValueError("as the compiled function does")
    for x in (lse, *(parts or ())):
        x.fill_(torch.nan)
    memory, heads_kv, batch = Memory(), k.shape[2], lists[-1]
    (left, right), *chunk = window if isinstance(window[0], tuple) else (window,)
    numbers = [words(int(x)) for x in (*lists[6:], left, right, *chunk)]
    numbers += [words(config.tile_n)] + [words(int(x)) for x in (granule, splits) if x is not None]
    params = [tensor(memory, q), tensor(memory, out), tensor(memory, lse, False)]
    if parts is not None:
        params += [view(memory.place(x), x, 2, 1) for x in parts]
    params += [tensor(memory, x, False) for x in (table, sink) if x is not None]
    params += [view(memory.place(x), x, 1, 0) for x in lists[:6]] + numbers
    for n in (shares, q.shape[2] // heads_kv):
        params += [words(n), *divisor(n)]
    params += [words(0)]
    of_merge = list(params)
    params += [tensor(memory, k), tensor(memory, v)]
    maps = {}
    if spec.pages != GATHER:
        for x, width in ((k, spec.head_dim), (v, spec.head_dim_v)):
            rows, columns = spec.pages or config.tile_n, 64 if width % 64 == 0 else 32
            maps[len(params)] = tensor_map(memory.tensors[-2 + (x is v)], x, (3, 1, 2, 0), rows, 2 * columns)
            params += [BLANK, np.zeros(16, np.uint8)]
    params += [np.zeros(1, np.uint8)] * 2 + [words(float(np.float32(scale_log2)))]
    params += [] if cap is None else [words(float(np.float32(cap)))]
    first, *second = edit(ptx_of(spec, config)).split(ENTRY)[1:]
    done = launch(first, params, maps, memory, (heads_kv, tiles, shares), config.threads(spec), seed)
    if blocks is not None:
        of_a_warp = (spec.head_dim + config.tile_n) // 16  # WGMMAs of a block
        blocks.append([n // (4 * of_a_warp) for n in done])
    if second:
        launch(
            second[0],
            of_merge,
            {},
            memory,
            (batch if spec.granules else shares - 1, heads_kv, tiles),
            MERGE_THREADS,
            seed,
        )


def launch(entry, params, maps, memory, grid, threads, seed) -> list[int]:
    """All CTAs of a kernel, one after the other; the WGMMAs of each."""
    sizes = param_sizes(entry)
    assert [len(raw) for raw in params] == sizes, list(zip([len(raw) for raw in params], sizes))
    cta = DecodeCta(parse(entry), params, maps, memory.tensors, threads)
    cta.warp_type, cta.grid = DecodeWarp, grid
    done = []
    for number, (z, y, x) in enumerate(np.ndindex(*reversed(grid))):
        cta.place, cta.trace = (x, y, z), Trace()
        cta.run(number, int(np.prod(grid)), seed)
        done.append(cta.trace.executed["WGMMA"])
    return done


def replace(monkeypatch, num_sms: int = 6, **options) -> list:
    """The machine in the place of what fa3.launch_decode loads, on a chip of so many multiprocessors. What it ran."""
    used: list = []

    def load(spec, config):
        def compiled(*arguments):
            used.append((spec, config, arguments))
            run(spec, config, *arguments, **options)

        return compiled

    monkeypatch.setattr(launch_decode, "load", load)
    monkeypatch.setattr(launch_decode, "chip", lambda index: named("NVIDIA H200", num_sms, HOPPER))
    monkeypatch.setattr(launch_decode, "_plans", {})
    return used
