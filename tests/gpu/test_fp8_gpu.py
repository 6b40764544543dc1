"""The FP8 forward against its emulation, float64 and itself: shapes, schedules, strides, lengths, memory, graphs.

Output memory starts as NaN and has guards around it, inputs are not written to, what surrounds them in memory is NaN.
"""

import math
from collections import defaultdict
from dataclasses import replace
from statistics import fmean

import pytest
import torch

import fa3
from fa3.heuristics import all_configs, config_of
from fa3.kernels.compile import load
from fa3.kernels.forward.config import TILES
from fa3.problem_fp8 import quantized_problem
from fa3.quant import reference
from fa3.quant.cast import cast
from fa3.quant.formats import E4M3, PER_TENSOR, QuantizedQKV
from fa3.quant.interface import quantize_qkv
from fa3.quant.prepare import prepare
from fa3.reference import LOG2_E
from fa3.reference_fp8 import fp8_attention
from fa3.testing import fp8_conformance as conformance
from fa3.testing.fp8 import PROPERTIES, Case, Subject, cases
from fa3.testing.fp8_bound import Bound, predicted_rmse
from fa3.testing.inputs import make, poison
from fa3.testing.properties import check
from fa3.testing.tolerance import UNIT, exact, lse_error, rmse

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NUM_SMS = 132
GUARD = 7
NAN_CODE = 0x7F
# The tensor core sums 32 products at a time with about 14 bits: over the steps of a head dim some 2^-11 of a score's
# |q| |k|, over the steps of a key block some 2^-9 of sum p |v|.
SCORE_EPS, SUM_EPS = 2.0**-11, 2.0**-9
# The emulation sums in float32, so that a score differs by SCORE_EPS |q| |k|, most by a tenth of it: |q| |k| scale is
# about 11, so e by 5e-4 of itself. E4M3's steps are 1/16 to 1/8 of a number, so of 200 P one falls to the other side,
# where it is off by a step instead of at most half: the root mean square of the difference is a third of that of
# rounding, at most.
OF_ROUNDING = 1 / 3
NOT_WORSE = 1.1  # RMSE against float64 over the emulation's
SIZES = [  # (seqlen_q, seqlen_k, batch, heads_kv, ratio): one row, tile edges and off them, longer q, longer k
    *((1, 1, 2, 2, 1), (1, 300, 1, 2, 3), (64, 64, 2, 1, 1), (77, 130, 1, 2, 2), (128, 128, 1, 1, 4)),
    *((200, 333, 2, 3, 1), (300, 900, 1, 2, 1), (513, 129, 1, 1, 2), (1024, 1024, 1, 2, 2)),
]
HEAD_DIMS = [*TILES, (80, 80), (112, 112), (160, 144), (208, 240), (64, 256), (256, 64)]
EDGES = [n + d for n in (16, 64, 96, 128, 192, 256, 384) for d in (-1, 0, 1)]


def attend(x, softmax_scale=None, causal=False, accumulation="accurate"):
    return fa3.flash_attn_quantized_func(x, softmax_scale, causal, accumulation=accumulation, return_lse=True)


def subject(accumulation="accurate"):
    def attention(x, softmax_scale=None, causal=False):
        return attend(x, softmax_scale, causal, accumulation)

    return Subject(attention, quantize_qkv, DEVICE, SCORE_EPS, SUM_EPS)


def tensors(case: Case):
    return make(case, DEVICE)


def quantized(seqlen_q, seqlen_k, batch=1, heads_kv=2, ratio=1, head_dim=128, head_dim_v=None, seed=0, **options):
    """Blocks of K and of V differ in size."""
    sizes = dict(heads_kv=heads_kv, ratio=ratio, head_dim=head_dim, head_dim_v=head_dim_v or head_dim)
    dtype = options.pop("dtype", "bfloat16")
    q, k, v = make(Case(dtype, batch, seqlen_q, seqlen_k, **sizes, seed=seed), DEVICE)
    blocks = torch.arange(seqlen_k, device=DEVICE)[:, None, None] // 64
    return quantize_qkv(q, (k * (1 + blocks % 3 / 4)).to(k.dtype), (v * 2.0 ** (blocks % 5)).to(v.dtype), **options)


def parts(x: QuantizedQKV):
    return {n: t for n, t in vars(x).items() if isinstance(t, torch.Tensor)}


def guarded(x: QuantizedQKV, causal=False, accumulation="accurate", softmax_scale=None):
    """attend into memory that is NaN, between guards that must not change; nor must the record."""
    batch, seqlen_q, heads, _ = x.q.shape
    guards, holes = [], []
    for shape, dtype in (((batch, seqlen_q, heads, x.head_dim_v), x.dtype), ((batch, heads, seqlen_q), torch.float32)):
        poison(shape, dtype, DEVICE)
        guards.append(torch.full((1 << 16,), GUARD, dtype=torch.int32, device=DEVICE))
        holes.append(torch.full(shape, math.nan, dtype=dtype, device=DEVICE))
        guards.append(torch.full((1 << 16,), GUARD, dtype=torch.int32, device=DEVICE))
    before = {n: bits(t).clone() for n, t in parts(x).items()}
    del holes
    out, lse = attend(x, softmax_scale, causal, accumulation)
    assert all((guard == GUARD).all() for guard in guards), "memory beside the outputs was written"
    assert all(torch.equal(bits(t), before[n]) for n, t in parts(x).items()), "an input was written"
    return out, lse


def bits(t):
    return t.view(torch.uint8) if t.dtype == E4M3.dtype else t


def emulated(x: QuantizedQKV, causal=False, accumulation="accurate"):
    """In the kernel's tiles, on the GPU."""
    config = config_of(quantized_problem(x, 1.0, causal, accumulation), NUM_SMS)
    return fp8_attention(x, None, causal, tile_m=config.tile_m, tile_n=config.tile_n)


def verify(x: QuantizedQKV, causal=False, accumulation="accurate", what=""):
    """Against the bound of every element and of LSE, and against the emulation where rows and P make an average."""
    out, lse = guarded(x, causal, accumulation)
    assert out.dtype == x.dtype and torch.isfinite(out).all(), what
    bound = Bound.of(x, x.q.shape[3] ** -0.5, causal, SCORE_EPS, SUM_EPS)
    share = bound.share(out)
    assert share <= 1, f"{what}: {share:.3f} of the allowed error"
    assert lse_error(lse, bound.lse) <= bound.lse_limit, what
    pairs = (x.q.shape[0] * x.q.shape[2]) * visible_pairs(x.q.shape[1], x.seqlen_k, causal)
    if out.numel() < 1 << 14 or pairs < 1 << 12:
        return
    want, want_lse = emulated(x, causal, accumulation)
    assert torch.equal(lse == -math.inf, want_lse == -math.inf), what
    errors = rmse(out, bound.out), rmse(want, bound.out)
    assert errors[0] <= NOT_WORSE * errors[1] + 1e-7, f"{what}: RMSE {errors[0]:.3e}, the emulation's {errors[1]:.3e}"
    apart = math.sqrt(2) * UNIT[str(x.dtype).removeprefix("torch.")] / math.sqrt(3)  # both are rounded to their type
    allowed = OF_ROUNDING * errors[1] + apart * bound.out.square().mean().sqrt().item()
    assert rmse(out, want.double()) <= allowed, (
        f"{what}: {rmse(out, want.double()):.3e} from the emulation, {allowed:.3e}"
    )


def visible_pairs(seqlen_q, seqlen_k, causal):
    """Of a head: where they are few, one P on another side of a rounding is the whole difference."""
    if not causal:
        return seqlen_q * seqlen_k
    return sum(max(0, min(seqlen_k, seqlen_k - seqlen_q + 1 + i)) for i in range(seqlen_q))


def assert_equal(got, wanted, what=""):
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b), what


# Against the emulation and float64


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
def test_grid(head_dim, head_dim_v, causal):
    for i, (seqlen_q, seqlen_k, batch, heads_kv, ratio) in enumerate(SIZES):
        options = dict(rotate=bool(i % 2), q_rows=(64, 1)[i // 2 % 2], dtype=("bfloat16", "float16")[i % 3 == 2])
        x = quantized(seqlen_q, seqlen_k, batch, heads_kv, ratio, head_dim, head_dim_v, i, **options)
        verify(x, causal, what=f"{SIZES[i]} {options}")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_fast_accumulation_at_short_lengths(head_dim, causal):
    for seqlen in (65, 128, 512):
        verify(quantized(seqlen, seqlen, 2, head_dim=head_dim), causal, "fast", f"{seqlen}")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lengths_around_every_tile_edge(head_dim):
    for i, seqlen_k in enumerate(EDGES):
        for causal in (False, True):
            x = quantized(EDGES[-1 - i], seqlen_k, 1, 1, 2, head_dim, seed=i)
            verify(x, causal, what=f"{EDGES[-1 - i]}x{seqlen_k} {causal}")


@pytest.mark.parametrize("causal", [False, True])
def test_every_head_ratio(causal):
    for heads_kv, ratio in [(4, 1), (2, 2), (2, 3), (1, 8), (1, 16), (3, 8), (5, 7)]:
        verify(quantized(150, 333, 1, heads_kv, ratio), causal, what=f"{heads_kv} {ratio}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_channel_scales(head_dim, causal):
    q, k, v = tensors(Case("bfloat16", 2, 200, 300, 2, 2, head_dim, head_dim))
    by = 2.0 ** torch.arange(head_dim, device=DEVICE).remainder(9)
    x, one = (reference.quantize_qkv(q, k, t, v_channel=True) for t in (v * by.bfloat16(), v))
    (out, lse), (plain, plain_lse) = guarded(x, causal), guarded(one, causal)
    assert_equal((out, lse), (plain * by.bfloat16(), plain_lse))
    want, _ = exact(*reference.dequantize_qkv(one), None, causal)
    assert rmse(plain, want) <= NOT_WORSE * rmse(emulated(one, causal)[0], want)


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
def test_properties(prop):
    record = check(prop, subject(), cases(DEVICE), 25)
    assert record.passed, record.failure


def test_rmse_by_the_papers_protocol():
    """The ten seeds of bench.accuracy."""
    rotated, per_tensor = [], []
    for seed in range(10):
        x = tensors(Case("bfloat16", 2, 4096, 4096, 8, 1, 128, 128, values="outliers", seed=seed))
        want, _ = exact(*x)
        by_block = quantize_qkv(*x)
        rotated.append(rmse(attend(by_block)[0], want))
        per_tensor.append(rmse(attend(reference.quantize_qkv(*x, rotate=False, granularity=PER_TENSOR))[0], want))
        if seed == 0:
            assert rotated[0] <= 1.02 * rmse(emulated(by_block)[0], want)
    assert fmean(rotated) <= 8.5e-3 and fmean(rotated) <= 0.5 * fmean(per_tensor), (rotated, per_tensor)


# Length


@pytest.mark.parametrize("seqlen_k", [1024, 8192, 65536, 131072])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_error_does_not_grow_with_length(head_dim, seqlen_k):
    measured = conformance.long_context(subject(), seqlen_k, head_dim)
    assert measured.figure <= measured.limit == 3e-3


def test_fast_accumulation_loses_what_accurate_keeps():
    """Head dim 256: to 128 the accurate kernel is the fast one too."""
    accurate, fast = (conformance.long_context(subject(a), 65536, 256).figure for a in ("accurate", "fast"))
    assert accurate <= 3e-3 and fast > 3 * accurate


@pytest.mark.parametrize("seqlen_q", [64, 1])
@pytest.mark.parametrize("seqlen_k", [4096, 32768, 131072])
def test_the_mean_of_many_values(seqlen_k, seqlen_q):
    measured = conformance.truncation(subject(), seqlen_k, seqlen_q)
    assert measured.figure <= measured.limit == 5e-3


@pytest.mark.parametrize("at", [0.0, 0.3, 1.0])
def test_needle(at):
    measured = conformance.needle(subject(), 131072, at)
    assert measured.figure <= measured.limit == 1e-2


def test_lse_of_many_keys():
    """128K keys: every block's factor is rounded, LSE must not drift."""
    x = quantized(64, 131072, rotate=True)
    want = exact(*reference.dequantize_qkv(x))[1]
    assert (attend(x)[1].double() - want).abs().max() <= 11 * SCORE_EPS


# Who computes what


def kernels():
    """Of every tile and its spec, all schedules."""
    found = defaultdict(list)
    for spec, config in all_configs():
        if spec.is_fp8:
            found[spec, config.tile_m, config.tile_n, config.promotion, config.chunk].append(config)
    return [(key[0], configs) for key, configs in found.items()]


def run(spec, config, x: QuantizedQKV):
    batch, seqlen_q, heads, head_dim = x.q.shape
    out = torch.full((batch, seqlen_q, heads, x.head_dim_v), math.nan, dtype=x.dtype, device=DEVICE)
    lse = torch.full((batch, heads, seqlen_q), math.nan, device=DEVICE)
    p = prepare(x)
    tickets = torch.zeros(1, dtype=torch.int32, device=DEVICE) if config.dynamic else None
    scales = p.q_scale, p.kv, p.v_max, p.q_rows
    load(spec, config)(x.q, x.k, x.v, out, lse, scales, None, None, None, tickets, head_dim**-0.5 * LOG2_E, NUM_SMS)
    return out, lse


@pytest.mark.parametrize(("spec", "configs"), kernels(), ids=lambda x: str(x) if not isinstance(x, list) else str(x[0]))
def test_schedules_agree(spec, configs):
    """Several tiles a CTA, the tile that is not full among them, and key blocks that a tile may not see."""
    for batch, seqlen_q, seqlen_k, heads_kv, ratio in ((3, 333, 257, 30, 2), (2, 700, 900, 7, 9), (1, 50, 300, 200, 1)):
        sizes = batch, heads_kv, ratio, spec.head_dim, spec.head_dim_v
        x = quantized(seqlen_q, seqlen_k, *sizes, dtype=spec.dtype_o)
        found = [run(spec, config, x) for config in configs]
        for config, got in zip(configs, found, strict=True):
            assert_equal(got, found[0], str(config))
        want, want_lse = exact(*reference.dequantize_qkv(x), None, spec.causal)
        assert torch.isfinite(found[0][0]).all()
        assert rmse(found[0][0], want) <= 0.05 * want.square().mean().sqrt().item()
        assert lse_error(found[0][1], want_lse) <= 1e-5 + 20 * SCORE_EPS


@pytest.mark.parametrize("accumulation", ["accurate", "fast"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_200_repeats_are_bitwise_equal(head_dim, causal, accumulation):
    x = quantized(1000, 1100, 2, 4, 2, head_dim)
    out, lse = guarded(x, causal, accumulation)
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(200):
        again, lse_again = attend(x, None, causal, accumulation)
        differing += (again != out).sum() + (lse_again != lse).sum()
    assert differing.item() == 0


# Bits


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_twice_the_scale_of_v_is_twice_o(head_dim):
    for causal in (False, True):
        x = quantized(200, 500, head_dim=head_dim)
        out, lse = attend(x, None, causal)
        for by in (2.0, 0.5, 2.0**20):
            assert_equal(attend(replace(x, v_scale=x.v_scale * by), None, causal), (out * by, lse))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_future_changes_no_bit(head_dim):
    for seqlen, row in ((500, 130), (500, 63), (300, 0), (700, 511)):
        x = quantized(seqlen, seqlen, head_dim=head_dim)
        k, v = (t.view(torch.uint8).clone() for t in (x.k, x.v))
        k[:, row + 1 :] = 0x7E
        v[..., -(-(row + 1) // 16) * 16 :] = 0xFE
        changed = replace(x, k=k.view(x.k.dtype), v=v.view(x.v.dtype))
        got, want = (
            [t[:, : row + 1] for t in (out, lse.mT)] for out, lse in (attend(y, None, True) for y in (changed, x))
        )
        assert_equal(got, want, f"{seqlen} {row}")


def test_flash_attn_func_takes_fp8_tensors_and_descales():
    q, k, v = (cast(t.float()) for t in tensors(Case("bfloat16", 2, 130, 300, 2, 3, 128, 128)))
    scales = [torch.rand(2, 2, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(i)) + 0.5 for i in range(3)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    for causal in (False, True):
        got = fa3.flash_attn_func(q, k, v, causal=causal, return_lse=True, **named)
        assert got[0].dtype == torch.bfloat16
        assert_equal(got, attend(reference.from_descales(q, k, v, *scales), None, causal))
        one = torch.ones(1, 1, device=DEVICE).expand(2, 2)
        got = fa3.flash_attn_func(q, k, v, causal=causal, q_descale=one, return_lse=True)
        assert_equal(got, attend(reference.from_descales(q, k, v), None, causal))


def test_the_whole_call_is_quantise_and_attend():
    x = tensors(Case("float16", 2, 200, 300, 2, 2, 128, 96))
    for options in ({}, {"rotate": False}, {"seed": 5}):
        got = fa3.flash_attn_fp8_func(*x, causal=True, return_lse=True, **options)
        assert got[0].dtype == torch.float16
        assert_equal(got, attend(quantize_qkv(*x, **options), None, True))
    predicted = predicted_rmse(quantize_qkv(*x), 128**-0.5, True)
    assert rmse(fa3.flash_attn_fp8_func(*x, causal=True), exact(*x, None, True)[0]) <= 1.5 * predicted


# Memory


def laid_out(codes, layout):
    """Other strides, the same values; NaN around them."""
    raw, (batch, rows, heads, dim) = codes.view(torch.uint8), codes.shape
    if layout == "transposed":
        return raw.transpose(1, 2).contiguous().transpose(1, 2).view(codes.dtype)
    if layout == "padded":
        wide = torch.full((batch, rows + 3, heads + 1, dim + 32), NAN_CODE, dtype=torch.uint8, device=DEVICE)
        view = wide[:, 2 : 2 + rows, 1:, 16 : 16 + dim]
    else:
        wide = torch.full((batch, rows, heads, dim + 1), NAN_CODE, dtype=torch.uint8, device=DEVICE)
        view = wide[..., 1:]
    return view.copy_(raw).view(codes.dtype)


@pytest.mark.parametrize("layout", ["transposed", "padded", "misaligned"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_strides(head_dim, layout):
    for causal in (False, True):
        x = quantized(130, 203, 2, 2, 2, head_dim)
        view = replace(x, **{n: laid_out(getattr(x, n), layout) for n in ("q", "k", "v")})
        want = attend(x, None, causal)
        assert torch.isfinite(want[0]).all()
        assert_equal(guarded(view, causal), want)
        scales = {n: torch.stack([getattr(x, n)] * 3, -1)[..., 1] for n in ("q_scale", "k_scale", "v_scale")}
        assert_equal(guarded(replace(x, **scales), causal), want)


def test_expanded_heads_and_batches():
    one = quantized(100, 200, 1, 1, 1)
    wide = {n: t.expand(3, *t.shape[1:]) for n, t in parts(one).items()}
    for n, dim in {"q": 2, "k": 2, "v": 1, "q_scale": 1, "k_scale": 1, "v_scale": 1}.items():
        wide[n] = wide[n].expand(*(4 if d == dim else -1 for d in range(wide[n].dim())))
    out, lse = guarded(replace(one, **wide))
    want = attend(one)
    assert_equal((out, lse), (want[0].expand_as(out), want[1].expand_as(lse)))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(2048, 1024), (129, 3), (300, 65)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_causal_with_more_queries_than_keys(head_dim, seqlen_q, seqlen_k):
    x, empty = quantized(seqlen_q, seqlen_k, head_dim=head_dim), seqlen_q - seqlen_k
    out, lse = guarded(x, True)
    assert (out[:, :empty] == 0).all() and (lse[..., :empty] == -math.inf).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[..., empty:]).all()
    verify(x, True)


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 130, 0)])
def test_empty_problems(shape):
    batch, seqlen_q, seqlen_k = shape
    for causal in (False, True):
        out, lse = guarded(quantized(seqlen_q, seqlen_k, batch, 2, 2, 64, 128), causal)
        assert out.shape == (batch, seqlen_q, 4, 128) and lse.shape == (batch, 4, seqlen_q)
        assert (out == 0).all() and (lse == -math.inf).all()


def test_zeros_and_zero_blocks():
    q, k, v = tensors(Case("bfloat16", 1, 130, 400, 2, 2, 128, 128))
    q[:, :64], k[:, 64:128], v[:, 128:192], v[:, 320:] = 0, 0, 0, 0
    for causal in (False, True):
        verify(quantize_qkv(q, k, v), causal)
    out, lse = attend(quantize_qkv(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)))
    assert (out == 0).all() and (lse - math.log(400)).abs().max() < 1e-5


def test_nan_stays_with_its_batch_and_head():
    q, k, v = tensors(Case("bfloat16", 2, 150, 300, 2, 2, 64, 64))
    v[1, 70, 1, 3] = math.nan
    out, _ = attend(quantize_qkv(q, k, v))
    assert out[1, :, 2:].isnan().all() and torch.isfinite(out[0]).all() and torch.isfinite(out[1, :, :2]).all()


# Streams, graphs, operator


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_graph_computes_what_its_inputs_hold(head_dim, causal):
    case = Case("bfloat16", 2, 640, 640, 20, 2, head_dim, head_dim)
    old, new = (make(replace(case, seed=seed), DEVICE) for seed in (0, 1))
    want = fa3.flash_attn_fp8_func(*new, causal=causal, return_lse=True)
    fa3.flash_attn_fp8_func(*old, causal=causal)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa3.flash_attn_fp8_func(*old, causal=causal, return_lse=True)
    for t, fresh in zip(old, new, strict=True):
        t.copy_(fresh)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        assert_equal((out, lse), want)


def test_a_call_never_waits_for_the_device():
    x = tensors(Case("bfloat16", 2, 300, 300, 2, 2, 128, 128))
    record = quantize_qkv(*x)
    attend(record), fa3.flash_attn_fp8_func(*x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(record), fa3.flash_attn_fp8_func(*x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_side_stream_is_used():
    fresh = tensors(Case("bfloat16", 2, 256, 256, 2, 1, 128, 128))
    want = fa3.flash_attn_fp8_func(*fresh)
    q, outs, stream = torch.zeros_like(fresh.q), [], torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            q.zero_()
            torch.cuda._sleep(2_000_000)
            q.copy_(fresh.q)
            outs.append(fa3.flash_attn_fp8_func(q, *fresh[1:]))
    stream.synchronize()
    assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("v_channel", [False, True])
@pytest.mark.parametrize("accumulation", ["accurate", "fast"])
def test_opcheck(accumulation, v_channel):
    x = reference.quantize_qkv(*tensors(Case("bfloat16", 2, 70, 90, 2, 2, 64, 48)), v_channel=v_channel)
    scales = x.q_scale, x.k_scale, x.v_scale, x.v_channel_scale
    arguments = (x.q, x.k, x.v, *scales, x.dtype, 0.1, True, accumulation)
    # Without test_schema, which compares inputs by a function that E4M3 does not have.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    results = torch.library.opcheck(torch.ops.fa3.forward_fp8.default, arguments, test_utils=tests)
    assert set(results.values()) == {"SUCCESS"}
