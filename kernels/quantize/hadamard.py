"""The fast Hadamard transform of rows that lie across the registers of LANES lanes.

A row's values are groups of 32 columns; of group g lane l holds columns 32 g + 8 l .. + 7. So bits 0-2 and from 5 on of
a column's number are register numbers, bits 3 and 4 are the lane. A Hadamard matrix is a product of one stage a bit, in
any order. Four stages are one matrix of 16 x 16: bits 0, 3, 4 and 1, which in a chunk's four words are just what the
columns of an mma operand are. The tensor core does them exactly but for its fp32 sums, without a shuffle; two words of
a chunk take the rows of the operand's upper half. Bit 2 and those from 5 on are sums and differences of registers.
"""

from collections.abc import Callable

from ..prims.fp8 import SIGNS
from .config import CHUNK, LANES, parts

COLUMNS = CHUNK * LANES  # of a group
FLIP = SIGNS  # changes both of a packed pair


def transform(fragments: Callable, head_dim: int, operands: dict, multiply: Callable) -> list:
    """values[group][i]: every part of head_dim times its Hadamard matrix, not normalised.

    fragments(group): chunks of four packed pairs, whose sum is to be transformed; made when they are needed.
    operands[size]: a lane's word of the matrix (see qk.RowBlock.operand). multiply(a, b, c): prims.mma.multiply in the
    type of the pairs.
    """
    values = []
    for part in parts(head_dim):
        first = len(values)
        b = operands[min(part, COLUMNS)]
        values += [_chunk(fragments(g), b, multiply) for g in range(first, first - (-part // COLUMNS))]
        between(values[first:])
    return values


def sizes(head_dim: int) -> set[int]:
    """Of the operands that the transform takes: how many columns of a group are transformed together."""
    return {min(part, COLUMNS) for part in parts(head_dim)}


def _chunk(words: list, b, multiply: Callable) -> list:
    """The 8 values of a chunk after all stages that stay in its group. Half t of the columns has bit 1 = t."""
    halves = [[0.0] * 4, [0.0] * 4]
    for w in words:
        halves = [multiply([w[0], w[2], w[1], w[3]], [b, b ^ FLIP * t if t else b], c) for t, c in enumerate(halves)]
    low, high = ([half[2 * h + e] for half in halves for e in range(2)] for h in range(2))
    return [x + y for x, y in zip(low, high)] + [x - y for x, y in zip(low, high)]


def between(groups: list) -> None:
    """The stages between groups, changed in place: as many as there are bits in their number."""
    step = 1
    while step < len(groups):
        for g in range(len(groups)):
            if not g & step:
                low, high = groups[g], groups[g + step]
                groups[g][:], groups[g + step][:] = (
                    [x + y for x, y in zip(low, high)],
                    [x - y for x, y in zip(low, high)],
                )
        step *= 2


def is_negative(k: int, n: int):
    """Sign of H[k, n]: the parity of the bits that both have, of numbers of three bits."""
    both = k & n
    return (both ^ both >> 1 ^ both >> 2) & 1


def normalisers(head_dim: int) -> list[float]:
    """1 / sqrt(size) of the part that a group's columns belong to, by group."""
    return [part**-0.5 for part in parts(head_dim) for _ in range(-(-part // COLUMNS))]
