"""The public names of `fa3.quant`, loaded at first access as those of `fa3` are. Imports nothing before that."""

from importlib import import_module
from types import ModuleType
from typing import Any

QUANT = {
    "QuantizedQKV": "fa3.quant.formats",
    "dequantize_qkv": "fa3.quant.reference",
    "from_descales": "fa3.quant.interface",
    "pack_v": "fa3.quant.interface",
    "quantize_qkv": "fa3.quant.interface",
}


def give(package: ModuleType, exports: dict[str, str] = QUANT) -> None:
    """Make package.name mean what the module exports[name] has under that name."""

    def __getattr__(name: str) -> Any:
        if name not in exports:  # also how a submodule is asked for before it is imported
            raise AttributeError(
                f"module {package.__name__!r} has no attribute {name!r}; it exports {', '.join(exports)}"
            )
        value = getattr(import_module(exports[name]), name)
        setattr(package, name, value)  # the next access does not come here
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(package), *exports})

    vars(package).update(__getattr__=__getattr__, __dir__=__dir__, __all__=list(exports))
