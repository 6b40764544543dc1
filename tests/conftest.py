"""Marked tests are skipped where they cannot run, saying why: gpu without a Hopper GPU, inductor without compilers."""

import importlib.util
import shutil
from collections.abc import Iterator

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        from fa3 import why_not  # not at the top: collecting imports no torch and asks nothing of CUDA

        reason = why_not()
        if reason:
            pytest.skip(reason)
    if item.get_closest_marker("inductor") and not (
        importlib.util.find_spec("triton") and any(map(shutil.which, ("cc", "gcc", "clang")))
    ):
        pytest.skip("inductor needs triton and a C compiler")


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Anything that waits for the device raises."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")
