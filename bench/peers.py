"""The implementations that are measured, each as attention(q, k, v, causal) -> out on (B, S, H, D) tensors.

Each is called the way its users call it: PyTorch's through sdpa_kernel, whose cost is in the eager and host times and
not in the kernel time.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

from bench.shapes import Shape
from fa3.testing.timing import first_tensor

Attention = Callable[[Any, Any, Any, bool], Any]
PEERS = ("cudnn", "fa2", "fa3", "fa4")


def load(names: Iterable[str]) -> tuple[dict[str, Attention], dict[str, str]]:
    """(implementations that import here, reason for each that does not)."""
    loaded, missing = {}, {}
    for name in names:
        try:
            loaded[name] = _LOADERS[name]()
        except Exception as error:  # a peer that is broken in any way is a line in the table
            missing[name] = reason(error)
    return loaded, missing


def reason(error: BaseException) -> str:
    """The first line of an error, with its type where the text is short of words."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def sdpa(q: Any, k: Any, v: Any, causal: bool, backend: Any) -> Any:
    """PyTorch's scaled_dot_product_attention on one backend; its causal mask is aligned top-left, so unequal lengths
    are refused.
    """
    import torch
    from torch.nn.attention import sdpa_kernel

    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"SDPA aligns its causal mask top-left: Sq {q.shape[1]}, Sk {k.shape[1]} is another problem")
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=causal,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return out.transpose(1, 2)


def _ours() -> Attention:
    import fa3

    attention = fa3.flash_attn_func
    return lambda q, k, v, causal: attention(q, k, v, causal=causal)


def _sdpa_on(backend: str) -> Attention:
    from torch.nn.attention import SDPBackend

    chosen = getattr(SDPBackend, backend)
    return lambda q, k, v, causal: sdpa(q, k, v, causal, chosen)


def _fa3() -> Attention:
    from fa3_fwd_interface import flash_attn_func

    return lambda q, k, v, causal: first_tensor(flash_attn_func(q, k, v, causal=causal))


def _fa4() -> Attention:
    from flash_attn.cute.interface import flash_attn_func

    return lambda q, k, v, causal: first_tensor(flash_attn_func(q, k, v, causal=causal))


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
    "naive": _naive,
    "reference": _reference,
}
IMPLS = tuple(_LOADERS)


def spec_of(shape: Shape, dtype: str) -> Any:
    """The Spec of our kernel for a shape."""
    from fa3.kernels.forward.config import Spec, tile_for

    return Spec(dtype, *tile_for(shape.head_dim, shape.head_dim_v), shape.causal)


def config_of(shape: Shape, dtype: str, num_sms: int) -> Any:
    """The Config that fa3 chooses for a shape."""
    from fa3.heuristics import config_for

    return config_for(spec_of(shape, dtype), shape.seqlen_q, shape.seqlen_k, shape.heads, shape.batch, num_sms)


def kernel(spec: Any, config: Any, shape: Shape, num_sms: int) -> Attention:
    """Our compiled kernel with this Config, called directly: outputs are allocated once and written again by every
    call.
    """
    import torch

    from fa3.kernels import compile as compiler

    run = compiler.load(spec, config)
    scale_log2 = math.log2(math.e) / math.sqrt(shape.head_dim)
    b, h, sq = shape.batch, shape.heads, shape.seqlen_q
    o = torch.empty(b, sq, h, shape.head_dim_v, dtype=getattr(torch, spec.dtype), device="cuda")
    lse = torch.empty(b, h, sq, dtype=torch.float32, device="cuda")

    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        assert causal == spec.causal
        tickets = q.new_zeros(1, dtype=torch.int32) if config.dynamic else None
        run(q, k, v, o, lse, None, None, tickets, scale_log2, num_sms)
        return o

    attention.output = o  # type: ignore[attr-defined]
    return attention
