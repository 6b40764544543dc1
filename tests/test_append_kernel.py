"""The append kernel without a GPU: what ptxas made of it, and its numbers on the PTX machine, bit for bit."""

import functools
import itertools

import pytest
import torch

from fa3 import launch_append
from fa3.kernels.append.config import CHUNK, DTYPES, THREADS, Rotary, Spec, config_for
from fa3.kernels.compile import inspect
from fa3.kernels.sass import read
from tests import plain_machine
from tests.append_case import CACHES, IMPOSSIBLE, assert_left_out, expected, make, whole
from tests.forward_machine import Memory, words

SPECS = [Spec(dtype) for dtype in DTYPES] + [
    Spec(dtype, Rotary(interleaved, table))
    for dtype, interleaved in itertools.product(DTYPES, (True, False))
    for table in (dtype, "float32")
]
SPECS += [Spec("bfloat16", None, False), Spec("float16", Rotary(False, "float32"), False)]
seen = functools.cache(lambda spec: inspect(spec, config_for(spec)))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_what_is_compiled(spec):
    found = read(seen(spec).cubin, seen(spec).remarks, seen(spec).shared_bytes)
    assert not found.spills and found.stack_bytes == 0 and found.warnings == () and found.shared_bytes == 0
    assert found.registers <= config_for(spec).registers_max, "an SM's threads do not fit"
    assert found.opcodes["STG.E.128"] == (1 if spec.aligned else 0)
    assert (found.opcodes["LDG.E.128"] >= 1) == spec.aligned
    assert not [name for name in found.opcodes if "FTZ" in name.split(".")], "denormals must not be lost"


def on_the_machine(case, monkeypatch):
    """fa3.launch_append's own launch, with the machine in the place of the compiled function."""
    used = []

    def load(spec, config):
        def launch(*arguments):
            used.append(spec)
            run(spec, config, *arguments)

        return launch

    monkeypatch.setattr(launch_append, "load", load)
    monkeypatch.setattr(launch_append, "check_chip", lambda chip: None)
    monkeypatch.setattr(launch_append, "chip", lambda index: None)
    monkeypatch.setattr(launch_append, "_plans", {})
    return launch_append.append(*case), used


def run(spec, config, q, out, k, v, k_cache, v_cache, cos, sin, lists):
    tensors = [x for x in (q, out, k, v, k_cache, v_cache, cos, sin) if x is not None]
    if spec.aligned and not all(launch_append._is_aligned(x) for x in tensors):
        raise ValueError("as the compiled function does")
    memory, params, ctas = Memory(), [], 0

    for x, y in ((q, out), (k, k_cache), (v, v_cache)):
        if x is not None:
            slices = -(-x.shape[2] * x.shape[3] // (CHUNK * THREADS))
            count = x.shape[0] * x.shape[1] * slices
            params += [plain_machine.tensor(memory, x), plain_machine.tensor(memory, y)]
            for n in (x.shape[1], y.shape[1], slices, x.shape[3] // CHUNK):
                params += plain_machine.divisor(n)
            params.append(words(count))
            ctas += count
    params += [plain_machine.tensor(memory, x) for x in (cos, sin) if x is not None]
    params += [plain_machine.tensor(memory, x, False) for x in lists[:7]]
    params += [words(x) for x in lists[7:]]
    plain_machine.run(seen(spec).ptx, params, memory, ctas, THREADS)


def verify(case, monkeypatch, aligned=True):
    q, k_memory, v_memory = expected(case)
    got, used = on_the_machine(case, monkeypatch)
    assert torch.equal(got, q)
    assert torch.equal(whole(case.k_cache), k_memory) and torch.equal(whole(case.v_cache), v_memory)
    assert all(spec.aligned for spec in used) == aligned


@pytest.mark.parametrize("rotary", ["none", "interleaved", "neox"])
@pytest.mark.parametrize("cache", CACHES)
def test_numbers(cache, rotary, monkeypatch):
    verify(make(cache, "one pool", rotary, has_rotary_seqlens=True), monkeypatch)
    verify(make(cache, "heads first", rotary, ragged_q=True, ragged_k=True, own=False, seed=1), monkeypatch)


@pytest.mark.parametrize("rotary", ["none", "neox"])
def test_any_strides(rotary, monkeypatch):
    verify(make("pages", "misaligned", rotary, table_dtype="float32"), monkeypatch, aligned=False)


def test_types(monkeypatch):
    verify(make("csr", dtype="float16", rotary="interleaved"), monkeypatch)
    verify(make("dense", dtype="float16", rotary="neox", table_dtype="float32", rotary_dim=32), monkeypatch)
    verify(make("dense", dtype="bfloat16", rotary="interleaved", table_dtype="float32"), monkeypatch)


def test_more_chunks_than_threads(monkeypatch):
    verify(make("pages", heads=40, heads_kv=40, head_dim=64, head_dim_v=256, lengths=(3,)), monkeypatch)


def test_many_sequences(monkeypatch):
    """More than a warp looks at in one step, empty ones among them."""
    verify(make("pages", lengths=(2, 0, 1) * 30, ragged_q=True, ragged_k=True, new=1, queries=1, heads=1, heads_kv=1,
                head_dim=16, head_dim_v=8), monkeypatch)  # fmt: skip


def test_a_length_for_all_and_q_alone(monkeypatch):
    verify(make(has_lengths=False), monkeypatch)
    verify(make("pages", has_lengths=False, has_rotary_seqlens=True), monkeypatch)
    verify(make(has_new=False), monkeypatch)


@pytest.mark.parametrize("number", range(len(IMPOSSIBLE)))
def test_what_lists_do_not_allow_is_not_written(number, monkeypatch):
    """Nor anything outside of a tensor read or written: the machine looks."""
    cache, sequence, edit = IMPOSSIBLE[number]
    case, edited = (make(cache, "one pool", "none", lengths=(1, 8, 4), page_size=16) for _ in range(2))
    edit(edited.serving)
    on_the_machine(edited, monkeypatch)
    assert_left_out(case, expected(case)[1], whole(edited.k_cache), sequence)


def test_positions_outside_the_tables_make_nan(monkeypatch):
    case = make(lengths=(3, 8), queries=3)
    short = case._replace(cos=case.cos[:9], sin=case.sin[:9])
    wanted, *_ = expected(case)
    got, _ = on_the_machine(short, monkeypatch)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1, :1], wanted[1, :1])
    assert got[1, 1:, :, :16].isnan().all() and torch.equal(got[1, 1:, :, 16:], wanted[1, 1:, :, 16:])
    assert case.k_cache[1, 9, :, :16].isnan().all() and torch.equal(case.v_cache[1, 9], case.v[1, 1])
