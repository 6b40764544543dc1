"""The merge kernel without a GPU: what ptxas made of it, and its numbers on the PTX machine."""

import functools
import itertools
import math

import pytest
import torch

import fa3
from fa3 import launch_merge
from fa3.kernels.compile import inspect
from fa3.kernels.merge.config import DTYPES, THREADS, Spec, config_for, lanes_log2
from fa3.kernels.sass import read
from tests import plain_machine
from tests.forward_machine import Memory, words
from tests.merge_case import assert_right, partials

SPECS = [Spec(dtype, dtype, True) for dtype in DTYPES]
SPECS += [Spec("float32", dtype, False) for dtype in DTYPES] + [Spec("bfloat16", "bfloat16", False)]
seen = functools.cache(lambda spec: inspect(spec, config_for(spec)))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_what_is_compiled(spec):
    found = read(seen(spec).cubin, seen(spec).remarks, seen(spec).shared_bytes)
    assert not found.spills and found.stack_bytes == 0 and found.warnings == () and found.shared_bytes == 0
    assert found.registers <= config_for(spec).registers_max
    loads = 2 if spec.dtype == "float32" else 1
    assert found.opcodes["LDG.E.128"] >= loads * (2 if spec.pair else 4), "partials are loaded ahead"
    assert found.count("CALL") == 0, "a division by a subroutine"
    assert not [name for name in found.opcodes if "FTZ" in name.split(".")], "denormals must not be lost"


def test_lanes_have_chunks():
    assert [lanes_log2(d) for d in (8, 16, 24, 32, 40, 64, 72, 128, 136, 256, 264, 512)] == [
        0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """fa3.launch_merge's own launch, with the machine in the place of the compiled function."""

    def load(device, dtype, out_dtype, is_pair):
        spec = Spec(launch_merge.NAMES[dtype], launch_merge.NAMES[out_dtype], is_pair)
        return functools.partial(run, spec)

    monkeypatch.setattr(launch_merge, "_run", load)


def run(spec, o, lse, other, other_lse, out, out_lse, lanes):
    if any(x is not None and launch_merge.fitted(x) is not x for x in (o, other, out)):
        raise ValueError("as the compiled function does")
    memory = Memory()
    place = functools.partial(plain_machine.tensor, memory)
    params = [place(o), place(lse, False)]
    params += [place(other), place(other_lse, False)] if spec.pair else []
    params += [place(out), place(out_lse, False)]
    batch, seqlen, heads, _ = out.shape
    params += [*plain_machine.divisor(heads), *plain_machine.divisor(seqlen), words(batch * seqlen * heads)]
    params.append(words(lanes))
    rows = THREADS >> lanes
    plain_machine.run(seen(spec).ptx, params, memory, -(-batch * seqlen * heads // rows), THREADS)


def merged(o, lse, out_dtype=None):
    """Of two partials by the pair's kernel, else by the other one; into canaries."""
    dtype = out_dtype or o.dtype
    around = torch.full((*o.shape[1:-1], o.shape[-1] + 16), 7.0, dtype=dtype)
    out, out_lse = around[..., 8:-8], torch.full(lse.shape[1:], 7.0).transpose(0, 1)
    out_lse = torch.full((*lse.shape[1:3], lse.shape[3] + 2), 7.0)[..., 1:-1]
    if len(o) == 2:
        launch_merge.merge_into(o[0], lse[0], o[1], lse[1], out, out_lse)
    else:
        launch_merge.merge_into(o, lse, None, None, out, out_lse)
    got = out.clone(), out_lse.clone()
    out[:] = 7.0
    assert (around == 7.0).all(), "memory beside the result was written"
    return got


def equal(got, wanted):
    return all(torch.equal(x, y) and torch.equal(x.signbit(), y.signbit()) for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 264])
def test_pair(dtype, head_dim):
    o, lse = partials(2, batch=1, dtype=dtype, head_dim=head_dim)
    got = merged(o, lse)
    assert_right(got, o, lse)
    assert equal(got, merged(o.flip(0), lse.flip(0))), "either order"
    exact = fa3.flash_attn_combine(o, lse)
    torch.testing.assert_close(got, exact, rtol=torch.finfo(o.dtype).eps, atol=1e-5)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_many(count, out_dtype):
    o, lse = partials(count, batch=1, dtype="float32", seed=count)
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    got = merged(o, lse, getattr(torch, out_dtype))
    assert_right(got, o, lse)
    if count == 1:
        o = torch.where((lse == -math.inf)[..., None], 0.0, o)
        assert equal(got, (o[0].to(got[0].dtype), lse[0]))


def test_many_of_sixteen_bits():
    o, lse = partials(5, dtype="bfloat16")
    assert_right(merged(o, lse), o, lse)


@pytest.mark.parametrize(("dtype", "junk"), [*itertools.product(("bfloat16", "float32"), (math.nan, 0.0))])
def test_empty_is_the_identity(dtype, junk):
    o, lse = partials(1, dtype=dtype, empty=0.2)
    o[..., :3] = -0.0
    o[..., 3] = 1e-39  # a denormal
    nothing = torch.full_like(o, junk), torch.full_like(lse, -math.inf)
    stacked = torch.cat([o, nothing[0]]), torch.cat([lse, nothing[1]])
    kept = torch.where((lse == -math.inf)[..., None], torch.zeros_like(o), o)[0], lse[0]
    assert equal(merged(*stacked), kept)
    assert equal(merged(stacked[0].flip(0), stacked[1].flip(0)), kept)


def test_infinite_and_nan():
    o, lse = partials(2, empty=0.0, dtype="float32")
    lse[:, 0, 0] = math.inf
    lse[0, 0, 1] = math.inf
    lse[0, 0, 2], lse[1, 0, 2] = math.nan, -math.inf
    out, sums = merged(o, lse)
    torch.testing.assert_close(out[0, 0], o[:, 0, 0].mean(0))
    assert torch.equal(out[0, 1], o[0, 0, 1]) and (sums[0, :2] == math.inf).all()
    assert out[0, 2].isnan().all() and sums[0, 2].isnan().all() and not out[0, 3:].isnan().any()


def test_in_place_and_misaligned():
    o, lse = partials(2, batch=1, empty=0.0)
    wanted = merged(o, lse)
    a, lse_a = o[0].clone(), lse[0].clone()
    launch_merge.merge_into(a, lse_a, o[1], lse[1], a, lse_a)
    assert equal((a, lse_a), wanted)
    odd = torch.zeros(*o.shape[:-1], o.shape[-1] + 3, dtype=o.dtype)[..., 1:-2].copy_(o)
    out, out_lse = torch.zeros_like(odd[0]), torch.zeros_like(lse[0])
    launch_merge.merge_into(odd[0], lse[0], odd[1], lse[1], out, out_lse)
    assert equal((out, out_lse), wanted)
