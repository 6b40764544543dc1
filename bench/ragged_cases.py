"""The prefill problems of sequences whose lengths differ, each beside equal sequences with the same FLOPs."""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from bench.shapes import Shape

HEADS, HEAD_DIM = 16, 128
UNIFORM_SEED, UNIFORM_BATCH, UNIFORM_MOST = 0, 64, 8192
PAGE_SIZES = (16, 64, 128)


@dataclass(frozen=True)
class Case:
    """`shape` is that of the equal sequences: as many, of the length whose square is the mean of those of `lengths`."""

    shape: Shape
    lengths: tuple[int, ...]  # queries and keys of each sequence
    page_size: int | None = None  # of the keys; None: they lie one after the other

    @property
    def name(self) -> str:
        return self.shape.name


def _case(name: str, lengths: Iterable[int], causal: bool, page_size: int | None = None) -> Case:
    lengths = tuple(lengths)
    equal = round(math.sqrt(sum(length * length for length in lengths) / len(lengths)))
    full_name = f"{name}-{'causal' if causal else 'full'}"
    shape = Shape(full_name, len(lengths), equal, equal, HEADS, HEADS, HEAD_DIM, HEAD_DIM, causal)
    return Case(shape, lengths, page_size)


def _drawn() -> list[int]:
    draw = random.Random(UNIFORM_SEED)
    return [draw.randint(1, UNIFORM_MOST) for _ in range(UNIFORM_BATCH)]


UNIFORM = tuple(_case("uniform-8k", _drawn(), causal) for causal in (True, False))
ONE_LONG = tuple(_case("one-64k", [65536] + [512] * 63, causal) for causal in (True, False))
PAGED = {
    page: tuple(_case(f"paged-16k-page{page}", [16384], causal, page) for causal in (True, False))
    for page in PAGE_SIZES
}  # fmt: skip
SMOKE = (_case("tiny", [40, 1, 0, 64], True), _case("tiny", [40, 1, 0, 64], False))

GROUPS: dict[str, tuple[Case, ...]] = {
    "uniform": UNIFORM,
    "one-long": ONE_LONG,
    "paged": tuple(case for cases in PAGED.values() for case in cases),
}
DEFAULT = tuple(GROUPS)
SHOWN = (*UNIFORM, *ONE_LONG)
NAMED = {case.name: case for case in (*(case for group in GROUPS.values() for case in group), *SMOKE)}
