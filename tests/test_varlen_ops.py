"""torch.ops.fa3.forward_varlen and forward_varlen_out on CPU: opcheck, fake = real, torch.compile, export."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fa3
from fa3 import ops_varlen
from fa3.testing.inputs import Inputs, lay_out
from tests.ragged import make

NEW, INTO = ops_varlen._forward, ops_varlen._forward_out
SIZES = dict(heads_kv=2, ratio=2, head_dim_v=40)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def arguments(*lengths, layout="contiguous", **options):
    x = make(*lengths, **SIZES, **options)
    q, k, v = (t[0] for t in lay_out(Inputs(x.q[None], x.k[None], x.v[None]), layout))
    return q, k, v, x.cu_q, x.cu_k, x.used_q, x.used_k, *x.bounds, 0.1, True


def place(q, v):
    return torch.full((*q.shape[:2], v.shape[2]), 7.0, dtype=q.dtype)


def looks(tensors):
    return [(x.shape, x.dtype, x.stride()) for x in tensors]


def assert_same(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("used", [{}, dict(room_k=[9, 22]), dict(room_q=[5, 13], room_k=[9, 22])])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_opcheck(dtype, used):
    given = arguments([5, 13], [8, 21], dtype=dtype, **used)
    assert set(torch.library.opcheck(NEW, given).values()) == {"SUCCESS"}
    assert set(torch.library.opcheck(INTO, (*given, place(given[0], given[2]))).values()) == {"SUCCESS"}


@pytest.mark.parametrize("lengths", [([5, 13], [8, 21]), ([], []), ([0, 0], [3, 4]), ([3, 4], [0, 0])])
@pytest.mark.parametrize("layout", ["contiguous", "packed", "misaligned"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_fake_looks_like_real(dtype, layout, lengths):
    given = arguments(*lengths, dtype=dtype, layout=layout)
    real = NEW(*given)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given]
    assert looks(NEW(*fakes)) == looks(real)
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in given]
    assert [look[:2] for look in looks(NEW(*meta))] == [look[:2] for look in looks(real)]
    assert looks([INTO(*given, place(given[0], given[2]))]) == looks(real[1:])


def test_fake_cuda_tensors_need_no_gpu():
    with FakeTensorMode():
        q = torch.empty(100, 8, 128, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(64, 2, width, dtype=torch.bfloat16, device="cuda") for width in (128, 72))
        cu = torch.empty(5, dtype=torch.int32, device="cuda")
        longest = cu.max()  # whose value nobody knows
        out, lse = fa3.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, return_lse=True)
        assert looks((out, lse)) == [((100, 8, 72), q.dtype, (576, 72, 1)), ((8, 100), torch.float32, (100, 1))]
        with pytest.raises(TypeError, match="cu_seqlens_k.*int64.*torch.int32"):
            fa3.flash_attn_varlen_func(q, k, v, cu, cu.long(), longest, longest)
        with pytest.raises(TypeError, match="float32 on cuda"):
            fa3.flash_attn_varlen_func(q.float(), k.float(), v.float(), cu, cu, None, None)


def test_a_symbolic_bound_gets_no_guard():
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment) as mode:
        x = make([5, 13], [8, 21], **SIZES)
        given = [mode.from_tensor(t) for t in (x.q, x.k, x.v, x.cu_q, x.cu_k)]
        bound = environment.create_unbacked_symint()
        out = fa3.flash_attn_varlen_func(*given, bound, bound)
        assert out.shape == (18, 4, 40)


def attend(q, k, v, cu_q, cu_k, max_q, max_k):
    """Work around the operator, so that there is a graph to break."""
    out, lse = fa3.flash_attn_varlen_func(q * 2, k, v, cu_q, cu_k, max_q, max_k, causal=True, return_lse=True)
    return out + 1, lse.exp()


def into(q, k, v, cu_q, cu_k, max_q, max_k, out):
    q = q * 2
    made = fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, out=out)
    return made + 1, out * 2


def call_of(*lengths, **options):
    x = make(*lengths, **SIZES, **options)
    return x.q, x.k, x.v, x.cu_q, x.cu_k, *x.bounds


LENGTHS = [([5, 13], [8, 21]), ([40, 88], [70, 3]), ([100, 100], [333, 0]), ([7, 0], [1, 1])]


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("bounds", ["int", "tensor", "none"])
def test_new_lengths_compile_at_most_twice(dynamic, bounds):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=dynamic)
    for lengths in LENGTHS:
        *tensors, max_q, max_k = call_of(*lengths, dtype="float32")  # other bounds may mean other tiles
        kind = {"int": lambda n: n, "tensor": torch.tensor, "none": lambda n: None}[bounds]
        assert_same(compiled(*tensors, kind(max_q), kind(max_k)), attend(*tensors, max_q, max_k))
    assert counter.frame_count <= 2
    assert "fa3.forward_varlen" in counter.graphs[-1].code


def test_new_numbers_of_sequences_compile_at_most_twice():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    for batch in (2, 3, 5, 9):
        given = call_of([7] * batch, [11] * batch)
        assert_same(compiled(*given), attend(*given))
    assert counter.frame_count <= 2


def test_a_given_out_is_written_in_the_compiled_function_too():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(into, backend=counter, fullgraph=True)
    for lengths in LENGTHS[:2]:
        given = call_of(*lengths)
        places = [place(given[0], given[2]) for _ in range(2)]
        assert_same(compiled(*given, places[0]), into(*given, places[1]))
        assert_same(places[:1], places[1:])
    assert counter.frame_count <= 2


def test_export():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, cu_q, cu_k):
            return attend(q, k, v, cu_q, cu_k, None, None)

    total_q, total_k, edges = (torch.export.Dim(name, min=2, max=4096) for name in ("total_q", "total_k", "edges"))
    shapes = dict(q={0: total_q}, k={0: total_k}, v={0: total_k}, cu_q={0: edges}, cu_k={0: edges})
    program = torch.export.export(Attention(), call_of([5, 13, 2], [8, 21, 5])[:5], dynamic_shapes=shapes)
    assert "fa3.forward_varlen" in program.graph_module.code
    for lengths in LENGTHS:
        *other, _, _ = call_of(*lengths, seed=1)
        assert_same(program.module()(*other), attend(*other, None, None))


def test_errors_keep_their_words_under_compile():
    *tensors, max_q, max_k = call_of([5, 13], [8, 21])
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"cu_seqlens_q.*int64.*torch.int32"):
        compiled(*tensors[:3], tensors[3].long(), tensors[4], max_q, max_k)
    assert_same(compiled(*tensors, max_q, max_k), attend(*tensors, max_q, max_k))


@pytest.mark.parametrize("which", range(3))
def test_the_operators_themselves_refuse_derivatives(which):
    given = list(arguments([5, 13], [8, 21], dtype="float32"))
    out = place(given[0], given[2])
    wanted = NEW(*given)
    tracked = [*given]
    tracked[which] = given[which].clone().requires_grad_(True)
    for call in (lambda: NEW(*tracked), lambda: INTO(*tracked, out)):
        with pytest.raises(NotImplementedError, match="gradient"):
            call()
        with torch.no_grad():
            call()
    assert (out != 7.0).all()
    assert_same(NEW(*given), wanted)

    def of_one(x):
        return NEW(*given[:which], x, *given[which + 1 :])

    with pytest.raises(NotImplementedError, match="gradient"):
        torch.func.grad(lambda x: of_one(x)[0].sum())(given[which])
    with pytest.raises(NotImplementedError, match="tangent"):
        torch.func.jvp(of_one, (given[which],), (torch.ones_like(given[which]),))


def test_vmap_runs_every_slice():
    given = arguments([5, 13], [8, 21])
    stacked = [torch.stack([x, -x]) for x in given[:3]]
    got = torch.vmap(lambda q, k, v: NEW(q, k, v, *given[3:]))(*stacked)
    for i, sign in enumerate((1, -1)):
        assert_same([x[i] for x in got], NEW(*(sign * x for x in given[:3]), *given[3:]))


def test_a_tensor_of_another_layout_is_named():
    given = arguments([5, 13], [8, 21], dtype="float32")
    with pytest.raises(TypeError, match="k must be a dense"):
        NEW(given[0], given[1].to_sparse(), *given[2:])
