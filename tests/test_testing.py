"""The inputs and the tolerance that other tests rely on."""

import dataclasses
import math

import pytest
import torch

from fa3 import reference
from fa3.testing import tolerance
from fa3.testing.inputs import LAYOUTS, Case, Inputs, draw, lay_out, make
from fa3.testing.tolerance import Errors, Expected, exact, expected, lse_error, plain, rmse

CASE = Case(batch=2, seqlen_q=70, seqlen_k=45, heads_kv=2, ratio=3, head_dim=16, head_dim_v=24)


def test_outliers_follow_the_papers_protocol():
    x = draw((1_000_000,), torch.float32, torch.Generator().manual_seed(1), "outliers")
    # variance 1 + 0.001 * 100; beyond 6 only outliers, of which 55 % get there
    assert x.var().item() == pytest.approx(1.1, abs=0.02)
    assert (x.abs() > 6).float().mean().item() == pytest.approx(0.00055, abs=0.0001)
    assert draw((1_000_000,), torch.float32, torch.Generator().manual_seed(1)).abs().max() < 6
    with pytest.raises(ValueError, match="'uniform'"):
        draw((1,), torch.float32, torch.Generator(), "uniform")


def test_a_seed_gives_the_same_values_in_every_layout():
    contiguous = make(CASE, "cpu")
    for layout in LAYOUTS:
        x = make(dataclasses.replace(CASE, layout=layout), "cpu")
        assert torch.equal(x.q, contiguous.q)
        if layout == "expanded":
            assert x.k.stride(2) == x.v.stride(2) == 0
        else:
            assert torch.equal(x.k, contiguous.k) and torch.equal(x.v, contiguous.v)
        assert all(t.stride(-1) == 1 for t in x)
        assert all(t.is_contiguous() for t in x) == (layout == "contiguous")
    assert not torch.equal(make(dataclasses.replace(CASE, seed=1), "cpu").q, contiguous.q)


def test_layouts_are_what_they_say():
    x = make(CASE, "cpu")
    assert lay_out(x, "misaligned").q.data_ptr() % 16 == 2
    assert lay_out(x, "transposed").k.transpose(1, 2).is_contiguous()
    packed = lay_out(x, "packed")
    assert len({t.untyped_storage().data_ptr() for t in packed}) == 1
    assert packed.q.stride(1) == packed.k.stride(1) == packed.v.stride(1) == 6 * 16 + 2 * 16 + 2 * 24


@pytest.mark.parametrize("layout", ["packed", "misaligned", "padded"])
def test_surroundings_are_nan(layout):
    for t in lay_out(make(CASE, "cpu"), layout):
        storage = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
        inside = torch.zeros(len(storage), dtype=torch.bool)
        inside.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(True)
        assert torch.isfinite(storage[inside]).all()
        if layout != "packed":
            assert storage[~inside].isnan().all() and (~inside).sum() > 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("at_once", [1, 50, 700, 20_000, 1 << 27])
def test_slabs_change_nothing(monkeypatch, at_once, causal):
    x = Inputs(*(t.double() for t in make(CASE, "cpu")))
    monkeypatch.setattr(tolerance, "SCORES_AT_ONCE", at_once)
    want, want_lse = reference.attention(*x, 0.3, causal)
    out, lse = exact(*x, 0.3, causal)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plain(*x, 0.3, causal), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads_at_once", [1, 3, 6, 7])
def test_slabs_of_few_heads_change_nothing(monkeypatch, heads_at_once):
    x = Inputs(*(t.double() for t in make(CASE, "cpu")))
    monkeypatch.setattr(tolerance, "HEADS_AT_ONCE", heads_at_once)
    torch.testing.assert_close(exact(*x), reference.attention(*x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 4), (4, 0)])
def test_slabs_of_nothing(seqlen_q, seqlen_k):
    out, lse = exact(*make(dataclasses.replace(CASE, seqlen_q=seqlen_q, seqlen_k=seqlen_k), "cpu"))
    assert out.shape == (2, seqlen_q, 6, 24) and (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("values", ["normal", "outliers"])
def test_tiled_attention_stays_well_inside_the_rule(dtype, values):
    x = make(dataclasses.replace(CASE, dtype=dtype, seqlen_k=500, values=values), "cpu")
    want = expected(*x)
    out, lse = reference.tiled_attention(*x)
    assert want.share(out) < 0.7 and want.lse_share(lse) < 0.3
    assert want.share(plain(*x)) == pytest.approx(1 / tolerance.MEAN_FACTOR, rel=0.01)
    want.assert_out(out)
    want.assert_lse(lse)


def one(value):
    return torch.full((1, 1, 1, 4), value, dtype=torch.float64)


RULE = Expected(one(1.0), torch.zeros(1, 1, 1, dtype=torch.float64), Errors(0.01, 0.01), largest_score=0.0)


@pytest.mark.parametrize(
    ("out", "passes"),
    [
        (one(1.0149), True),  # 1.5 times the mean
        (one(1.0151), False),
        (one(1.0) + torch.tensor([0.02, 0, 0, 0]), True),  # twice the largest
        (one(1.0) - torch.tensor([0.02002, 0, 0, 0]), False),
        (one(1.0) + torch.tensor([math.nan, 0, 0, 0]), False),
        (one(math.inf), False),
    ],
)
def test_rule_draws_the_line(out, passes):
    assert (RULE.share(out) <= 1) == passes
    if passes:
        RULE.assert_out(out)
    else:
        with pytest.raises(
            AssertionError, match="out: max error .* allowed 2.001e-02.* mean error .* allowed 1.500e-02"
        ):
            RULE.assert_out(out)


def test_lse_rule():
    RULE.assert_lse(torch.full((1, 1, 1), 0.9e-5))
    for bad in (1.1e-5, math.nan, -math.inf):
        with pytest.raises(AssertionError, match="allowed 1.000e-05"):
            RULE.assert_lse(torch.full((1, 1, 1), bad))
    empty = torch.tensor([-math.inf, 1.0])
    assert lse_error(empty, empty) == 0
    assert lse_error(torch.tensor([-1e30, 1.0]), empty) == math.inf


def test_no_yardstick_where_pytorch_overflows():
    x = Inputs(*(torch.full((1, 2, 1, 64), 60.0, dtype=torch.float16) for _ in range(3)))  # scores 230400
    with pytest.raises(ValueError, match="float16"):
        expected(*x)


def test_rmse():
    assert rmse(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])) == pytest.approx(math.sqrt(2))
