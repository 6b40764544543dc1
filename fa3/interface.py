"""The public functions, with FlashAttention-3's argument names, defaults and conventions: a caller changes the import.

Everywhere: dense layouts (batch, seqlen, heads, head_dim); causal is aligned bottom-right; query head h reads KV head
h // (heads / heads_kv); a query that sees no key has output 0 and LSE -inf.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa3 import launch, ops  # ops registers the operator
from fa3.device import chip
from fa3.heuristics import ACCUMULATIONS
from fa3.problem import check_are_tensors, check_flags, check_later_arguments, check_scale, default_scale, split_packed
from fa3.variant import variant_of

if TYPE_CHECKING:
    from fa3.explanation import Explanation

_forward, is_plain = ops._forward, ops.is_plain

ACCURATE = ACCUMULATIONS[0]
# What is imported on a call, and the package that brings it.
REQUIRED = {
    "cutlass": "nvidia-cutlass-dsl",
    "tvm_ffi": "apache-tvm-ffi",
    "tvm_ffi_orcjit": "apache-tvm-ffi-orcjit",
}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:  # Tensor, or (Tensor, Tensor)
    """softmax(softmax_scale * Q K^T) V: FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608).

    Args:
        q: (batch, seqlen_q, heads, head_dim), bfloat16, float16 or float8_e4m3fn on a Hopper GPU.
        k, v: (batch, seqlen_k, heads_kv, head_dim) and (batch, seqlen_k, heads_kv, head_dim_v) of q's dtype and device.
            heads is a multiple of heads_kv. head_dim and head_dim_v are multiples of 8 up to 256, of FP8 multiples of
            16, independent of each other. Any length may be 0. The last dimension must be contiguous, other strides are
            free, 0 included.
        softmax_scale: finite, >= 0; by default 1 / sqrt(head_dim).
        causal: query i sees key j where j <= i + seqlen_k - seqlen_q (bottom-right), else all keys.
        q_descale, k_descale, v_descale: of FP8 only: (batch, heads_kv) in float32, any strides, None for 1: what q (all
            query heads of a KV head), k and v are multiplied with. `flash_attn_fp8_func` takes 16-bit tensors and is
            more accurate: its scales are per row of q and per 64 rows of k and v.
        window_size: (left, right): query i, which stands at key i + seqlen_k - seqlen_q, sees no more than so many keys
            before and behind that one; a negative number or None is no limit. causal makes right 0. Blocks of keys that
            no query of a tile sees are not read. Of 16-bit tensors only, as are the three that follow.
        attention_chunk: keys are cut into chunks of so many; a query sees those of the chunk that it stands in. 0: no
            chunks.
        softcap: scaled scores become softcap * tanh(score / softcap), to a relative error of 2^-11. 0: as they are.
        learnable_sink, or s_aux: (heads,), float32, bfloat16 or float16: one more score a head, of no key and without a
            value, that takes its share of every query's softmax.
        qv, num_splits, pack_gqa, sm_margin: not supported yet: must hold their defaults (pack_gqa may be False).
        deterministic: the forward always is.
        return_attn_probs, return_lse: both mean: return (out, lse). The first is FlashAttention-3's name.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) in q's dtype (of FP8: bfloat16), contiguous; with return_lse also lse
        (batch, heads, seqlen_q) in float32, the natural logarithm of the sum of the exponentials of the scaled scores,
        of the sink too: of a query that sees no key it is the sink, or -inf.

    CPU tensors run `fa3.reference.tiled_attention` in the kernel's tile order, float32 and float64 too (lse is float64
    for float64), FP8 ones `fa3.reference_fp8.fp8_attention`. A call allocates out, lse where it is returned or has more
    than 64 Ki rows, a counter of 4 bytes where the grid is large, and of FP8 the packed V and prepared scales.
    Inputs that TMA cannot take (data pointer not a multiple of 16 bytes, or a stride that is not a multiple of 16
    bytes, in a dimension of more than one element) are copied first; `explain` tells which. The kernel runs on the
    current stream of the tensors' device; make one call before capturing a CUDA graph, which loads the kernel.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, its value and what is allowed.
        NotImplementedError: an argument is not supported yet, or an input requires a gradient while gradients are on.
        fa3.kernels.compile.CompilerMissing, LoaderMissing: a package is missing that compiles or loads the kernel; the
            message says what to install.
    """
    # fmt: off
    if (  # by type too: an array would compare element by element, a CUDA tensor would wait for the device
        qv is not None or q_descale is not None or k_descale is not None or v_descale is not None
        or type(window_size) is not tuple or window_size != (-1, -1) or pack_gqa is not None
        or type(attention_chunk) is not int or attention_chunk != 0 or type(softcap) is not float or softcap != 0.0
        or type(num_splits) is not int or num_splits != 1 or type(sm_margin) is not int or sm_margin != 0
        or learnable_sink is not None or s_aux is not None
    ):
        check_later_arguments(qv, num_splits, pack_gqa, sm_margin)
        check_flags(causal=causal, return_attn_probs=return_attn_probs, return_lse=return_lse)
        variant = variant_of(causal, window_size, attention_chunk, softcap)
        if learnable_sink is not None or s_aux is not None or variant != (causal, -1, -1, 0, 0.0):
            from fa3.interface_variant import dense

            descales = (q_descale, k_descale, v_descale)
            out, lse = dense(
                q, k, v, descales, softmax_scale, variant, learnable_sink, s_aux, return_attn_probs or return_lse
            )
            return (out, lse) if return_attn_probs or return_lse else out
        if q_descale is not None or k_descale is not None or v_descale is not None:
            from fa3.interface_fp8 import with_descales

            descales = (q_descale, k_descale, v_descale)
            return with_descales(q, k, v, *descales, softmax_scale, causal, return_attn_probs, return_lse)
    # fmt: on
    if not (isinstance(causal, bool) and isinstance(return_attn_probs, bool) and isinstance(return_lse, bool)):
        check_flags(causal=causal, return_attn_probs=return_attn_probs, return_lse=return_lse)
    if softmax_scale is not None and not isinstance(softmax_scale, float):
        check_scale(softmax_scale)
        softmax_scale = float(softmax_scale)
    keeps_lse = return_attn_probs or return_lse
    if is_plain(q, k, v):
        out, lse = launch.forward(q, k, v, softmax_scale, causal, keeps_lse)
    else:
        check_are_tensors(q=q, k=k, v=v)
        out, lse = _forward(q, k, v, default_scale(q) if softmax_scale is None else softmax_scale, causal)
    return (out, lse) if keeps_lse else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
) -> Any:  # Tensor, or (Tensor, Tensor)
    """`flash_attn_func` on views of one tensor; nothing is copied.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or, with num_heads_q given, (batch, seqlen, heads + 2 * heads_kv,
            head_dim) with the heads of q first, then those of k and of v.
        num_heads_q: heads of q in the second layout.

    Every other argument, what is returned and what is raised: as in `flash_attn_func`.
    """
    q, k, v = split_packed(qkv, num_heads_q)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
        return_lse=return_lse,
    )


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    accumulation: str = ACCURATE,
) -> Explanation:
    """What `flash_attn_func` would run for these tensors: kernel, tile, schedule, cache, copies. Launches nothing.

    Takes tensors of shape, dtype and strides only too (device "meta", or fake): these are answered for the current
    Hopper GPU, or for an H100 SXM where there is none. FP8 tensors stand for what `flash_attn_fp8_func` makes too, with
    the accumulation that it is given. Raises what the call would raise.
    """
    from fa3.explanation import explanation_of

    check_are_tensors(q=q, k=k, v=v)
    check_flags(causal=causal)
    scale = default_scale(q) if softmax_scale is None else softmax_scale
    return explanation_of(q, k, v, scale, causal, accumulation)


def why_not(device: int | None = None) -> str | None:
    """One sentence on why the kernels cannot run on that CUDA device (by default the current one); None if they can.

    Initialises CUDA, so call it after forking. CPU tensors run the reference whatever the answer.
    """
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        return f"CUDA is not available: torch {torch.__version__} ({built}) finds no usable GPU and driver"
    found = chip(torch.cuda.current_device() if device is None else device)
    if not found.is_hopper:
        major, minor = found.capability
        return f"the GPU is not a Hopper: found {found.name} (sm_{major}{minor}), the kernels need sm_90"
    for module, package in REQUIRED.items():
        if importlib.util.find_spec(module) is None:
            return f"{module} cannot be found: pip install {package}"
    return None


def is_available(device: int | None = None) -> bool:
    """Whether the kernels can run on that CUDA device (by default the current one). `why_not` says why they cannot."""
    return why_not(device) is None
