"""The host side on a Hopper GPU: streams, devices, graphs, host time, memory, strides, operator, compiler."""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fa3
from fa3.testing.inputs import Case, lay_out, make, poison
from fa3.testing.tolerance import expected

pytestmark = pytest.mark.gpu

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def attend(q, k, v, causal=False):
    return fa3.flash_attn_func(q, k, v, causal=causal, return_lse=True)


def assert_right(q, k, v, causal=False, got=None):
    wanted = expected(q, k, v, causal=causal)
    out, lse = attend(q, k, v, causal) if got is None else got
    wanted.assert_out(out)
    wanted.assert_lse(lse)
    return out, lse


def assert_equal(got, wanted):
    """Bit for bit; torch.equal takes -inf for -inf and no NaN."""
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(x, y)


def assert_a_valid_call_works():
    assert_right(*make(Case(seqlen_q=65, seqlen_k=65), "cuda"))
    torch.cuda.synchronize()


# Streams


def test_a_side_stream_is_used_100_times():
    """Q is written on the stream after a delay; a launch on any other stream would read the old q."""
    fresh, k, v = make(Case(batch=2, seqlen_q=256, seqlen_k=256, heads_kv=2), "cuda")
    wanted = attend(fresh, k, v)
    q, results = torch.zeros_like(fresh), []
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(100):
            q.zero_()
            torch.cuda._sleep(2_000_000)  # about 1 ms: the launch is queued long before q is there
            q.copy_(fresh)
            results.append(attend(q, k, v))
    stream.synchronize()
    for got in results:
        assert_equal(got, wanted)


def test_two_streams_with_two_shapes_do_not_disturb_each_other():
    inputs = [
        make(Case(seqlen_q=300, seqlen_k=300, heads_kv=3), "cuda"),
        make(Case(seqlen_q=129, seqlen_k=700, heads_kv=2), "cuda"),
    ]
    wanted = [attend(*x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results = []
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append((i, attend(*inputs[i])))
    torch.cuda.synchronize()
    for i, got in results:
        assert_equal(got, wanted[i])


# Devices


@TWO_GPUS
def test_another_device_than_the_current_one():
    torch.cuda.set_device(0)
    on_0 = make(Case(batch=2, seqlen_q=200, seqlen_k=333, heads_kv=2, ratio=2), "cuda:0")
    on_1 = [x.to("cuda:1") for x in on_0]
    wanted = attend(*on_0, True)
    for inputs, device in [(on_1, 1), (on_0, 0), (on_1, 1), (on_0, 0)] * 3:
        got = attend(*inputs, True)
        assert torch.cuda.current_device() == 0
        assert all(x.get_device() == device for x in got)
        assert_equal([x.to("cuda:0") for x in got], wanted)
    with torch.cuda.device(1):
        got = attend(*on_0, True)
        assert torch.cuda.current_device() == 1 and got[0].get_device() == 0
        assert_equal(got, wanted)
    assert_right(*on_1, causal=True)


@TWO_GPUS
def test_the_current_stream_of_the_other_device_is_used():
    torch.cuda.set_device(0)
    fresh, k, v = make(Case(seqlen_q=256, seqlen_k=256), "cuda:1")
    wanted = attend(fresh, k, v)
    q = torch.zeros_like(fresh)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # also makes cuda:1 current
        torch.cuda.set_device(0)
        with torch.cuda.device(1):
            torch.cuda._sleep(20_000_000)
            q.copy_(fresh)
        got = attend(q, k, v)
        torch.cuda.set_device(1)
    torch.cuda.synchronize(1)
    torch.cuda.set_device(0)
    assert_equal(got, wanted)


@TWO_GPUS
def test_devices_are_not_mixed():
    q, k, v = make(Case(), "cuda:0")
    for arguments in ((q.to("cuda:1"), k, v), (q, k.to("cuda:1"), v), (q, k, v.to("cuda:1"))):
        with pytest.raises(ValueError, match=r"one device.*cuda:\d.*cuda:\d"):
            attend(*arguments)
    assert_a_valid_call_works()


def test_the_host_s_tensors_are_not_mixed_in():
    q, k, v = make(Case(), "cuda")
    for arguments in ((q.cpu(), k, v), (q, k.cpu(), v), (q, k, v.cpu())):
        with pytest.raises(ValueError, match="one device.*cpu"):
            attend(*arguments)
    assert_a_valid_call_works()


# Errors


def test_an_error_leaves_the_device_usable():
    q, k, v = make(Case(batch=1, seqlen_q=128, seqlen_k=128, heads_kv=4, ratio=2), "cuda")
    wrong = [
        ((q, k[:, :, :3], v[:, :, :3]), ValueError, "q 8 and k, v 3"),
        ((q, k, v[:, :, :2]), ValueError, "k 4, v 2"),
        ((q, k[..., :56], v), ValueError, "64, got 56"),
        ((q.float(), k.float(), v.float()), TypeError, "float32 on cuda"),
        ((q, k.half(), v), TypeError, "one dtype"),
        ((q[..., :60], k[..., :60], v), ValueError, "head_dim 60"),
        ((q.repeat_interleave(2, -1)[..., ::2], k, v), ValueError, "q has stride 2"),
    ]
    for arguments, error, words in wrong:
        for call in (fa3.flash_attn_func, lambda q, k, v: torch.ops.fa3.forward(q, k, v, 0.1, False)):
            with pytest.raises(error, match=words):
                call(*arguments)
    with pytest.raises(NotImplementedError, match="gradient"):
        fa3.flash_attn_func(q.clone().requires_grad_(True), k, v)
    assert_a_valid_call_works()


def test_parameters_are_taken_where_no_gradient_is_wanted():
    q, k, v = make(Case(seqlen_q=100, seqlen_k=100), "cuda")
    wanted = attend(q, k, v)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = attend(torch.nn.Parameter(q), k.clone().requires_grad_(True), v)
        assert_equal(got, wanted)
        assert not got[0].requires_grad


@pytest.mark.parametrize("causal", [False, True])
def test_scale_zero_weighs_the_keys_that_are_seen_alike(causal):
    q, k, v = make(Case(dtype="float16", seqlen_q=300, seqlen_k=300), "cuda")
    out, lse = fa3.flash_attn_func(q, k, v, 0.0, causal, return_lse=True)
    seen = torch.arange(1, 301, device="cuda") if causal else torch.full((300,), 300, device="cuda")
    torch.testing.assert_close(lse[0, 0], seen.float().log(), rtol=1e-5, atol=1e-5)
    means = v[0, :, 0].double().cumsum(0) / torch.arange(1, 301, device="cuda")[:, None]
    wanted = means if causal else means[-1:].expand(300, -1)
    torch.testing.assert_close(out[0, :, 0].double(), wanted, rtol=0, atol=4e-3)


# Graphs, synchronisation, time, memory


def test_a_captured_graph_replays_on_changed_inputs():
    case = Case(batch=2, seqlen_q=300, seqlen_k=300, heads_kv=2, ratio=2, head_dim=128, head_dim_v=128, causal=True)
    static = make(case, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(*static, True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(*static, True)
    for seed in (1, 2, 3):
        inputs = make(Case(**{**vars(case), "seed": seed}), "cuda")
        wanted = attend(*inputs, True)
        for place, value in zip(static, inputs, strict=True):
            place.copy_(value)
        for x in got:
            x.fill_(math.nan)
        graph.replay()
        assert_equal(got, wanted)


def test_inputs_that_are_copied_are_copied_in_the_graph_too():
    static = lay_out(make(Case(seqlen_q=130, seqlen_k=130), "cuda"), "misaligned")
    attend(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(*static)
    inputs = make(Case(seqlen_q=130, seqlen_k=130, seed=1), "cuda")
    for place, value in zip(static, inputs, strict=True):
        place.copy_(value)
    graph.replay()
    assert_equal(got, attend(*inputs))


@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "packed", "expanded"])
def test_nothing_waits_for_the_device(no_sync, layout):
    q, k, v = make(Case(batch=2, seqlen_q=77, seqlen_k=77, heads_kv=2, layout=layout), "cuda")
    results = [attend(q, k, v, causal) for causal in (False, True)]
    results.append(attend(q, k[:, :0], v[:, :0]))
    results.append(torch.ops.fa3.forward(q, k, v, 0.0, True))
    fa3.explain(q, k, v)
    torch.cuda.set_sync_debug_mode("default")
    assert_right(q, k, v, got=results[0])
    assert_right(q, k, v, causal=True, got=results[1])


@pytest.mark.parametrize("seqlen", [1024, 8192])
def test_a_call_takes_the_memory_of_its_outputs(seqlen):
    case = Case(batch=2, seqlen_q=seqlen, seqlen_k=seqlen, heads_kv=4, head_dim=128, head_dim_v=64, layout="packed")
    q, k, v = make(case, "cuda")
    attend(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    out, lse = attend(q, k, v)
    torch.cuda.synchronize()
    outputs = out.numel() * out.element_size() + lse.numel() * lse.element_size()
    assert outputs == 2 * seqlen * 4 * (64 * 2 + 4)
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == outputs


# Alignment and strides


@pytest.mark.parametrize("head_dim", [16, 64])
def test_misaligned_tensors(head_dim):
    """Offset of 2 bytes, head stride of 130 bytes (D64); an odd storage offset; a view that starts at byte 2."""
    shape = (2, 1920, 8, head_dim)
    case = Case(batch=2, seqlen_q=1920, seqlen_k=1920, heads_kv=8, head_dim=head_dim, head_dim_v=head_dim)
    q, k, v = make(case, "cuda")
    wanted = assert_right(q, k, v)
    odd_rows = torch.full((2, 1920, 8, head_dim + 1), math.nan, dtype=q.dtype, device="cuda")[..., 1:]
    odd_offset = torch.full((k.numel() + 7,), math.nan, dtype=q.dtype, device="cuda")[3 : 3 + k.numel()].view(shape)
    byte_2 = torch.full((v.numel() + 1,), math.nan, dtype=q.dtype, device="cuda")[1:].view(shape)
    odd = (odd_rows.copy_(q), odd_offset.copy_(k), byte_2.copy_(v))
    assert [x.data_ptr() % 16 for x in odd] == [2, 6, 2] and odd_rows.stride(2) == head_dim + 1
    assert len(fa3.explain(*odd).copies) == 3
    assert_equal(attend(*odd), wanted)
    for i in range(3):
        mixed = [odd[j] if i == j else x for j, x in enumerate((q, k, v))]
        assert_equal(attend(*mixed), wanted)
    assert_a_valid_call_works()


def test_odd_strides_of_single_element_dimensions():
    q, k, v = make(Case(seqlen_q=200, seqlen_k=200), "cuda")
    odd = [x.as_strided(x.shape, (x.stride(0) + 3, x.stride(1), 65, 1)) for x in (q, k, v)]
    assert fa3.explain(*odd).copies == ()
    assert_equal(attend(*odd), assert_right(q, k, v))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_slices_of_a_fused_projection(head_dim):
    poison((1 << 24,), torch.bfloat16, "cuda")
    torch.manual_seed(0)
    width = 4 * head_dim
    linear = torch.nn.Linear(width, 3 * width, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        qkv = linear(torch.randn(1, 128, width, device="cuda", dtype=torch.bfloat16))
    q, k, v = (x.view(1, 128, 4, head_dim) for x in qkv.split(width, -1))
    assert fa3.explain(q, k, v).copies == () and not q.is_contiguous()
    for causal in (False, True):
        got = attend(q, k, v, causal)
        assert_equal(got, attend(*(x.contiguous() for x in (q, k, v)), causal))
        assert_right(q, k, v, causal, got)
    packed = qkv.view(1, 128, 3, 4, head_dim)
    assert_equal(fa3.flash_attn_qkvpacked_func(packed, causal=True, return_lse=True), got)
    assert_equal(fa3.flash_attn_qkvpacked_func(packed.flatten(2, 3), causal=True, num_heads_q=4, return_lse=True), got)


@pytest.mark.parametrize("causal", [False, True])
def test_head_major_storage(causal):
    """S 8192, H 32, D 256, bit for bit against contiguous inputs; the first and last head against float64."""
    case = Case(seqlen_q=8192, seqlen_k=8192, heads_kv=32, head_dim=256, head_dim_v=256, layout="transposed")
    q, k, v = make(case, "cuda")
    assert fa3.explain(q, k, v).copies == ()
    out, lse = attend(q, k, v, causal)
    assert_equal((out, lse), attend(*(x.contiguous() for x in (q, k, v)), causal))
    for head in (0, 31):
        part = slice(head, head + 1)
        assert_right(*(x[:, :, part] for x in (q, k, v)), causal, (out[:, :, part], lse[:, part]))


@pytest.mark.parametrize("seqlen_k", [65, 97, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_and_values_of_stride_zero(seqlen_k, causal):
    q, k, v = make(Case(batch=2, seqlen_q=128, seqlen_k=seqlen_k, heads_kv=8, layout="expanded"), "cuda")
    assert k.stride(2) == 0 and fa3.explain(q, k, v).copies == ()
    got = assert_right(q, k, v, causal)
    assert_equal(got, attend(q, k.contiguous(), v.contiguous(), causal))
    over_batch = [x[:1].expand(2, -1, -1, -1) for x in (k, v)]
    assert_equal(attend(q, *over_batch, causal), attend(q, *(x.contiguous() for x in over_batch), causal))


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3), (1, 2, 0, 3), (2, 0, 1, 3)])
def test_values_whose_base_has_another_order_of_dimensions(order):
    q, k, v = make(Case(batch=3, seqlen_q=100, seqlen_k=150, heads_kv=2, head_dim_v=128), "cuda")
    back = [order.index(i) for i in range(4)]
    view = v.permute(order).contiguous().permute(back)
    assert view.shape == v.shape and view.stride() != v.stride()
    assert_equal(attend(q, k, view), assert_right(q, k, v))


# Operator and compiler


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "packed", "misaligned"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_opcheck(dtype, layout):
    case = Case(dtype=dtype, batch=2, seqlen_q=70, seqlen_k=90, heads_kv=2, ratio=2, head_dim_v=40, layout=layout)
    results = torch.library.opcheck(torch.ops.fa3.forward.default, (*make(case, "cuda"), 0.1, True))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("ratio", [1, 4])
def test_fake_looks_like_real_for_mixed_layouts(ratio):
    case = Case(dtype="float16", batch=2, seqlen_q=513, seqlen_k=513, heads_kv=16 // ratio, ratio=ratio)
    q, k, v = make(case, "cuda")
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    operator = torch.ops.fa3.forward.default
    assert set(torch.library.opcheck(operator, (q, k, v, 0.125, True)).values()) == {"SUCCESS"}
    meta = operator(*(x.to("meta") for x in (q, k, v)), 0.125, True)
    real = assert_right(q, k, v, causal=True, got=operator(q, k, v, 0.125, True))
    assert [(x.shape, x.dtype, x.stride()) for x in meta] == [(x.shape, x.dtype, x.stride()) for x in real]


def layer(q, k, v):
    out, lse = fa3.flash_attn_func(q * 2, k, v, causal=True, return_lse=True)
    return out + 1, lse.exp()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "packed"])
def test_compile_makes_one_graph(backend, layout):
    torch._dynamo.reset()
    inputs = make(Case(batch=2, seqlen_q=130, seqlen_k=130, heads_kv=2, layout=layout), "cuda")
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for _ in range(2):
        for got, wanted in zip(compiled(*inputs), layer(*inputs), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dynamic", [True, None])
def test_new_lengths_compile_at_most_twice(dynamic):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=dynamic)
    for seqlen in (128, 200, 333):
        inputs = make(Case(seqlen_q=seqlen, seqlen_k=seqlen, heads_kv=2, ratio=2), "cuda")
        assert_equal(compiled(*inputs), layer(*inputs))
    assert counter.frame_count <= 2


@pytest.mark.inductor
def test_compile_with_cuda_graphs():
    torch._dynamo.reset()
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for seed in range(4):
        inputs = make(Case(batch=2, seqlen_q=130, seqlen_k=130, heads_kv=2, seed=seed), "cuda")
        for got, wanted in zip(compiled(*inputs), layer(*inputs), strict=True):
            torch.testing.assert_close(got.clone(), wanted, rtol=1e-2, atol=1e-2)


def test_explain_of_what_has_run():
    q, k, v = make(Case(seqlen_q=64, seqlen_k=64), "cuda")
    attend(q, k, v)
    found = fa3.explain(q, k, v)
    assert found.runs == "kernel" and found.cache == "memory" and found.copies == ()
    assert found.device.startswith("cuda:0") and torch.cuda.get_device_name(0) in found.device
    assert fa3.is_available() and fa3.why_not() is None
