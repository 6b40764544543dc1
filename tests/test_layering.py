"""The import arrows of docs/design.md, the sizes of files and functions (by ast), and that `import fa3` is light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"kernels": "fa3.kernels", "quant": "fa3.quant", "fa3": "fa3", "tests": "tests", "bench": "bench"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 180
SHAPELESS_NAMES = {"utils", "util", "common", "helpers", "misc"}

# A layer, and the layers that it may import besides itself. The longest matching prefix names a module's layer.
LAYERS = {
    "fa3.kernels.prims": [],
    "fa3.kernels.algo": ["fa3.kernels.prims"],
    "fa3.kernels.forward": ["fa3.kernels.algo", "fa3.kernels.prims"],
    "fa3.kernels.backward": ["fa3.kernels.algo", "fa3.kernels.prims"],
    "fa3.kernels.quantize": ["fa3.kernels.prims"],
    "fa3.kernels.decode": ["fa3.kernels.algo", "fa3.kernels.prims", "fa3.kernels.forward"],
    "fa3.kernels.append": ["fa3.kernels.prims"],
    "fa3.kernels.merge": ["fa3.kernels.prims"],
    "fa3.operators": [],  # how one is registered
    "fa3.kernels": [],  # compile.py and what stands beside it: they know no kernel
    "fa3.quant": ["fa3.operators", "fa3.kernels", "fa3.kernels.prims", "fa3.kernels.quantize"],
    "fa3": [
        "fa3.operators",
        "fa3.reference",
        "fa3.variant",
        "fa3.quant",
        "fa3.kernels",
        "fa3.kernels.forward",
        "fa3.kernels.backward",
        "fa3.kernels.decode",
        "fa3.kernels.append",
        "fa3.kernels.merge",
    ],
    "fa3.variant": [],
    "fa3.reference": ["fa3.variant"],  # the specification stands alone, but for the record of what it specifies
    "fa3.testing": [
        *("fa3", "fa3.reference", "fa3.variant", "fa3.quant"),
        *("fa3.kernels", "fa3.kernels.forward", "fa3.kernels.backward"),
    ],
    "bench": ["fa3", "fa3.reference", "fa3.testing", "fa3.quant", "fa3.kernels", "fa3.kernels.forward"],
    "tests": ["*"],
}
# What is measured with is tested too; everything else shares through fa3.testing.
BENCH_TESTS = "tests.test_bench"  # and what begins so
COMMANDS = {"fa3.demo", "fa3.check"}  # these show what fa3.testing measures


def layer(module: str) -> str | None:
    names = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    return max(names, key=len, default=None)


def sources() -> Iterator[tuple[str, Path]]:
    """(module name, file) of every Python file; the links fa3/kernels and fa3/quant are not followed."""
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if (folder, parts[:1]) in {("fa3", ("kernels",)), ("fa3", ("quant",))}:
                continue
            yield ".".join((package, *parts)).removesuffix(".__init__"), path


def imports(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, imported name) of every import in the file, also inside functions; relative ones made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
                base = ".".join([*parents, *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def arrow_faults(module: str, source: str, is_package: bool = False) -> list[str]:
    """What a file imports that its layer may not."""
    faults = []
    own = layer(module)
    allowed = {own, *LAYERS[own or "tests"]}
    if module in COMMANDS:
        allowed.add("fa3.testing")
    for line, name in imports(ast.parse(source), module, is_package):
        top = name.split(".")[0]
        if top in {"kernels", "quant"}:
            faults.append(f"{module}:{line} imports {top}: it is fa3.{top}")
        if module.startswith("fa3.kernels") and top == "torch":
            faults.append(f"{module}:{line} imports torch: kernels never do")
        target = layer(name)
        if target and target not in allowed and "*" not in allowed:
            faults.append(f"{module}:{line} imports {name}: {own} may not import {target}")
        if own == "tests" and target == "bench" and not module.startswith(BENCH_TESTS):
            faults.append(f"{module}:{line} imports {name}: tests and bench share through fa3.testing")
    return faults


def size_faults(module: str, source: str) -> list[str]:
    faults = []
    lines = source.count("\n")
    if lines > MAX_FILE_LINES:
        faults.append(f"{module} has {lines} lines")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                faults.append(f"{module}:{node.lineno} {node.name} has {length} lines")
    return faults


def test_every_import_follows_the_arrows():
    found = list(sources())
    assert {"fa3", "fa3.kernels.forward.config", "tests.test_layering"} <= {module for module, _ in found}
    faults = [f for module, path in found for f in arrow_faults(module, path.read_text(), path.name == "__init__.py")]
    assert not faults, "\n".join(faults)


def test_files_and_functions_are_short():
    faults = [fault for module, path in sources() for fault in size_faults(module, path.read_text())]
    assert not faults, "\n".join(faults)


def test_file_names_name_an_idea():
    assert not [str(path) for module, path in sources() if module.split(".")[-1] in SHAPELESS_NAMES]


def test_kernels_and_quant_are_links_to_namespace_packages():
    for name in ("kernels", "quant"):
        link = ROOT / "fa3" / name
        assert link.is_symlink() and link.readlink() == Path("..") / name and link.is_dir()
        assert not list((ROOT / name).rglob("__init__.py"))


def test_package_init_only_exports():
    tree = ast.parse((ROOT / "fa3/__init__.py").read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert functions <= {"__getattr__", "__dir__"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.For | ast.While | ast.With)]


def test_importing_fa3_imports_no_torch_and_no_compiler():
    heavy = ("torch", "cutlass", "numpy")
    program = f"import sys, fa3, fa3.kernels.forward.config; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fa3.kernels.prims.ring", "from fa3.kernels.algo import softmax"),
        ("fa3.kernels.prims.ring", "from ..algo.softmax import Softmax"),
        ("fa3.kernels.algo.mask", "def f():\n    import torch"),
        ("fa3.kernels.forward.kernel", "from fa3.kernels.backward.mma import step"),
        ("fa3.kernels.forward.kernel", "from fa3.kernels.compile import load"),
        ("fa3.kernels.compile", "from fa3.kernels.forward.config import Spec"),
        ("fa3.kernels.compile", "from fa3 import device"),
        ("fa3.quant.cast", "from fa3.problem import Problem"),
        ("fa3.quant.cast", "from fa3.kernels.forward.config import Spec"),
        ("fa3.kernels.quantize.kernel", "from fa3.kernels.algo.gqa import HeadMap"),
        ("fa3.reference", "from fa3.kernels.forward.config import Config"),
        ("fa3.interface", "from fa3.testing.inputs import normal"),
        ("fa3.interface", "from .testing import inputs"),
        ("fa3.heuristics", "from fa3.kernels.algo.scheduler import Scheduler"),
        ("fa3.launch", "from kernels.compile import load"),
        ("tests.test_x", "import kernels.compile"),
        ("tests.test_x", "from bench.forward import rows"),
        ("bench.forward", "from tests.test_x import case"),
    ],
)
def test_a_wrong_import_is_found(module, source):
    assert arrow_faults(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fa3.kernels.forward.kernel", "from ..algo.softmax import Softmax\nfrom .config import Spec\nimport cutlass"),
        ("fa3.launch", "import torch\nfrom fa3.kernels.compile import load"),
        ("fa3.problem", "from fa3.kernels.forward.config import Spec"),
        ("fa3.quant.interface", "from fa3.kernels.quantize.config import Spec"),
        ("fa3.demo", "from fa3.testing.timing import graph_time"),
        ("bench.forward", "from fa3.testing.timing import graph_time"),
        ("tests.test_x", "import kernels_of_somebody_else"),
    ],
)
def test_a_right_import_is_let_through(module, source):
    assert not arrow_faults(module, source)


def test_long_files_and_functions_are_found():
    assert size_faults("fa3.x", "x = 1\n" * (MAX_FILE_LINES + 1))
    assert size_faults("fa3.x", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES)
    assert not size_faults("fa3.x", "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1))
