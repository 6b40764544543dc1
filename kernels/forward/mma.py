"""Consumer role: S = Q K^T, P = softmax(S), O += P V for one warpgroup's 64 query rows.

Two schedules of the same parts. `InTurn` finishes a block before the next. `Overlapped` issues QK of block i before PV
of block i - 1, so that the softmax of block i runs under that PV (FlashAttention-3, arXiv 2407.08608, section 3.2).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ..algo.blocks import Blocks
from ..algo.softmax import Softmax
from ..prims.ptx import pack
from ..prims.ring import Ring
from ..prims.wgmma import issue, scale_rows

STEP = 16  # keys of one step of PV: K of a 16-bit WGMMA


class Attention(NamedTuple):
    """One warpgroup's operands and accumulator."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    rQ: cute.Tensor  # (mma, m, k) descriptors
    rK: cute.Tensor  # (mma, n, k, stage)
    rV: cute.Tensor  # (mma, d, k, stage)
    rP: cute.Tensor  # (mma, m, k) registers
    acc_O: cute.Tensor
    k_ring: Ring
    v_ring: Ring
    softmax: Softmax
    turns: object  # Turns or NoTurns
    tile_n: int
    rescaling: object  # UnderQK or AmongExponentials: when O is multiplied with the softmax's factor

    @property
    def steps(self) -> int:
        return self.tile_n // STEP

    def issue_qk(self, i) -> cute.Tensor:
        acc_S = cute.make_rmem_tensor(self.qk.partition_shape_C((64, self.tile_n)), Float32)
        issue(self.qk, acc_S, self.rQ, self.rK[None, None, None, self.k_ring.stage(i)], False)
        return acc_S

    def issue_pv(self, i):
        issue(self.pv, self.acc_O, self.rP, self.rV[None, None, None, self.v_ring.stage(i)], True)

    def keep_p(self, acc_S: cute.Tensor, k: int):
        """P of step k = acc_S rounded. The accumulator's register order is the A operand's: no lane moves anything.

        NOTE: only after wait_group(0): P packed while PV reads the old one makes ptxas serialise every wgmma (C7513).
        """
        pairs = cute.recast_tensor(self.rP, Int32)
        for i in range(4 * k, 4 * k + 4):
            pairs[i] = pack(acc_S[2 * i], acc_S[2 * i + 1], self.rP.element_type)

    def round_p(self, acc_S: cute.Tensor, beside=lambda k: None):
        """beside(k): what goes with step k."""
        for k in range(self.steps):
            self.keep_p(acc_S, k)
            beside(k)

    def rescale_o(self, k: int | None = None):
        """O, or the share of it that goes with step k."""
        size, steps = cute.size(self.acc_O), self.steps
        first, last = (0, size) if k is None else (size * k // steps, size * (k + 1) // steps)
        scale_rows(self.acc_O, self.softmax.factor, first, last)

    @cute.jit
    def values(self, i: Int32):
        """O += P V of block i, alone."""
        self.v_ring.wait_full(i)
        self.issue_pv(i)
        warpgroup.wait_group(0)
        self.v_ring.release(i)


class AmongExponentials:
    """O takes a block's factor with the rounding of P: ptxas puts both under the latency of exp2."""

    def before_pv(self, a: Attention): ...

    def round_p(self, a: Attention, acc_S: cute.Tensor):
        a.round_p(acc_S, a.rescale_o)


class UnderQK:
    """O takes the last block's factor while the next QK runs: where O is large, nothing else hides it."""

    def before_pv(self, a: Attention):
        a.rescale_o()

    def round_p(self, a: Attention, acc_S: cute.Tensor):
        a.round_p(acc_S)


class InTurn(NamedTuple):
    """Softmax and matmuls of a warpgroup one after the other."""

    def first(self, a: Attention, i: Int32, n_block: Int32, mask):
        self.block(a, i, n_block, mask, is_first=True)

    @cute.jit
    def step(self, a: cutlass.Constexpr, i: Int32, n_block: Int32, mask: cutlass.Constexpr):
        self.block(a, i, n_block, mask, is_first=False)

    def block(self, a: Attention, i, n_block, mask, is_first: bool):
        a.k_ring.wait_full(i)
        a.turns.take()
        acc_S = a.issue_qk(i)
        a.turns.give()
        warpgroup.wait_group(0)
        a.k_ring.release(i)
        if mask is not None:
            mask.apply(acc_S, n_block)
        a.softmax.update(acc_S, is_first=is_first, check_inf=mask is not None)
        a.round_p(acc_S) if is_first else a.round_p(acc_S, a.rescale_o)
        a.values(i)

    def last(self, a: Attention, i: Int32): ...


class Overlapped(NamedTuple):
    """Softmax of block i under PV of block i - 1."""

    def first(self, a: Attention, i: Int32, n_block: Int32, mask):
        a.k_ring.wait_full(i)
        acc_S = a.issue_qk(i)
        warpgroup.wait_group(0)
        a.k_ring.release(i)
        mask.apply(acc_S, n_block)
        a.softmax.update(acc_S, is_first=True, check_inf=True)
        a.round_p(acc_S)

    @cute.jit
    def step(self, a: cutlass.Constexpr, i: Int32, n_block: Int32, mask: cutlass.Constexpr):
        a.k_ring.wait_full(i)
        a.turns.take()
        acc_S = a.issue_qk(i)
        a.rescaling.before_pv(a)
        a.v_ring.wait_full(i - 1)
        a.issue_pv(i - 1)
        a.turns.give()
        warpgroup.wait_group(1)
        a.k_ring.release(i)
        if cutlass.const_expr(mask is not None):
            mask.apply(acc_S, n_block)
        a.softmax.update(acc_S, is_first=False, check_inf=mask is not None)
        # NOTE: ptxas moves this wait up among the exponentials, so that rounding and rescaling run with them. Pinned
        # behind them by a branch it is 6-11 % slower.
        warpgroup.wait_group(0)
        a.v_ring.release(i - 1)
        a.rescaling.round_p(a, acc_S)

    def last(self, a: Attention, i: Int32):
        a.rescaling.before_pv(a)
        a.values(i)


@cute.jit
def attend(schedule: cutlass.Constexpr, a: cutlass.Constexpr, mask: cutlass.Constexpr, blocks: Blocks, base: Int32):
    """All key blocks of one query tile, at ring positions base..; the PV of the last one is left to schedule.last."""
    a.acc_O.fill(0.0)
    a.softmax.reset()
    schedule.first(a, base, blocks.n_block(0), mask)
    for i in cutlass.range(1, blocks.masked, unroll=1):
        schedule.step(a, base + i, blocks.n_block(i), mask)
    for i in cutlass.range(blocks.masked, blocks.count, unroll=1):
        schedule.step(a, base + i, blocks.n_block(i), None)
