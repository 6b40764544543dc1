"""The implementations that are measured, each as attention(q, k, v, causal) -> out on (B, S, H, D) tensors.

Each is called the way its users call it. PyTorch's runs in sdpa_kernel, which says the backend: it is entered around a
sample (`around`), as around a model, and no call pays for it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, TypeVar

from bench.shapes import Shape
from fa3.testing.timing import Around, first_tensor

Attention = Callable[[Any, Any, Any, bool], Any]
T = TypeVar("T")
PEERS = ("cudnn", "fa2", "fa3", "fa4", "flashinfer")
WORKSPACE_BYTES = 128 * 1024 * 1024  # FlashInfer's documentation asks for so much


def load(names: Iterable[str]) -> tuple[dict[str, Attention], dict[str, str]]:
    """(implementations that import here, reason for each that does not)."""
    return load_of(_LOADERS, names)


def load_of(loaders: Mapping[str, Callable[[], T]], names: Iterable[str]) -> tuple[dict[str, T], dict[str, str]]:
    """The same of a suite with implementations of its own."""
    loaded, missing = {}, {}
    for name in names:
        try:
            loaded[name] = loaders[name]()
        except Exception as error:  # a peer that is broken in any way is a line in the table
            missing[name] = reason(error)
    return loaded, missing


def reason(error: BaseException) -> str:
    """The first line of an error, with its type where the text is short of words."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def around(attention: Attention) -> Around:
    """What a call of it needs around it; it may stay entered for many calls."""
    return getattr(attention, "around", nullcontext)


def sdpa(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """PyTorch's scaled_dot_product_attention on the backend that `around` chose; its causal mask is aligned top-left,
    so unequal lengths are refused.
    """
    import torch

    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"SDPA aligns its causal mask top-left: Sq {q.shape[1]}, Sk {k.shape[1]} is another problem")
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
    )
    return out.transpose(1, 2)


def _ours() -> Attention:
    import fa3

    attention = fa3.flash_attn_func
    return lambda q, k, v, causal: attention(q, k, v, causal=causal)


def _sdpa_on(backend: str) -> Attention:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return sdpa(q, k, v, causal)

    attention.around = partial(sdpa_kernel, getattr(SDPBackend, backend))  # type: ignore[attr-defined]
    return attention


def _fa3() -> Attention:
    from fa3_fwd_interface import flash_attn_func

    return lambda q, k, v, causal: first_tensor(flash_attn_func(q, k, v, causal=causal))


def _fa4() -> Attention:
    from flash_attn.cute.interface import flash_attn_func

    return lambda q, k, v, causal: first_tensor(flash_attn_func(q, k, v, causal=causal))


def _flashinfer() -> Attention:
    """Its ragged batch prefill on the FlashAttention-3 backend. The plan, which is of the lengths alone and shared by
    all layers of a model, is made by the first call of a problem; the others run it.
    """
    import torch
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    workspace: dict[Any, Any] = {}  # of the device: plans take turns in it

    @lru_cache(maxsize=8)
    def planned(sizes: tuple[int, ...], dtype: Any, device: Any, causal: bool) -> Any:
        batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v = sizes
        if device not in workspace:
            workspace[device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace[device], kv_layout="NHD", backend="fa3")
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        wrapper.plan(
            starts * seqlen_q, starts * seqlen_k, heads, heads_kv, head_dim,
            head_dim_vo=head_dim_v, causal=causal, q_data_type=dtype, kv_data_type=dtype,
        )  # fmt: skip
        return wrapper

    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        sizes = (*q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:], v.shape[3])
        flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))  # (batch * seqlen, heads, head_dim)
        out = first_tensor(planned(sizes, q.dtype, q.device, causal).run(*flat))
        return out.unflatten(0, q.shape[:2])

    return attention


def _naive() -> Attention:
    from fa3.reference import attention

    return lambda q, k, v, causal: attention(q, k, v, causal=causal)[0]


def _reference() -> Attention:
    from fa3.reference import tiled_attention

    return lambda q, k, v, causal: tiled_attention(q, k, v, causal=causal)[0]


_LOADERS: dict[str, Callable[[], Attention]] = {
    "ours": _ours,
    "cudnn": lambda: _sdpa_on("CUDNN_ATTENTION"),
    "fa2": lambda: _sdpa_on("FLASH_ATTENTION"),
    "fa3": _fa3,
    "fa4": _fa4,
    "flashinfer": _flashinfer,
    "naive": _naive,
    "reference": _reference,
}
IMPLS = tuple(_LOADERS)
NO_ATTENTION = ("ours_quantize", "copy")  # Q, K and V to FP8 alone, and a copy that moves as many bytes
# In records, not in `load`: the whole FP8 call from 16 bit; what ragged attention is set beside, the same function and
# the dense one on equal sequences.
OTHERS = ("ours_call", *NO_ATTENTION, "ours_equal", "ours_dense")
FP8 = "float8_e4m3fn"


def spec_of(shape: Shape, dtype: str) -> Any:
    """The Spec of our kernel for a shape."""
    from fa3.kernels.forward.config import Spec, tile_for

    return Spec(dtype, *tile_for(shape.head_dim, shape.head_dim_v), shape.causal)


def fp8_kernel_of(shape: Shape, accumulation: str, num_sms: int) -> tuple[Any, Any]:
    """The Spec and Config that fa3 chooses for a shape in FP8 with BF16 output."""
    from fa3.heuristics import config_for
    from fa3.kernels.forward.config import Spec, tile_for

    spec = Spec(FP8, *tile_for(shape.head_dim, shape.head_dim_v), shape.causal, "bfloat16")
    sizes = shape.seqlen_q, shape.seqlen_k, shape.heads, shape.batch, num_sms
    return spec, config_for(spec, *sizes, accumulation)


def config_of(shape: Shape, dtype: str, num_sms: int) -> Any:
    """The Config that fa3 chooses for a shape."""
    from fa3.heuristics import config_for

    return config_for(spec_of(shape, dtype), shape.seqlen_q, shape.seqlen_k, shape.heads, shape.batch, num_sms)


def kernel(spec: Any, config: Any, shape: Shape, num_sms: int) -> Attention:
    """Our compiled kernel with this Config, called directly: outputs are allocated once and written again by every
    call.
    """
    run = _loaded(spec, config, shape, num_sms)

    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        assert causal == spec.causal
        return run(q, k, v, None, None)

    attention.output = run.output  # type: ignore[attr-defined]
    return attention


def fp8_kernel(spec: Any, config: Any, shape: Shape, num_sms: int) -> Callable[[Any], Callable[[], Any]]:
    """The same for FP8: QuantizedQKV -> call. The scales are prepared outside the call, once."""
    from fa3.quant.prepare import prepare

    run = _loaded(spec, config, shape, num_sms)

    def bind(x: Any) -> Callable[[], Any]:
        p = prepare(x)
        return partial(run, x.q, x.k, x.v, (p.q_scale, p.kv, p.v_max, p.q_rows), x.v_channel_scale)

    return bind


def per_head(q: Any, k: Any, v: Any) -> Any:
    """QuantizedQKV as FlashAttention-3 takes it: E4M3 with one scale for each batch and KV head, nothing rotated."""
    from fa3.quant.cast import cast, divide, scale_of
    from fa3.quant.formats import PER_HEAD
    from fa3.quant.reference import from_descales

    def codes_and_scale(x: Any) -> tuple[Any, Any]:
        ratio = x.shape[2] // k.shape[2]
        scale = scale_of(x, PER_HEAD).unflatten(1, (-1, ratio)).amax(-1)
        return cast(divide(x, scale.repeat_interleave(ratio, 1), PER_HEAD)), scale

    (q8, of_q), (k8, of_k), (v8, of_v) = (codes_and_scale(x) for x in (q, k, v))
    return from_descales(q8, k8, v8, of_q, of_k, of_v, q.dtype)


def fa3_fp8() -> Callable[..., Callable[[], Any]]:
    """FlashAttention-3's FP8 forward: (what per_head or from_descales gives, causal, softmax scale) -> call."""
    from fa3_fwd_interface import flash_attn_func

    from fa3.quant.cast import unpack_v

    def bind(x: Any, causal: bool, softmax_scale: float | None = None) -> Callable[[], Any]:
        of_q = x.q_scale[..., 0].unflatten(1, (x.heads_kv, -1))[..., 0]
        names = ("q_descale", of_q), ("k_descale", x.k_scale[..., 0]), ("v_descale", x.v_scale[..., 0])
        options = {name: scale.contiguous() for name, scale in names}
        v = unpack_v(x.v, x.seqlen_k)
        return lambda: first_tensor(flash_attn_func(x.q, x.k, v, softmax_scale=softmax_scale, causal=causal, **options))

    return bind


def _loaded(spec: Any, config: Any, shape: Shape, num_sms: int) -> Any:
    """run(q, k, v, scales, v_channel) -> out, always the same one, which is run.output too."""
    import torch

    from fa3.kernels import compile as compiler

    function = compiler.load(spec, config)
    scale_log2 = math.log2(math.e) / math.sqrt(shape.head_dim)
    b, h, sq = shape.batch, shape.heads, shape.seqlen_q
    size, dtype = (b, sq, h, shape.head_dim_v), getattr(torch, spec.dtype_o or spec.dtype)
    o = torch.full(size, math.nan, dtype=dtype, device="cuda")
    lse = torch.empty(b, h, sq, dtype=torch.float32, device="cuda")

    def run(q: Any, k: Any, v: Any, scales: Any, v_channel: Any) -> Any:
        tickets = torch.zeros(1, dtype=torch.int32, device="cuda") if config.dynamic else None
        function(q, k, v, o, lse, scales, v_channel, None, None, tickets, scale_log2, num_sms)
        return o

    run.output = o  # type: ignore[attr-defined]
    return run
