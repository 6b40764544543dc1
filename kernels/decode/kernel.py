"""Attention of few queries to many keys (decode, speculative verification) for sm_90a: as fast as the keys arrive.

role       warps                       waits for                 signals
loader     1 (TMA), 4 (row by row)     q, k, v empty             q, k, v full
consumer   4 a warpgroup               q, k, v full              q, k, v empty

A CTA has one tile of up to 64 query rows, the heads of a group for token after token, and a share of all sequences'
keys (algo/pieces.py). A sequence that lies in one share gives O and LSE; of others every share gives a part, and a
second kernel merges them.
"""

from functools import partial

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..algo.pieces import Batch, Given, Line, Piece
from ..algo.scheduler import LANES
from ..algo.softcap import ExactSoftcap, Uncapped
from ..algo.softmax import Softmax
from ..algo.window import Chunk, Window
from ..forward.accumulate import AmongExponentials
from ..forward.mma import Attention, Overlapped
from ..forward.values import WholeValues
from ..prims.branch import when
from ..prims.divide import Divisor
from ..prims.ptx import thread_here
from ..prims.ring import Ring
from ..prims.turns import NoTurns, Turns
from .attend import Cleaned, Fenced, RowLimits
from .config import GATHER, ROWS, Config, Spec
from .load import Boxes, BoxLoader, Contiguous, Paged, Queries, RowLoader, Rows, Tile
from .merge import WARPS, Merge
from .rows import Output, Parts, Place

LAYOUT = cutlass.tensor_utils.LayoutEnum
MAJOR = cute.nvgpu.OperandMajorMode
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": Float32}
CONSUMER_WARPS = 4  # of a warpgroup
CLEAN_BARRIER, TURN_BARRIER = 1, 3  # named barriers, one a warpgroup of consumers from here on


class Decode:
    def __init__(self, spec: Spec, config: Config):
        self.spec, self.config = spec, config
        self.dtype = DTYPES[spec.dtype]

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor,
        parts: Parts | None, table: cute.Tensor | None, mSink: cute.Tensor | None, given: Given, window: Window | Chunk,
        granule: Int32 | None, splits: Int32 | None, scale_log2: Float32, cap: Float32 | None, tiles: Int32,
        shares: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """mQ (b, sq, h, d), of ragged queries (1, total, h, d); mK, mV (b, rows, h_kv, d), of pages (pages, page_size,
        h_kv, d); mO (b, sq, h, d_v); mLSE (b, h, sq) float32; table (b, width) int32; mSink (h) float32.

        tiles: of ROWS query rows, of a group of heads. shares: CTAs of a tile and head. scale_log2 = softmax scale *
        log2(e), above 0; with softcap: softcap * log2(e), and cap = 2 * softmax scale * log2(e) / softcap.
        """
        c, spec, dtype = self.config, self.spec, self.dtype
        qk = sm90.make_trivial_tiled_mma(dtype, dtype, MAJOR.K, MAJOR.K, Float32, (1, 1, 1), (64, c.tile_n))
        pv = sm90.make_trivial_tiled_mma(
            dtype, dtype, MAJOR.K, MAJOR.MN, Float32, (1, 1, 1), (64, spec.head_dim_v), warpgroup.OperandSource.RMEM
        )
        q_tile = sm90.make_smem_layout_a(LAYOUT.ROW_MAJOR, (64, c.tile_n, spec.head_dim), dtype, c.q_stages)
        k_tile = sm90.make_smem_layout_b(LAYOUT.ROW_MAJOR, (64, c.tile_n, spec.head_dim), dtype, c.stages)
        v_tile = sm90.make_smem_layout_b(LAYOUT.COL_MAJOR, (64, spec.head_dim_v, c.tile_n), dtype, c.stages)
        heads_kv = mK.shape[2]
        ratio = mQ.shape[2] // heads_kv
        batch = Batch(given, window, c.tile_n, granule, splits)
        K, V = self.operand(mK, k_tile, spec.head_dim), self.operand(mV, v_tile, spec.head_dim_v)
        line = Line(batch, Divisor.of(shares), Divisor.of(ratio), Int32(0))
        args = mQ, mO, mLSE, parts, table, mSink, line
        self.kernel(*args, mK, mV, K, V, qk, pv, q_tile, k_tile, v_tile, scale_log2, cap).launch(
            grid=(heads_kv, tiles, shares), block=(c.threads(spec), 1, 1), stream=stream, min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip
        if const_expr(spec.splits):
            self.merge(*args).launch(
                grid=(given.batch if spec.granules else shares - 1, heads_kv, tiles),
                block=(LANES * WARPS, 1, 1),
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=True,
            )

    def tile(self, sX: cute.Tensor, head_dim: int, rows: int = 0) -> Tile:
        return Tile(sX, head_dim, rows or self.config.tile_n, self.width(head_dim))

    def width(self, head_dim: int) -> int:
        """Columns that a swizzle spans."""
        return 64 if head_dim % 64 == 0 else 32

    def operand(self, mX: cute.Tensor, tile, head_dim: int) -> tuple | None:
        """TMA's atom and coordinates; None where it is not used."""
        if self.spec.pages == GATHER:
            return None
        return Boxes.create(mX, tile.inner, self.spec.pages or self.config.tile_n, self.width(head_dim))

    @cute.kernel
    def merge(self, mQ, mO, mLSE, parts, table, mSink, line: Line):
        cute.arch.griddepcontrol_launch_dependents()
        item, head_kv, tile = cute.arch.block_idx()
        _, heads_kv, tiles = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        line = line._replace(row=tile * ROWS)
        units, unit = heads_kv * tiles, tile * heads_kv + head_kv
        Merge(parts, mO, mLSE, mSink, line, units, unit, head_kv, self.spec, self.dtype).run(item, warp)

    @cute.kernel
    def kernel(
        self, mQ, mO, mLSE, parts, table, mSink, line: Line, mK, mV, K, V, qk, pv, q_tile, k_tile, v_tile,
        scale_log2: Float32, cap,
    ):  # fmt: skip
        c, spec = self.config, self.spec
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        head_kv, tile, part = cute.arch.block_idx()
        heads_kv, tiles, _ = cute.arch.grid_dim()
        units, unit = heads_kv * tiles, tile * heads_kv + head_kv
        line = line._replace(row=tile * ROWS)
        smem = cutlass.memory.SmemAllocator()
        sQ, sK, sV = (self.stages(smem, x) for x in (q_tile, k_tile, v_tile))
        gathers = spec.pages == GATHER
        producers = 32 * c.loaders(spec) if gathers else 1
        k_ring, v_ring = (self.ring(smem, sX, c.stages, producers) for sX in (sK, sV))
        q_ring = self.ring(smem, sQ, c.q_stages, 32 * c.loaders(spec))
        first_loader = CONSUMER_WARPS * c.consumers
        if warp == first_loader:
            with cute.arch.elect_one():
                for ring in (q_ring, k_ring, v_ring):
                    ring.init()
            if const_expr(not gathers):
                for atom, _ in (K, V):
                    cpasync.prefetch_descriptor(atom)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # NOTE: what comes before runs under the end of the kernel before this one; nothing of memory was read yet.
        cute.arch.griddepcontrol_wait()
        if const_expr(spec.splits):
            cute.arch.griddepcontrol_launch_dependents()

        if warp >= first_loader:
            source = Contiguous(line.batch) if spec.pages == 0 else Paged(table, mK.shape[1], line.batch)
            loader = warp - first_loader
            q = Queries(mQ, self.tile(sQ, spec.head_dim, ROWS), q_ring, line, head_kv, loader, c.loaders(spec))
            k_data, v_data = self.tile(sK, spec.head_dim), self.tile(sV, spec.head_dim_v)
            if const_expr(gathers):
                by_row = Rows(mK, k_data, k_ring), Rows(mV, v_data, v_ring)
                line.walk(part, RowLoader(q, *by_row, source, head_kv, c.tile_n, loader).run)
            else:
                rows = spec.pages or c.tile_n
                of_k, of_v = (
                    Boxes(*x, data, ring, rows)  # type: ignore[call-arg]
                    for x, data, ring in ((K, k_data, k_ring), (V, v_data, v_ring))
                )
                line.walk(part, BoxLoader(q, of_k, of_v, source, head_kv, c.tile_n).run)
        else:
            attention = self.attention(qk, pv, sQ, sK, sV, k_ring, v_ring, scale_log2, cap)
            v_data = self.tile(sV, spec.head_dim_v)

            wg = warp // CONSUMER_WARPS
            output = Output(mO, mLSE, parts, mSink, unit, units, spec, self.dtype)
            turns = Turns(wg, c.consumers, TURN_BARRIER) if c.consumers > 1 else NoTurns()
            turns.start()
            line.walk(part, partial(self.consume, attention, line, head_kv, q_ring, v_data, output, wg, turns))

    def consume(
        self, a: Attention, line: Line, head_kv, q_ring: Ring, v_data: Tile, output: Output, wg, turns, piece: Piece
    ):
        """A piece, by the warpgroup whose turn it is."""
        place = Place.of(line.batch, piece, head_kv, line.ratio, line.row)
        attend = partial(self.attend, a, piece, place, line.batch, q_ring, v_data, output, wg, turns)
        if self.config.consumers == 1:
            attend()
        else:
            when(piece.nth % self.config.consumers == wg, attend)

    def attend(
        self, a: Attention, piece: Piece, place: Place, batch: Batch, q_ring: Ring, v_data: Tile, output, wg, turns
    ):
        """One piece."""
        thread = thread_here()
        row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        mask = RowLimits.create(batch, piece, place, row, column, self.config.tile_n)
        if self.spec.pages != GATHER:
            a = a._replace(v_ring=Cleaned(a.v_ring, v_data, piece, CLEAN_BARRIER + wg))  # type: ignore[arg-type]
        # NOTE: a barrier's phase has one bit: who waits two phases ahead is let through. So a piece is begun when the
        # one before it has seen all its tiles; what runs together is the end of one and the start of the next.
        turns.take()
        Fenced(q_ring).wait_full(piece.nth)
        a = a._replace(rQ=a.rQ[None, None, None, q_ring.stage(piece.nth)])  # type: ignore[index]
        attend_piece(a, mask, piece, partial(q_ring.release, piece.nth))
        turns.give()
        output.store(a, piece, place, row, column)

    def stages(self, smem, layout) -> cute.Tensor:
        return smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def ring(self, smem, sX: cute.Tensor, stages: int, producers: int) -> Ring:
        bars = smem.allocate_array(Int64, 2 * stages)
        stage_bytes = cute.size_in_bytes(sX.element_type, sX.layout) // stages
        return Ring(bars, bars + stages, stages, stage_bytes, CONSUMER_WARPS, producers)

    def attention(self, qk, pv, sQ, sK, sV, k_ring, v_ring, scale_log2, cap) -> Attention:
        c, spec = self.config, self.spec
        qk_wg, pv_wg = qk.get_slice(0), pv.get_slice(0)
        k_ring, v_ring = (Fenced(x) for x in (k_ring, v_ring)) if spec.pages == GATHER else (k_ring, v_ring)
        return Attention(
            qk,
            pv,
            rQ=qk.make_fragment_A(qk_wg.partition_A(sQ)),
            sQ=None,
            rK=qk.make_fragment_B(qk_wg.partition_B(sK)),
            sK=None,
            rV=(pv.make_fragment_B(pv_wg.partition_B(sV)),),
            rP=cute.make_rmem_tensor(pv.partition_shape_A((64, c.tile_n)), self.dtype),
            acc_O=cute.make_rmem_tensor(pv.partition_shape_C((64, spec.head_dim_v)), Float32),
            k_ring=k_ring,
            v_ring=v_ring,
            softmax=Softmax.create(scale_log2),
            turns=NoTurns(),
            cap=ExactSoftcap(cap) if spec.softcap else Uncapped(),
            past_keys=WholeValues(),
            accumulation=AmongExponentials(),
            tile_n=c.tile_n,
            steps=c.tile_n // 16,
        )


@cute.jit
def attend_piece(a: cutlass.Constexpr, mask: cutlass.Constexpr, piece: cutlass.Constexpr, release: cutlass.Constexpr):
    """All key blocks of a piece, from right to left. release(): Q is not needed any more."""
    schedule, last = Overlapped(), piece.n_block + piece.count - 1  # type: ignore[call-arg]
    a.acc_O.fill(0.0)
    a.softmax.reset()
    schedule.first(a, piece.base, last, mask)
    for i in cutlass.range(1, piece.count, unroll=1):
        schedule.step(a, piece.base + i, last - i, mask)
    release()
    schedule.last(a, piece.base + piece.count - 1)


def lists() -> Given:
    """As `signature` wants them."""

    def numbers():
        return make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4)

    return Given(*(numbers() for _ in range(6)), *(Int32(0) for _ in range(10)))


def signature(spec: Spec, config: Config) -> tuple:
    """What cute.compile takes: fn(q, k, v, o, lse, parts, table, sink, given, window, granule, splits, scale_log2, cap,
    tiles, shares) on the current stream; None for what the kernel does not have.
    """
    dtype = DTYPES[spec.dtype]
    batch, heads, heads_kv, seqlen_q, pages, rows, head_dim, head_dim_v, b = (cute.sym_int() for _ in range(9))

    def tensor(shape, step=8, align=16):
        strides = tuple(cute.sym_int64(divisibility=step) for _ in range(3))
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=align)

    q = tensor((batch, seqlen_q, heads, head_dim))
    k, v = tensor((pages, rows, heads_kv, head_dim)), tensor((pages, rows, heads_kv, head_dim_v))
    o = tensor((batch, seqlen_q, heads, head_dim_v), 2, 4)
    lse_strides = tuple(cute.sym_int64() for _ in range(3))
    lse = make_fake_tensor(Float32, (batch, heads, seqlen_q), lse_strides, assumed_align=4)
    slots, tile_rows = cute.sym_int(), cute.sym_int()
    part_o = make_fake_tensor(
        Float32, (slots, tile_rows, spec.head_dim_v), (cute.sym_int64(), spec.head_dim_v, 1), assumed_align=16
    )
    part_lse = make_fake_tensor(Float32, (slots, tile_rows), (cute.sym_int64(), 1), assumed_align=4)
    parts = Parts(part_o, part_lse) if spec.splits else None
    table_strides = cute.sym_int64(), cute.sym_int64()
    table = make_fake_tensor(Int32, (b, cute.sym_int()), table_strides, assumed_align=4) if spec.pages else None
    sink = make_fake_tensor(DTYPES[spec.sink], (heads,), (cute.sym_int64(),), assumed_align=4) if spec.sink else None
    number = Int32(1)
    whole = Window(number, number)
    window = Chunk(whole, number) if spec.chunk else whole
    granule = (number, number) if spec.granules else (None, None)
    cap = Float32(1.0) if spec.softcap else None
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return Decode(spec, config), (
        q, k, v, o, lse, parts, table, sink, lists(), window, *granule, Float32(1.0), cap, number, number, stream,
    )  # fmt: skip
