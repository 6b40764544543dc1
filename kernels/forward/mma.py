"""Consumer role: S = Q K^T, P = softmax(S), O += P V for one warpgroup's 64 query rows.

Schedules of the same parts. `InTurn` finishes a block before the next. `Overlapped` issues QK of block i before
PV of block i - 1, so that the softmax of block i runs under that PV (FlashAttention-3, arXiv 2407.08608, section 3.2).
`Optimistic` is the same without the search for the largest scores.
For FP8, where the matmuls are the shorter part, `Halved` does the same with other waits, and `Alternating` issues QK a
block ahead.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from ..algo.blocks import Blocks
from ..algo.window import LocalBlocks
from ..prims.branch import either
from ..prims.fp8 import pack_e4m3
from ..prims.ptx import pack
from ..prims.ring import Ring
from ..prims.warp_mma import multiply
from ..prims.wgmma import ROWS, issue, scale_rows, settled


class Queries(NamedTuple):
    """A warpgroup's Q in shared memory, where a work tile has a place of its own in the ring."""

    rQ: cute.Tensor  # (mma, m, k, rows of a warpgroup in a stage, and stage)
    sQ: cute.Tensor  # (64, head_dim, the same), as `plain` leaves it
    ring: Ring
    warpgroups: int
    wg: Int32

    def of_tile(self, nth: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        place = self.ring.stage(nth) * self.warpgroups + self.wg
        return settled(self.rQ[None, None, None, place]), self.sQ[None, None, place]


class OneQuery(NamedTuple):
    """The same place for all work tiles."""

    rQ: cute.Tensor  # (mma, m, k)
    sQ: cute.Tensor  # (64, head_dim), as `plain` leaves it

    def of_tile(self, nth: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        return self.rQ, self.sQ


class Attention(NamedTuple):
    """One warpgroup's operands and accumulator."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    rQ: cute.Tensor | None  # (mma, m, k) descriptors, of the work tile: see Queries
    sQ: cute.Tensor | None  # (64, head_dim), likewise; sQ and sK as `plain` leaves them
    rK: cute.Tensor  # (mma, n, k, stage)
    sK: cute.Tensor  # (tile_n, head_dim, stage)
    rV: tuple  # of (mma, d, k, stage), one for each chunk of O's columns
    rP: cute.Tensor  # (mma, m, k) registers
    acc_O: cute.Tensor
    k_ring: Ring
    v_ring: Ring
    softmax: object  # Softmax, SinkSoftmax or BlockScaledSoftmax
    cap: object  # Uncapped or Softcap
    past_keys: object  # see values.py
    turns: object  # Turns or NoTurns
    accumulation: object  # see accumulate.py
    tile_n: int
    steps: int  # of PV in a block: the keys of a WGMMA each

    def scores(self) -> cute.Tensor:
        return cute.make_rmem_tensor(self.qk.partition_shape_C((64, self.tile_n)), Float32)

    def issue_qk(self, i, acc_S: cute.Tensor | None = None) -> cute.Tensor:
        """acc_S: where the scores go; else they get registers of their own."""
        acc_S = self.scores() if acc_S is None else acc_S
        issue(self.qk, acc_S, self.rQ, self.rK[None, None, None, self.k_ring.stage(i)], False)
        return acc_S

    def scores_anew(self, i, acc_S: cute.Tensor):
        """Those of this warp alone, and at once."""
        multiply(self.sQ, self.sK[None, None, self.k_ring.stage(i)], acc_S)

    def issue_pv(self, i, acc: cute.Tensor, accumulate: bool, n: int = 0):
        """Of the n-th chunk of O's columns."""
        issue(self.pv, acc, self.rP, self.rV[n][None, None, None, self.v_ring.stage(i)], accumulate)

    def softmax_of(self, acc_S: cute.Tensor, keys, is_first: bool, check_inf: bool):
        """acc_S becomes P, unrounded.

        NOTE: row by row. The max of the second row runs under the exponentials of the first: 0.5 to 1.5 % faster than
        both maxima first.
        """
        for r in range(ROWS):
            self.softmax.update_row(acc_S, r, keys, is_first, check_inf)

    def keep_p(self, acc_S: cute.Tensor, words):
        """P = acc_S rounded, in these registers. The accumulator's register order is the A operand's: no lane moves
        anything (of E4M3 because V's keys are permuted to match).

        NOTE: only after wait_group(0): P packed while PV reads the old one makes ptxas serialise every wgmma (C7513).
        """
        P = cute.recast_tensor(self.rP, Int32)
        for i in words:
            if self.rP.element_type is cutlass.Float8E4M3FN:
                first = 8 * (i // 2) + 2 * (i % 2)
                P[i] = pack_e4m3([acc_S[first + j] for j in (0, 1, 4, 5)])
            else:
                P[i] = pack(acc_S[2 * i], acc_S[2 * i + 1], self.rP.element_type)

    def round_p(self, acc_S: cute.Tensor, beside=lambda k: None):
        """beside(k): what goes with step k."""
        for k in range(self.steps):
            self.keep_p(acc_S, range(4 * k, 4 * k + 4))
            beside(k)

    @cute.jit
    def values(self, i: Int32):
        """P V of block i, alone."""
        self.v_ring.wait_full(i)
        for n in cutlass.range_constexpr(len(self.rV)):
            self.accumulation.issue_pv(self, i, n)
            warpgroup.wait_group(0)
            self.accumulation.complete(self, n)
        self.v_ring.release(i)


def follows(n_block: Int32) -> Int32:
    """1, after the last block 0. NOTE: a minimum is a vector instruction, and its way back costs 20 cycles."""
    return Int32(Uint32(-n_block) >> 31)


@cute.jit
def attend(
    schedule: cutlass.Constexpr,
    a: cutlass.Constexpr,
    mask: cutlass.Constexpr,
    blocks: Blocks | LocalBlocks,
    base: Int32,
):
    """All key blocks of one query tile, at ring positions base..; the PV of the last one is left to schedule.last."""
    a.acc_O.fill(0.0)
    a.softmax.reset()
    schedule.first(a, base, blocks.n_block(0), mask)
    for i in cutlass.range(1, blocks.masked, unroll=1):
        schedule.step(a, base + i, blocks.n_block(i), mask)
    for i in cutlass.range(blocks.masked, blocks.unmasked, unroll=1):
        schedule.step(a, base + i, blocks.n_block(i), None)
    if cutlass.const_expr(blocks.has_edge):
        for i in cutlass.range(blocks.unmasked, blocks.count, unroll=1):
            schedule.step(a, base + i, blocks.n_block(i), mask)


class InTurn(NamedTuple):
    """Softmax and matmuls of a warpgroup one after the other."""

    attend = attend

    def first(self, a: Attention, i: Int32, n_block: Int32, mask):
        self.block(a, i, n_block, mask, is_first=True)

    @cute.jit
    def step(self, a: cutlass.Constexpr, i: Int32, n_block: Int32, mask: cutlass.Constexpr):
        self.block(a, i, n_block, mask, is_first=False)

    def block(self, a: Attention, i, n_block, mask, is_first: bool):
        keys = a.softmax.of_block(n_block)
        a.k_ring.wait_full(i)
        a.turns.take()
        acc_S = a.issue_qk(i)
        a.turns.give()
        warpgroup.wait_group(0)
        a.k_ring.release(i)
        a.cap.apply(acc_S)
        if mask is not None:
            mask.apply(acc_S, n_block)
        a.softmax_of(acc_S, keys, is_first, mask is not None)
        a.round_p(acc_S) if is_first else a.accumulation.round_p(a, acc_S)
        a.accumulation.before_pv(a)
        if is_first:
            a.past_keys.clear(i, n_block, mask.lengths.k)
        a.values(i)

    def last(self, a: Attention, i: Int32): ...


class Overlapped(NamedTuple):
    """Softmax of block i under PV of block i - 1."""

    attend = attend

    def first(self, a: Attention, i: Int32, n_block: Int32, mask):
        keys = a.softmax.of_block(n_block)
        a.k_ring.wait_full(i)
        acc_S = a.issue_qk(i)
        warpgroup.wait_group(0)
        a.k_ring.release(i)
        a.cap.apply(acc_S)
        mask.apply(acc_S, n_block)
        a.softmax_of(acc_S, keys, True, True)
        a.round_p(acc_S)
        a.past_keys.clear(i, n_block, mask.lengths.k)

    @cute.jit
    def step(self, a: cutlass.Constexpr, i: Int32, n_block: Int32, mask: cutlass.Constexpr):
        keys = a.softmax.of_block(n_block)
        a.k_ring.wait_full(i)
        a.turns.take()
        acc_S = a.issue_qk(i)
        a.accumulation.before_pv(a)
        a.v_ring.wait_full(i - 1)
        a.accumulation.issue_pv(a, i - 1, 0)
        a.turns.give()
        warpgroup.wait_group(1)
        a.k_ring.release(i)
        a.cap.apply(acc_S)
        if cutlass.const_expr(mask is not None):
            mask.apply(acc_S, n_block)
        a.softmax_of(acc_S, keys, False, mask is not None)
        # NOTE: ptxas moves this wait up among the exponentials, so that rounding and rescaling run with them. Pinned
        # behind them by a branch it is 6-11 % slower.
        warpgroup.wait_group(0)
        a.v_ring.release(i - 1)
        a.accumulation.round_p(a, acc_S)

    def last(self, a: Attention, i: Int32):
        a.accumulation.before_pv(a)
        a.values(i)


class Optimistic(NamedTuple):
    """Overlapped, in 16 bit, without the maxima: the exponentials of a block without a mask begin when its scores are
    there, against the max that its rows had before. O and the sums need no factor then.

    Softmax is the same with any reference, as long as P is in range, and rows rarely outgrow the max of their first
    block by much. A warp whose sums say that one did computes the scores anew, by itself, and takes the block's max: so
    K is held until then.
    """

    attend = attend
    first = Overlapped.first

    @cute.jit
    def step(self, a: cutlass.Constexpr, i: Int32, n_block: Int32, mask: cutlass.Constexpr):
        a.k_ring.wait_full(i)
        a.turns.take()
        acc_S = a.issue_qk(i)
        a.v_ring.wait_full(i - 1)
        a.issue_pv(i - 1, a.acc_O, True)
        a.turns.give()
        warpgroup.wait_group(1)
        sums = None
        a.cap.apply(acc_S)
        if cutlass.const_expr(mask is not None):
            mask.apply(acc_S, n_block)
            a.softmax_of(acc_S, None, False, True)
        else:
            sums = a.softmax.guess(acc_S)
        warpgroup.wait_group(0)
        a.v_ring.release(i - 1)
        a.round_p(acc_S)
        if cutlass.const_expr(mask is not None):
            scale_rows(a.acc_O, a.softmax.factor)
        else:
            # NOTE: behind the rounding. A branch ahead of it would part the conversions from the exponentials.
            either(a.softmax.outgrown(sums), lambda: self.anew(a, i, acc_S), lambda: a.softmax.accept(sums))
        a.k_ring.release(i)

    def anew(self, a: Attention, i: Int32, acc_S: cute.Tensor):
        a.scores_anew(i, acc_S)
        a.cap.apply(acc_S)
        a.softmax_of(acc_S, None, False, False)
        a.round_p(acc_S)
        scale_rows(a.acc_O, a.softmax.factor)

    def last(self, a: Attention, i: Int32):
        a.values(i)


class Halved(NamedTuple):
    """Overlapped, for FP8, where the matmuls are done before the exponentials.

    PV of block i - 1 is awaited in the middle, behind the exponentials of the first row: what follows it runs with
    those of the second. V of block i is awaited there too. Of a PV in chunks of O's columns the last two run so, each
    under one row's exponentials; those before are waited for.
    """

    attend = attend
    last = Overlapped.last

    @cute.jit
    def first(self, a: cutlass.Constexpr, i: Int32, n_block: Int32, mask: cutlass.Constexpr):
        Overlapped().first(a, i, n_block, mask)
        a.v_ring.wait_full(i)

    @cute.jit
    def step(self, a: cutlass.Constexpr, i: Int32, n_block: Int32, mask: cutlass.Constexpr):
        chunks = len(a.rV)
        keys = a.softmax.of_block(n_block)
        a.k_ring.wait_full(i)
        a.turns.take()
        acc_S = a.issue_qk(i)
        a.accumulation.before_pv(a)
        a.accumulation.issue_pv(a, i - 1, 0)
        a.turns.give()
        warpgroup.wait_group(1)
        a.k_ring.release(i)
        if cutlass.const_expr(mask is not None):
            mask.apply(acc_S, n_block)
        found = [a.softmax.refer(r, a.softmax.largest(acc_S, r), keys, False, mask is not None) for r in range(ROWS)]
        for n in cutlass.range_constexpr(chunks - ROWS):
            warpgroup.wait_group(0)
            a.accumulation.complete(a, n)
            a.accumulation.issue_pv(a, i - 1, n + 1)
        a.softmax.exponentiate(acc_S, 0, keys, found[0])
        # NOTE: its loop keeps ptxas from moving the wait for PV up, before the maxima.
        a.v_ring.wait_full(i)
        warpgroup.wait_group(0)
        if cutlass.const_expr(chunks > 1):
            a.accumulation.complete(a, chunks - 2)
            a.accumulation.issue_pv(a, i - 1, chunks - 1)
            a.softmax.exponentiate(acc_S, 1, keys, found[1])
            warpgroup.wait_group(0)
            a.v_ring.release(i - 1)
            a.accumulation.complete(a, chunks - 1)
            a.round_p(acc_S)
        else:
            a.v_ring.release(i - 1)
            a.softmax.exponentiate(acc_S, 1, keys, found[1])
            a.accumulation.round_p(a, acc_S)


class Prefetching(NamedTuple):
    """Halved, with no branch among the exponentials: for three warpgroups.

    V of block i, and K and the scales of the next block, are awaited behind them. The second row's maxima come behind
    the first row's exponentials.
    """

    attend = attend
    last = Overlapped.last

    @cute.jit
    def first(self, a: cutlass.Constexpr, i: Int32, n_block: Int32, mask: cutlass.Constexpr):
        Overlapped().first(a, i, n_block, mask)
        self.prepare(a, i, n_block)

    @cute.jit
    def step(self, a: cutlass.Constexpr, i: Int32, n_block: Int32, mask: cutlass.Constexpr):
        keys, chunks, check_inf = a.softmax.fetched(), len(a.rV), mask is not None
        a.turns.take()
        acc_S = a.issue_qk(i)
        a.accumulation.before_pv(a)
        a.accumulation.issue_pv(a, i - 1, 0)
        a.turns.give()
        warpgroup.wait_group(1)
        a.k_ring.release(i)
        if cutlass.const_expr(mask is not None):
            mask.apply(acc_S, n_block)
        for n in cutlass.range_constexpr(chunks - ROWS):
            warpgroup.wait_group(0)
            a.accumulation.complete(a, n)
            a.accumulation.issue_pv(a, i - 1, n + 1)
        a.softmax.update_row(acc_S, 0, keys, False, check_inf)
        if cutlass.const_expr(chunks > 1):
            warpgroup.wait_group(0)
            a.accumulation.complete(a, chunks - 2)
            a.accumulation.issue_pv(a, i - 1, chunks - 1)
        a.softmax.update_row(acc_S, 1, keys, False, check_inf)
        self.prepare(a, i, n_block)
        warpgroup.wait_group(0)
        a.v_ring.release(i - 1)
        if cutlass.const_expr(chunks > 1):
            a.accumulation.complete(a, chunks - 1)
            a.round_p(acc_S)
        else:
            a.accumulation.round_p(a, acc_S)

    @cute.jit
    def prepare(self, a: cutlass.Constexpr, i: Int32, n_block: Int32):
        """What comes after block i: its V, and if another block follows, its K and scales."""
        a.v_ring.wait_full(i)
        wait, more = a.k_ring.wait_full, follows(n_block)
        if more > 0:
            wait(i + 1)
        a.softmax.fetch(n_block - more)


class Alternating(NamedTuple):
    """QK one block ahead, for FP8: no warp waits for its scores.

    QK of block i + 1 is issued amid the exponentials of block i, and its largest scores are found among the last of
    them. PV of block i - 1 runs before, while the maxima are shared. QK of block i + 1 goes to the registers where that
    PV was: scores and fresh sums take turns in two sets, and so the loop takes two blocks a turn.
    """

    last = Overlapped.last

    @cute.jit
    def attend(self, a: cutlass.Constexpr, mask: cutlass.Constexpr, blocks: Blocks, base: Int32):
        a.acc_O.fill(0.0)
        a.softmax.reset()
        one, other = a.scores(), a.scores()
        largest = cute.make_rmem_tensor((ROWS, a.softmax.keys.groups), Float32)
        a.k_ring.wait_full(base)
        a.issue_qk(base, one)
        a.softmax.fetch(blocks.n_block(0))
        warpgroup.wait_group(0)
        mask.apply(one, blocks.n_block(0))
        self.find(a, one, largest)
        self.step(a, base, blocks.n_block(0), mask, one, other, largest, is_first=True)
        one.store(other.load())
        paired = blocks.masked + (blocks.count - blocks.masked) % 2
        for i in cutlass.range(1, paired, unroll=1):
            self.step(a, base + i, blocks.n_block(i), mask, one, other, largest)
            one.store(other.load())
        for i in cutlass.range(paired, blocks.count, 2, unroll=1):
            self.step(a, base + i, blocks.n_block(i), None, one, other, largest)
            self.step(a, base + i + 1, blocks.n_block(i + 1), None, other, one, largest)

    def step(self, a: Attention, i, n_block, mask, acc_S: cute.Tensor, other: cute.Tensor, largest, is_first=False):
        """Block i, of scores acc_S, up to its P. The scores of block i + 1 come to `other`, their largest to `largest`.

        In the last block QK reads a block again, and nobody its scores.
        """
        keys, more = a.softmax.fetched(), follows(n_block)
        accumulation = a.accumulation.at(other)
        accumulation.before_pv(a)
        if not is_first:
            accumulation.issue_pv(a, i - 1, 0)
        found = []
        for r in range(ROWS):
            tops = [largest[r, g] for g in range(a.softmax.keys.groups)]
            found.append(a.softmax.refer(r, tops, keys, is_first, mask is not None))

        def exponentiate(r: int, g: int):
            a.softmax.exponentiate(acc_S, r, keys, found[r], (g,))

        def keep(r: int, g: int):
            """NOTE: at once. Where all is rounded at the end, ptxas takes three instructions for two."""
            words = a.softmax.keys.group // 16  # a thread has four columns of 16, rounded to one register
            a.keep_p(acc_S, [2 * w + r for w in range(g * words, (g + 1) * words)])

        first, *others, last = [(r, g) for g in range(a.softmax.keys.groups) for r in range(ROWS)]
        exponentiate(*first)
        # NOTE: K of block i is released after this wait, so that in the last block the barrier is still at its phase.
        a.k_ring.wait_full(i + more)
        warpgroup.wait_group(0)
        keep(*first)
        a.k_ring.release(i)
        if not is_first:
            a.v_ring.release(i - 1)
            accumulation.complete(a, 0)
        for part in others[: len(others) // 2]:
            exponentiate(*part)
            keep(*part)
        a.issue_qk(i + more, other)
        a.softmax.fetch(n_block - more)
        for part in others[len(others) // 2 :]:
            exponentiate(*part)
            keep(*part)
        a.v_ring.wait_full(i)
        warpgroup.wait_group(0)
        if mask is not None:
            mask.apply(other, n_block - more)
        self.find(a, other, largest)
        exponentiate(*last)
        keep(*last)

    def find(self, a: Attention, acc_S: cute.Tensor, largest: cute.Tensor):
        for r in range(ROWS):
            for g, score in enumerate(a.softmax.largest(acc_S, r)):
                largest[r, g] = score
