"""The FP8 operators on CPU (opcheck, fake = real, torch.compile, no derivative) and the launch with a recorder in the
kernel's place and CPU tensors in the GPU's.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

import fa3
from fa3 import launch, launch_fp8, ops, ops_fp8
from fa3.device import ASSUMED, named
from fa3.kernels.forward.config import FP8, Config, Spec
from fa3.quant import QuantizedQKV, from_descales, quantize_qkv
from fa3.quant.prepare import BEYOND, prepare
from fa3.testing.inputs import Case, make
from tests.launch_recorder import Recorder

E4M3 = torch.float8_e4m3fn
QUANTIZE, PACK = torch.ops.fa3.quantize_qkv.default, torch.ops.fa3.pack_v.default
FORWARD, ROW_MAJOR = torch.ops.fa3.forward_fp8.default, ops._forward


def tensors(dtype="bfloat16", **changes):
    sizes = dict(batch=2, seqlen_q=70, seqlen_k=90, heads_kv=2, ratio=2, head_dim=64, head_dim_v=80)
    return make(Case(**{"dtype": dtype, **sizes, **changes}), "cpu")


def row_major(**changes):
    return [x.to(E4M3) for x in tensors(**changes)]


def quantized(**changes) -> QuantizedQKV:
    return quantize_qkv(*tensors(**changes))


def arguments(x: QuantizedQKV, scale=0.1, causal=True, accumulation="accurate"):
    codes = (x.q, x.k, x.v, x.q_scale, x.k_scale, x.v_scale, x.v_channel_scale)
    return (*codes, x.dtype, scale, causal, accumulation)


def bits(x):
    return x.view(torch.uint8) if x.dtype == E4M3 else x


def assert_same(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(bits(x), bits(y))


def looks(results):
    results = results if isinstance(results, tuple) else (results,)
    return [(tuple(x.shape), x.dtype, x.stride(), x.device.type) for x in results]


COS = torch.rand(90, 16)
CALLS = {
    "quantize": lambda: (QUANTIZE, (*tensors(), True, 3, None, None, False, 0, 64)),
    "quantize by row": lambda: (QUANTIZE, (*tensors("float16"), False, 0, COS, COS, True, 5, 1)),
    "quantize strided": lambda: (QUANTIZE, (*tensors(layout="transposed"), True, 0, None, None, False, 0, 64)),
    "pack": lambda: (PACK, (row_major()[2],)),
    "forward": lambda: (FORWARD, arguments(quantized())),
    "forward fast": lambda: (FORWARD, arguments(quantized(dtype="float16"), causal=False, accumulation="fast")),
    "channels": lambda: (FORWARD, arguments(replace(quantized(), v_channel_scale=torch.rand(2, 2, 80)))),
    "row-major": lambda: (ROW_MAJOR, (*row_major(), 0.1, True)),
    "one row": lambda: (FORWARD, arguments(quantized(seqlen_q=1, seqlen_k=1))),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture
def comparable(monkeypatch):
    """opcheck asks whether the inputs have kept their bits by torch.allclose, which does not know float8."""
    real = torch.allclose
    monkeypatch.setattr(torch, "allclose", lambda a, b, **named: real(a.float(), b.float(), **named))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_opcheck(call, comparable):
    results = torch.library.opcheck(*call())
    assert len(results) == 4 and set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_fake_looks_like_real(call):
    operator, args = call()
    real = operator(*args)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
    assert looks(operator(*fakes)) == looks(real)
    meta = operator(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in args))
    assert [look[:3] for look in looks(meta)] == [look[:3] for look in looks(real)]


def whole(q, k, v):
    out, lse = fa3.flash_attn_fp8_func(q * 2, k, v, causal=True, return_lse=True)
    return out + 1, lse.exp()


def apart(q, k, v):
    x = fa3.quant.quantize_qkv(q, k, v, rotate=False, q_rows=1)
    return fa3.flash_attn_quantized_func(x, causal=True), fa3.flash_attn_quantized_func(x, 0.2, accumulation="fast")


def descaled(q, k, v):
    q, k, v = (x.to(E4M3) for x in (q, k, v))
    descale = torch.full((2, 2), 0.5)
    return fa3.flash_attn_func(q, k, v, causal=True) + fa3.flash_attn_func(q, k, v, k_descale=descale), descale


@pytest.mark.parametrize("dynamic", [False, True, None])
@pytest.mark.parametrize("function", [whole, apart, descaled])
def test_compile_makes_one_graph(function, dynamic):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic)
    lengths = (70,) if dynamic is False else (70, 200, 333)
    for seqlen in lengths:
        inputs = tensors(seqlen_q=seqlen, seqlen_k=seqlen)
        assert_same(compiled(*inputs), function(*inputs))
    assert counter.frame_count <= min(2, len(lengths))
    # A symbolic scale makes the compiler start over: the first graph is left empty.
    assert "fa3." in counter.graphs[-1].print_readable(print_output=False)


def test_errors_keep_their_words_under_compile():
    q, k, v = tensors()
    compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="q has head_dim 40; allowed: multiples of 16"):
        compiled(q[..., :40], k[..., :40], v)
    assert_same(compiled(q, k, v), whole(q, k, v))


def test_gradients_are_refused():
    q, k, v = tensors()
    x = quantized()
    wanted = whole(q, k, v)
    tracked = q.clone().requires_grad_(True)
    scale = x.k_scale.clone().requires_grad_(True)
    calls = [
        lambda: fa3.flash_attn_fp8_func(tracked, k, v),
        lambda: QUANTIZE(tracked, k, v, True, 0, None, None, False, 0, 64),
        lambda: fa3.flash_attn_quantized_func(replace(x, k_scale=scale)),
        lambda: torch.func.grad(lambda t: fa3.flash_attn_fp8_func(t, k, v).sum())(q),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match="gradient"):
            call()
    with pytest.raises(NotImplementedError, match="tangent"):
        torch.func.jvp(lambda t: fa3.flash_attn_fp8_func(t, k, v), (q,), (torch.ones_like(q),))
    with pytest.raises(Exception, match="requires a gradient"):
        torch.compile(whole, backend="aot_eager", fullgraph=True)(tracked, k, v)
    with torch.no_grad():
        assert_same(whole(tracked, k, v), wanted)


def test_export():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return whole(q, k, v)

    seqlen = torch.export.Dim("seqlen", min=65, max=4096)  # more than one block of scales
    program = torch.export.export(
        Attention(), tuple(tensors(seqlen_k=70)), dynamic_shapes={n: {1: seqlen} for n in "qkv"}
    )
    other = tensors(seqlen_q=90, seqlen_k=90, seed=1)
    assert_same(program.module()(*other), whole(*other))


# Launch


@pytest.fixture
def recorder(monkeypatch):
    return Recorder().replace(monkeypatch, launch, launch_fp8)


def test_what_the_kernel_is_called_with(recorder):
    x = quantized(dtype="float16", head_dim=80, head_dim_v=48)
    out, lse = launch_fp8.forward(x, 0.25, True, "accurate")
    (call,) = recorder.calls
    assert call.q is x.q and call.k is x.k and call.v is x.v and call.out is out and call.lse is lse
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 70, 4, 48), torch.float16, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 4, 70), torch.float32, True)
    assert call.scale_log2 == pytest.approx(0.25 * math.log2(math.e), rel=1e-12)
    assert call.num_sms == ASSUMED.num_sms and call.v_channel is call.tickets is None
    wanted = prepare(x)
    assert len(call.scales) == 4 and call.scales[3] == 1
    assert_same(call.scales[:3], (wanted.q_scale, wanted.kv, wanted.v_max))
    assert recorder.loaded == [(Spec(FP8, 96, 96, True, "float16"), Config(2, 128, promotion=1, pingpong=False))]


def test_every_choice_is_planned_apart_and_only_once(recorder):
    x = quantized(head_dim=256, head_dim_v=256)
    channels = replace(x, v_channel_scale=torch.ones(2, 2, 256))
    by_block = quantize_qkv(*tensors(head_dim=256, head_dim_v=256), q_rows=64)
    for _ in range(2):
        launch_fp8.forward(x, 0.1, False, "accurate")
        launch_fp8.forward(x, 0.1, True, "accurate")
        launch_fp8.forward(x, 0.1, False, "fast")
        launch_fp8.forward(channels, 0.1, False, "accurate")
        launch_fp8.forward(replace(x, dtype=torch.float16), 0.1, False, "accurate")
        launch_fp8.forward(by_block, 0.1, False, "accurate")
    assert len(recorder.loaded) == 6 and len(recorder.calls) == 12
    causal, promotion = zip(*((s.causal, c.promotion) for s, c in recorder.loaded))
    assert causal == (False, True, False, False, False, False) and promotion == (1, 1, 0, 1, 1, 1)
    assert [s.v_channel_scale for s, _ in recorder.loaded] == [False, False, False, True, False, False]
    assert recorder.calls[3].v_channel is channels.v_channel_scale and recorder.calls[5].scales[3] == 64


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(k_scale=torch.ones(2, 2, 1)), ValueError, r"k_scale has shape \(2, 2, 1\); allowed: \(2, 2, 2\)"),
        (dict(q_scale=torch.ones(2, 4, 2).double()), TypeError, "q_scale has dtype torch.float64"),
        (dict(v_scale=torch.ones(2, 2, 2, device="meta")), ValueError, "v_scale is on meta"),
        (dict(seqlen_k=91), ValueError, "k has shape"),
        (dict(dtype=torch.int8), TypeError, "dtype is torch.int8"),
    ],
)
def test_a_wrong_record_after_a_right_one(recorder, change, error, message):
    x = quantized()
    launch_fp8.forward(x, 0.1, False, "accurate")
    with pytest.raises(error, match=message):
        launch_fp8.forward(replace(x, **change), 0.1, False, "accurate")
    assert len(recorder.calls) == 1


def test_what_the_kernel_refuses_is_said_in_words(recorder):
    x = quantized()
    launch_fp8.forward(x, 0.1, False, "accurate")
    turned = replace(x, q=x.q.transpose(1, 3).contiguous().transpose(1, 3))
    with pytest.raises(ValueError, match="q has stride 280 in its last dimension.*q.contiguous"):
        launch_fp8.forward(turned, 0.1, False, "accurate")


def test_strides_that_tma_cannot_take_are_copied_and_others_are_not(recorder):
    x = quantized(heads_kv=1)
    odd = torch.zeros(2, 70, 2, 72, dtype=torch.uint8).view(E4M3)[..., 8:]
    odd.copy_(x.q)
    one_head = x.k.as_strided(x.k.shape, (x.k.stride(0), x.k.stride(1), 1, 1))
    expanded = x.v[:1].expand(2, -1, -1, -1)
    launch_fp8.forward(replace(x, q=odd, k=one_head, v=expanded), 0.1, False, "accurate")
    (call,) = recorder.calls
    assert call.q.data_ptr() != odd.data_ptr() and torch.equal(bits(call.q), bits(x.q))
    assert call.k.data_ptr() == x.k.data_ptr() and torch.equal(bits(call.k), bits(x.k))
    assert call.v is expanded


def test_a_dynamic_grid_gets_a_counter_of_its_own_in_every_call(recorder):
    x = quantized(batch=1, seqlen_q=512, seqlen_k=16, heads_kv=264, ratio=1, head_dim=16, head_dim_v=16)
    for _ in range(2):
        launch_fp8.forward(x, 0.1, False, "accurate")
    first, second = (call.tickets for call in recorder.calls)
    assert recorder.loaded[0][1].dynamic and first is not second
    assert all(t.tolist() == [0] and t.dtype == torch.int32 for t in (first, second))


@pytest.mark.parametrize("sizes", [dict(batch=0), dict(seqlen_q=0), dict(seqlen_k=0)])
def test_empty_problems_launch_nothing(recorder, sizes):
    x = quantized(**sizes)
    for out, lse in (launch_fp8.forward(x, 0.1, True, "accurate"), ops_fp8.attend(x, 0.1, True, "accurate")):
        assert out.shape == (*x.q.shape[:3], 80) and torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -math.inf)) and lse.shape == (x.q.shape[0], 4, x.q.shape[1])
    assert recorder.loaded == [] and recorder.calls == []


def test_the_scale_is_checked_in_every_call(recorder):
    x = quantized()
    launch_fp8.forward(x, 0.0, False, "accurate")
    assert 0 < recorder.calls[0].scale_log2 < 2e-38
    for scale in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="softmax_scale"):
            launch_fp8.forward(x, scale, False, "accurate")
    assert len(recorder.calls) == 1


def test_row_major_tensors_go_the_same_way(recorder):
    """The 16-bit launcher hands FP8 tensors over: V packed, scales of 1, O in BF16."""
    q, k, v = row_major()
    out, lse = launch.forward(q, k, v, None, True)
    (call,) = recorder.calls
    x = from_descales(q, k, v)
    assert call.q is q and call.k is k and torch.equal(bits(call.v), bits(x.v))
    assert out.dtype == torch.bfloat16 and call.scale_log2 == pytest.approx(64**-0.5 * math.log2(math.e))
    assert (call.scales[0] == 1).all() and (call.scales[1][:, :, :-BEYOND] == torch.tensor([1.0, 0, 1, 1])).all()
    assert launch._plans == {}
    with pytest.raises(TypeError, match="one dtype"):
        launch.forward(q, k, v.half(), None, True)


def test_another_chip_is_refused_before_anything_is_loaded(recorder, monkeypatch):
    monkeypatch.setattr(launch_fp8, "chip", lambda index: named("NVIDIA A100-SXM4-40GB", 108, (8, 0)))
    with pytest.raises(ValueError, match="A100.*sm_80.*sm_90"):
        launch_fp8.forward(quantized(), 0.1, False, "accurate")
    assert recorder.loaded == [] and launch_fp8._plans == {}


def test_plans_do_not_pile_up(recorder, monkeypatch):
    monkeypatch.setattr(launch, "PLANS_MAX", 3)
    for seqlen in range(1, 9):
        launch_fp8.forward(quantized(seqlen_q=seqlen), 0.1, False, "accurate")
        assert len(launch_fp8._plans) <= 3
    assert [c.q.shape[1] for c in recorder.calls] == list(range(1, 9))


def test_the_device_is_changed_for_the_launch_only_where_it_is_another(recorder, monkeypatch):
    entered = recorder.watch_device(monkeypatch)
    x = quantized()
    launch_fp8.forward(x, 0.1, False, "accurate")
    assert entered == []
    monkeypatch.setattr(launch_fp8, "current_device", lambda: 3)
    launch_fp8.forward(x, 0.1, False, "accurate")
    assert entered == [(-1, 1), ("left", 2)]
