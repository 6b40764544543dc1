"""The quantise kernels against fa3.quant.reference: the same bits without a rotation, one step of e4m3 at most with it.

Output memory starts as NaN and has guards around it, inputs are not written to, what surrounds them in memory is NaN.
"""

import math

import pytest
import torch

from fa3.quant import cast, launch, reference
from fa3.quant.formats import BLOCK, E4M3, Granularity, QuantizedQKV
from fa3.quant.interface import pack_v, quantize_qkv
from fa3.quant.prepare import prepare as specification

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16)
GUARD = 7
HEAD_DIMS = [(d, d) for d in range(16, 257, 16)] + [(192, 128), (64, 256), (256, 64)]
LENGTHS = [(1, 1), (17, 15), (63, 64), (64, 65), (65, 63), (128, 129), (200, 77), (3, 1000), (1023, 130), (640, 257)]
CODES, SCALES = ("q", "k", "v"), ("q_scale", "k_scale", "v_scale")


def draw(shape, dtype=torch.bfloat16, seed=0, spread=2.0):
    """Normal values whose size differs from row to row, with outliers."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(shape, device=DEVICE, generator=generator)
    rows = torch.randn((*shape[:-1], 1), device=DEVICE, generator=generator)
    outliers = torch.rand(shape, device=DEVICE, generator=generator) < 1e-3
    return (x * (spread * rows).exp2() * (1 + 30 * outliers)).to(dtype)


def inputs(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v, dtype=torch.bfloat16, seed=0):
    return (
        draw((batch, seqlen_q, heads, head_dim), dtype, seed),
        draw((batch, seqlen_k, heads_kv, head_dim), dtype, seed + 1),
        draw((batch, seqlen_k, heads_kv, head_dim_v), dtype, seed + 2),
    )


def guarded(q, k, v, **options) -> QuantizedQKV:
    """quantize_qkv into memory that is NaN, between guards that must not change; nor must the inputs."""
    batch, seqlen_q, heads, head_dim = q.shape
    guards, holes = [], []
    padded = -(-k.shape[1] // 16) * 16
    shapes = [q.shape, k.shape, (batch, k.shape[2], v.shape[3], padded)]
    scales = [(batch, heads, seqlen_q if options.get("q_rows") == 1 else -(-seqlen_q // 64))]
    scales += 2 * [(batch, k.shape[2], -(-k.shape[1] // 64))]
    for shape, dtype, nan in [
        *((s, torch.uint8, 0x7F) for s in shapes),
        *((s, torch.float32, math.nan) for s in scales),
    ]:
        guards.append(torch.full((1 << 14,), GUARD, dtype=torch.int32, device=DEVICE))
        holes += [torch.full(shape, nan, dtype=dtype, device=DEVICE) for _ in range(3)]
    guards.append(torch.full((1 << 14,), GUARD, dtype=torch.int32, device=DEVICE))
    before = [t.clone() for t in (q, k, v)]
    del holes
    done = quantize_qkv(q, k, v, **options)
    assert all((guard == GUARD).all() for guard in guards), "memory beside the outputs was written"
    assert all(same(a, b) for a, b in zip(before, (q, k, v))), "an input was written"
    done.validate()
    return done


def bits(x):
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(a, b) -> bool:
    """Equal bits, any NaN like another."""
    return a.shape == b.shape and bool(((bits(a) == bits(b)) | (a.float().isnan() & b.float().isnan())).all())


def steps(a, b):
    """How many e4m3 numbers lie between two codes."""

    def rank(x):
        code = x.contiguous().view(torch.uint8).int()
        return torch.where(code >= 128, 128 - code, code)

    return (rank(a) - rank(b)).abs()


def assert_equal(got: QuantizedQKV, want: QuantizedQKV, fields=CODES + SCALES, what="") -> None:
    for name in fields:
        a, b = getattr(got, name), getattr(want, name)
        assert same(a, b), f"{what}: {name} differs in {int((bits(a) != bits(b)).sum())} of {a.numel()} places"


def assert_close(got: QuantizedQKV, want: QuantizedQKV, what="") -> None:
    """Rotated Q and K: sums in another order. V: the same bits.

    A code that falls on the other side of a tie moves the fitted scale of its rows, by less than two percent.
    """
    assert_equal(got, want, ("v", "v_scale"), what)
    for name, rows in (("q", want.q_rows), ("k", BLOCK)):
        a, b = getattr(got, name), getattr(want, name)
        assert torch.isfinite(a.float()).all(), f"{what}: {name} is not finite"
        difference = steps(a, b)
        # Where a sum cancels to almost nothing its last bits are anybody's: a step of the smallest numbers.
        assert difference.max() <= 1, f"{what}: {name} is {int(difference.max())} steps off"
        assert (difference > 0).float().mean() < 1e-3, f"{what}: {name} differs too often"
        moved = cast.spread(getattr(got, name + "_scale"), a.shape, Granularity("block", rows))
        fixed = cast.spread(getattr(want, name + "_scale"), a.shape, Granularity("block", rows))
        tied = [(part > 0).any(3).any(1) for part in difference.split(rows, 1)]  # (B, H) of every block
        limit = torch.where(torch.stack(tied, -1), 2e-2, 1e-5)
        limit = cast.spread(limit, a.shape, Granularity("block", rows)) * fixed
        assert ((moved - fixed).abs() <= limit).all(), f"{what}: {name}_scale"


def rotary_tables(positions, dim, dtype=torch.float32):
    angle = torch.arange(positions, device=DEVICE)[:, None] * 10000.0 ** -(
        torch.arange(dim // 2, device=DEVICE) * 2 / dim
    )
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("q_rows", [64, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
def test_same_bits_without_rotation(head_dim, head_dim_v, dtype, q_rows):
    for i, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        heads_kv, ratio, batch = ((2, 1, 1), (1, 3, 2), (3, 2, 1))[i % 3]
        q, k, v = inputs(batch, seqlen_q, seqlen_k, heads_kv * ratio, heads_kv, head_dim, head_dim_v, dtype, i)
        got = guarded(q, k, v, rotate=False, q_rows=q_rows)
        assert_equal(got, reference.quantize_qkv(q, k, v, rotate=False, q_rows=q_rows), what=f"{seqlen_q} {seqlen_k}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
def test_rotation(head_dim, head_dim_v, dtype):
    for i, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        q, k, v = inputs(1 + i % 2, seqlen_q, seqlen_k, 4, 2, head_dim, head_dim_v, dtype, i)
        options = dict(rotate=True, seed=i, q_rows=(64, 1)[i % 2])
        assert_close(guarded(q, k, v, **options), reference.quantize_qkv(q, k, v, **options), f"{seqlen_q} {seqlen_k}")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("table_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (128, 48), (96, 64), (80, 16), (256, 256)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_embedding(dtype, head_dim, rotary_dim, table_dtype, interleaved):
    seqlen_q, seqlen_k, offset = 77, 200, 123
    q, k, v = inputs(2, seqlen_q, seqlen_k, 2, 1, head_dim, head_dim, dtype)
    cos, sin = rotary_tables(seqlen_k, rotary_dim, table_dtype or dtype)
    told = dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved, rotary_q_offset=offset)
    record = reference.Rotary(cos, sin, interleaved, offset)
    plain = guarded(q, k, v, rotate=False, **told)
    assert_equal(plain, reference.quantize_qkv(q, k, v, rotate=False, rotary=record), what="plain")
    assert_close(guarded(q, k, v, rotate=True, **told), reference.quantize_qkv(q, k, v, rotary=record), "rotated")


def strided(x, layout):
    batch, seqlen, heads, dim = x.shape
    if layout == "padded":
        wide = torch.full((batch, seqlen + 3, heads + 1, dim + 24), math.nan, device=DEVICE, dtype=x.dtype)
        view = wide[:, 2 : 2 + seqlen, 1:, 8 : 8 + dim]
    elif layout == "transposed":
        view = torch.empty(batch, heads, seqlen, dim, device=DEVICE, dtype=x.dtype).transpose(1, 2)
    elif layout == "misaligned":
        view = torch.empty(x.numel() + 1, device=DEVICE, dtype=x.dtype)[1:].view(x.shape)
    else:
        wide = torch.full((batch, seqlen, heads, dim + 4), math.nan, device=DEVICE, dtype=x.dtype)
        view = wide[..., :dim]
    return view.copy_(x)


@pytest.mark.parametrize("layout", ["padded", "transposed", "misaligned", "odd"])
def test_strides(layout):
    x = inputs(2, 130, 77, 4, 2, 128, 128)
    for rotate in (False, True):
        got = guarded(*(strided(t, layout) for t in x), rotate=rotate)
        assert_equal(got, quantize_qkv(*x, rotate=rotate))
    one = inputs(1, 77, 77, 1, 1, 64, 64)
    assert_equal(
        quantize_qkv(*(t.expand(3, -1, 2, -1) for t in one)), quantize_qkv(*(t.repeat(3, 1, 2, 1) for t in one))
    )


def test_packed_projections():
    """Q, K and V as views of one tensor."""
    qkv = draw((2, 200, 3, 4, 64))
    views = qkv.unbind(2)
    assert_equal(quantize_qkv(*views), quantize_qkv(*(x.contiguous() for x in views)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values(dtype):
    """Zeros of both signs, denormals, the smallest and the largest numbers, block after block."""
    info = torch.finfo(dtype)
    magnitudes = [0.0, info.smallest_normal / 4, info.smallest_normal, 2.0**-14, 1.0, info.max / 4, info.max]
    blocks = [draw((1, 64, 1, 128), torch.float32, i, 0.0).clamp(-1, 1) * m for i, m in enumerate(magnitudes)]
    x = torch.cat(blocks, 1).to(dtype)
    x[:, 0, :, ::2] = -0.0
    assert_equal(guarded(x, x, x, rotate=False), reference.quantize_qkv(x, x, x, rotate=False))
    tame = x[:, : 64 * 5]
    assert_close(guarded(tame, tame, tame), reference.quantize_qkv(tame, tame, tame))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_block_alone(bad, rotate):
    q, k, v = inputs(1, 300, 300, 2, 2, 128, 128)
    for x in (q, k, v):
        x[0, 100, 1, 17] = bad
    got, clean = quantize_qkv(q, k, v, rotate=rotate), quantize_qkv(*inputs(1, 300, 300, 2, 2, 128, 128), rotate=rotate)
    for name in SCALES:
        scale, at = getattr(got, name).clone(), (0, 1, 100 // (got.q_rows if name == "q_scale" else BLOCK))
        assert scale[at].isnan() and scale.isnan().sum() == 1
        scale[at] = getattr(clean, name)[at]
        assert same(scale, getattr(clean, name))
    if not rotate:
        assert_equal(got, reference.quantize_qkv(q, k, v, rotate=False))


def test_every_16_bit_number():
    """All bf16 and fp16 significands against scales of all kinds: the cast rounds as a division does."""
    for dtype in DTYPES:
        finite = torch.arange(-(1 << 15), 1 << 15, device=DEVICE).to(torch.int16).view(dtype)
        finite = finite[finite.isfinite() & (finite.float().abs() < 6e4) & (finite.float().abs() > 1e-7)]
        rows = -(-len(finite) // 128)
        x = torch.nn.functional.pad(finite[torch.randperm(len(finite), device=DEVICE)], (0, rows * 128 - len(finite)))
        x = x.view(1, rows, 1, 128)
        for top in range(40):
            y = x.float().clamp(-1, 1).mul(1.0).to(dtype) if top == 0 else x.clamp(-(1.01**top), 1.01**top)
            assert_equal(quantize_qkv(y, y, y, rotate=False, q_rows=1),
                         reference.quantize_qkv(y, y, y, rotate=False, q_rows=1), what=f"{dtype} {top}")  # fmt: skip


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
def test_packing_of_e4m3(head_dim):
    for seqlen in (1, 15, 16, 17, 64, 127, 128, 129, 1000):
        v = draw((2, seqlen, 3, head_dim)).to(E4M3.dtype)
        guards = [torch.full((1 << 14,), GUARD, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        assert torch.equal(pack_v(v).view(torch.uint8), cast.pack_v(v).view(torch.uint8))
        wide = torch.zeros(2, seqlen, 3, head_dim + 16, device=DEVICE).to(E4M3.dtype)
        wide.view(torch.uint8)[..., 16:] = v.view(torch.uint8)
        assert torch.equal(pack_v(wide[..., 16:]).view(torch.uint8), cast.pack_v(v).view(torch.uint8))
        assert all((guard == GUARD).all() for guard in guards)


def test_empty():
    for batch, seqlen_q, seqlen_k in ((0, 5, 5), (1, 0, 70), (1, 70, 0), (2, 0, 0)):
        x = inputs(batch, seqlen_q, seqlen_k, 2, 1, 64, 64)
        assert_equal(quantize_qkv(*x, rotate=False), reference.quantize_qkv(*x, rotate=False))


def test_graph_stream_and_repetition():
    x = inputs(1, 1000, 900, 4, 2, 128, 128)
    want = quantize_qkv(*x, seed=3)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        again = quantize_qkv(*x, seed=3)
    torch.cuda.current_stream().wait_stream(side)
    assert_equal(again, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize_qkv(*x, seed=3)
    fresh = inputs(1, 1000, 900, 4, 2, 128, 128, seed=9)
    for old, new in zip(x, fresh):
        old.copy_(new)
    graph.replay()
    assert_equal(captured, quantize_qkv(*fresh, seed=3))


def test_offsets_beyond_32_bits():
    """A view whose last head lies more than 2^32 bytes after the first."""
    memory = torch.empty((1 << 31) + (1 << 20), dtype=torch.bfloat16, device=DEVICE)
    x = memory.as_strided((1, 200, 2, 128), (0, 128, 1 << 31, 1))
    x.copy_(draw(x.shape))
    assert_equal(quantize_qkv(x, x, x, rotate=False), reference.quantize_qkv(x, x, x, rotate=False))


def scales(blocks, seed=0):
    """Of K and V, (2, 3, blocks): sizes far apart, zeros, what is not finite; a head of zeros, and one of NaN."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    k, v = (torch.randn(2, 3, blocks, device=DEVICE, generator=generator).mul(12).exp2() for _ in range(2))
    for x in (k, v):
        drawn = torch.rand(x.shape, device=DEVICE, generator=generator)
        x[drawn < 0.1] = 0
        x[(drawn > 0.1) & (drawn < 0.13)] = math.nan
    v[0, 1], v[1, 2] = 0, math.nan
    v[0, 2, -1:] = math.inf
    return k, v


def with_scales(k_scale, v_scale):
    """A record for what prepares its scales; nothing else reads K and V."""
    q = torch.zeros(2, 70, 6, 16, dtype=E4M3.dtype, device=DEVICE)
    q_scale = torch.ones(2, 6, 2, device=DEVICE)
    return QuantizedQKV(q, q, q, q_scale, k_scale, v_scale, None, 64 * k_scale.shape[2], torch.bfloat16)


@pytest.mark.parametrize("blocks", [1, 2, 63, 64, 511, 512, 513, 2048])
def test_prepared_scales(blocks):
    k, v = scales(blocks, blocks)
    v = v.transpose(0, 1).contiguous().transpose(0, 1)  # any strides
    x, twice = with_scales(k, v), with_scales(k, 2 * v)
    (got, tickets), want = launch.prepare(x), specification(x)
    assert tickets.tolist() == [0] and got.q_scale is x.q_scale and got.q_rows == 64
    assert (
        same(got.v_max, want.v_max) and same(got.kv[..., 0], want.kv[..., 0]) and same(got.kv[..., 3], want.kv[..., 3])
    )
    torch.testing.assert_close(got.kv[..., 1], want.kv[..., 1], rtol=0, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(got.kv[..., 2], want.kv[..., 2], rtol=1e-5, atol=0, equal_nan=True)
    moved, _ = launch.prepare(twice)
    assert same(moved.kv, got.kv) and same(moved.v_max, 2 * got.v_max)


def test_prepared_scales_of_stride_0():
    number = torch.tensor([[0.3, 0.7]], device=DEVICE)
    k = number[..., None].expand(1, 2, 700)
    got, _ = launch.prepare(with_scales(k, k))
    assert (got.kv[:, :, :700, 0] == k).all() and (got.kv[:, :, :700, 1] == 0).all() and torch.equal(got.v_max, number)
