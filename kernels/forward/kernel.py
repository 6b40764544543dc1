"""FlashAttention-3 forward for sm_90a: O = softmax(scale Q K^T) V and its log-sum-exp.

role       warps              registers     waits for               signals
producer   1 (of 4)           24..56        q, k, v empty           q, k, v full (TMA)
consumer   4 a warpgroup      160..256      q, k, v full            q, k, v empty

barrier        kind    depth         arrivals
q_full         TMA     q_stages      Q bytes of a query tile
k_full v_full  TMA     stages        bytes of a block
q_empty        warps   q_stages      each consumer warp; where O lies over Q: the storing warp of each warpgroup
k_empty v_empty warps  stages        each consumer warp
stored         warps   1             where O lies over V: the storing warp of each warpgroup
ticket_full    thread  2             of a dynamic or ragged grid: the lane that tells which tile is next
ticket_empty   warps   2             of a dynamic or ragged grid: each consumer warp
turns          named   warpgroups    256 threads: who waits, who lets go
o_tile         named   warpgroups    128 threads: a warpgroup's O is in shared memory; of pages: V's zeros are
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..algo.blocks import Blocks, ceil_div, first_row
from ..algo.gqa import HeadMap
from ..algo.scheduler import (
    Announced,
    Dynamic,
    Folded,
    Grid,
    InOrder,
    LongestFirst,
    OneTile,
    Persistent,
    RaggedLongestFirst,
    RaggedOrder,
    Slots,
    WorkTile,
    section_in_l2,
)
from ..algo.seqlen import DenseSeqlen, Lengths, Paged, PagedSeqlen, Ragged, RaggedSeqlen
from ..algo.sink import NoSink, Sink
from ..algo.softcap import Softcap, Uncapped
from ..algo.softmax import Softmax
from ..algo.softmax_fp8 import BlockScaledSoftmax, Scales
from ..algo.window import Chunk, Diagonal, LocalBlocks, Window
from ..prims.ptx import shared_here, thread_here
from ..prims.ring import Ring
from ..prims.tma import Operand, boxed, operand, ragged
from ..prims.turns import NoTurns, Turns
from ..prims.warp_mma import plain
from ..prims.wgmma import ROWS, scale_rows, settled
from .accumulate import AmongExponentials, Promoted, PromotedAtOnce, UnderQK
from .config import Config, Spec
from .epilogue import Apart, OutputTile, OverQ, OverV, scale_columns, store_lse
from .load import DenseKV, PagedKV, QuerySource, load_kv
from .mma import Alternating, Attention, Halved, InTurn, OneQuery, Optimistic, Overlapped, Prefetching, Queries
from .values import PagedValues, WholeValues

LAYOUT = cutlass.tensor_utils.LayoutEnum
MAJOR = cute.nvgpu.OperandMajorMode
SOURCE = warpgroup.OperandSource
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float8_e4m3fn": cutlass.Float8E4M3FN}
SINK_DTYPES = {**DTYPES, "float32": Float32}
TURNS_BARRIER, O_BARRIER = 1, 4  # named barriers, one a warpgroup from here on; 0 is the CTA's
CONSUMER_WARPS = 4  # of a warpgroup
TICKETS = 2  # drawn ahead of the consumers


class VariantNumbers(NamedTuple):
    """What a variant of attention is given at run time; what it does not have is not read."""

    left: Int32  # of a window, see algo.window: 0 to 2^31 - 2
    right: Int32
    chunk: Int32  # keys, at least 1
    inner_scale: Float32  # softmax scale / softcap, finite; scale_log2 is softcap * log2(e) then
    sink: cute.Tensor | None  # (heads)


class Producer(NamedTuple):
    query: QuerySource
    kv: DenseKV | PagedKV
    place: OverQ | Apart | OverV  # of O
    keys: Diagonal | Window | Chunk
    seqlen: DenseSeqlen | RaggedSeqlen
    spec: Spec
    config: Config

    def blocks(self, tile: WorkTile) -> Blocks | LocalBlocks:
        c = self.config
        return self.keys.blocks(self.row(tile), self.seqlen.of(tile.batch), c.tile_m, c.tile_n)

    def row(self, tile: WorkTile) -> Int32:
        return first_row(tile.m_block, self.seqlen.of(tile.batch), self.config.tile_m, self.spec.causal)

    def run(self, tile: WorkTile, blocks: Blocks | LocalBlocks, before_last):
        k, v = self.kv.feeds(self.seqlen, tile)
        self.query.put(self.seqlen, tile, self.row(tile))
        return load_kv(k, self.place.guard(v, tile), blocks, tile.base, before_last)


class Consumer(NamedTuple):
    attention: Attention
    queries: Queries | OneQuery
    schedule: object  # see mma.py
    output: OutputTile
    q_ring: Ring
    mLSE: cute.Tensor
    v_channel: cute.Tensor | None
    heads: HeadMap
    keys: Diagonal | Window | Chunk
    sink: NoSink | Sink
    seqlen: DenseSeqlen | RaggedSeqlen
    warpgroup: Int32
    spec: Spec
    config: Config

    blocks, row = Producer.blocks, Producer.row

    def run(self, tile: WorkTile, blocks: Blocks | LocalBlocks):
        a, mask, first = self.of(tile)
        self.q_ring.wait_full(tile.nth)
        a.softmax.begin_tile()
        self.schedule.attend(a, mask, blocks, tile.base)
        self.close(tile, blocks, a, mask, first)

    def of(self, tile: WorkTile) -> tuple:
        """Attention and mask of a work tile, and this warpgroup's first row."""
        first = self.row(tile) + 64 * self.warpgroup
        mask = self.mask(tile, first, thread_here())
        softmax = self.attention.softmax.of_tile(tile, self.heads.kv_head(tile.head), mask.row)
        rQ, sQ = self.queries.of_tile(tile.nth)
        return self.attention._replace(rQ=rQ, sQ=sQ, softmax=softmax), mask, first

    def mask(self, tile: WorkTile, first: Int32, thread: Int32):
        row, column = first + thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        return self.keys.mask(row, column, self.seqlen.of(tile.batch), self.config.tile_n)

    def close(self, tile: WorkTile, blocks: Blocks | LocalBlocks, a: Attention, mask, first: Int32):
        """The last PV of a tile, and its O."""
        thread = thread_here()
        mask = self.mask(tile, first, thread)
        self.output.place.before_last_values(tile)
        self.schedule.last(a, tile.base + blocks.count - 1)
        inverse, lse = cute.make_rmem_tensor(ROWS, Float32), cute.make_rmem_tensor(ROWS, Float32)
        a.softmax.finish(inverse, lse)
        self.sink.join(tile.head, inverse, lse)
        scale_rows(a.acc_O, inverse)
        if self.spec.v_channel_scale:
            head_kv = self.heads.kv_head(tile.head)
            scale_columns(a.acc_O, self.v_channel[tile.batch, head_kv, None], mask.column)
        self.output.store(a.acc_O, a.pv, self.seqlen, tile, first, thread, tile.base + blocks.count)
        store_lse(lse, self.seqlen.lse(self.mLSE, tile.head, tile.batch), mask.row, mask.column)


class Forward:
    def __init__(self, spec: Spec, config: Config):
        self.spec, self.config = spec, config
        self.dtype, self.dtype_o = DTYPES[spec.dtype], DTYPES[spec.dtype_o or spec.dtype]

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor,
        scales: Scales | None, v_channel: cute.Tensor | None, given: Ragged | Paged | None,
        variant: VariantNumbers | None, tickets: cute.Tensor | None, scale_log2: Float32, num_sms: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """mQ (b, sq, h, d); mK (b, sk, h_kv, d); mV (b, sk, h_kv, d_v), of FP8 (b, h_kv, d_v, sk padded to whole groups
        of 16 keys, permuted inside each); mO (b, sq, h, d_v); mLSE (b, h, sq) float32. scales: of FP8; v_channel (b,
        h_kv, d_v) float32: of the columns of O. given: of a ragged batch, whose tensors have b = 1 and s = total; of a
        paged one mK and mV are (pages, page size, h_kv, d or d_v).

        d and d_v may be smaller than the tile's. tickets (1) int32, 0, for a dynamic grid. scale_log2 = softmax scale
        * log2(e), above 0; with a softcap it is softcap * log2(e).
        """
        c, spec, dtype = self.config, self.spec, self.dtype
        # NOTE: an FP8 WGMMA takes V with the keys contiguous only.
        v_major, v_layout, v_modes = (
            (MAJOR.K, LAYOUT.ROW_MAJOR, [2, 3, 1, 0]) if spec.is_fp8 else (MAJOR.MN, LAYOUT.COL_MAJOR, [3, 1, 2, 0])
        )
        qk = sm90.make_trivial_tiled_mma(dtype, dtype, MAJOR.K, MAJOR.K, Float32, (1, 1, 1), (64, c.tile_n))
        pv = sm90.make_trivial_tiled_mma(
            dtype, dtype, MAJOR.K, v_major, Float32, (1, 1, 1), (64, c.chunk or spec.head_dim_v), SOURCE.RMEM
        )
        q_tile = sm90.make_smem_layout_a(
            LAYOUT.ROW_MAJOR, (64, c.tile_n, spec.head_dim), dtype, c.warpgroups * c.q_stages
        )
        o_tile = sm90.make_smem_layout_a(LAYOUT.ROW_MAJOR, (64, c.tile_n, spec.head_dim_v), self.dtype_o, c.warpgroups)
        k_tile = sm90.make_smem_layout_b(LAYOUT.ROW_MAJOR, (64, c.tile_n, spec.head_dim), dtype, c.stages)
        v_tile = sm90.make_smem_layout_b(v_layout, (64, spec.head_dim_v, c.tile_n), dtype, c.stages)
        fetch, put = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        batch, seqlen_q, heads, _ = mQ.shape
        _, seqlen_k, heads_kv, _ = mK.shape
        head_map = HeadMap(heads // heads_kv)
        if const_expr(spec.ragged):
            mQ, mO = ragged(mQ), ragged(mO)
        if const_expr(spec.ragged and not spec.paged):
            mK, mV = ragged(mK), ragged(mV)
        Q = operand(fetch, mQ, [1, 3, 2, 0], q_tile)
        if const_expr(spec.paged):
            K = boxed(fetch, mK, [1, 3, 2, 0], k_tile, 0, c.box)
            V = boxed(fetch, mV, v_modes, v_tile, 1, c.box)
        else:
            K = operand(fetch, mK, [1, 3, 2, 0], k_tile)
            V = operand(fetch, mV, v_modes, v_tile)
        O = operand(put, mO, [1, 3, 2, 0], o_tile)
        if const_expr(spec.ragged):
            seqlen = PagedSeqlen.create(given, seqlen_k) if spec.paged else RaggedSeqlen.create(given)
            sequences = given.cu_q.shape[0] - 1
            slots = Slots(seqlen_q // c.tile_m + sequences, heads)
            order = (RaggedLongestFirst if spec.causal else RaggedOrder)(slots, seqlen.q, sequences, Int32(c.tile_m))
        else:
            seqlen = DenseSeqlen(Lengths(seqlen_q, seqlen_k))
            order = self.order(seqlen_q, seqlen_k, heads, batch, head_map.ratio)
        ctas = order.grid.tiles if const_expr(not c.persistent) else cutlass.min(order.grid.tiles, num_sms)
        self.kernel(
            Q, K, V, O, mLSE, scales, v_channel, tickets, qk, pv, scale_log2, seqlen, head_map, order, variant
        ).launch(grid=(ctas, 1, 1), block=(c.threads, 1, 1), stream=stream, min_blocks_per_mp=1)

    def order(self, seqlen_q, seqlen_k, heads, batch, ratio):
        c, spec = self.config, self.spec
        grid = Grid(ceil_div(seqlen_q, c.tile_m), heads, heads * batch)
        if not spec.causal:
            return InOrder(grid)
        if c.persistent and not c.dynamic:
            return Folded(grid)
        kv_bytes = Int64(seqlen_k) * (spec.element_bytes * (spec.head_dim + spec.head_dim_v))
        return LongestFirst(grid, section_in_l2(kv_bytes, ratio, grid.sequences))

    def scheduler(
        self, smem, order, tickets: cute.Tensor | None, consumers: int
    ) -> OneTile | Persistent | Dynamic | Announced:
        if not self.config.persistent:
            return OneTile(order)
        if not self.config.dynamic:
            return Persistent(order)
        if isinstance(order, RaggedOrder):
            found = smem.allocate_tensor(Int32, cute.make_layout((TICKETS, 3)), byte_alignment=8)
            return Announced(order, tickets, found, self.ring(smem, found, TICKETS, consumers))
        drawn = smem.allocate_tensor(Int32, cute.make_layout(TICKETS), byte_alignment=8)
        return Dynamic(order, tickets, drawn, self.ring(smem, drawn, TICKETS, consumers))

    @cute.kernel
    def kernel(
        self, Q: Operand, K: Operand, V: Operand, O: Operand, mLSE: cute.Tensor, scales: Scales | None,
        v_channel: cute.Tensor | None, tickets: cute.Tensor | None, qk: cute.TiledMma, pv: cute.TiledMma,
        scale_log2: Float32, seqlen, head_map: HeadMap, order, variant: VariantNumbers | None,
    ):  # fmt: skip
        c, spec = self.config, self.spec
        smem = cutlass.memory.SmemAllocator()
        sQ, sK, sV = (self.stages(smem, x, self.dtype) for x in (Q, K, V))
        sO = self.stages(smem, O, self.dtype_o) if const_expr(c.o_place(spec) == "own") else None
        consumers = c.warpgroups * CONSUMER_WARPS
        q_ring = self.ring(smem, sQ, c.q_stages, c.warpgroups if c.o_place(spec) == "q" else consumers)
        k_ring, v_ring = (self.ring(smem, sX, c.stages, consumers) for sX in (sK, sV))
        stored = self.ring(smem, sQ, 1, c.warpgroups)
        scheduler = self.scheduler(smem, order, tickets, consumers)
        thread, _, _ = cute.arch.thread_idx()
        role = cute.arch.make_warp_uniform(thread // 128)  # 0 producer, 1.. consumers
        warp = cute.arch.make_warp_uniform(thread // 32)
        if warp == 0:
            for x in (Q, K, V, O):
                cpasync.prefetch_descriptor(x.atom)
            with cute.arch.elect_one():
                for ring in (q_ring, k_ring, v_ring, stored, *scheduler.rings):
                    ring.init()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        producer_registers, consumer_registers = c.registers(spec)
        if role == 0:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == 0:
                query = QuerySource(Q, sQ, q_ring, c.warpgroups, spec.head_dim)
                kv = self.kv(K, V, sK, sV, k_ring, v_ring, head_map)
                place, _ = self.o_place(sQ, sO, sV, O, q_ring, v_ring, stored, Int32(0))
                producer = Producer(query, kv, place, self.keys(variant), seqlen, spec, c)
                scheduler.lead(producer.blocks, producer.run)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            wg = role - 1
            softmax = self.softmax(scales, scale_log2)
            # NOTE: by an address read anew. With the one that is there the kernels of head dim 256 spill it.
            distance = shared_here() - sQ.iterator.toint()
            plain_q, plain_k = plain(sQ, distance), plain(sK, distance)
            attention = self.attention(qk, pv, sK, sV, plain_k, k_ring, v_ring, softmax, self.cap(variant), wg)
            queries = self.queries(qk, sQ, plain_q, q_ring, wg)
            place, own = self.o_place(sQ, sO, sV, O, q_ring, v_ring, stored, wg)
            output = OutputTile(O, own, place, O_BARRIER + wg, spec.head_dim_v)
            attention.turns.start()
            consumer = Consumer(
                attention, queries, self.schedule(), output, q_ring, mLSE, v_channel, head_map, self.keys(variant),
                self.sink(variant), seqlen, wg, spec, c,
            )  # fmt: skip
            scheduler.follow(consumer.blocks, consumer.run)
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def stages(self, smem, x: Operand, dtype) -> cute.Tensor:
        return smem.allocate_tensor(dtype, x.layout.outer, byte_alignment=1024, swizzle=x.layout.inner)

    def ring(self, smem, sX: cute.Tensor, stages: int, consumers: int) -> Ring:
        bars = smem.allocate_array(Int64, 2 * stages)
        return Ring(bars, bars + stages, stages, cute.size_in_bytes(sX.element_type, sX.layout) // stages, consumers)

    def o_place(self, sQ, sO, sV, O: Operand, q_ring, v_ring, stored, wg) -> tuple[OverQ | Apart | OverV, cute.Tensor]:
        """How a warpgroup's O leaves, and its shared memory (64, head_dim_v)."""

        def over(sX: cute.Tensor) -> cute.Tensor:
            return cute.make_tensor(sX[None, None, wg].iterator, cute.slice_(O.layout.outer, (None, None, 0)))

        return {
            "q": lambda: (OverQ(q_ring), over(sQ)),
            "own": lambda: (Apart(q_ring, O_BARRIER + wg), sO[None, None, wg]),
            "v": lambda: (OverV(q_ring, v_ring, stored, wg), over(sV)),
        }[self.config.o_place(self.spec)]()

    def softmax(self, scales: Scales | None, scale_log2: Float32) -> Softmax | BlockScaledSoftmax:
        if scales is None:
            return Softmax.create(scale_log2)
        return BlockScaledSoftmax.create(scales, scale_log2, self.config.tile_n)

    def kv(self, *operands) -> DenseKV | PagedKV:
        c, sizes = self.config, (self.config.tile_n, self.spec.head_dim, self.spec.head_dim_v)
        return PagedKV(*operands, *sizes, c.box) if self.spec.paged else DenseKV(*operands, *sizes)

    def past_keys(self, sV, v_ring, wg) -> WholeValues | PagedValues:
        if not self.spec.paged:
            return WholeValues()
        return PagedValues(sV, v_ring, self.config.tile_n, self.spec.head_dim_v, O_BARRIER + wg)

    def keys(self, variant: VariantNumbers | None) -> Diagonal | Window | Chunk:
        if not self.spec.local:
            return Diagonal(self.spec.causal)
        window = Window(variant.left, variant.right)
        return Chunk(window, variant.chunk) if self.spec.local == "chunk" else window

    def cap(self, variant: VariantNumbers | None) -> Uncapped | Softcap:
        return Softcap(variant.inner_scale) if self.spec.softcap else Uncapped()

    def sink(self, variant: VariantNumbers | None) -> NoSink | Sink:
        return Sink(variant.sink) if self.spec.sink else NoSink()

    def schedule(self) -> Overlapped | Optimistic | Halved | InTurn:
        c = self.config
        if not c.overlap:
            return InTurn()
        if not self.spec.is_fp8:
            return Optimistic() if c.optimistic else Overlapped()
        if c.alternate:
            return Alternating()
        return Prefetching() if c.prefetch else Halved()

    def accumulation(self, pv: cute.TiledMma) -> AmongExponentials | UnderQK | Promoted:
        c = self.config
        if c.promotion:
            return (Promoted if c.overlap else PromotedAtOnce).create(pv, c.chunk or self.spec.head_dim_v)
        return UnderQK() if c.rescale_early else AmongExponentials()

    def settle(self, fragment: cute.Tensor) -> cute.Tensor:
        return settled(fragment) if self.spec.is_fp8 else fragment

    def queries(self, qk, sQ, plain_q, q_ring, wg) -> Queries | OneQuery:
        qk_wg, c = qk.get_slice(0), self.config
        if c.q_stages > 1:
            return Queries(qk.make_fragment_A(qk_wg.partition_A(sQ)), plain_q, q_ring, c.warpgroups, wg)
        rQ = self.settle(qk.make_fragment_A(qk_wg.partition_A(sQ[None, None, wg])))
        return OneQuery(rQ, plain_q[None, None, wg])

    def attention(self, qk, pv, sK, sV, plain_k, k_ring, v_ring, softmax, cap, wg) -> Attention:
        c, columns = self.config, self.config.chunk or self.spec.head_dim_v
        qk_wg, pv_wg = qk.get_slice(0), pv.get_slice(0)
        tiler = (columns, c.tile_n, c.stages)
        chunks = [cute.local_tile(sV, tiler, (n, 0, 0)) for n in range(self.spec.head_dim_v // columns)]
        return Attention(
            qk,
            pv,
            rQ=None,
            sQ=None,
            rK=self.settle(qk.make_fragment_B(qk_wg.partition_B(sK))),
            sK=plain_k,
            rV=tuple(self.settle(pv.make_fragment_B(pv_wg.partition_B(chunk))) for chunk in chunks),
            rP=cute.make_rmem_tensor(pv.partition_shape_A((64, c.tile_n)), self.dtype),
            acc_O=cute.make_rmem_tensor(pv.partition_shape_C((64, self.spec.head_dim_v)), Float32),
            k_ring=k_ring,
            v_ring=v_ring,
            softmax=softmax,
            cap=cap,
            past_keys=self.past_keys(sV, v_ring, wg),
            turns=Turns(wg, c.warpgroups, TURNS_BARRIER) if c.pingpong else NoTurns(),
            accumulation=self.accumulation(pv),
            tile_n=c.tile_n,
            steps=c.tile_n // self.spec.step,
        )


def ragged_batch() -> Ragged:
    """As `signature` wants it."""
    batch, edges = cute.sym_int(), cute.sym_int()
    tensors = (make_fake_tensor(Int32, (n,), (1,), assumed_align=4) for n in (edges, edges, batch, batch))
    return Ragged(*tensors, Int32(0), Int32(0))


def paged_batch() -> Paged:
    """As `signature` wants it."""
    batch, edges, width = cute.sym_int(), cute.sym_int(), cute.sym_int()
    cu_q, used_q, used_k = (make_fake_tensor(Int32, (n,), (1,), assumed_align=4) for n in (edges, batch, batch))
    strides = (cute.sym_int64(), cute.sym_int64())
    return Paged(cu_q, make_fake_tensor(Int32, (batch, width), strides, assumed_align=4), used_q, used_k, Int32(0))


def variant_numbers(spec: Spec, heads) -> VariantNumbers:
    """As `signature` wants it."""
    dtype, strides = SINK_DTYPES.get(spec.sink), (cute.sym_int64(),)
    sink = make_fake_tensor(dtype, (heads,), strides, assumed_align=2) if spec.sink else None
    return VariantNumbers(Int32(0), Int32(0), Int32(1), Float32(1.0), sink)


def signature(spec: Spec, config: Config) -> tuple:
    """What cute.compile takes: fn(q, k, v, o, lse, scales, v_channel, ragged, variant, tickets, scale_log2, num_sms)
    on the current stream; None for what the kernel does not have.
    """
    batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v = (cute.sym_int() for _ in range(7))
    step = 16 // spec.element_bytes  # elements: what TMA asks of strides

    def tensor(shape, dtype=DTYPES[spec.dtype], step=step):
        strides = tuple(cute.sym_int64(divisibility=step) for _ in range(3))
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)

    def floats(*shape):
        return make_fake_tensor(Float32, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=4)

    q = tensor((batch, seqlen_q, heads, head_dim))
    of_k = (cute.sym_int() if spec.paged else batch, seqlen_k, heads_kv)  # (pages, page size, h_kv)
    k = tensor((*of_k, head_dim))
    v_shape = (batch, heads_kv, head_dim_v, cute.sym_int()) if spec.is_fp8 else (*of_k, head_dim_v)
    o = tensor((batch, seqlen_q, heads, head_dim_v), DTYPES[spec.dtype_o or spec.dtype], 8)
    lse_strides = (cute.sym_int64(), cute.sym_int64(), 1)
    lse = make_fake_tensor(Float32, (batch, heads, seqlen_q), lse_strides, assumed_align=4)
    kv_strides = (cute.sym_int64(divisibility=4), cute.sym_int64(divisibility=4), 4, 1)
    kv_scales = make_fake_tensor(Float32, (batch, heads_kv, cute.sym_int(), 4), kv_strides, assumed_align=16)
    scales = Scales(floats(batch, heads, cute.sym_int()), kv_scales, floats(batch, heads_kv), Int32(1))
    v_channel = floats(batch, heads_kv, head_dim_v) if spec.v_channel_scale else None
    tickets = make_fake_tensor(Int32, (1,), (1,), assumed_align=4) if config.dynamic else None
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    variant = variant_numbers(spec, heads) if spec.is_variant else None
    given = paged_batch() if spec.paged else ragged_batch() if spec.ragged else None
    optional = (scales if spec.is_fp8 else None, v_channel, given, variant, tickets)
    return Forward(spec, config), (q, k, tensor(v_shape), o, lse, *optional, Float32(1.0), Int32(1), stream)
