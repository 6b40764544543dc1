"""The quantise kernels without a GPU: what ptxas made of them, their arithmetic in NumPy, their index maps.

Compiles run in processes of their own, two at a time; under xdist every worker compiles its own share.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fa3.kernels import compile, sass
from fa3.kernels.forward.config import SHARED_BYTES
from fa3.kernels.quantize import config, hadamard, qk, scale, v
from fa3.kernels.quantize.config import KEYS, THREADS, Config, PackSpec, Rotary, ScalesSpec, Spec, config_for
from fa3.quant import cast, formats
from fa3.quant import hadamard as reference

REGISTER_FILE = 65536  # 32-bit registers of an SM
HEAD_DIMS = range(16, 257, 16)
FULL = Rotary(256, False, "float32")
CASES: list[Spec | PackSpec] = [
    *(Spec("bfloat16", d, d, rotate=True) for d in HEAD_DIMS),
    *(Spec("float16", d, d, q_rows=1) for d in (16, 64, 80, 96, 128, 192, 256)),
    *(Spec("float16", d, d, True, q_rows=1) for d in (64, 112, 128, 256)),
    *(Spec("bfloat16", d, d) for d in (64, 128, 256)),
    *(Spec("bfloat16", d, d_v, True) for d, d_v in ((192, 128), (64, 256), (256, 64))),
    *(Spec("float16", d, d, True, Rotary(d, False, "float32"), 1) for d in (64, 80, 128, 192, 240, 256)),
    Spec("bfloat16", 128, 128, True, Rotary(128, True, "bfloat16")),
    Spec("bfloat16", 128, 128, False, Rotary(64, False, "bfloat16")),
    Spec("float16", 96, 96, False, Rotary(48, True, "float32")),
    *(PackSpec(d) for d in (16, 64, 80, 128, 192, 256)),
]
NAMES = [repr(spec).replace("Spec", "") for spec in CASES]


def look(spec):
    seen = compile.inspect(spec, config_for(spec))
    return seen, sass.read(seen.cubin, seen.remarks, seen.shared_bytes)


@pytest.fixture(scope="module")
def account(request):
    """look(CASES[i]) as a function of i; without xdist all that were selected are started at once."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    with ThreadPoolExecutor(2 if alone else 1) as pool:
        selected = [i.callspec.params["case"] for i in request.session.items if "account" in i.fixturenames]
        futures = {case: pool.submit(look, CASES[case]) for case in selected if alone}
        yield lambda case: (futures.pop(case, None) or pool.submit(look, CASES[case])).result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_every_kernel(account, case):
    spec = CASES[case]
    chosen = config_for(spec)
    seen, found = account(case)
    assert not found.spills and found.stack_bytes == 0 and found.spill_bytes == 0
    assert found.count("LDL") == found.count("STL") == 0
    assert found.registers <= chosen.registers_max and found.registers * THREADS * chosen.ctas <= REGISTER_FILE
    assert found.warnings == () and "0 bytes stack frame" in seen.remarks
    assert 0 < found.shared_bytes <= chosen.shared_bytes(spec)
    assert (found.shared_bytes + config.RESERVED_BYTES) * chosen.ctas <= config.SM_BYTES
    assert found.opcodes["STG.E.128"] >= -(-v_dim(spec) * KEYS // 16 // THREADS)
    assert found.count("CALL") == 0, "a division by a subroutine"
    flushing = [name for name in found.opcodes if "FTZ" in name.split(".")]
    assert not flushing, "denormals must not be lost"
    if isinstance(spec, PackSpec):
        assert found.count("F2FP") == 0 and found.opcodes["LDG.E.64"] == 4 * -(-v_dim(spec) // 64)
        return
    groups = -(-spec.head_dim // 32)
    assert found.opcodes["LDG.E.128"] >= groups + 4 * -(-v_dim(spec) // 64)
    packed = found.count("F2FP.SATFINITE.E4M3")
    assert packed == 4 * groups + 16 * -(-v_dim(spec) // 64), "two values an instruction"
    products = 2 * groups * (3 if spec.rotary else 1) if spec.rotate else 0
    assert found.count("HMMA") == products
    sums = 2 * (2 + 3) * spec.rotate  # two values over a row's lanes, then over a warp's rows
    assert found.count("SHFL") <= 2 * groups + 2 * (spec.q_rows == 1) + sums, "the rotation needs no shuffles"
    unpacked = found.count("F2FP.F16.E4M3.UNPACK_B")
    assert 4 * groups * spec.rotate <= unpacked <= 5 * groups * spec.rotate, "codes are read once, but for a few"


def test_the_kernel_of_the_scales():
    _, found = look(ScalesSpec())
    assert not found.spills and found.stack_bytes == 0 and found.warnings == () and found.registers <= 64
    assert found.opcodes["STG.E.128"] == 1, "a block's record is one store"


def v_dim(spec) -> int:
    return spec.head_dim_v


# Records


def test_configs():
    for spec in CASES:
        chosen = config_for(spec)
        assert chosen == config_for(spec) and hash(spec) == hash(CASES[CASES.index(spec)])
        assert 1 <= chosen.ctas <= 8 and chosen.shared_bytes(spec) <= SHARED_BYTES
        assert chosen.carveout(spec) <= 100
        needed = chosen.ctas * (chosen.shared_bytes(spec) + config.RESERVED_BYTES)
        assert chosen.carveout(spec) * config.SM_BYTES >= 100 * needed
    assert Config(4).registers_max == 64 and Config(5).registers_max == 48 and Config(1).registers_max == 255
    assert (config.BLOCK, config.GROUP) == (formats.BLOCK, formats.GROUP)
    with pytest.raises(Exception, match="cannot assign"):
        CASES[0].rotate = False


def test_parts_are_those_of_the_reference():
    for dim in HEAD_DIMS:
        assert config.parts(dim) == reference.parts(dim)


# The scale and the division, against correctly rounded ones: every operation below is exact in float64 before it is
# rounded to float32.


def f32(x):
    return np.asarray(x, np.float64).astype(np.float32)


def fma(a, b, c):
    return f32(np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64))


def test_the_scale_is_rounded_as_a_division_would():
    """Every significand; a power of two changes nothing as long as nothing is denormal."""
    absmax = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)
    inverse = np.float32(scale.E4M3_MAX_INVERSE)
    quotient = f32(absmax.astype(np.float64) * np.float64(inverse))
    rest = fma(quotient, -scale.E4M3_MAX, absmax)
    assert (fma(rest, inverse, quotient) == absmax / np.float32(scale.E4M3_MAX)).all()


def quotients(x, s, guess_error):
    """What Division computes of x (16-bit values) and s in [1, 2), with the reciprocal's estimate so many ulps off."""
    guess = f32(1 / s.astype(np.float64))
    guess = (guess.view(np.int32) + guess_error).view(np.float32)
    inverse = fma(guess, fma(-s, guess, 1.0), guess)
    high = (inverse.view(np.int32) - 1).view(np.float32)
    low = f32(inverse.astype(np.float64) * fma(-s, high, 1.0))
    assert (low > 0).all()
    return fma(x, high, f32(x.astype(np.float64) * low.astype(np.float64)))


def codes(x):
    return torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@pytest.mark.parametrize("guess_error", [-1, 0, 1])
def test_the_cast_is_that_of_a_division(guess_error):
    """Scales beside those where a quotient could lie next to an e4m3 tie, and drawn ones; every 11-bit significand."""
    near = (np.arange(8, 16)[:, None] << 20) + np.arange(-32, 33)
    near = np.unique(near[(near >= 1 << 23) & (near < 1 << 24)])
    drawn = np.random.default_rng(0).integers(1 << 23, 1 << 24, 500)
    scales = f32(np.concatenate([near, drawn]) / 2.0**23)[:, None]
    values = f32(np.arange(1024, 2048) / 1024.0)
    for exponent in (8, 7, 0, -6, -7, -9, -10):
        x = values[None, :] * np.float32(2.0**exponent)
        s = np.broadcast_to(scales, (len(scales), x.shape[1]))
        x = np.broadcast_to(x, s.shape)
        assert (codes(quotients(x, s.copy(), guess_error)) == codes(x / s)).all()


def test_zeros_keep_their_sign():
    zeros = np.array([0.0, -0.0], np.float32)
    found = quotients(zeros, np.array([1.0, 1.7], np.float32), 0)
    assert (np.signbit(found) == [False, True]).all()


# The Hadamard transform: the kernel's own steps with lanes as the entries of arrays.

LANE = np.arange(32)
ROW, QUAD = LANE // 4, LANE % 4


class Pair:
    """A packed pair of every lane."""

    def __init__(self, low, high):
        self.low, self.high = low, high

    def __xor__(self, flip):
        assert flip in (0, hadamard.FLIP)
        return Pair(-self.low, -self.high) if flip else self


def multiply(a, b, c):
    """mma.m16n8k16 by the fragment layouts of the PTX manual."""
    A, B = np.zeros((16, 16)), np.zeros((16, 8))
    for word, (row, column) in zip(a, ((0, 0), (8, 0), (0, 8), (8, 8)), strict=True):
        A[ROW + row, column + 2 * QUAD], A[ROW + row, column + 2 * QUAD + 1] = word.low, word.high
    for word, row in zip(b, (0, 8), strict=True):
        B[row + 2 * QUAD, ROW], B[row + 2 * QUAD + 1, ROW] = word.low, word.high
    C = A @ B
    return [C[ROW + 8 * (i // 2), 2 * QUAD + i % 2] + c[i] for i in range(4)]


def operand(size):
    k, n = 2 * QUAD, ROW
    low, high = (1.0 - 2.0 * hadamard.is_negative(k + e, n) for e in range(2))
    same = (k // 4 == n // 4) | (size == hadamard.COLUMNS)
    return Pair(low * same, high * same)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_hadamard_transform(head_dim):
    groups = -(-head_dim // hadamard.COLUMNS)
    rows = np.zeros((8, groups * hadamard.COLUMNS))
    rows[:, :head_dim] = np.random.default_rng(0).integers(-99, 99, (8, head_dim))

    def columns(group):
        return hadamard.COLUMNS * group + 8 * QUAD

    def fragments(group):
        first = columns(group)
        pairs = [Pair(rows[ROW, first + 2 * i], rows[ROW, first + 2 * i + 1]) for i in range(4)]
        return [pairs[:], [Pair(0 * p.low, 0 * p.high) for p in pairs]]  # a sum of chunks

    operands = {size: operand(size) for size in hadamard.sizes(head_dim)}
    values = hadamard.transform(fragments, head_dim, operands, multiply)
    found, weights = np.zeros_like(rows), hadamard.normalisers(head_dim)
    for group in range(groups):
        for i in range(8):
            found[ROW, columns(group) + i] = values[group][i] * weights[group]
    want = rows[:, :head_dim] @ reference.matrix(head_dim, torch.ones(head_dim)).numpy()
    np.testing.assert_allclose(found[:, :head_dim], want, rtol=0, atol=1e-10)


# The fitted scale: the kernel's own sums with the CTA's threads as the entries of arrays.


@pytest.mark.parametrize("by_row", [True, False])
def test_fitted_scale(monkeypatch, by_row):
    thread = np.arange(THREADS)
    rows = torch.randn(1, config.BLOCK, 1, 64, generator=torch.Generator().manual_seed(0))
    rows[:, 3], rows[:, 50:] = 5 * rows[:, 3], 0  # one that is longer, some that are beyond the end
    granularity = formats.PER_ROW if by_row else formats.PER_BLOCK
    want_codes, want = cast.quantize(rows, granularity, True)
    plain = cast.scale_of(rows, granularity)[0, 0].numpy()[thread // 4 if by_row else 0 * thread]
    quotients = cast.divide(rows, torch.from_numpy(plain[::4])[None, None], formats.PER_ROW)
    y, near = (x[0, :, 0].numpy() for x in (quotients, want_codes.float()))

    def chunk(x, group):  # of every thread
        first = hadamard.COLUMNS * group + 8 * (thread % 4)
        return [x[thread // 4, first + i] for i in range(8)]

    monkeypatch.setattr(qk, "unpack_e4m3", lambda word: word)
    monkeypatch.setattr(qk.cute.arch, "shuffle_sync_bfly", lambda x, distance: x[thread ^ distance])
    monkeypatch.setattr(qk.cute, "make_tensor", lambda *_: None)
    monkeypatch.setattr(qk, "sums_of_warps", lambda _, values, __: [x[::32].sum() for x in values])
    for name, function in (("rcp_approx", lambda x: 1 / x), ("fmax", lambda a, b, nan=False: np.maximum(a, b)),
                           ("fmin", np.minimum)):  # fmt: skip
        monkeypatch.setattr(scale.cute.arch, name, function)
    length = along = np.float32(0.0)
    for values, codes_of in ((chunk(y, g), chunk(near, g)) for g in range(2)):
        length, along = qk._length_and_along(values, [codes_of[:4], codes_of[4:]], length, along)
    length, along = qk._over_lanes([length, along], (1, 2))
    if by_row:
        found = scale.fitted(plain, length, along)
    else:
        shared = SimpleNamespace(iterator=0)
        found = qk.RowBlock(None, None, None, shared, thread, None, None).fitted_to_block(plain, length, along)
    np.testing.assert_allclose(found, want[0, 0].numpy()[thread // 4 if by_row else 0 * thread], rtol=1e-6)
    assert (np.abs(found[plain > 0] / plain[plain > 0] - 1) > 1e-5).mean() > 0.9


# V: who holds which key, where shared memory has it, who stores it.


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
def test_keys_arrive_in_packed_order(head_dim):
    memory = np.full((head_dim * v.ROW_WORDS, 4, 2), -1)  # word, byte -> (key, column)
    thread = np.arange(THREADS)
    tile = v.KeyTile(None, None, None, thread, head_dim, None)
    for slab in range(tile.slabs):
        for i in range(8):
            column = v.SLAB * slab + 8 * tile.chunk + i
            here = column < head_dim
            word = v.slot(column, tile.group, tile.quad)
            for warp in range(THREADS // 32):
                lanes = here & (thread // 32 == warp)
                assert len(set(word[lanes] % 32)) == lanes.sum(), "bank conflict"
            for key in range(4):
                row = v.GROUP * tile.group + v.key_of(tile.quad, key)
                memory[word[here], key] = np.stack([row, column], -1)[here]
    assert (memory >= 0).all()
    pieces = KEYS // v.PIECE
    for column in range(head_dim):
        words = [v.slot(column, piece, 0) + i for piece in range(pieces) for i in range(4)]
        assert len({w % 32 for w in words}) == 32, "bank conflict"
        found = memory[words].reshape(KEYS, 2)
        keys = [v.GROUP * group + key for group in range(KEYS // v.GROUP) for key in formats.KEY_ORDER]
        assert (found[:, 0] == keys).all() and (found[:, 1] == column).all()


def test_a_block_is_what_its_warps_hold():
    """The warps whose largest values are put together hold the 64 keys of one scale."""
    warps = config.WARPS * config.BLOCK // KEYS
    groups = np.arange(config.WARPS)
    assert (groups // warps == groups * v.GROUP // config.BLOCK).all()


def test_bytes_are_transposed(monkeypatch):
    """prmt as the PTX manual has it: digit i of the selection names the byte (of eight) that becomes byte i."""

    def prmt(a, b, selection):
        source = [*a, *b]
        return tuple(source[selection >> 4 * i & 7] for i in range(4))

    monkeypatch.setattr(v, "_bytes", prmt)
    rows = [tuple((key, column) for column in range(4)) for key in range(4)]
    assert v.transposed(rows) == [tuple((key, column) for key in range(4)) for column in range(4)]
