"""The forward kernel against float64: a grid of shapes, drawn shapes and strides, inputs that broke other libraries.

Output memory starts as NaN and has guards around it, inputs are not written to, what surrounds them in memory is NaN.
"""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa3 import flash_attn_func
from fa3.kernels.forward.config import TILES
from fa3.testing.inputs import Case, Inputs, draw, make, poison
from fa3.testing.properties import PROPERTIES, Subject, cases, check, chosen_config, many_rows
from fa3.testing.tolerance import RMSE_LIMITS, SCORE_EPS, Errors, exact, expected, rmse

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = ("float16", "bfloat16")
GUARD = 7
FILLED_DIMS = [(8, 8), (40, 40), (72, 72), (104, 104), (136, 128), (200, 200), (248, 248), (64, 256), (256, 64)]
LENGTHS = [  # (seqlen_q, seqlen_k, batch): one row, tile edges and off them, more keys than queries and the other way
    *((1, 1, 2), (1, 17, 2), (64, 64, 2), (77, 77, 1), (113, 203, 2), (128, 128, 2), (108, 256, 1), (256, 108, 1)),
    *((300, 900, 1), (799, 3, 2), (1023, 1024, 1), (1024, 1023, 1), (512, 4096, 1)),
]
CAUSAL_LENGTHS = [(129, 3, 1), (2048, 1024, 1)]
HEADS = [(2, 1), (1, 2), (2, 3), (1, 8), (1, 5)]  # (heads_kv, ratio)
LAYOUTS = ("contiguous", "padded", "transposed", "packed", "expanded", "misaligned")


def guarded(x: Inputs, scale: float | None = None, causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_attn_func into memory that is NaN, between guards that must not change; nor must the inputs."""
    batch, seqlen_q, heads, _ = x.q.shape
    guards, holes = [], []
    for shape, dtype in (
        ((batch, seqlen_q, heads, x.v.shape[3]), x.q.dtype),
        ((batch, heads, seqlen_q), torch.float32),
    ):
        poison(shape, dtype, DEVICE)
        guards.append(torch.full((1 << 16,), GUARD, dtype=torch.int32, device=DEVICE))
        holes.append(torch.full(shape, math.nan, dtype=dtype, device=DEVICE))
        guards.append(torch.full((1 << 16,), GUARD, dtype=torch.int32, device=DEVICE))
    before = [t.clone() for t in x]
    del holes
    out, lse = flash_attn_func(*x, softmax_scale=scale, causal=causal, return_lse=True)
    assert all((guard == GUARD).all() for guard in guards), "memory beside the outputs was written"
    assert all(torch.equal(a, b) for a, b in zip(before, x, strict=True)), "an input was written"
    return out, lse


def verify(x: Inputs, scale: float | None = None, causal: bool = False, what: str = "") -> None:
    out, lse = guarded(x, scale, causal)
    want = expected(*x, scale, causal)
    want.assert_out(out, f"{what} out")
    want.assert_lse(lse, f"{what} lse")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return draw(shape, dtype, torch.Generator(DEVICE).manual_seed(seed))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [*TILES, *FILLED_DIMS])
def test_grid(dtype, head_dim, head_dim_v, causal):
    lengths = LENGTHS + CAUSAL_LENGTHS * causal
    for i, (seqlen_q, seqlen_k, batch) in enumerate(lengths):
        (heads_kv, ratio), layout = HEADS[i % len(HEADS)], LAYOUTS[i % len(LAYOUTS)]
        sizes = dict(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_kv=heads_kv, ratio=ratio)
        case = Case(dtype, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal, layout=layout, seed=i, **sizes)
        verify(make(many_rows(case), DEVICE), None, causal, what=str(case))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_ratio_in_both_masks(dtype, causal):
    for heads_kv, ratio in [(4, 1), (2, 2), (2, 3), (1, 8), (1, 16), (3, 8), (5, 7)]:
        case = Case(dtype, 1, 150, 333, heads_kv, ratio, 128, 128, causal)
        verify(make(case, DEVICE), None, causal, what=str(case))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lengths_around_every_tile_edge(head_dim):
    """All lengths near multiples of 16, where a mask or a block count could be one off."""
    edges = [n + d for n in (16, 64, 80, 112, 128, 144, 176, 192, 256, 384) for d in (-1, 0, 1)]
    for i, seqlen_k in enumerate(edges):
        for causal in (False, True):
            case = Case("bfloat16", 1, edges[-1 - i], seqlen_k, 1, 2, head_dim, head_dim, causal, seed=i)
            verify(make(case, DEVICE), None, causal, what=str(case))


@pytest.mark.parametrize("seqlen", [4096, 16384])
def test_long_sequences(seqlen):
    for causal in (False, True):
        verify(make(Case("bfloat16", 1, seqlen, seqlen, 1, 2, 128, 128), DEVICE), None, causal, what=f"{seqlen}")


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
def test_properties(prop):
    examples = 100 if prop.name in ("error", "layout") else 30
    record = check(prop, Subject(flash_attn_func, DEVICE, chosen_config), cases(DEVICE), examples)
    assert record.passed, record.failure


@st.composite
def strided(draw_one, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Strides of (B, S, H, D) with the first three dimensions in any order, with gaps, or expanded; an offset."""
    strides, step = [0, 0, 0, 1], sizes[3]
    for dim in draw_one(st.permutations([0, 1, 2])):
        step += draw_one(st.sampled_from([0, 0, 8, 64, 1, 12]))
        strides[dim] = step
        step *= sizes[dim]
    if draw_one(st.booleans()):
        strides[draw_one(st.sampled_from([0, 2]))] = 0
    return tuple(strides), draw_one(st.sampled_from([0, 0, 8, 3]))


@st.composite
def strided_problems(draw_one):
    batch, heads_kv, ratio = (draw_one(st.integers(1, 3)) for _ in range(3))
    seqlen_q, seqlen_k = draw_one(st.integers(1, 300)), draw_one(st.integers(1, 300))
    head_dim, head_dim_v = (8 * draw_one(st.integers(1, 32)) for _ in range(2))
    sizes = (
        (batch, seqlen_q, heads_kv * ratio, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim_v),
    )
    return [(size, *draw_one(strided(size))) for size in sizes], draw_one(st.booleans()), draw_one(st.integers(0, 99))


@settings(max_examples=100, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(strided_problems())
def test_any_strides_equal_contiguous(problem):
    views, causal, seed = problem
    x = []
    for i, (size, strides, offset) in enumerate(views):
        length = offset + 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
        storage = torch.full((length,), math.nan, dtype=torch.bfloat16, device=DEVICE)
        view = storage.as_strided(size, strides, offset)
        expanded = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
        view[expanded] = normal(*size, seed=3 * seed + i)[expanded]
        x.append(view)
    got = guarded(Inputs(*x), None, causal)
    want = flash_attn_func(*(t.contiguous() for t in x), causal=causal, return_lse=True)
    assert torch.isfinite(got[0]).all()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize(
    "case",
    [
        Case("bfloat16", 4, 1024, 1024, 4, 2, 128, 128, True),
        Case("float16", 2, 777, 1999, 2, 4, 64, 64, False),
        Case("bfloat16", 2, 500, 900, 2, 1, 256, 256, True),
        Case("float16", 3, 333, 333, 2, 2, 192, 128, False),
        Case("bfloat16", 8, 1, 4096, 8, 4, 128, 128, False),
    ],
    ids=lambda case: f"{case.head_dim}-{case.dtype}-{case.seqlen_q}x{case.seqlen_k}",
)
def test_a_thousand_repeats_are_bitwise_equal(case):
    x = make(case, DEVICE)
    out, lse = guarded(x, None, case.causal)
    expected(*x, None, case.causal).assert_out(out)
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(1000):
        again, lse_again = flash_attn_func(*x, causal=case.causal, return_lse=True)
        differing += (again != out).sum() + (lse_again != lse).sum()
    assert differing.item() == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_grow_from_block_to_block(dtype, head_dim, causal):
    """Keys are taken from right to left, and the scores of each block are far above those before. The CTAs take several
    tiles.
    """
    for seqlen_q, seqlen_k in ((390, 900), (1100, 1300)):
        q, k, v = make(Case(dtype, 9, seqlen_q, seqlen_k, 4, 8, head_dim, head_dim), DEVICE)
        k *= torch.linspace(30, 0.1, seqlen_k, device=DEVICE, dtype=k.dtype)[:, None, None]
        verify(Inputs(q, k, v), None, causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rmse_by_the_papers_protocol(dtype):
    x = make(Case(dtype, 2, 4096, 4096, 8, 1, 128, 128, values="outliers"), DEVICE)
    out, _ = guarded(x)
    assert rmse(out, exact(*x)[0]) <= RMSE_LIMITS[dtype]


@pytest.mark.parametrize(("batch", "heads_kv", "ratio"), [(70000, 1, 1), (3, 22000, 1), (9000, 2, 4), (2, 1, 33000)])
def test_more_batches_and_heads_than_a_grid_dimension(batch, heads_kv, ratio):
    for causal in (False, True):
        verify(make(Case("bfloat16", batch, 3, 5, heads_kv, ratio, 64, 64), DEVICE), None, causal)


def test_new_sizes_compile_nothing(monkeypatch):
    from fa3.heuristics import all_configs
    from fa3.kernels.compile import load, state

    asked: list[tuple] = []

    def asking(spec, config):
        if (spec, config) in asked:
            assert state(spec, config) == "memory"
        asked.append((spec, config))
        return load(spec, config)

    monkeypatch.setattr("fa3.launch.load", asking)
    sizes = itertools.product((1, 3), (97, 130, 1001), (45, 258, 2049), ((1, 1), (2, 5)))
    for batch, seqlen_q, seqlen_k, (heads_kv, ratio) in sizes:
        case = Case("float16", batch, seqlen_q, seqlen_k, heads_kv, ratio, 120, 120)
        x = make(case, DEVICE)
        out, _ = flash_attn_func(*x, return_lse=True)
        expected(*x).assert_out(out, str(case))
    specs = {spec for spec, _ in asked}
    assert len(asked) == 36 and len(specs) == 1
    assert set(asked) <= {pair for pair in all_configs() if pair[0] in specs}
    assert len(set(asked)) <= 4


@pytest.mark.parametrize("shape", [(0, 4, 4, 2), (2, 0, 4, 2), (2, 130, 0, 2), (2, 4, 4, 0), (0, 0, 0, 2)])
def test_empty_problems(shape):
    batch, seqlen_q, seqlen_k, ratio = shape
    for causal in (False, True):
        case = Case("bfloat16", batch, seqlen_q, seqlen_k, 2, ratio, 64, 128, causal)
        out, lse = guarded(make(case, DEVICE), None, causal)
        assert out.shape == (batch, seqlen_q, 2 * ratio, 128) and lse.shape == (batch, 2 * ratio, seqlen_q)
        assert (out == 0).all() and (lse == -math.inf).all()


# Inputs that broke attention libraries


@pytest.mark.parametrize(
    ("case", "empty"),
    [
        (Case("bfloat16", 1, 2048, 1024, 4, 1, 64, 64, True), 1024),
        (Case("bfloat16", 1, 129, 3, 2, 4, 128, 128, True), 126),
    ],
    ids=["2048x1024", "129x3"],
)
def test_causal_with_more_queries_than_keys(case, empty):
    x = make(case, DEVICE)
    out, lse = guarded(x, None, True)
    assert (out[:, :empty] == 0).all() and (lse[..., :empty] == -math.inf).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[..., empty:]).all()
    want = expected(*x, None, True)
    want.assert_out(out)
    want.assert_lse(lse)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_k", "log"), [(1, 0.0), (17, 2.8332), (255, 5.5413), (257, 5.5491), (4097, 8.3180)])
def test_zero_query_gives_the_mean_and_the_log_of_the_count(seqlen_k, log, causal):
    cache = [normal(1, 8192, 8, 128, seed=i) for i in range(2)]
    for slots in cache:
        slots[:, seqlen_k:] = math.nan
    x = Inputs(torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16, device=DEVICE), *(c[:, :seqlen_k] for c in cache))
    out, lse = guarded(x, None, causal)
    expected(*x, None, causal).assert_out(out)
    mean = x.v.double().mean(1, keepdim=True)
    assert Errors.of(out, mean).max <= 2.0**-8 * mean.abs().max().item() + 1e-6
    assert (lse - math.log(seqlen_k)).abs().max().item() <= 1e-5
    assert lse.mean().item() == pytest.approx(log, abs=1e-4)


def test_scores_far_below_zero():
    x = Inputs(normal(1, 5, 4, 128), normal(1, 97, 2, 128, seed=1), normal(1, 97, 2, 128, seed=2))
    x.q[..., 0] = 0
    near = expected(*x)  # a shift of all scores by -65536 / sqrt(128) cancels
    x.q[..., 0], x.k[..., 0] = 256, -256
    out, lse = guarded(x)
    assert -5850 < lse.min().item() and lse.max().item() < -5750
    coarse = 8 * 2.0**-7 * 128**-0.5  # float32 near 65536 holds multiples of 2^-7, added up in 8 steps
    assert Errors.of(out, near.out).max <= near.limit.max + coarse * x.v.abs().max().item()
    exact_lse = exact(*x)[1]
    assert (lse.double() - exact_lse).abs().max().item() <= SCORE_EPS * 5850


def test_huge_scores():
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16, device=DEVICE)
    out, lse = guarded(Inputs(x, x, x))
    assert (out == 133120).all()
    assert lse.item() == pytest.approx(1.41767e11, rel=1e-4)


def test_sequence_major_keys_beyond_32_bit_offsets():
    """Batches 128 elements apart, keys 90112: the last key starts 2.16e9 elements in."""

    def sequence_major(seed):
        memory = torch.empty(24000, 704, 128, dtype=torch.bfloat16, device=DEVICE)
        for i, rows in enumerate(memory.split(2000)):
            rows.copy_(normal(*rows.shape, seed=100 * seed + i))
        return memory.transpose(0, 1).unsqueeze(2)

    q, k, v = normal(704, 256, 1, 128), sequence_major(1), sequence_major(2)
    assert k.shape == (704, 24000, 1, 128) and k.stride()[:2] == (128, 90112)
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    for batch in (0, 703):
        one = Inputs(*(t[batch : batch + 1].contiguous() for t in (q, k, v)))
        want = expected(*one)
        want.assert_out(out[batch : batch + 1], f"batch {batch}")
        want.assert_lse(lse[batch : batch + 1], f"batch {batch} lse")
    few = flash_attn_func(*(t[700:704].contiguous() for t in (q, k, v)))
    bound = 4 * 2.0**-8 * few.abs().max().item()  # another tile may be chosen for 4 batches
    assert (out[700:704].float() - few.float()).abs().max().item() <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_offsets_beyond_32_bits_in_views(dtype):
    """Strides past 2^31 elements between two batches, and between two heads, of which little is touched."""
    far = 2**31 + 64
    memory = torch.empty(far + 500 * 128, dtype=dtype, device=DEVICE)
    for shape, strides in (((2, 500, 1, 64), (far, 64, 64, 1)), ((1, 500, 2, 64), (64, 128, far, 1))):
        view = memory.as_strided(shape, strides)
        view.copy_(normal(*shape, dtype=dtype))
        dense = view.contiguous()
        for causal in (False, True):
            got = flash_attn_func(view, view, view, causal=causal, return_lse=True)
            want = flash_attn_func(dense, dense, dense, causal=causal, return_lse=True)
            assert torch.isfinite(got[0]).all()
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def assert_equals_contiguous(*x: torch.Tensor) -> None:
    for causal in (False, True):
        got = guarded(Inputs(*x), None, causal)
        want = guarded(Inputs(*(t.contiguous() for t in x)), None, causal)
        assert torch.isfinite(got[0]).all()
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_slices_of_a_fused_projection(head_dim):
    qkv = normal(1, 128, 3 * 4 * head_dim).unflatten(-1, (3, 4, head_dim))
    assert_equals_contiguous(*qkv.unbind(2))


def test_heads_before_the_sequence():
    assert_equals_contiguous(*(normal(1, 32, 8192, 256, seed=i).transpose(1, 2) for i in range(3)))


@pytest.mark.parametrize("seqlen_k", [65, 97, 128])
def test_expanded_keys_and_values(seqlen_k):
    k, v = (normal(2, seqlen_k, 8, 128, seed=i)[:, :, :1].expand(2, seqlen_k, 8, 128) for i in (1, 2))
    assert_equals_contiguous(normal(2, 200, 8, 128), k, v)


def test_values_with_another_order_of_dimensions():
    v = normal(4, 2, 300, 128, seed=2).permute(1, 2, 0, 3)  # stored (H, B, S, D)
    assert_equals_contiguous(normal(2, 300, 4, 128), normal(2, 300, 4, 128, seed=1), v)


def test_lse_is_a_natural_logarithm():
    q, k, v = (normal(1, 1024, 1, 64, dtype=torch.float16, seed=i) for i in range(3))
    _, lse = guarded(Inputs(torch.zeros_like(q), k, v))
    assert (lse - 6.931471806).abs().max().item() <= 1e-5
    _, lse = guarded(Inputs(q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 8
    assert lse.dtype == torch.float32
    assert (lse.double() - scores.logsumexp(-1)).abs().max().item() <= 2e-5
