"""Tensors -> Problem: the sizes of a call and the kernel's Spec. Every user error of the package is raised here.

Each error names the argument, the value that was got and what is allowed, and comes before anything is launched.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from fa3.device import Chip
from fa3.heuristics import ACCUMULATIONS
from fa3.kernels.forward.config import FP8 as FP8_NAME
from fa3.kernels.forward.config import Config, Spec, tile_for
from fa3.reference import LOG2_E

KERNEL_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
FP8 = torch.float8_e4m3fn
CHECKING_DTYPES = (torch.float32, torch.float64)  # CPU only: the reference in higher precision
DEVICES = ("cuda", "cpu", "meta")
HEAD_DIM_STEP, FP8_HEAD_DIM_STEP, HEAD_DIM_MAX = 8, 16, 256
SIZE_MAX = 2**31 - 2**16  # sizes and tiles are counted in 32 bits on the device, with room for a tile; offsets in 64
MAX_SCALE = torch.finfo(torch.float32).max / LOG2_E  # the kernel takes softmax_scale * log2(e) in fp32


@dataclass(frozen=True)
class Problem:
    """A validated call: q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v likewise."""

    spec: Spec
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    accumulation: str = ACCUMULATIONS[0]  # of FP8: a key of heuristics.FP8_ROWS

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.seqlen_q, self.heads, self.head_dim_v

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.batch, self.heads, self.seqlen_q

    @property
    def is_empty(self) -> bool:
        """No kernel runs: there is no query, or no key that one could see."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k, self.heads)

    def num_tiles(self, tile_m: int) -> int:
        return self.batch * self.heads * -(-self.seqlen_q // tile_m)


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, accumulation: str = ACCUMULATIONS[0]
) -> Problem:
    """The Problem of a call, or the ValueError / TypeError that says what is wrong with it."""
    check_tensors(q, k, v)
    check_scale(softmax_scale)
    check_accumulation(accumulation, q.dtype)
    batch, seqlen_q, heads, head_dim = q.shape
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    tile = tile_for(head_dim, head_dim_v)
    if q.dtype == FP8:
        spec = Spec(FP8_NAME, *tile, causal, KERNEL_DTYPES[out_dtype(q.dtype)])
    else:  # fp32 and fp64 run on the CPU only, in the order of the bf16 kernel
        spec = Spec(KERNEL_DTYPES.get(q.dtype, "bfloat16"), *tile, causal)
    return Problem(spec, batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v, accumulation)


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of O: that of the inputs, of FP8 bfloat16 as in FlashAttention-3."""
    return torch.bfloat16 if dtype == FP8 else dtype


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Types, devices, dtypes, shapes, head ratio, last stride. Sizes may be symbolic: no comparison fixes a length."""
    check_are_tensors(q=q, k=k, v=v)
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device, got q on {q.device}, k on {k.device}, v on {v.device}")
    if q.device.type not in DEVICES:
        raise ValueError(f"q, k, v are on {q.device}; allowed: {', '.join(DEVICES)}")
    _check_dtypes(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_rank(name, tensor)
    _check_shapes(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(-1)} in its last dimension, which must be contiguous (stride 1): "
                f"call {name}.contiguous() first"
            )


def check_are_tensors(**arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
        if value.layout is not torch.strided or value.is_nested:
            kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
            raise TypeError(f"{name} must be a dense (strided) tensor, got {kind}")


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v must have one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}")
    if q.dtype in KERNEL_DTYPES or q.dtype == FP8 or (q.dtype in CHECKING_DTYPES and q.device.type != "cuda"):
        return
    raise TypeError(
        f"q, k, v have dtype {q.dtype} on {q.device.type}; allowed: torch.bfloat16, torch.float16 and {FP8}, "
        "and on CPU torch.float32 and torch.float64"
    )


def _check_rank(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 4:
        raise ValueError(
            f"{name} must have 4 dimensions (batch, seqlen, heads, head_dim), got {tensor.dim()}: {tuple(tensor.shape)}"
        )


def check_head_dim(name: str, head_dim: int, dtype: torch.dtype) -> None:
    step = FP8_HEAD_DIM_STEP if dtype == FP8 else HEAD_DIM_STEP
    if head_dim % step != 0 or head_dim < step or head_dim > HEAD_DIM_MAX:
        of = f" of {dtype}" if dtype == FP8 else ""
        raise ValueError(
            f"{name} has head_dim {head_dim}{of}; allowed: multiples of {step} from {step} to {HEAD_DIM_MAX}"
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_head_dim("q", q.shape[3], q.dtype)
    check_head_dim("v", v.shape[3], q.dtype)
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have the head_dim of q, {q.shape[3]}, got {k.shape[3]} (v's may differ)")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k, v must have one batch size, got q {q.shape[0]}, k {k.shape[0]}, v {v.shape[0]}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k and v must have one seqlen, got k {k.shape[1]}, v {v.shape[1]}")
    heads, heads_kv = q.shape[2], k.shape[2]
    if heads_kv != v.shape[2]:
        raise ValueError(f"k and v must have the same number of heads, got k {heads_kv}, v {v.shape[2]}")
    if heads_kv == 0:
        raise ValueError(f"k and v must have at least 1 head, got q {heads} and k, v 0")
    if heads % heads_kv != 0:
        raise ValueError(
            f"the number of heads of q must be a multiple of that of k and v, got q {heads} and k, v {heads_kv}"
        )


def check_sizes(problem: Problem, config: Config) -> None:
    """What the device counts in 32 bits."""
    for name in ("batch", "seqlen_q", "seqlen_k", "heads"):
        if getattr(problem, name) > SIZE_MAX:
            raise ValueError(f"{name} is {getattr(problem, name)}; allowed: at most {SIZE_MAX}")
    tiles = problem.num_tiles(config.tile_m)
    if tiles > SIZE_MAX:
        raise ValueError(
            f"q of shape {(problem.batch, problem.seqlen_q, problem.heads, problem.head_dim)} makes {tiles} work tiles "
            f"(batch * heads * seqlen_q / {config.tile_m}); allowed: at most {SIZE_MAX}. Split the batch"
        )


def default_scale(q: Tensor) -> float:
    """1 / sqrt(head_dim)."""
    check_are_tensors(q=q)
    _check_rank("q", q)
    check_head_dim("q", q.shape[3], q.dtype)
    return q.shape[3] ** -0.5


def check_scale(softmax_scale: float) -> None:
    if not isinstance(softmax_scale, numbers.Real) or isinstance(softmax_scale, bool):
        raise TypeError(f"softmax_scale must be a float or None, got {type(softmax_scale).__name__}")
    value = float(softmax_scale)  # of NumPy's small types too: they could not hold the limit
    if value < 0:
        raise ValueError(f"softmax_scale is {softmax_scale}; allowed: finite and >= 0. Negate q instead")
    if not value <= MAX_SCALE:  # also true of NaN
        raise ValueError(f"softmax_scale is {softmax_scale}; allowed: finite (up to {MAX_SCALE:.3g}) and >= 0")


def check_flags(**arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, bool):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise TypeError(f"{name} must be True or False, got {value!r} of type {kind}")


def check_accumulation(accumulation: object, dtype: torch.dtype) -> None:
    if accumulation not in ACCUMULATIONS:
        raise ValueError(f"accumulation is {accumulation!r}; allowed: {', '.join(map(repr, ACCUMULATIONS))}")
    if accumulation != ACCUMULATIONS[0] and dtype != FP8:
        raise ValueError(f"accumulation is {accumulation!r} for {dtype}; allowed: {ACCUMULATIONS[0]!r} but for {FP8}")


def check_descales_apply(q: Tensor, q_descale: object, k_descale: object, v_descale: object) -> None:
    """16-bit tensors have none. Their shapes are checked where they are used."""
    check_are_tensors(q=q)
    for name, value in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if value is not None and q.dtype != FP8:
            kind = type(value).__name__
            raise NotImplementedError(f"{name} is for {FP8}, q has dtype {q.dtype}; allowed: None, got {kind}")


def check_later_arguments(qv: object, num_splits: object, pack_gqa: object, sm_margin: object) -> None:
    """Arguments of FlashAttention-3 that exist here for the callers' sake and may only hold their neutral value yet."""
    if qv is not None:
        raise NotImplementedError(f"qv is not supported yet; allowed: None, got {type(qv).__name__}")
    if isinstance(num_splits, bool) or not isinstance(num_splits, numbers.Integral) or num_splits not in (0, 1):
        raise NotImplementedError(
            f"num_splits={num_splits!r} is not supported here; allowed: 1, or 0, which means it too"
        )
    _check_neutral(("sm_margin", sm_margin, 0))
    if pack_gqa is not None and pack_gqa is not False:
        raise NotImplementedError(f"pack_gqa={pack_gqa!r} is not supported yet; allowed: None or False")


def check_no_variant(window_size: object, attention_chunk: object, softcap: object) -> None:
    """Where nothing but plain attention exists yet."""
    if not isinstance(window_size, (tuple, list)) or tuple(window_size) != (-1, -1):
        raise NotImplementedError(f"window_size={window_size!r} is not supported yet; allowed: (-1, -1), no window")
    _check_neutral(("attention_chunk", attention_chunk, 0), ("softcap", softcap, 0.0))


def _check_neutral(*arguments: tuple[str, object, float]) -> None:
    for name, value, neutral in arguments:
        if not isinstance(value, (int, float)) or value != neutral:
            raise NotImplementedError(f"{name}={value!r} is not supported yet; allowed: {neutral}")


def split_packed(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k, v of (batch, seqlen, 3, heads, head_dim) or (batch, seqlen, heads + 2 * heads_kv, head_dim)."""
    check_are_tensors(qkv=qkv)
    if num_heads_q is not None and (not isinstance(num_heads_q, numbers.Integral) or isinstance(num_heads_q, bool)):
        raise TypeError(f"num_heads_q must be an int or None, got {type(num_heads_q).__name__}")
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise ValueError(
                f"qkv with 5 dimensions must be (batch, seqlen, 3, heads, head_dim), got {tuple(qkv.shape)}"
            )
        if num_heads_q is not None and num_heads_q != qkv.shape[3]:
            raise ValueError(f"num_heads_q is {num_heads_q}, but qkv with 5 dimensions has {qkv.shape[3]} heads of q")
        q, k, v = qkv.unbind(2)
        return q, k, v
    if qkv.dim() != 4:
        raise ValueError(
            "qkv must be (batch, seqlen, 3, heads, head_dim) or (batch, seqlen, heads + 2 * heads_kv, head_dim), "
            f"got {tuple(qkv.shape)}"
        )
    if num_heads_q is None:
        raise ValueError(f"num_heads_q is needed for qkv with 4 dimensions, got None and {tuple(qkv.shape)}")
    both = qkv.shape[2] - num_heads_q
    if num_heads_q < 0 or both < 0 or both % 2 != 0:
        raise ValueError(
            f"num_heads_q is {num_heads_q}; qkv has {qkv.shape[2]} heads, "
            "which must be num_heads_q + 2 * heads of k and v"
        )
    q, k, v = qkv.split([num_heads_q, both // 2, both // 2], 2)
    return q, k, v


def check_chip(chip: Chip) -> None:
    if not chip.is_hopper:
        major, minor = chip.capability
        raise ValueError(
            f"q is on {chip.name} (sm_{major}{minor}); allowed: Hopper GPUs (sm_90), or CPU tensors for the reference"
        )


def check_gradients(*tensors: Tensor) -> None:
    """A call that autograd would have to differentiate."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(
            "an input requires a gradient, and the backward does not exist yet: call under torch.no_grad(), or detach"
        )
