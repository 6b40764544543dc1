"""torch.ops.fa3.forward on CPU: opcheck, fake = real for any layout, torch.compile, export, no derivative."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

import fa3
from fa3 import ops
from fa3.testing.inputs import LAYOUTS, Case, make

OP = torch.ops.fa3.forward.default
DTYPES = ["bfloat16", "float16", "float32", "float64"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def case(**changes):
    sizes = dict(batch=2, seqlen_q=13, seqlen_k=21, heads_kv=2, ratio=2, head_dim=64, head_dim_v=40, causal=True)
    return Case(**{**sizes, **changes})


def looks(tensors):
    return [(x.shape, x.dtype, x.stride(), x.device.type) for x in tensors]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype, layout):
    q, k, v = make(case(dtype=dtype, layout=layout), "cpu")
    results = torch.library.opcheck(OP, (q, k, v, 0.1, True))
    assert len(results) == 4 and set(results.values()) == {"SUCCESS"}


def test_opcheck_of_mixed_layouts():
    """q and v stored (B, S, H, D), k stored (B, H, S, D)."""
    for ratio in (1, 4):
        q, k, v = make(case(dtype="float16", seqlen_q=37, seqlen_k=37, ratio=ratio, head_dim_v=64), "cpu")
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        assert set(torch.library.opcheck(OP, (q, k, v, 0.1, False)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("sizes", [{}, dict(batch=0), dict(seqlen_q=0), dict(seqlen_k=0), dict(ratio=0), dict(ratio=1)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "packed", "misaligned"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_looks_like_real(dtype, layout, sizes):
    inputs = make(case(dtype=dtype, layout=layout, **sizes), "cpu")
    real = OP(*inputs, 0.1, True)
    fake_mode = FakeTensorMode()
    assert looks(OP(*(fake_mode.from_tensor(x) for x in inputs), 0.1, True)) == looks(real)
    meta = OP(*(x.to("meta") for x in inputs), 0.1, True)
    assert [look[:3] for look in looks(meta)] == [look[:3] for look in looks(real)]
    assert real[1].dtype == ops.lse_dtype(inputs.q.dtype) and all(x.is_contiguous() for x in real)


def test_fake_cuda_tensors_need_no_gpu():
    with FakeTensorMode():
        q = torch.empty(2, 128, 8, 128, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(2, 64, 2, width, dtype=torch.bfloat16, device="cuda") for width in (128, 72))
        out, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
        assert looks((out, lse)) == [
            ((2, 128, 8, 72), torch.bfloat16, (128 * 8 * 72, 8 * 72, 72, 1), "cuda"),
            ((2, 8, 128), torch.float32, (8 * 128, 128, 1), "cuda"),
        ]
        with pytest.raises(TypeError, match="float32 on cuda"):
            fa3.flash_attn_func(q.float(), k.float(), v.float())
        with pytest.raises(ValueError, match="q 8 and k, v 3"):
            fa3.flash_attn_func(q, *(torch.empty(2, 64, 3, 128, dtype=q.dtype, device="cuda") for _ in range(2)))


def attend(q, k, v):
    """Work around the operator, so that there is a graph to break."""
    out, lse = fa3.flash_attn_func(q * 2, k, v, causal=True, return_lse=True)
    return out + 1, lse.exp()


def assert_same(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "packed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compile_makes_one_graph(dtype, layout):
    inputs = make(case(dtype=dtype, layout=layout), "cpu")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    assert_same(compiled(*inputs), attend(*inputs))
    assert_same(compiled(*inputs), attend(*inputs))
    assert counter.frame_count == 1
    assert "fa3.forward" in counter.graphs[0].code


@pytest.mark.parametrize("dynamic", [True, None])
def test_new_lengths_compile_at_most_twice(dynamic):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=dynamic)
    for seqlen in (128, 200, 333):
        inputs = make(case(seqlen_q=seqlen, seqlen_k=seqlen), "cpu")
        assert_same(compiled(*inputs), attend(*inputs))
    assert counter.frame_count <= 2


def test_packed_and_default_scale_compile():
    def packed(qkv):
        return fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=4)

    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True, dynamic=True)
    for seqlen in (9, 17):
        qkv = torch.randn(1, seqlen, 8, 32, dtype=torch.bfloat16)
        assert_same([compiled(qkv)], [packed(qkv)])


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_keeps_the_strides_of_eager():
    """A projection feeds strided views: a relaid input could lose its contiguous last dimension."""

    def layer(x, weight):
        qkv = (x @ weight).view(1, -1, 3, 2, 64)
        return fa3.flash_attn_qkvpacked_func(qkv + 1, causal=True) * 2

    x, weight = torch.randn(1, 19, 32), torch.randn(32, 3 * 2 * 64)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x, weight), layer(x, weight), rtol=1e-4, atol=1e-4)


def test_export():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v)

    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    shapes = {name: {1: seqlen} for name in "qkv"}
    inputs = make(case(seqlen_q=32, seqlen_k=32), "cpu")
    program = torch.export.export(Attention(), tuple(inputs), dynamic_shapes=shapes)
    assert "fa3.forward" in program.graph_module.code
    other = make(case(seqlen_q=47, seqlen_k=47, seed=1), "cpu")
    assert_same(program.module()(*other), attend(*other))


def test_errors_keep_their_words_under_compile():
    q, k, v = make(case(), "cpu")
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="head_dim of q, 64, got 56"):
        compiled(q, k[..., :56], v)
    assert_same(compiled(q, k, v), attend(q, k, v))


def test_the_operator_itself_refuses_gradients():
    q, k, v = make(case(), "cpu")
    wanted = OP(q, k, v, 0.1, True)
    tracked = q.clone().requires_grad_(True)
    for call in (
        lambda: OP(tracked, k, v, 0.1, True),
        lambda: torch.ops.fa3.forward(k.repeat(1, 1, 2, 1), k, tracked.mT.mT[:, :, :2], 0.1, True),
    ):
        with pytest.raises(NotImplementedError, match="gradient"):
            call()
    with torch.no_grad():
        assert_same(OP(tracked, k, v, 0.1, True), wanted)
    with pytest.raises(NotImplementedError, match="gradient"):
        torch.func.grad(lambda x: OP(x, k, v, 0.1, True)[0].sum())(q)
    with pytest.raises(NotImplementedError, match="tangent"):
        torch.func.jvp(lambda x: OP(x, k, v, 0.1, True), (q,), (torch.ones_like(q),))
    with FakeTensorMode() as mode, pytest.raises(NotImplementedError, match="gradient"):
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        OP(fakes[0].requires_grad_(True), *fakes[1:], 0.1, True)
    with pytest.raises(Exception, match="requires a gradient"):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(tracked, k, v)
    assert_same(OP(q, k, v, 0.1, True), wanted)


def test_vmap_runs_every_slice():
    q, k, v = make(case(batch=3), "cpu")
    stacked = [x.unsqueeze(1) for x in (q, k, v)]
    got = torch.vmap(lambda q, k, v: OP(q, k, v, 0.1, True))(*stacked)
    assert_same([x.squeeze(1) for x in got], OP(q, k, v, 0.1, True))


def test_a_tensor_of_another_layout_is_named():
    q, k, v = make(case(dtype="float32"), "cpu")
    with pytest.raises(TypeError, match="k must be a dense"):
        OP(q, k.to_sparse(), v, 0.1, True)
