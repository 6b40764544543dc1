"""The kernels that quantise Q, K and V, to compile them ahead of use. Imports neither torch nor the compiler."""

from collections.abc import Iterable

from fa3.kernels.quantize.config import (
    DTYPES,
    HEAD_DIM_STEP,
    Config,
    PackSpec,
    ScalesSpec,
    Spec,
    config_for,
)

AnySpec = Spec | PackSpec | ScalesSpec
Kernel = tuple[AnySpec, Config]


def all_kernels(head_dims: Iterable[tuple[int, int]]) -> list[Kernel]:
    """For these head dims (of Q and K, of V): both types, rotated, without rotary embedding; and those that pack V.

    Also the one that prepares scales.
    """
    specs: list[AnySpec] = [ScalesSpec()]
    for head_dim, head_dim_v in head_dims:
        specs += [Spec(dtype, head_dim, head_dim_v, rotate=True) for dtype in DTYPES]
        specs.append(PackSpec(head_dim_v))
    return [(spec, config_for(spec)) for spec in dict.fromkeys(specs)]


def are_served(head_dims: tuple[int, int]) -> bool:
    return not any(dim % HEAD_DIM_STEP for dim in head_dims)


def describe(spec: AnySpec) -> str:
    """One kernel in a few words."""
    if isinstance(spec, ScalesSpec):
        return "prepare scales"
    if isinstance(spec, PackSpec):
        return f"pack V {spec.head_dim_v}"
    return f"quantize {spec.dtype} {spec.head_dim}/{spec.head_dim_v}"
