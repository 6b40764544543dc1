"""What the launcher leaves for the compiled function to look at, it does look at: it is part of no plan's key."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAUNCH = 100  # and the device


@pytest.fixture(scope="module")
def results():
    """Of tests/compiled_call.py: name -> (error, devices that were made current and launches)."""
    if shutil.which("gcc") is None:
        pytest.skip("the stubs of CUDA need gcc")
    command = [sys.executable, "-m", "tests.compiled_call"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_what_fits_is_launched_on_the_tensors_device_and_the_current_one_stays(results):
    for kind in ("", "ragged: ", "append: ", "merge: "):
        assert results[f"{kind}right"] == ["", [LAUNCH]]
        assert results[f"{kind}right, on device 1"] == ["", [1, LAUNCH + 1, 0]]
    assert results["decode: right"] == ["", [LAUNCH] * 2]
    for name in ("ragged: no lengths", "window", "sink: right", "append: no new rows"):
        assert results[name] == ["", [LAUNCH]]


@pytest.mark.parametrize(
    "name, reason",
    [
        ("k.shape[0]", "mQ.shape[0]"),
        ("k.shape[1]", "mK.shape[1]"),
        ("k.shape[2]", "mK.shape[2]"),
        ("k.shape[3]", "mQ.shape[3]"),
        ("v.shape[0]", "mQ.shape[0]"),
        ("out.shape[3]", "mV.shape[3]"),
        ("lse.shape[1]", "mQ.shape"),
        ("k.ndim", "ndim=4"),
        ("k.dtype", "dtype=bfloat16"),
        ("v.dtype", "dtype=bfloat16"),
        ("k.device", "mQ.device.index"),
        ("v.device", "mQ.device.index"),
        ("q.device", "mQ.device.index"),
        ("k on the CPU", "device_type=cuda"),
        ("v on the CPU", "device_type=cuda"),
        ("k.data", "aligned"),
        ("ragged: k.shape[1]", "mV.shape[1]"),
        ("ragged: cu_k.shape", "given[1].shape[0]"),
        ("ragged: used_k.shape", "given[3].shape[0]"),
        ("ragged: cu_q.ndim", "given[0]"),
        ("ragged: cu_q.dtype", "given[0]"),
        ("ragged: used_k.dtype", "given[3]"),
        ("ragged: cu_k.device", "device index on given[1]"),
        ("ragged: used_q on the CPU", "given[2]"),
        ("append: v.shape[1]", "mK.shape[1]"),
        ("append: k_cache.shape[2]", "mK.shape[2]"),
        ("append: v_cache.shape[3]", "mV.shape[3]"),
        ("append: sin.shape[0]", "mCos.shape[0]"),
        ("append: cos.dtype", "dtype=bfloat16"),
        ("append: k_cache.device", "mQ.device.index"),
        ("append: v_cache.data", "alignment=16"),
        ("append: table.dtype", "dtype=int32"),
        ("append: lengths.device", "mQ.device.index"),
        ("append: cu_q on the CPU", "device_type=cuda"),
        ("merge: other.dtype", "dtype=bfloat16"),
        ("merge: other_lse.device", "mO.device.index"),
        ("merge: out.data", "alignment=16"),
        ("decode: k.dtype", "dtype=bfloat16"),
        ("decode: v.dtype", "dtype=bfloat16"),
        ("decode: k.device", "mQ.device.index"),
        ("decode: v on the CPU", "device_type=cuda"),
        ("decode: k.data", "alignment=16"),
        ("decode: out.shape[0]", "mQ.shape[0]"),
        ("decode: out.shape[2]", "mQ.shape[2]"),
        ("decode: out.shape[3]", "mV.shape[3]"),
        ("decode: out.ndim", "ndim=4"),
        ("decode: out.dtype", "dtype=bfloat16"),
        ("decode: out.device", "mQ.device.index"),
        ("decode: table.ndim", "ndim=2"),
        ("decode: table.dtype", "dtype=int32"),
        ("decode: table.device", "mQ.device.index"),
        ("decode: lengths.dtype", "dtype=int32"),
        ("decode: lengths.ndim", "ndim=1"),
        ("decode: left.device", "mQ.device.index"),
        ("decode: batch_idx on the CPU", "device_type=cuda"),
        ("decode: cu_q.dtype", "dtype=int32"),
        ("decode: sink.shape", "mQ.shape[2]"),
        ("decode: sink.device", "mQ.device.index"),
        ("sink: shape", "variant[4].shape[0]"),
        ("sink: dtype", "variant[4]"),
        ("sink: device", "device index on variant[4]"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_launch(results, name, reason):
    error, seen = results[name]
    assert error.startswith(("ValueError", "TypeError")) and reason in error and seen == []


def test_every_call_is_looked_at(results):
    assert len(results) == 18 + 11 + 13 + 5 + 5 + 23
