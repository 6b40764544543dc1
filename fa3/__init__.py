"""FlashAttention-3 for Hopper GPUs, called from PyTorch. Importing it imports neither torch nor the compiler."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa3 import quant as quant
    from fa3.interface import explain, flash_attn_func, flash_attn_qkvpacked_func, is_available, why_not
    from fa3.interface_fp8 import flash_attn_fp8_func, flash_attn_quantized_func
    from fa3.interface_kvcache import flash_attn_with_kvcache, get_scheduler_metadata
    from fa3.interface_varlen import flash_attn_varlen_func
    from fa3.merge import flash_attn_combine, merge_states

__version__ = "0.1.0"
__all__ = [
    "explain",
    "flash_attn_combine",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_quantized_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "is_available",
    "merge_states",
    "why_not",
]
ELSEWHERE = {
    "flash_attn_combine": "fa3.merge",
    "flash_attn_fp8_func": "fa3.interface_fp8",
    "flash_attn_quantized_func": "fa3.interface_fp8",
    "flash_attn_varlen_func": "fa3.interface_varlen",
    "flash_attn_with_kvcache": "fa3.interface_kvcache",
    "get_scheduler_metadata": "fa3.interface_kvcache",
    "merge_states": "fa3.merge",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fa3' has no attribute {name!r}; it exports {', '.join(__all__)}")
    value = getattr(import_module(ELSEWHERE.get(name, "fa3.interface")), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# NOTE: fa3.quant is a namespace package: the folder at the top of a clone has no __init__.py, which would make of it a
# package `quant` of everybody who works there. Its functions are given to it from here, whoever imports it first.
import_module("fa3.exports").give(import_module("fa3.quant"))
