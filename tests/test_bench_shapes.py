"""The shapes that are measured: what they count and how they are chosen."""

import dataclasses

import pytest

from bench.shapes import DIMS_PAIRS, GRID, MODELS, NAMED, ODD_PAIRS, Shape, select


def square(**changes):
    return dataclasses.replace(Shape("x", 2, 8, 8, 4, 2, 64, 64, False), **changes)


def test_the_grid_is_24_points_of_the_same_size():
    assert len(GRID) == len({s.name for s in GRID}) == 24
    assert {s.batch * s.seqlen_q for s in GRID} == {16384}
    assert {s.heads * s.head_dim for s in GRID} == {2048}
    points = {(s.head_dim, s.causal, s.seqlen_q) for s in GRID}
    assert points == {(d, c, n) for d in (64, 128, 256) for c in (False, True) for n in (512, 1024, 4096, 16384)}


@pytest.mark.parametrize(
    "name, flops",
    [
        ("hd128-16k-full", 2_199_023_255_552),  # 4 * 16 * 16384^2 * 128
        ("hd128-16k-causal", 1_099_511_627_776),
        ("hd64-512-full", 68_719_476_736),  # 4 * 32 * 32 * 512^2 * 64
        ("deepseek-v3-4k", 687_194_767_360),  # 2 * 128 * 4096^2 * (192 + 128) / 2
    ],
)
def test_flops_of_known_shapes(name, flops):
    assert NAMED[name].flops == flops


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(3, 5), (5, 3), (1, 7), (7, 1), (4, 9)])
def test_causal_flops_count_the_visible_pairs_exactly(seqlen_q, seqlen_k):
    pairs = sum(j <= i + seqlen_k - seqlen_q for i in range(seqlen_q) for j in range(seqlen_k))
    shape = square(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=True)
    assert shape.flops == 2 * 2 * 4 * (64 + 64) * pairs


def test_bytes_count_each_tensor_once():
    assert NAMED["hd128-4k-full"].bytes() == 4 * 16384 * 2048 * 2
    assert square().bytes() == 2 * (2 * 8 * 4 * 128 + 2 * 8 * 2 * 128)


def test_shapes_are_chosen_by_name_group_or_start():
    assert select(["grid"]) == GRID and select(["models"]) == MODELS
    assert [s.name for s in select(["hd128-16k", "tiny", "hd128-16k-full"])] == [
        "hd128-16k-full",
        "hd128-16k-causal",
        "tiny",
    ]
    with pytest.raises(
        ValueError, match="no shape named 'hd12'; there are grid, models, grid-more, odd, dims, hd64-512"
    ):
        select(["hd12"])


def test_an_odd_length_lies_beside_the_next_multiple_of_128_at_the_same_batch():
    places = {(odd.head_dim, odd.causal, odd.seqlen_q, even.seqlen_q) for odd, even in ODD_PAIRS}
    lengths = [(197, 256), (577, 640), (1000, 1024), (4095, 4096), (4097, 4224)]
    assert places == {(d, c, *pair) for d in (64, 128) for c in (False, True) for pair in lengths}
    for odd, even in ODD_PAIRS:
        assert dataclasses.replace(even, name=odd.name, seqlen_q=odd.seqlen_q, seqlen_k=odd.seqlen_k) == odd
        assert odd.heads * odd.head_dim == 2048 and abs(odd.batch * odd.seqlen_q / 16384 - 1) < 0.03
    chosen = select(["odd"])
    assert len(chosen) == 40 and chosen[:6] == (*ODD_PAIRS[0], *ODD_PAIRS[1], *ODD_PAIRS[2])
    assert chosen[5] is NAMED["hd64-1k-full"] and chosen[7] is NAMED["hd64-4k-full"]  # a problem has one name


def test_head_dims_are_set_beside_128_and_the_wider_grid_is_as_large():
    assert {(s.head_dim, s.causal, beside.name) for s, beside in DIMS_PAIRS} == {
        (d, c, f"hd128-4k-{'causal' if c else 'full'}") for d in (72, 80, 96, 160, 192) for c in (False, True)
    }
    names = [shape.name for shape in select(["dims"])]
    assert names[:3] == ["hd128-4k-full", "hd72-4k-full", "hd80-4k-full"] and len(names) == 12
    more = select(["grid-more"])
    assert {(s.head_dim, s.head_dim_v, s.causal, s.seqlen_q) for s in more} == {
        (*d, c, n) for d in ((96, 96), (192, 192), (192, 128)) for c in (False, True) for n in (512, 1024, 4096, 16384)
    }
    assert {(s.batch * s.seqlen_q, s.heads) for s in more if s.head_dim == 192} == {(16384, 10)}
    assert NAMED["hd192v128-1k-causal"].flops == 16 * 10 * (192 + 128) * 1024**2


def test_every_problem_has_one_name():
    assert len({dataclasses.replace(shape, name="") for shape in NAMED.values()}) == len(NAMED)


@pytest.mark.parametrize("shape", NAMED.values(), ids=lambda s: s.name)
def test_every_named_shape_is_one_that_the_kernel_takes(shape):
    assert shape.heads % shape.heads_kv == 0
    assert shape.head_dim % 8 == shape.head_dim_v % 8 == 0
    assert max(shape.head_dim, shape.head_dim_v) <= 256
