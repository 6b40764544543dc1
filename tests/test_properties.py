"""The accuracy properties hold for fa3 on CPU, and broken attention does not pass them."""

import math

import pytest
import torch

import fa3
from fa3.reference import attention, tiled_attention
from fa3.testing import properties
from fa3.testing.inputs import Case
from fa3.testing.properties import PROPERTIES, Subject, cases, check, run_all


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
def test_holds_on_cpu(prop):
    record = check(prop, Subject(fa3.flash_attn_func), cases("cpu"), examples=30)
    assert record.passed, record.failure
    assert record.examples >= 30 and record.worst <= record.limit


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_holds_in_higher_precision(prop, dtype):
    record = check(prop, Subject(fa3.flash_attn_func), cases("cpu", [dtype], longest=140), examples=10)
    assert record.passed, record.failure


def as_function(broken):
    """With the signature of flash_attn_func and the scale as a number."""

    def function(q, k, v, softmax_scale=None, causal=False, return_lse=True):
        return broken(q, k, v, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, causal)

    return function


def mask_one_key_short(q, k, v, scale, causal):
    if causal and 0 < q.shape[1]:
        out, lse = tiled_attention(torch.cat([q, q[:, -1:]], 1), k, v, scale, True)
        return out[:, :-1].contiguous(), lse[..., :-1].contiguous()
    return tiled_attention(q, k, v, scale, causal)


def mask_one_key_long(q, k, v, scale, causal):
    if causal and 0 < k.shape[1]:
        k, v = (torch.cat([x, x[:, -1:]], 1) for x in (k, v))
    return tiled_attention(q, k, v, scale, causal)


def mask_top_left(q, k, v, scale, causal):
    if causal and q.shape[1] < k.shape[1]:
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    return tiled_attention(q, k, v, scale, causal)


def unscaled(q, k, v, scale, causal):
    return tiled_attention(q, k, v, 1.0, causal)


def default_scale_always(q, k, v, scale, causal):
    return tiled_attention(q, k, v, None, causal)


def heads_interleaved(q, k, v, scale, causal):
    ratio = q.shape[2] // k.shape[2]
    return tiled_attention(q, k.repeat(1, 1, ratio, 1), v.repeat(1, 1, ratio, 1), scale, causal)


def lse_in_base_two(q, k, v, scale, causal):
    out, lse = tiled_attention(q, k, v, scale, causal)
    return out, lse / math.log(2)


def last_partial_block_missing(q, k, v, scale, causal):
    whole = k.shape[1] // 64 * 64
    if causal or whole == 0:
        return tiled_attention(q, k, v, scale, causal)
    return tiled_attention(q, k[:, :whole], v[:, :whole], scale, causal)


def zeros_past_the_end_count(q, k, v, scale, causal):
    if causal:
        return tiled_attention(q, k, v, scale, causal)
    fill = [0, 0, 0, 0, 0, -k.shape[1] % 64]
    return tiled_attention(q, *(torch.nn.functional.pad(x, fill) for x in (k, v)), scale, causal)


def accumulated_without_rescaling(q, k, v, scale, causal):
    """What was summed up is added as it is when the maximum moves. LSE is right."""
    _, lse = tiled_attention(q, k, v, scale, causal)
    cut = max(0, k.shape[1] - 64)
    if causal or cut == 0:
        return tiled_attention(q, k, v, scale, causal)
    out, total = 0, 0
    for keys in (slice(cut, None), slice(0, cut)):
        scores = torch.einsum("bihd,bjhd->bhij", q.float(), widened(q, k)[:, keys].float()) * scale
        p = torch.exp(scores - scores.amax(-1, keepdim=True))
        out = out + torch.einsum("bhij,bjhd->bihd", p, widened(q, v)[:, keys].float())
        total = total + p.sum(-1)
    return (out / total.transpose(1, 2)[..., None]).to(q.dtype), lse


def widened(q, x):
    return x.repeat_interleave(q.shape[2] // x.shape[2], 2)


def largest_score_not_subtracted(q, k, v, scale, causal):
    out, lse = tiled_attention(q, k, v, scale, causal)
    overflow = (lse > 11).transpose(1, 2)[..., None]  # exp(11) is about the largest of 16-bit floats
    return torch.where(overflow, math.nan, out), lse


def scores_rounded(q, k, v, scale, causal):
    """As exact as plain PyTorch at two more roundings: every score loses its last bits."""
    out, lse = attention((q.float() * scale * 1.01).to(q.dtype), k, v, 1 / 1.01, causal)
    return out, tiled_attention(q, k, v, scale, causal)[1]


def reads_the_neighbours(q, k, v, scale, causal):
    out, lse = tiled_attention(q, k, v, scale, causal)
    return out + 0 * out.mean((0, 2), keepdim=True), lse


def empty_rows_have_a_finite_lse(q, k, v, scale, causal):
    out, lse = tiled_attention(q, k, v, scale, causal)
    return out, lse.clamp_min(-1e5)


def ignores_strides(q, k, v, scale, causal):
    """K read as if its rows were dense."""
    if k.numel() and not k.is_contiguous():
        k = k.as_strided(k.shape, torch.empty(k.shape, device="meta").stride())
    return tiled_attention(q, k, v, scale, causal)


calls = 0


def changes_from_call_to_call(q, k, v, scale, causal):
    global calls
    calls += 1
    return tiled_attention(q, k, v, scale, causal, tile_n=32 + 32 * (calls % 2))


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        (mask_one_key_short, {"error", "lse"}),
        (mask_one_key_long, {"error", "lse", "future"}),
        (mask_top_left, {"error", "lse"}),
        (unscaled, {"error", "lse", "power_of_two"}),
        (default_scale_always, {"error", "lse", "power_of_two"}),
        (heads_interleaved, {"error", "lse", "neighbours", "repeated_heads"}),
        (lse_in_base_two, {"lse"}),
        (last_partial_block_missing, {"error", "lse", "permutation"}),
        (zeros_past_the_end_count, {"error", "lse", "rows_sum_to_one"}),
        (accumulated_without_rescaling, {"error"}),
        (largest_score_not_subtracted, {"error", "shift"}),
        (scores_rounded, {"error"}),
        (reads_the_neighbours, {"neighbours"}),
        (empty_rows_have_a_finite_lse, {"empty_rows"}),
        (ignores_strides, {"layout"}),
        (changes_from_call_to_call, {"repeatable"}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_broken_attention_is_caught(broken, caught_by, monkeypatch):
    monkeypatch.setattr(properties, "PROPERTIES", tuple(p for p in PROPERTIES if p.name in caught_by))
    records = run_all(as_function(broken), "cpu", examples=40, shrink=False)
    assert {record.property for record in records if not record.passed} == caught_by
    assert all("Case(" in record.failure for record in records)


def test_run_all_reports_every_property_as_it_comes():
    seen = []
    records = run_all(fa3.flash_attn_func, "cpu", examples=2, report=seen.append)
    assert [record.property for record in records] == [prop.name for prop in PROPERTIES]
    assert tuple(seen) == records and all(record.passed and record.examples == 2 for record in records)


def test_an_error_of_the_function_is_a_failure_with_its_case():
    def refuses(q, k, v, **options):
        raise RuntimeError("no kernel")

    (record, *_) = run_all(refuses, "cpu", examples=2, shrink=False)
    assert not record.passed and "Case(" in record.failure and "RuntimeError: no kernel" in record.failure


def test_wrong_types_are_a_failure():
    def float32_out(q, k, v, softmax_scale=None, causal=False, return_lse=True):
        out, lse = tiled_attention(q, k, v, softmax_scale, causal)
        return out.float(), lse

    record = check(PROPERTIES[0], Subject(float32_out), cases("cpu"), 2)
    assert not record.passed and "torch.float32" in record.failure


def test_properties_take_a_case_of_ones_own():
    case = Case(seqlen_q=1, seqlen_k=300, heads_kv=2, ratio=4, head_dim=40, head_dim_v=72, layout="packed")
    for prop in PROPERTIES:
        measured = prop.measure(Subject(as_function(tiled_attention)), case)
        assert measured.figure <= measured.limit, prop.name
