"""Which combinations python -m fa3 bench sweep tries."""

import pytest

from bench import sweep
from fa3.kernels.forward.config import Config, Spec


@pytest.mark.parametrize(
    "dtype, config, fits",
    [
        ("bfloat16", Config(2, 128, optimistic=True), True),
        ("float16", Config(2, 128, optimistic=True, pingpong=False, persistent=True, dynamic=True), True),
        ("bfloat16", Config(2, 128, optimistic=True, overlap=False), False),
        ("bfloat16", Config(2, 128, optimistic=True, rescale_early=True), False),
        ("bfloat16", Config(2, 128, rescale_early=True), True),
        ("float8_e4m3fn", Config(2, 128, optimistic=True), False),
        ("float8_e4m3fn", Config(2, 128), True),
        ("bfloat16", Config(2, 64, q_stages=2), False),
        ("bfloat16", Config(2, 64, q_stages=2, persistent=True), True),
        ("float8_e4m3fn", Config(2, 128, q_stages=2, persistent=True, dynamic=True), True),
        ("bfloat16", Config(2, 176, persistent=True), True),
        ("bfloat16", Config(2, 176, q_stages=2, persistent=True), False),  # 247 KB
    ],
)
def test_what_the_sweep_takes_together(dtype, config, fits):
    assert sweep.fits(Spec(dtype, 128, 128, False), config) == fits


def test_the_sweep_varies_the_places_of_q():
    args = sweep.parser().parse_args(
        ["--tile-n", "64", "64", "16", "--warpgroups", "2", "--q-stages", "1", "2", "--pingpong", "on"]
        + ["--persistent", "on", "--optimistic", "on", "off"]
    )
    configs = sweep.candidates(args)
    assert {(c.q_stages, c.optimistic) for c in configs} == {(1, False), (1, True), (2, False), (2, True)}
    assert len(configs) == len({sweep.brief(c) for c in configs}) == 4
