"""fa3.quant.interface on CPU tensors, and every error of it."""

import pytest
import torch

from fa3.quant import cast, launch, reference
from fa3.quant.formats import E4M3
from fa3.quant.interface import pack_v, quantize_qkv


def inputs(dtype=torch.bfloat16, seqlen_q=70, seqlen_k=90, heads=4, heads_kv=2, head_dim=64, head_dim_v=80):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, seqlen_q, heads, head_dim), (2, seqlen_k, heads_kv, head_dim), (2, seqlen_k, heads_kv, head_dim_v)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def tables(positions=100, dim=32):
    angle = torch.arange(positions)[:, None] / torch.arange(1, dim // 2 + 1)
    return angle.cos(), angle.sin()


def assert_same(a, b):
    for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale"):
        x, y = getattr(a, name), getattr(b, name)
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)), name
    assert (a.seqlen_k, a.dtype, a.rotated) == (b.seqlen_k, b.dtype, b.rotated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cpu_tensors_take_the_reference(dtype):
    x = inputs(dtype)
    cos, sin = tables()
    assert_same(quantize_qkv(*x), reference.quantize_qkv(*x))
    assert_same(quantize_qkv(*x, rotate=False, q_rows=1), reference.quantize_qkv(*x, rotate=False, q_rows=1))
    want = reference.quantize_qkv(*x, seed=5, rotary=reference.Rotary(cos, sin, True, 20))
    told = dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=True, rotary_q_offset=20)
    assert_same(quantize_qkv(*x, seed=5, **told), want)


def test_packing_on_cpu():
    v = inputs()[2].to(E4M3.dtype)
    assert torch.equal(pack_v(v).view(torch.uint8), cast.pack_v(v).view(torch.uint8))


def changed(index, change):
    x = inputs()
    x[index] = change(x[index])
    return x


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (changed(0, lambda q: q.tolist()), TypeError, "q must be a torch.Tensor"),
        (changed(1, lambda k: k.half()), ValueError, "k is torch.float16"),
        (changed(0, lambda q: q.int()), TypeError, "q has dtype torch.int32 on cpu"),
        (changed(2, lambda v: v.to("meta")), ValueError, "v is torch.bfloat16 on meta"),
        (changed(0, lambda q: q[0]), ValueError, "q must have 4 dimensions"),
        (changed(0, lambda q: q[..., :40]), ValueError, "q has head_dim 40; allowed: multiples of 16"),
        (changed(1, lambda k: k[..., :48]), ValueError, "k must have the head_dim of q, 64, got 48"),
        (changed(2, lambda v: v[:, :-1]), ValueError, "k and v must have one batch"),
        (changed(0, lambda q: q[:1]), ValueError, "q's batch, 1"),
        (changed(0, lambda q: q[:, :, :3]), ValueError, "q has 3 heads"),
        (changed(1, lambda k: k[:, :, :0]), ValueError, "k has no heads"),
        (changed(0, lambda q: q.transpose(1, 3).contiguous().transpose(1, 3)), ValueError, "q has stride 280"),
        (changed(0, lambda q: q[:, :, :0]), ValueError, "q has no heads"),
        (changed(0, lambda q: q.to_sparse()), TypeError, "q must be a dense"),
    ],
)
def test_wrong_tensors(arguments, error, message):
    with pytest.raises(error, match=message):
        quantize_qkv(*arguments)


COS, SIN = tables()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(rotate=1), TypeError, "rotate must be True or False, got 1"),
        (dict(seed=0.5), TypeError, "seed must be an int, got 0.5"),
        (dict(q_rows=32), ValueError, "q_rows is 32; allowed: 1 and 64"),
        (dict(rotary_cos=COS), TypeError, "rotary_sin must be a torch.Tensor"),
        (dict(rotary_cos=COS, rotary_sin=SIN.half()), ValueError, "rotary_sin is torch.float16"),
        (dict(rotary_cos=COS.bfloat16(), rotary_sin=SIN), ValueError, "allowed: one type"),
        (dict(rotary_cos=COS[:, :5], rotary_sin=SIN[:, :5]), ValueError, "a multiple of 16 up to head_dim, 64"),
        (dict(rotary_cos=COS[:80], rotary_sin=SIN[:80]), ValueError, "cos has 80 rows"),
        (dict(rotary_cos=COS, rotary_sin=SIN, rotary_q_offset=31), ValueError, "need 101 rows"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        quantize_qkv(*inputs(), **options)


def test_wrong_v():
    with pytest.raises(TypeError, match="v is torch.bfloat16; allowed: torch.float8_e4m3fn"):
        pack_v(inputs()[2])


def test_what_is_copied():
    """Rows that do not start at multiples of 16 bytes; of one-element dimensions the stride is changed instead."""
    x = torch.zeros(2, 6, 3, 32, dtype=torch.bfloat16)
    assert launch.aligned(x) is x
    odd = torch.zeros(2, 6, 3, 36, dtype=torch.bfloat16)[..., :32]
    assert launch.aligned(odd).is_contiguous()
    shifted = torch.zeros(2 * 6 * 3 * 32 + 1, dtype=torch.bfloat16)[1:].view(2, 6, 3, 32)
    assert launch.aligned(shifted).data_ptr() % 16 == 0
    single = x.as_strided((1, 6, 3, 32), (7, 96, 32, 1))
    fitted = launch.aligned(single)
    assert fitted.data_ptr() == x.data_ptr() and fitted.stride() == (8, 96, 32, 1)
