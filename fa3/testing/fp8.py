"""Properties of the FP8 path: what must hold of the quantisation, the rotation and the attention for every input.

A property is a plain function (Subject, Case) -> Measured, as in fa3.testing.properties: by default it runs on the
plain torch specification and the emulation, with a Subject of one's own on kernels. `run_all` tries every property of
PROPERTIES on drawn cases. fp8_conformance.py has what takes sizes instead; fp8_bound.py derives the tolerances.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fa3.quant import hadamard
from fa3.quant.cast import cast, pack_v, scale_of, unpack_v
from fa3.quant.formats import BLOCK, E4M3, PER_TENSOR, QuantizedQKV
from fa3.quant.reference import dequantize_qkv, quantize_qkv
from fa3.reference_fp8 import fp8_attention
from fa3.testing import inputs
from fa3.testing.fp8_bound import Bound, largest, per_query_head, predicted_rmse, stored, weights
from fa3.testing.inputs import Inputs
from fa3.testing.properties import LONGEST, Measured, Property, Record, check, differing
from fa3.testing.tolerance import UNIT, exact, lse_error, rmse

PATTERNS = ("none", "loud_row", "loud_channel", "zero_block")
SPREADS = (1e-6, 1e-3, 1.0, 1e3, 1e6)
HALF_PRECISION_SPREADS = (1e-3, 1.0, 1e2)
ROWS = 256  # of O in an RMSE, at least: with fewer, luck decides
RMS_ROOM = 1.5  # over the predicted RMSE: few rows make the average
FIRST_ORDER_ROOM = 2.0  # the same, where second-order terms are left out
RESOLVED = 2.0**16  # one block of rows so much larger: E4M3's normal numbers reach over 2^14.8


@dataclass(frozen=True)
class Subject:
    """What is tested: attention(x, softmax_scale=, causal=) -> (out, lse), quantize as fa3.quant.reference's
    quantize_qkv. score_eps and sum_eps: what its matrix products may lose, relative to |q| |k| and to sum p |v|."""

    attention: Callable[..., tuple[torch.Tensor, torch.Tensor]] = fp8_attention
    quantize: Callable[..., QuantizedQKV] = quantize_qkv
    device: str = "cpu"
    score_eps: float = 2.0**-20
    sum_eps: float = 2.0**-14

    def bound(self, x: QuantizedQKV, case: "Case", causal: bool) -> Bound:
        return Bound.of(x, case.softmax_scale, causal, self.score_eps, self.sum_eps)


@dataclass(frozen=True)
class Case(inputs.Case):
    spread: float = 1.0  # what Q and K are multiplied with
    spread_v: float = 1.0
    pattern: str = "none"
    rotate: bool = True


def make(case: Case, device: str) -> Inputs:
    """The case's q, k and v with its pattern and spread."""
    generator = torch.Generator().manual_seed(case.seed)
    made = []
    for x, by in zip(inputs.make(case, device), (case.spread, case.spread, case.spread_v)):
        x, limit = x.float() * by, torch.finfo(x.dtype).max / 16
        if case.pattern == "loud_row" and x.shape[1]:
            x[:, int(torch.randint(x.shape[1], (1,), generator=generator))] *= 100
        elif case.pattern == "loud_channel":
            x[..., case.seed % x.shape[-1]] *= 30
        elif case.pattern == "zero_block":
            x[:, :BLOCK] = 0
        made.append(x.clamp(-limit, limit).to(getattr(torch, case.dtype)))
    return Inputs(*made)


def cases(device: str = "cpu", longest: int | None = None) -> Any:
    """A hypothesis strategy of problems of all kinds."""
    from hypothesis import strategies as st

    longest = longest or LONGEST[device.split(":")[0]]
    lengths = st.one_of(
        st.integers(1, longest), st.sampled_from([n for n in (1, 63, 64, 65, 128, 193) if n <= longest])
    )
    dims = st.sampled_from((64, 80, 96, 128, 192, 256))

    @st.composite
    def draw(one: Callable) -> Case:
        dtype = one(st.sampled_from(("bfloat16", "float16")))
        spreads = st.sampled_from(SPREADS if dtype == "bfloat16" else HALF_PRECISION_SPREADS)
        sizes = dict(seqlen_q=one(lengths), seqlen_k=one(lengths), head_dim=one(dims), head_dim_v=one(dims))
        return Case(
            dtype=dtype,
            batch=one(st.integers(1, 2)),
            heads_kv=one(st.integers(1, 2)),
            ratio=one(st.integers(1, 3)),
            causal=one(st.booleans()),
            values=one(st.sampled_from(inputs.VALUES)),
            spread=one(spreads),
            spread_v=one(spreads),
            pattern=one(st.sampled_from(PATTERNS)),
            rotate=one(st.booleans()),
            seed=one(st.integers(0, 2**31 - 1)),
            **sizes,
        )

    return draw()


# Quantisation


def rounding(subject: Subject, case: Case) -> Measured:
    """Every element within half a step of the format at its scale, whatever the scale; no code is clipped."""
    x = make(case, subject.device)
    worst = 0.0
    for tensor, s in zip(x, stored(subject.quantize(*x, rotate=False, q_rows=1 if case.seed % 2 else BLOCK))):
        error = (s.codes.double() * s.step - tensor.double()).abs()
        half = E4M3.half_ulp(torch.where(s.step == 0, 0.0, tensor.double() / s.step)) * s.step
        worst = max(worst, largest(torch.where(half == 0, torch.where(error == 0, 0.0, math.inf), error / half)))
    return Measured(worst, 1 + 2.0**-18)  # the quotient is rounded before it is cast


def scales(subject: Subject, case: Case) -> Measured:
    x = make(case, subject.device)
    done = stored(subject.quantize(*x, rotate=False))
    return Measured(sum(differing(s.scale, scale_of(t, s.granularity)) for t, s in zip(x, done)), 0)


def idempotent(subject: Subject, case: Case) -> Measured:
    """What is on the grid of its scale, with a largest value of 448, comes back bit by bit."""
    x = []
    for tensor, s in zip(make(case, subject.device), stored(subject.quantize(*make(case, subject.device)))):
        codes = s.codes.float()
        codes[:, ::BLOCK, :, 0] = E4M3.max
        blocks = torch.arange(codes.shape[1], device=codes.device)[:, None, None] // BLOCK
        x.append((codes * torch.exp2(blocks % 7 - 3.0)).to(tensor.dtype))
    again = stored(subject.quantize(*x, rotate=False))
    return Measured(sum(differing(s.codes.double() * s.step, t.double()) for t, s in zip(x, again)), 0)


def zero_block(subject: Subject, case: Case) -> Measured:
    x = make(replace(case, pattern="zero_block", values="normal", spread=1.0), subject.device)
    done = subject.quantize(*x, rotate=case.rotate)
    wrong = sum(int((s.codes[:, :BLOCK].float() != 0).sum()) for s in stored(done))
    wrong += sum(int((t[..., 0] != 0).sum()) for t in (done.q_scale, done.k_scale, done.v_scale))
    out, lse = subject.attention(done, causal=case.causal)
    return Measured(wrong + int((~torch.isfinite(out)).sum()) + int(torch.isnan(lse).sum()), 0)


def scaled_inputs(subject: Subject, case: Case) -> Measured:
    """All inputs times a power of two: the same codes, all scales times it."""
    by = 2.0 ** (1 + case.seed % 3)
    x = make(case, subject.device)
    a, b = (stored(subject.quantize(*y, rotate=case.rotate)) for y in (x, (t * by for t in x)))
    wrong = sum(differing(s.codes.float(), t.codes.float()) + differing(s.scale * by, t.scale) for s, t in zip(a, b))
    return Measured(wrong, 0)


def unbiased(subject: Subject, case: Case) -> Measured:
    """Values spread evenly in every binade: as many are rounded down as up, in standard deviations of a fair coin."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = 1, 4 * BLOCK, 2, 128
    exponent = torch.randint(E4M3.min_exponent, 8, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    x = torch.ldexp(sign * (1 + torch.rand(shape, generator=generator)), exponent)
    x[:, ::BLOCK, :, 0] = E4M3.max  # scales of 1
    x = x.to(getattr(torch, case.dtype)).to(subject.device)
    worst = 0.0
    for s in stored(subject.quantize(x, x, x, rotate=False, q_rows=BLOCK)):
        up = int((s.codes.float().abs() > x.float().abs()).sum())
        both = differing(s.codes.float(), x.float())
        worst = max(worst, abs(up - both / 2) / (0.5 * math.sqrt(both)))
    return Measured(worst, 5)


def not_finite(subject: Subject, case: Case) -> Measured:
    """One NaN or infinity in V makes NaN of its block's outputs, and of nothing silently a number."""
    x = make(replace(case, spread=1.0, spread_v=1.0), subject.device)
    at = case.seed % case.seqlen_k
    x.v[0, at, 0, 0] = math.nan if case.seed % 2 else math.inf
    done = subject.quantize(*x, rotate=case.rotate)
    out, _ = subject.attention(done, causal=False)
    numbers = int((~torch.isnan(out[0, :, : case.ratio])).sum()) + int(~torch.isnan(done.v_scale[0, 0, at // BLOCK]))
    others = torch.isnan(out[1:]).sum() + torch.isnan(out[:, :, case.ratio :]).sum()
    return Measured(numbers + int(others), 0)


# Rotation


def orthogonal(subject: Subject, case: Case) -> Measured:
    dim = case.head_dim
    rotated = hadamard.rotate(torch.eye(dim, device=subject.device), hadamard.random_signs(dim, case.seed)).double()
    return Measured(largest(rotated @ rotated.T - torch.eye(dim, device=subject.device)), 1e-6)


def keeps_scores(subject: Subject, case: Case) -> Measured:
    """In float64, relative to |q| |k|; and its transpose undoes it."""
    signs = hadamard.random_signs(case.head_dim, case.seed)
    q, k, _ = (t.double() for t in make(replace(case, spread=1.0), subject.device))
    back = largest(hadamard.unrotate(hadamard.rotate(q, signs), signs) - q) / (1 + largest(q))
    q, k = (t.reshape(-1, case.head_dim) for t in (q, k))
    scores = hadamard.rotate(q, signs) @ hadamard.rotate(k, signs).T
    size = q.norm(dim=-1)[:, None] * k.norm(dim=-1) + 1e-300
    return Measured(max(largest((scores - q @ k.T) / size), back), 1e-13)


def one_hot(subject: Subject, case: Case) -> Measured:
    """A row with one component: its part of the rotated row is full scale everywhere, with the signs of the matrix."""
    dim, at = case.head_dim, case.seed % case.head_dim
    x = torch.zeros(1, 1, 1, dim, dtype=getattr(torch, case.dtype), device=subject.device)
    x[..., at] = 3.0
    want = hadamard.matrix(dim, hadamard.random_signs(dim, case.seed))[at].sign() * E4M3.max
    done = subject.quantize(x, x, x, rotate=True, seed=case.seed)
    return Measured(sum(differing(codes.flatten().cpu().double(), want) for codes in (done.q, done.k)), 0)


def rotation_helps(subject: Subject, case: Case) -> Measured:
    """A component that is large in Q and in K: the RMSE with the rotation over the RMSE without."""
    case = Case(case.dtype, 1, 512, 256, 2, head_dim=128, head_dim_v=64, seed=case.seed)
    x = make(case, subject.device)
    for t in (x.q, x.k):
        t[..., case.seed % 128] *= 8
    want, _ = exact(*x)
    with_it, without = (rmse(subject.attention(subject.quantize(*x, rotate=r))[0], want) for r in (True, False))
    return Measured(with_it / without, 0.95)


# Attention


def _run(subject: Subject, case: Case, x: QuantizedQKV, causal: bool | None = None):
    causal = case.causal if causal is None else causal
    return subject.attention(x, softmax_scale=case.softmax_scale, causal=causal)


def _quantized(subject: Subject, case: Case) -> QuantizedQKV:
    return subject.quantize(*make(case, subject.device), rotate=case.rotate, seed=case.seed % 97)


def _many_rows(case: Case) -> Case:
    return replace(case, batch=max(case.batch, -(-ROWS // (case.seqlen_q * case.heads))))


def error(subject: Subject, case: Case) -> Measured:
    x = _quantized(subject, case)
    bound = subject.bound(x, case, case.causal)
    return Measured(bound.share(_run(subject, case, x)[0]), 1)


def rms_error(subject: Subject, case: Case) -> Measured:
    case = replace(_many_rows(case), spread=min(case.spread, 1.0))
    x = _quantized(subject, case)
    bound = subject.bound(x, case, case.causal)
    return Measured(rmse(_run(subject, case, x)[0], bound.out) / max(bound.rms, 1e-300), RMS_ROOM)


def lse(subject: Subject, case: Case) -> Measured:
    x = _quantized(subject, case)
    bound = subject.bound(x, case, case.causal)
    return Measured(lse_error(_run(subject, case, x)[1], bound.lse) / bound.lse_limit, 1)


def from_the_inputs(subject: Subject, case: Case) -> Measured:
    """The RMSE against attention to the tensors before quantisation, over the predicted one."""
    return _against_the_inputs(subject, case, 0.0)


def shift(subject: Subject, case: Case) -> Measured:
    """The same, all keys moved by one vector, which in exact arithmetic changes nothing."""
    return _against_the_inputs(subject, case, 2.0)


def _against_the_inputs(subject: Subject, case: Case, constant: float) -> Measured:
    case = replace(_many_rows(case), spread=1.0, values="normal", pattern="none")
    x = make(case, subject.device)
    want, _ = exact(*x, case.softmax_scale, case.causal)
    direction = hadamard.random_signs(case.head_dim, case.seed).to(subject.device)
    moved = x._replace(k=(x.k.float() + constant * direction).to(x.k.dtype))
    done = subject.quantize(*moved, rotate=case.rotate)
    key_eps = 2 * UNIT[case.dtype] if constant else 0.0  # adding to K in 16 bits rounds it
    predicted = predicted_rmse(done, case.softmax_scale, case.causal, key_eps)
    return Measured(rmse(_run(subject, case, done)[0], want) / max(predicted, 1e-300), FIRST_ORDER_ROOM)


SURE = math.log(1e6)  # a difference of scores that leaves the other a weight of 1e-6


def huge_scores(subject: Subject, case: Case) -> Measured:
    """Q and K of a million: one key takes a row, and where it does so clearly, the row of O is that key's value."""
    case = replace(case, dtype="bfloat16", spread=1e6, spread_v=1.0, pattern="none")
    x = _quantized(subject, case)
    out, lse_ = _run(subject, case, x)
    if not torch.isfinite(out).all():
        return Measured(math.inf, 1)
    q, k, v = dequantize_qkv(x)
    _, lse = exact(q, k, v, case.softmax_scale, case.causal)
    top = weights(q, k, lse, case.softmax_scale, case.causal).max(-1)
    winner = top.indices[..., None].expand(*top.indices.shape, case.head_dim_v)
    value = per_query_head(v, case.ratio).gather(2, winner).transpose(1, 2)
    # Scores are as good as equal within 2^-18 of their size, for the kernel's FP32, and within what the products lose.
    lost = 2 * subject.score_eps * case.softmax_scale * q.norm(dim=-1).max() * k.norm(dim=-1).max()
    cool = min(2.0**-18, SURE / max(lost.item(), 1.0))
    cooler = weights(q, k, lse * cool, case.softmax_scale * cool, case.causal)
    is_clear = ((cooler.amax(-1) > (1 - 1e-6) * cooler.sum(-1)) & torch.isfinite(lse_)).transpose(1, 2)[..., None]
    limit = (E4M3.half_step + subject.sum_eps + UNIT["bfloat16"]) * value.abs() + 1e-4
    return Measured(largest(torch.where(is_clear, out.double() - value, 0.0) / limit), 1)


def ones(subject: Subject, case: Case) -> Measured:
    """V = 1: P is rounded, its sum is not."""
    x = make(replace(case, spread=min(case.spread, 1.0)), subject.device)
    x = x._replace(v=torch.ones_like(x.v))
    out, lse_ = _run(subject, case, subject.quantize(*x, rotate=case.rotate))
    want = torch.isfinite(lse_).double().transpose(1, 2)[..., None]
    small = 2.0**-18 * E4M3.max * case.seqlen_k / E4M3.max  # P below the normal numbers
    return Measured(largest(out.double() - want), E4M3.half_step + small + subject.sum_eps + UNIT[case.dtype])


def permutation(subject: Subject, case: Case) -> Measured:
    """Whole blocks of keys change places, with their values and scales."""
    case = replace(case, causal=False, seqlen_k=-(-case.seqlen_k // BLOCK) * BLOCK)
    x = _quantized(subject, case)
    order = torch.randperm(case.seqlen_k // BLOCK, generator=torch.Generator().manual_seed(case.seed)).to(
        subject.device
    )
    k = x.k.view(torch.uint8).unflatten(1, (-1, BLOCK))[:, order].flatten(1, 2).view(x.k.dtype)
    v = x.v.view(torch.uint8).unflatten(-1, (-1, BLOCK))[..., order, :].flatten(-2).view(x.v.dtype)
    moved = replace(x, k=k, v=v, k_scale=x.k_scale[..., order], v_scale=x.v_scale[..., order])
    return Measured(subject.bound(x, case, False).share(_run(subject, case, moved)[0]), 1)


def future(subject: Subject, case: Case) -> Measured:
    """The codes of keys after the diagonal of a row change; it and all rows before it keep their bits."""
    x = _quantized(subject, case)
    row = case.seed % case.seqlen_q
    first = max(0, row + 1 + case.seqlen_k - case.seqlen_q)
    k, v = (t.view(torch.uint8).clone() for t in (x.k, unpack_v(x.v, x.seqlen_k)))
    k[:, first:] ^= 0x85  # other signs and last bits; NaN is left as NaN
    v[:, first:] = 0x7E  # 448
    changed = replace(x, k=_no_nan(k), v=pack_v(v.view(E4M3.dtype)))
    (a, a_lse), (b, b_lse) = (_run(subject, case, y, True) for y in (x, changed))
    a, b = a[:, : row + 1], b[:, : row + 1]
    return Measured(differing(a, b) + differing(a_lse[..., : row + 1], b_lse[..., : row + 1]), 0)


def _no_nan(codes: torch.Tensor) -> torch.Tensor:
    return torch.where(codes & 0x7F == 0x7F, codes & 0xFE, codes).view(E4M3.dtype)


def empty_rows(subject: Subject, case: Case) -> Measured:
    if case.seqlen_q <= case.seqlen_k:
        case = replace(case, seqlen_q=case.seqlen_k + 1 + case.seqlen_q % 150)
    out, lse_ = _run(subject, case, _quantized(subject, case), True)
    empty = case.seqlen_q - case.seqlen_k
    wrong = (out[:, :empty] != 0).sum() + (lse_[..., :empty] != -math.inf).sum()
    return Measured(int(wrong + (~torch.isfinite(out)).sum() + (~torch.isfinite(lse_[..., empty:])).sum()), 0)


def neighbours(subject: Subject, case: Case) -> Measured:
    """NaN in the codes and scales of all other batches and heads: this one keeps its bits."""
    x = _quantized(subject, case)
    b, h = case.seed % case.batch, case.seed % case.heads
    alone: dict[str, Any] = {}
    for name, head, at in (("q", h, 2), ("k", h // case.ratio, 2), ("v", h // case.ratio, 1)):
        codes = getattr(x, name).view(torch.uint8)
        scale = getattr(x, name + "_scale")
        new, new_scale = torch.full_like(codes, 0x7F), torch.full_like(scale, math.nan)
        new.select(at, head)[b], new_scale[b, head] = codes.select(at, head)[b], scale[b, head]
        alone |= {name: new.view(E4M3.dtype), name + "_scale": new_scale}
    (out, lse_), (other, other_lse) = (_run(subject, case, y) for y in (x, replace(x, **alone)))
    return Measured(differing(out[b, :, h], other[b, :, h]) + differing(lse_[b, h], other_lse[b, h]), 0)


def v_descale(subject: Subject, case: Case) -> Measured:
    """Twice the scale of V: exactly twice O."""
    x = replace(_quantized(subject, replace(case, spread=min(case.spread, 1.0))), dtype=torch.bfloat16)
    (out, lse_), (twice, twice_lse) = (_run(subject, case, y) for y in (x, replace(x, v_scale=x.v_scale * 2)))
    return Measured(differing(out * 2, twice) + int(lse_error(twice_lse, lse_.double()) > 1e-5), 0)


def qk_descale(subject: Subject, case: Case) -> Measured:
    """Twice the scale of Q, or of K, is twice the softmax scale, bit by bit."""
    x = _quantized(subject, case)
    scale = case.softmax_scale
    want = subject.attention(x, softmax_scale=2 * scale, causal=case.causal)
    wrong = 0
    for other in (replace(x, q_scale=x.q_scale * 2), replace(x, k_scale=x.k_scale * 2)):
        out, lse_ = subject.attention(other, softmax_scale=scale, causal=case.causal)
        wrong += differing(out, want[0]) + differing(lse_, want[1])
    return Measured(wrong, 0)


def block_scales(subject: Subject, case: Case) -> Measured:
    """One block of keys has values RESOLVED times larger; the rows that do not see it: RMSE with block scales over
    RMSE with one scale for V."""
    case = Case("bfloat16", 1, 256, 256, case.heads_kv, 1, case.head_dim, case.head_dim_v, seed=case.seed)
    x = make(case, subject.device)
    x.v[:, 3 * BLOCK :] *= RESOLVED
    want, _ = exact(*x, None, True)
    blocks = subject.quantize(*x, rotate=False)
    one = scale_of(x.v, PER_TENSOR)
    v8 = pack_v(cast(x.v.float() / one))
    coarse = replace(blocks, v=v8, v_scale=one.expand(blocks.v_scale.shape).contiguous())
    errors = [
        rmse(subject.attention(y, causal=True)[0][:, : 3 * BLOCK], want[:, : 3 * BLOCK]) for y in (blocks, coarse)
    ]
    return Measured(errors[0] / errors[1], 1 / 3)


def repeatable(subject: Subject, case: Case) -> Measured:
    runs = [_run(subject, case, _quantized(subject, case)) for _ in range(2)]
    return Measured(differing(runs[0][0], runs[1][0]) + differing(runs[0][1], runs[1][1]), 0)


def emulation(subject: Subject, case: Case) -> Measured:
    """Attention against the emulation on the CPU: the RMSE of their difference over that of the emulation's error."""
    case = replace(_many_rows(case), spread=min(case.spread, 1.0))
    x = _quantized(subject, case)
    there = {n: getattr(x, n).cpu() for n in ("q", "k", "v", "q_scale", "k_scale", "v_scale")}
    want, _ = fp8_attention(replace(x, **there), case.softmax_scale, case.causal)
    bound = subject.bound(x, case, case.causal)
    return Measured(rmse(_run(subject, case, x)[0].cpu(), want) / max(bound.rms, 1e-300), 0.5)


SHARE, BITS, RATIO = "of the allowed", "values", "ratio"


def _property(name: str, statement: str, unit: str, measure: Callable[..., Measured]) -> Property:
    return Property(name, statement, unit, measure)


PROPERTIES = (
    _property("rounding", "every element is rounded to the nearest at its scale, none is clipped", SHARE, rounding),
    _property("scales", "scale = largest magnitude of the block / 448, bit by bit", BITS, scales),
    _property("idempotent", "quantising what is on the grid gives it back, bit by bit", BITS, idempotent),
    _property("zero_block", "zeros stay zeros, with a scale of 0", BITS, zero_block),
    _property("scaled_inputs", "inputs times a power of two: the same codes, scales times it", BITS, scaled_inputs),
    _property("unbiased", "as many values are rounded up as down", "standard deviations", unbiased),
    _property("not_finite", "NaN and infinity become NaN and never numbers", BITS, not_finite),
    _property("orthogonal", "the rotation is orthogonal", "difference", orthogonal),
    _property("keeps_scores", "the rotation keeps Q K^T, and its transpose undoes it", "difference", keeps_scores),
    _property("one_hot", "the rotation spreads one component evenly over its part of the row", BITS, one_hot),
    _property("rotation_helps", "the rotation lowers the RMSE where a component is large", RATIO, rotation_helps),
    _property("error", "the error is within the bound of the quantisation steps", SHARE, error),
    _property("rms_error", "the RMSE is what independent roundings of P give", RATIO, rms_error),
    _property("lse", "LSE is that of the same tensors in float64", SHARE, lse),
    _property("from_the_inputs", "the RMSE from the inputs is what the steps predict", RATIO, from_the_inputs),
    _property("shift", "adding a vector to all keys changes nothing beyond that", RATIO, shift),
    _property(
        "huge_scores", "Q and K of a million: finite, and the key with the largest score wins", SHARE, huge_scores
    ),
    _property("ones", "V = 1 gives O = 1 but for the rounding of P", "difference", ones),
    _property("permutation", "the order of whole blocks of keys does not matter", SHARE, permutation),
    _property("future", "causal: later codes leave earlier rows as they are, bit by bit", BITS, future),
    _property("empty_rows", "a query that sees no key has O = 0 and LSE = -inf", BITS, empty_rows),
    _property("neighbours", "NaN in other batches and heads leaves this one as it is", BITS, neighbours),
    _property("v_descale", "twice the scale of V gives exactly twice O", BITS, v_descale),
    _property("qk_descale", "twice the scale of Q or K = twice the softmax scale, bit by bit", BITS, qk_descale),
    _property(
        "block_scales", "block scales: a third of the RMSE of one scale, beside a loud block", RATIO, block_scales
    ),
    _property("repeatable", "the same call gives the same, bit by bit", BITS, repeatable),
    _property("emulation", "attention differs from the emulation by less than from float64", RATIO, emulation),
)


def run_all(
    subject: Subject,
    examples: int = 20,
    report: Callable[[Record], None] | None = None,
    *,
    seed: int = 0,
    shrink: bool = True,
) -> tuple[Record, ...]:
    """Every property on `examples` cases each, as fa3.testing.properties.run_all. Needs hypothesis."""
    records = []
    for prop in PROPERTIES:
        one: Any = subject
        records.append(check(prop, one, cases(subject.device), examples, seed, shrink))
        if report is not None:
            report(records[-1])
    return tuple(records)
