"""The kernels of attention to a cache, and those around it (append, merge), to compile them ahead of use.

Imports neither torch nor the compiler.
"""

from fa3 import heuristics_decode
from fa3.kernels.append.config import DTYPES, Rotary
from fa3.kernels.append.config import Config as AppendConfig
from fa3.kernels.append.config import Spec as AppendSpec
from fa3.kernels.append.config import config_for as append_config
from fa3.kernels.decode.config import GATHER
from fa3.kernels.decode.config import Config as DecodeConfig
from fa3.kernels.decode.config import Spec as DecodeSpec
from fa3.kernels.merge.config import Config as MergeConfig
from fa3.kernels.merge.config import Spec as MergeSpec
from fa3.kernels.merge.config import config_for as merge_config

AnySpec = AppendSpec | MergeSpec
Kernel = tuple[AppendSpec, AppendConfig] | tuple[MergeSpec, MergeConfig]


def all_kernels(dtype: str | None = None) -> list[Kernel]:
    """Of one type or of both, for every head dim: append with tables of that type, merge of two and of float32 splits.

    Others (tables of float32, strides that are no multiples of 16 bytes, other results of a merge) are compiled when a
    call asks for them.
    """
    kernels: list[Kernel] = []
    for kind in DTYPES if dtype is None else [x for x in DTYPES if x == dtype]:
        for rotary in (None, Rotary(True, kind), Rotary(False, kind)):
            append = AppendSpec(kind, rotary)
            kernels.append((append, append_config(append)))
        for merge in (MergeSpec(kind, kind, True), MergeSpec("float32", kind, False)):
            kernels.append((merge, merge_config(merge)))
    return kernels


def decode_kernels(
    dtype: str | None = None, tile: tuple[int, int] | None = None
) -> list[tuple[DecodeSpec, DecodeConfig]]:
    """Of one type and tile of head dims or of all: caches without pages and with pages of any size, any mask.

    Those with split sizes given, attention_chunk, softcap or sinks are compiled when a call asks for them.
    """
    return [
        (spec, config)
        for spec, config in heuristics_decode.all_configs()
        if dtype in (None, spec.dtype) and tile in (None, (spec.head_dim, spec.head_dim_v))
    ]


def describe_decode(spec: DecodeSpec, config: DecodeConfig) -> str:
    pages = {0: "no pages", GATHER: "any pages"}.get(spec.pages, f"pages by {spec.pages} keys")
    words = [f"decode {spec.dtype} {spec.head_dim}/{spec.head_dim_v} {pages}", f"blocks of {config.tile_n}"]
    return ", ".join([*words, "split" if spec.splits else "not split"])


def describe(spec: AnySpec) -> str:
    """One kernel around it in a few words."""
    if isinstance(spec, MergeSpec):
        return f"merge {'two' if spec.pair else 'any number'} of {spec.dtype} to {spec.dtype_o}"
    words = [f"append {spec.dtype}"]
    if spec.rotary is not None:
        words.append(f"rotary {'interleaved' if spec.rotary.interleaved else 'in halves'} by {spec.rotary.dtype}")
    words += ["any strides"] * (not spec.aligned)
    return " ".join(words)
