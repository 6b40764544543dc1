"""Tests marked gpu run on a Hopper GPU and are skipped elsewhere, saying why."""

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        from fa3 import why_not  # not at the top: collecting imports no torch and asks nothing of CUDA

        reason = why_not()
        if reason:
            pytest.skip(reason)
