"""The compiled forward called on tensors that only say they are on a GPU, in a process whose CUDA does nothing.

`python -m tests.compiled_call` prints as JSON what became of the calls of `calls`: [error, CUDA calls]. The functions
that a compiled kernel leaves open come from a library of stubs, compiled here. Needs gcc, no GPU and no driver.
"""

import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path

STUBS = """
int device, seen[64], count;
static int note(int what) { return seen[count++ % 64] = what, 0; }
int _cudaGetDevice(int *d) { return *d = device, 0; }
int _cudaSetDevice(int d) { return note(device = d); }
int _cudaLaunchKernelEx(void *config, void *kernel, void **arguments) { return note(100 + device); }
int cuda_dialect_init_library_once(void **handle) { return *handle = &device, 0; }
void cuda_dialect_unload_library_once(void **handle) { *handle = 0; }
int CuteDSLRT_TVMFFISetRaisedCudaError(int error) { return -1; }
"""
UNUSED = (  # called when a kernel is loaded
    "_cudaLibraryLoadData", "_cudaLibraryGetKernel", "_cuKernelGetAttribute", "_cudaFuncSetAttribute",
    "_cudaKernelSetAttributeForDevice", "_cudaDeviceGetAttribute",
)  # fmt: skip
BFLOAT16, FLOAT16, FLOAT32, INT32, INT64 = (
    (4, 16, 1),
    (2, 16, 1),
    (2, 32, 1),
    (0, 32, 1),
    (0, 64, 1),
)  # as DLPack has them: kind, bits, lanes
CPU, CUDA = 1, 2


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("kind_and_bits", ctypes.c_uint8 * 2),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),  # from here on: DLManagedTensor
        ("deleter", ctypes.c_void_p),
    ]


class Tensor:
    """Contiguous, on no memory. It must outlive what is made of it."""

    def __init__(self, shape, dtype=BFLOAT16, device=0, kind=CUDA, address=4096):
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        self.strides = (ctypes.c_int64 * len(shape))(*strides)
        self.kind, self.device = kind, device
        self.managed = DLTensor(
            address, (kind, device), len(shape), dtype[:2], dtype[2],
            ctypes.addressof(self.shape), ctypes.addressof(self.strides), 0, None, None,
        )  # fmt: skip

    def __dlpack__(self, **_):
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return capsule(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self):
        return self.kind, self.device


def calls():
    """Name -> q, k, v, out, lse. Batch 2, 7 queries, 5 keys, heads 4 / 2, head dims 64, 40."""
    right = dict(q=(2, 7, 4, 64), k=(2, 5, 2, 64), v=(2, 5, 2, 40), out=(2, 7, 4, 40), lse=(2, 4, 7))

    def made(**changes):
        """A change: another shape, or what Tensor takes besides."""
        tensors = {}
        for name, shape in right.items():
            change = changes.get(name, {})
            dtype = FLOAT32 if name == "lse" else BFLOAT16
            options = {"dtype": dtype, **change} if isinstance(change, dict) else {"dtype": dtype}
            tensors[name] = Tensor(shape if isinstance(change, dict) else change, **options)
        return list(tensors.values())

    elsewhere = dict(device=1)
    return {
        "right": made(),
        "right, on device 1": made(**dict.fromkeys(right, elsewhere)),
        "k.shape[0]": made(k=(1, 5, 2, 64)),
        "k.shape[1]": made(k=(2, 6, 2, 64)),
        "k.shape[2]": made(k=(2, 5, 4, 64)),
        "k.shape[3]": made(k=(2, 5, 2, 56)),
        "v.shape[0]": made(v=(1, 5, 2, 40)),
        "out.shape[3]": made(out=(2, 7, 4, 64)),
        "lse.shape[1]": made(lse=(2, 7, 4)),
        "k.ndim": made(k=(2, 10, 64)),
        "k.dtype": made(k=dict(dtype=FLOAT16)),
        "v.dtype": made(v=dict(dtype=FLOAT32)),
        "k.device": made(k=elsewhere),
        "v.device": made(v=elsewhere),
        "q.device": made(q=elsewhere),
        "k on the CPU": made(k=dict(kind=CPU)),
        "v on the CPU": made(v=dict(kind=CPU)),
        "k.data": made(k=dict(address=4096 + 8)),
    }


def ragged_calls():
    """Name -> q, k, v, out, lse, lists and counter of a ragged call. 3 sequences of together 7 queries and 5 keys."""
    right = dict(q=(1, 7, 4, 64), k=(1, 5, 2, 64), v=(1, 5, 2, 64), out=(1, 7, 4, 64), lse=(1, 4, 7))
    lists = dict(cu_q=(4,), cu_k=(4,), used_q=(3,), used_k=(3,), tickets=(1,))

    def made(**changes):
        tensors = []
        for name, shape in {**right, **lists}.items():
            change = changes.get(name, {})
            dtype = INT32 if name in lists else FLOAT32 if name == "lse" else BFLOAT16
            options = {"dtype": dtype, **change} if isinstance(change, dict) else {"dtype": dtype}
            tensors.append(Tensor(shape if isinstance(change, dict) else change, **options))
        return tensors

    return {
        "right": made(),
        "right, on device 1": made(**dict.fromkeys({**right, **lists}, dict(device=1))),
        "no lengths": made(used_q=(4,), used_k=(4,)),
        "k.shape[1]": made(k=(1, 6, 2, 64)),
        "cu_k.shape": made(cu_k=(5,)),
        "used_k.shape": made(used_k=(4,)),
        "cu_q.ndim": made(cu_q=(2, 2)),
        "cu_q.dtype": made(cu_q=dict(dtype=INT64)),
        "used_k.dtype": made(used_k=dict(dtype=FLOAT32)),
        "cu_k.device": made(cu_k=dict(device=1)),
        "used_q on the CPU": made(used_q=dict(kind=CPU)),
    }


def append_calls():
    """Name -> the arguments of an append with a rotary embedding. 3 sequences, 2 new rows, 9 pages of 16."""
    right = dict(q=(3, 2, 8, 64), out=(3, 2, 8, 64), k=(3, 2, 4, 64), v=(3, 2, 4, 32), k_cache=(9, 16, 4, 64),
                 v_cache=(9, 16, 4, 32), cos=(99, 32), sin=(99, 32))  # fmt: skip
    lists = dict(lengths=(3,), cu_k=(4,), batch_idx=(3,), table=(3, 7), indptr=(4,), cu_q=(4,), rotary=(3,))

    def made(**changes):
        def tensor(name, shape):
            change = changes.get(name, {})
            dtype = INT32 if name in lists else BFLOAT16
            return Tensor(shape, **{"dtype": dtype, **change}) if isinstance(change, dict) else Tensor(change)

        tensors, told = ([tensor(*item) for item in each.items()] for each in (right, lists))
        return (*tensors, (*told, 1, 0))

    return {
        "right": made(),
        "right, on device 1": made(**dict.fromkeys({**right, **lists}, dict(device=1))),
        "no new rows": made(k=(0, 16, 4, 64), v=(0, 16, 4, 32)),
        "v.shape[1]": made(v=(3, 1, 4, 32)),
        "k_cache.shape[2]": made(k_cache=(9, 16, 2, 64)),
        "v_cache.shape[3]": made(v_cache=(9, 16, 4, 64)),
        "sin.shape[0]": made(sin=(98, 32)),
        "cos.dtype": made(cos=dict(dtype=FLOAT32)),
        "k_cache.device": made(k_cache=dict(device=1)),
        "v_cache.data": made(v_cache=dict(address=4096 + 8)),
        "table.dtype": made(table=dict(dtype=INT64)),
        "lengths.device": made(lengths=dict(device=1)),
        "cu_q on the CPU": made(cu_q=dict(kind=CPU)),
    }


def merge_calls():
    """Name -> the arguments of a merge of two."""
    o, lse = (2, 3, 4, 64), (2, 3, 4)

    def made(**changes):
        shapes = dict(o=o, lse=lse, other=o, other_lse=lse, out=o, out_lse=lse)
        options = {name: dict(dtype=FLOAT32 if "lse" in name else BFLOAT16) for name in shapes}
        return (*(Tensor(shape, **{**options[name], **changes.get(name, {})}) for name, shape in shapes.items()), 3)

    return {
        "right": made(),
        "right, on device 1": made(
            **dict.fromkeys(("o", "lse", "other", "other_lse", "out", "out_lse"), dict(device=1))
        ),
        "other.dtype": made(other=dict(dtype=FLOAT16)),
        "other_lse.device": made(other_lse=dict(device=1)),
        "out.data": made(out=dict(address=4096 + 8)),
    }


def decode_calls():
    """Name -> the arguments of attention of 2 queries a sequence to 9 pages of 64, of 3 sequences."""
    right = dict(q=(3, 2, 8, 64), k=(9, 64, 4, 64), v=(9, 64, 4, 40), out=(3, 2, 8, 40), lse=(3, 8, 2),
                 part_o=(6, 4, 64), part_lse=(6, 4), table=(3, 7), sink=(8,))  # fmt: skip
    lists = dict(lengths=(3,), cu_k=(4,), left=(3,), batch_idx=(3,), indptr=(4,), cu_q=(4,))
    floats = "lse", "part_o", "part_lse", "sink"

    def made(**changes):
        def tensor(name, shape):
            change = changes.get(name, {})
            dtype = INT32 if name in lists or name == "table" else FLOAT32 if name in floats else BFLOAT16
            made = isinstance(change, dict)
            return Tensor(shape if made else change, **{"dtype": dtype, **(change if made else {})})

        x, told = ([tensor(*item) for item in each.items()] for each in (right, lists))
        told = (*told, 1, 0, 0, 0, 0, 0, 0, 2, 448, 3)
        return (*x[:5], tuple(x[5:7]), x[7], x[8], told, (2**30, 0), None, None, 0.1, None, 1, 2)

    return {
        "right": made(),
        "right, on device 1": made(**dict.fromkeys({**right, **lists}, dict(device=1))),
        "k.dtype": made(k=dict(dtype=FLOAT16)),
        "v.dtype": made(v=dict(dtype=FLOAT32)),
        "k.device": made(k=dict(device=1)),
        "v on the CPU": made(v=dict(kind=CPU)),
        "k.data": made(k=dict(address=4096 + 8)),
        "out.shape[0]": made(out=(2, 2, 8, 40)),
        "out.shape[2]": made(out=(3, 2, 4, 40)),
        "out.shape[3]": made(out=(3, 2, 8, 64)),
        "out.ndim": made(out=(6, 8, 40)),
        "out.dtype": made(out=dict(dtype=FLOAT16)),
        "out.device": made(out=dict(device=1)),
        "table.ndim": made(table=(21,)),
        "table.dtype": made(table=dict(dtype=INT64)),
        "table.device": made(table=dict(device=1)),
        "lengths.dtype": made(lengths=dict(dtype=INT64)),
        "lengths.ndim": made(lengths=(3, 1)),
        "left.device": made(left=dict(device=1)),
        "batch_idx on the CPU": made(batch_idx=dict(kind=CPU)),
        "cu_q.dtype": made(cu_q=dict(dtype=FLOAT32)),
        "sink.shape": made(sink=(4,)),
        "sink.device": made(sink=dict(device=1)),
    }


def sinks():
    """Name -> sinks of 4 heads."""
    return {
        "right": Tensor((4,), FLOAT32),
        "shape": Tensor((3,), FLOAT32),
        "dtype": Tensor((4,), BFLOAT16),
        "device": Tensor((4,), FLOAT32, device=1),
    }


def main() -> None:
    folder = tempfile.mkdtemp()
    source, library = Path(folder, "stubs.c"), Path(folder, "stubs.so")
    source.write_text(STUBS + "".join(f"int {name}(void) {{ return 0; }}\n" for name in UNUSED))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    stubs = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    sys.modules["torch"] = None  # tvm_ffi would ask it about CUDA
    import tvm_ffi

    from fa3.heuristics_decode import config_for
    from fa3.kernels import compile
    from fa3.kernels.append.config import Rotary
    from fa3.kernels.append.config import Spec as AppendSpec
    from fa3.kernels.append.config import config_for as append_config
    from fa3.kernels.decode.config import Spec as DecodeSpec
    from fa3.kernels.forward.config import Config, Spec
    from fa3.kernels.merge.config import Spec as MergeSpec
    from fa3.kernels.merge.config import config_for as merge_config

    run = compile.load(Spec("bfloat16", 64, 64, False), Config(2, 128))  # linked to what was loaded first: the stubs
    seen, count = (ctypes.c_int * 64).in_dll(stubs, "seen"), ctypes.c_int.in_dll(stubs, "count")
    results = {}

    def note(name, run, tensors, lists=None, tickets=None, variant=None):
        count.value, error = 0, ""
        try:
            run(*map(tvm_ffi.from_dlpack, tensors), None, None, lists, variant, tickets, 0.1, 132)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        results[name] = (error, seen[: count.value])

    for name, tensors in calls().items():
        note(name, run, tensors)
    run = compile.load(Spec("bfloat16", 64, 64, False, ragged=True), Config(2, 128, persistent=True, dynamic=True))
    for name, tensors in ragged_calls().items():
        *lists, tickets = map(tvm_ffi.from_dlpack, tensors[5:])
        note(f"ragged: {name}", run, tensors[:5], (*lists, 1, 1), tickets)

    def given(x):
        return tuple(map(given, x)) if isinstance(x, tuple) else tvm_ffi.from_dlpack(x) if isinstance(x, Tensor) else x

    decode = DecodeSpec("bfloat16", 64, 64, 64, sink="float32")
    append, pair = AppendSpec("bfloat16", Rotary(False, "bfloat16")), MergeSpec("bfloat16", "bfloat16", True)
    for kind, run, each in (
        ("append", compile.load(append, append_config(append)), append_calls()),
        ("merge", compile.load(pair, merge_config(pair)), merge_calls()),
        ("decode", compile.load(decode, config_for(decode)), decode_calls()),
    ):
        for name, arguments in each.items():
            count.value, error = 0, ""
            try:
                run(*given(arguments))
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            results[f"{kind}: {name}"] = (error, seen[: count.value])
    right = calls()["right"]
    run = compile.load(Spec("bfloat16", 64, 64, False, local="window", softcap=True), Config(2, 128))
    note("window", run, right, variant=(5, 2**31 - 2, 1, 0.5, None))
    run = compile.load(Spec("bfloat16", 64, 64, True, sink="float32"), Config(2, 128))
    for name, sink in sinks().items():
        note(f"sink: {name}", run, right, variant=(0, 0, 1, 1.0, tvm_ffi.from_dlpack(sink)))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
