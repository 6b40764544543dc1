"""Property-based accuracy tests of an attention function: what must hold for every input, and cases drawn to break it.

`run_all` tries every property of PROPERTIES on an attention function with flash_attn_func's signature, on CPU or GPU,
and returns one Record each; `python -m fa3 check` prints them and the test suite asserts them. A property is a plain
function (Subject, Case) -> Measured, so it can also be called on a case of one's own. Needs hypothesis (fa3[test]).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import hypothesis
import torch
from hypothesis import strategies as st

from fa3.heuristics import DTYPES
from fa3.testing.inputs import LAYOUTS, VALUES, Case, Inputs, lay_out, make
from fa3.testing.tolerance import SCORE_EPS, UNIT, expected, lse_error

Result = tuple[torch.Tensor, torch.Tensor]  # out, lse

EDGES = (0, 1, 2, 63, 64, 65, 127, 128, 129, 192, 193, 255, 256, 257)  # lengths around tile edges
ROWS = 64  # rows of P in an accuracy comparison, at least: with fewer, luck decides
LONGEST = {"cpu": 260, "cuda": 1100}


@dataclass(frozen=True)
class Subject:
    """What is tested: attention(q, k, v, softmax_scale=, causal=, return_lse=True) -> (out, lse), and where.

    config_of(q, k, v, causal) names the kernel that would run. Calls of different shapes must agree bit by bit where it
    is equal; without it, as on a CPU whose matrix product orders its sums by shape, to rounding.
    """

    attention: Callable
    device: str = "cpu"
    config_of: Callable[..., object] | None = None

    def run(self, x: Inputs, scale: float | None, causal: bool) -> Result:
        out, lse = self.attention(*x, softmax_scale=scale, causal=causal, return_lse=True)
        batch, seqlen_q, heads, _ = x.q.shape
        got = tuple(out.shape), out.dtype, tuple(lse.shape), lse.dtype
        lse_dtype = torch.float64 if x.q.dtype == torch.float64 else torch.float32
        want = (batch, seqlen_q, heads, x.v.shape[3]), x.q.dtype, (batch, heads, seqlen_q), lse_dtype
        if got != want:
            raise AssertionError(f"out and lse are {got}, not {want}")
        return out, lse

    def is_same_kernel(self, a: Inputs, b: Inputs, causal: bool) -> bool:
        return self.config_of is not None and self.config_of(*a, causal) == self.config_of(*b, causal)


@dataclass(frozen=True)
class Measured:
    figure: float
    limit: float


@dataclass(frozen=True)
class Property:
    name: str
    statement: str
    unit: str  # of the figure
    measure: Callable[[Subject, Case], Measured]


@dataclass(frozen=True)
class Record:
    """How a property fared. failure: the smallest failing case found and what was wrong with it, or empty."""

    property: str
    statement: str
    unit: str
    examples: int
    worst: float
    limit: float
    passed: bool
    failure: str = ""


def chosen_config(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> object:
    """The Config that fa3 takes for these tensors."""
    from fa3 import device, launch, problem  # imports the launcher, which the reference alone does not need

    chip = device.chip(q.get_device()) if q.is_cuda else device.ASSUMED
    return launch.config_of(problem.problem_of(q, k, v, 1.0, causal), chip.num_sms)


def cases(device: str = "cpu", dtypes: Sequence[str] = DTYPES, longest: int | None = None) -> st.SearchStrategy[Case]:
    """Problems of all kinds: lengths at and off tile edges, any head dims and ratios, layouts, scales, value ranges."""
    longest = longest or LONGEST[device.split(":")[0]]
    small = device.startswith("cpu")
    lengths = st.one_of(st.integers(1, longest), st.sampled_from([n for n in EDGES if n <= longest]))
    dims = st.integers(1, 32).map(lambda n: 8 * n)

    @st.composite
    def draw(draw_one) -> Case:
        head_dim = draw_one(dims)
        return Case(
            dtype=draw_one(st.sampled_from(dtypes)),
            batch=draw_one(st.integers(1, 2 if small else 5)),
            seqlen_q=draw_one(lengths),
            seqlen_k=draw_one(lengths),
            heads_kv=draw_one(st.integers(1, 2 if small else 4)),
            ratio=draw_one(st.integers(1, 3 if small else 8)),
            head_dim=head_dim,
            head_dim_v=draw_one(st.one_of(st.just(head_dim), dims)),
            causal=draw_one(st.booleans()),
            scale=draw_one(st.one_of(st.none(), st.floats(0.01, 1.0))),
            layout=draw_one(st.sampled_from(LAYOUTS)),
            values=draw_one(st.sampled_from(VALUES)),
            seed=draw_one(st.integers(0, 2**31 - 1)),
        )

    return draw()


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Values that are not the same; NaN never is."""
    return int((a != b).sum())


def same_bits(a: Result, b: Result) -> Measured:
    return Measured(differing(a[0], b[0]) + differing(a[1], b[1]), 0)


def same_answer(subject: Subject, causal: bool, a: tuple[Inputs, Result], b: tuple[Inputs, Result]) -> Measured:
    """Two results that belong to one problem: equal bit by bit where one kernel made both, else to rounding."""
    (x, (out, lse)), (y, (other_out, other_lse)) = a, b
    if subject.is_same_kernel(x, y, causal):
        return same_bits((out, lse), (other_out, other_lse))
    if lse_error(lse, other_lse) > 1e-5 + 1e-5 * _largest(lse[torch.isfinite(lse)]):
        return Measured(math.inf, 0)
    room = 4 * UNIT[str(x.q.dtype).removeprefix("torch.")] * _largest(x.v) + 1e-5  # P and O rounded, in both
    return Measured(0 if _largest(out.double() - other_out.double()) <= room else math.inf, 0)


def many_rows(case: Case) -> Case:
    rows = max(1, case.seqlen_q * case.heads)
    return replace(case, batch=max(case.batch, -(-ROWS // rows)))


def error(subject: Subject, case: Case) -> Measured:
    case = many_rows(case)
    x = make(case, subject.device)
    out, _ = subject.run(x, case.scale, case.causal)
    return Measured(expected(*x, case.scale, case.causal).share(out), 1)


def lse(subject: Subject, case: Case) -> Measured:
    x = make(case, subject.device)
    _, got = subject.run(x, case.scale, case.causal)
    return Measured(expected(*x, case.scale, case.causal).lse_share(got), 1)


def rows_sum_to_one(subject: Subject, case: Case) -> Measured:
    x = make(case, subject.device)
    x = x._replace(v=torch.ones_like(x.v))
    out, got = subject.run(x, case.scale, case.causal)
    want = torch.isfinite(got).to(out.dtype).transpose(1, 2)[..., None].expand(out.shape)  # 0 where a row sees no key
    return Measured(_largest(out.double() - want), _rounding(case))


def empty_rows(subject: Subject, case: Case) -> Measured:
    """Queries before the first key, under a causal mask: every query where there is no key at all."""
    if case.seqlen_q <= case.seqlen_k:
        case = replace(case, seqlen_q=case.seqlen_k + 1 + case.seqlen_q % 150)
    x = make(replace(case, causal=True), subject.device)
    empty = case.seqlen_q - case.seqlen_k
    out, got = subject.run(x, case.scale, True)
    wrong = (out[:, :empty] != 0).sum() + (got[..., :empty] != -math.inf).sum()
    wrong += (~torch.isfinite(out)).sum() + (~torch.isfinite(got[..., empty:])).sum()
    return Measured(int(wrong), 0)


def shift(subject: Subject, case: Case) -> Measured:
    """The last component of all keys goes from 0 to a constant, so that every row's scores move by one number."""
    case = many_rows(case)
    x = Inputs(*(t.clone() for t in make(replace(case, layout="contiguous"), subject.device)))
    x.q[..., -1] = x.q[..., -1].float().clamp(-2, 2).round().to(x.q.dtype)
    x.k[..., -1] = 0
    want = expected(*x, case.scale, case.causal)
    constant = 2.0 ** round(math.log2(30 / case.softmax_scale))
    x.k[..., -1] = constant
    out, _ = subject.run(x, case.scale, case.causal)
    room = 2 * SCORE_EPS * (2 * constant * case.softmax_scale) * _largest(x.v)  # scores are that much coarser
    excess = (out.double() - want.out).abs() - room
    return Measured(want.share(want.out + excess.clamp_min(0)), 1)


def permutation(subject: Subject, case: Case) -> Measured:
    case = replace(many_rows(case), causal=False)
    x = make(case, subject.device)
    order = torch.randperm(case.seqlen_k, generator=torch.Generator().manual_seed(case.seed)).to(subject.device)
    out, _ = subject.run(Inputs(x.q, x.k[:, order], x.v[:, order]), case.scale, False)
    return Measured(expected(*x, case.scale).share(out), 1)


def future(subject: Subject, case: Case) -> Measured:
    """Keys after the diagonal of a row change; it and all rows before it keep their bits."""
    x = make(replace(case, layout="contiguous"), subject.device)
    row = case.seed % max(1, case.seqlen_q)
    first = max(0, row + 1 + case.seqlen_k - case.seqlen_q)
    changed = Inputs(x.q, x.k.clone(), x.v.clone())
    changed.k[:, first:] = 3 - 2 * changed.k[:, first:]
    changed.v[:, first:] = 100
    before, after = (subject.run(y, case.scale, True) for y in (x, changed))
    return same_bits(*((out[:, : row + 1], got[..., : row + 1]) for out, got in (before, after)))


def repeated_heads(subject: Subject, case: Case) -> Measured:
    x = make(case, subject.device)
    full = Inputs(x.q, *(t.repeat_interleave(case.ratio, 2) for t in (x.k, x.v)))
    grouped, separate = (subject.run(y, case.scale, case.causal) for y in (x, full))
    return same_answer(subject, case.causal, (x, grouped), (full, separate))


def neighbours(subject: Subject, case: Case) -> Measured:
    """All batches but one, all KV heads but one and all query heads but one become NaN: that one keeps its bits."""
    x = make(replace(case, layout="contiguous"), subject.device)
    batch, head = case.seed % case.batch, case.seed % case.heads
    alone = Inputs(*(torch.full_like(t, math.nan) for t in x))
    for new, old, h in zip(alone, x, (head, head // case.ratio, head // case.ratio)):
        new[batch, :, h] = old[batch, :, h]
    before, after = (subject.run(y, case.scale, case.causal) for y in (x, alone))
    return same_bits(*((out[batch, :, head], got[batch, head]) for out, got in (before, after)))


def alone(subject: Subject, case: Case) -> Measured:
    """One batch and one KV head with its query heads, cut out and run by itself."""
    x = make(case, subject.device)
    b, h = case.seed % case.batch, case.seed % case.heads_kv
    group = slice(h * case.ratio, (h + 1) * case.ratio)
    part = Inputs(x.q[b : b + 1, :, group], *(t[b : b + 1, :, h : h + 1] for t in (x.k, x.v)))
    out, got = subject.run(x, case.scale, case.causal)
    whole = out[b : b + 1, :, group], got[b : b + 1, group]
    return same_answer(subject, case.causal, (x, whole), (part, subject.run(part, case.scale, case.causal)))


def layout(subject: Subject, case: Case) -> Measured:
    x = make(replace(case, layout="contiguous"), subject.device)
    view = lay_out(x, "padded" if case.layout == "contiguous" else case.layout)
    results = [subject.run(y, case.scale, case.causal) for y in (view, lay_out(view, "contiguous"))]
    return same_bits(*results)


def power_of_two(subject: Subject, case: Case) -> Measured:
    x = make(case, subject.device)
    return same_bits(
        subject.run(x._replace(q=x.q * 2), case.softmax_scale, case.causal),
        subject.run(x, case.softmax_scale * 2, case.causal),
    )


def repeatable(subject: Subject, case: Case) -> Measured:
    x = make(case, subject.device)
    return same_bits(*(subject.run(x, case.scale, case.causal) for _ in range(2)))


def convexity(subject: Subject, case: Case) -> Measured:
    """O lies between the smallest and the largest V that the row sees, in every column."""
    x = make(case, subject.device)
    out, _ = subject.run(x, case.scale, case.causal)
    first = case.seqlen_q - case.seqlen_k if case.causal else 0  # queries before it see nothing
    if out.numel() == 0 or case.seqlen_k == 0 or first >= case.seqlen_q:
        return Measured(_largest(out), 0)
    seen = torch.arange(case.seqlen_q, device=out.device) + case.seqlen_k - case.seqlen_q
    seen = seen.clamp(0, case.seqlen_k - 1) if case.causal else torch.full_like(seen, case.seqlen_k - 1)
    v = x.v.double().repeat_interleave(case.ratio, 2)
    low, high = torch.cummin(v, 1).values[:, seen], torch.cummax(v, 1).values[:, seen]
    outside = torch.maximum(low - out, out - high)[:, max(0, first) :]
    return Measured(
        max(0.0, outside.max().item()) if torch.isfinite(out).all() else math.inf, _rounding(case) * _largest(v)
    )


def _largest(x: torch.Tensor) -> float:
    """Of the magnitudes; inf where there is a NaN."""
    return torch.nan_to_num(x.abs().double(), nan=math.inf, posinf=math.inf).max().item() if x.numel() else 0.0


def _rounding(case: Case) -> float:
    """What rounding P (its sum is not rounded) and the output may do to a weighted mean of values up to 1."""
    lost = 2.0**-25 * case.seqlen_k if case.dtype == "float16" else 0.0  # p below the smallest normal number
    return 2.1 * UNIT[case.dtype] + lost + 1e-6


SHARE, BITS, DIFFERENCE = "of the allowed", "values", "difference"

PROPERTIES = (
    Property("error", "max error <= 2x and mean error <= 1.5x that of plain PyTorch, against float64", SHARE, error),
    Property("lse", "LSE is the natural log-sum-exp of the scaled scores", SHARE, lse),
    Property("rows_sum_to_one", "V = 1 gives O = 1", DIFFERENCE, rows_sum_to_one),
    Property("empty_rows", "a query that sees no key has O = 0 and LSE = -inf", BITS, empty_rows),
    Property("shift", "adding a number to all scores of a row changes nothing", SHARE, shift),
    Property("permutation", "without a mask the order of the keys does not matter", SHARE, permutation),
    Property("future", "causal: later keys leave earlier rows as they are, bit by bit", BITS, future),
    Property("repeated_heads", "grouped heads = K and V repeated, bit by bit in one kernel", BITS, repeated_heads),
    Property("neighbours", "NaN in other batches and heads leaves this one as it is, bit by bit", BITS, neighbours),
    Property("alone", "a batch and head group run alone gives the same, bit by bit in one kernel", BITS, alone),
    Property("layout", "strided, padded and misaligned views = contiguous inputs, bit by bit", BITS, layout),
    Property("power_of_two", "2 q with a scale = q with twice the scale, bit by bit", BITS, power_of_two),
    Property("repeatable", "the same call gives the same, bit by bit", BITS, repeatable),
    Property("convexity", "O lies between the smallest and the largest V seen", DIFFERENCE, convexity),
)


def check(
    prop: Property,
    subject: Subject,
    strategy: st.SearchStrategy[Case],
    examples: int,
    seed: int = 0,
    shrink: bool = True,
) -> Record:
    """Try one property on so many drawn cases; on a failure look for the smallest case that still fails, if shrink."""
    worst, limit, tried, failure = 0.0, 0.0, 0, ""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink)[: 1 + shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(strategy)
    def body(case: Case) -> None:
        nonlocal worst, limit, tried, failure
        tried += not failure
        try:
            measured = prop.measure(subject, case)
        except Exception as problem:
            failure = f"{case}: {type(problem).__name__}: {problem}"
            raise
        if not failure and _nearness(measured) >= _nearness(Measured(worst, limit)):
            worst, limit = measured.figure, measured.limit
        if not measured.figure <= measured.limit:
            failure = f"{case}: {measured.figure:.6g} {prop.unit}, limit {measured.limit:.6g}"
            raise AssertionError(failure)

    try:
        body()
    except Exception as problem:
        failure = failure or f"{type(problem).__name__}: {problem}"
    return Record(prop.name, prop.statement, prop.unit, tried, worst, limit, not failure, failure)


def run_all(
    attention: Callable,
    device: str = "cpu",
    examples: int = 20,
    report: Callable[[Record], None] | None = None,
    *,
    dtypes: Sequence[str] = DTYPES,
    seed: int = 0,
    shrink: bool = True,
) -> tuple[Record, ...]:
    """Every property on `examples` cases each. attention has flash_attn_func's signature; report sees each Record as it
    comes. Nothing is raised for a property that fails: its Record says so."""
    subject = Subject(attention, device, chosen_config if device.startswith("cuda") else None)
    strategy = cases(device, dtypes)
    records = []
    for prop in PROPERTIES:
        records.append(check(prop, subject, strategy, examples, seed, shrink))
        if report is not None:
            report(records[-1])
    return tuple(records)


def _nearness(measured: Measured) -> tuple[float, float]:
    """How close to its limit, to tell which of two figures is worse."""
    return (measured.figure / measured.limit if measured.limit else measured.figure), measured.figure
