"""Importing needs no GPU, compiler or torch; forking after it is safe; the answers are true elsewhere too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fa3

ROOT = Path(__file__).parent.parent


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_exports_are_listed_and_nothing_else_is_found():
    assert set(fa3.__all__) <= set(dir(fa3))
    assert all(callable(getattr(fa3, name)) for name in fa3.__all__)
    with pytest.raises(AttributeError, match="flash_attention.*flash_attn_func"):
        _ = fa3.flash_attention


def test_import_is_light():
    heavy = ["torch", "cutlass", "tvm_ffi", "numpy", "fa3.interface"]
    assert run(f"import sys, fa3; fa3.__version__; dir(fa3); print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_names_of_quant_come_lazily_and_its_folder_is_no_package_of_its_own():
    program = """
import sys, fa3
print(fa3.quant.__file__, "torch" in sys.modules, "quantize_qkv" in dir(fa3.quant))
from fa3.quant import QuantizedQKV, quantize_qkv, cast
print(quantize_qkv is fa3.quant.quantize_qkv is fa3.quant.interface.quantize_qkv, cast.__name__, QuantizedQKV.__name__)
try:
    fa3.quant.quantise
except AttributeError as error:
    print("quantize_qkv" in str(error))
"""
    assert run(program).splitlines() == ["None False True", "True fa3.quant.cast QuantizedQKV", "True"]
    assert run("import fa3.quant.formats; print(fa3.quant.quantize_qkv.__name__)") == "quantize_qkv"


def test_the_first_use_imports_torch_but_neither_compiler_nor_context():
    program = """
import sys, fa3
fa3.flash_attn_func, fa3.explain, fa3.is_available
import torch
print([m for m in ("cutlass", "tvm_ffi", "tvm_ffi_orcjit") if m in sys.modules], torch.cuda.is_initialized())
"""
    assert run(program) == "[] False"


def test_a_16_bit_call_imports_nothing_that_is_for_others():
    """What it imports is part of the first call of a process."""
    others = ["fa3.interface_fp8", "fa3.ops_fp8", "fa3.launch_fp8", "fa3.quant.interface", "fa3.quant.ops"]
    others += [
        "fa3.interface_varlen",
        "fa3.ops_varlen",
        "fa3.launch_varlen",
        "fa3.interface_kvcache",
        "fa3.ops_kvcache",
        "fa3.explanation",
        "fa3.kernels.sass",
        "filelock",
        "platformdirs",
    ]
    program = f"""
import sys, torch
before = set(sys.modules)
import fa3
from fa3 import launch
from fa3.device import ASSUMED
from fa3.heuristics import config_of
from fa3.kernels import compile
x = torch.ones(1, 1, 1, 8, dtype=torch.float16)
fa3.flash_attn_func(x, x, x)
launch.chip, launch.load = lambda index: ASSUMED, lambda spec, config: compile.state(spec, config) and print
launch.forward(x, x, x, None, False)
print([m for m in {others} if m in sys.modules and m not in before])
"""
    assert run(program, FA3_CACHE_DIR="/nonexistent").splitlines()[-1] == "[]"


def test_the_first_use_of_fp8_may_be_under_a_compiler():
    """Which then traces the import of what quantises."""
    program = """
import torch, fa3
q, k, v = (torch.randn(1, 70, 1, 16).to(torch.float8_e4m3fn) for _ in range(3))
one = torch.ones(1, 1)
def attend(q, k, v, one):
    return fa3.flash_attn_func(q, k, v, q_descale=one, causal=True).float() * 2
compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v, one)
print(torch.equal(compiled, attend(q, k, v, one)), compiled.isfinite().all().item())
"""
    assert run(program) == "True True"


def test_a_call_on_cpu_needs_neither_gpu_nor_compiler():
    program = """
import sys
sys.modules["cutlass"] = None
import torch, fa3
x = torch.ones(1, 1, 1, 8)
print(fa3.flash_attn_func(x, x, x).sum().item(), fa3.is_available(), "tvm_ffi" in sys.modules)
"""
    assert run(program, CUDA_VISIBLE_DEVICES="") == "8.0 False False"


def test_fork_after_import():
    program = """
import os, fa3, torch
fa3.flash_attn_func
child = os.fork()
if child == 0:
    x = torch.ones(1, 2, 1, 8)
    os._exit(0 if fa3.flash_attn_func(x, x, x).sum().item() == 16.0 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.cuda.is_initialized())
"""
    assert run(program) == "0 False"


def test_import_before_and_after_torch():
    for first, second in (("torch", "fa3"), ("fa3", "torch")):
        call = "x = torch.ones(1, 1, 1, 8); print(fa3.flash_attn_func(x, x, x).sum().item())"
        assert run(f"import {first}, {second}; {call}") == "8.0"


def test_another_gpu_is_named_at_the_call_and_not_at_the_import():
    program = """
import fa3, torch
from types import SimpleNamespace
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
found = SimpleNamespace(name="NVIDIA L4", multi_processor_count=58, major=8, minor=9)
torch.cuda.get_device_properties = lambda index: found
print(fa3.is_available(), fa3.why_not())
from fa3 import launch
x = torch.ones(1, 1, 1, 8, dtype=torch.float16)
try:
    launch.forward(x, x, x, 1.0, False)
except ValueError as error:
    print(error)
"""
    first, second = run(program).splitlines()
    assert first.startswith("False") and "NVIDIA L4" in first and "sm_89" in first and "sm_90" in first
    assert "NVIDIA L4 (sm_89)" in second and "Hopper" in second
