"""The shape of the code: who imports whom, how large things are, what importing costs."""

from __future__ import annotations

import ast
import functools
import io
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torch_pruner"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

# The picture of docs/architecture.md: what is on the left of an arrow may be imported by what is on
# its right, and nothing may be imported the other way round.
#
#   exc ← log ← option_kinds ← config ← target ← graph ← task ← pareto
#     ← codegen.tir ← codegen.parts ← families ← codegen.build ← tuner
#     ← compiler (which also has cache and report)
#     ← devices ← background
#     ← dynamo.lower ← dynamo.capture ← dynamo.run ← dynamo.sizes ← dynamo ← cli
_BASE = {
    "exc", "fork_locks", "log", "versions", "option_kinds", "config", "target", "cards", "cpus",
    "fingerprint",
}  # fmt: skip
_NOUNS = _BASE | {"graph", "task", "pareto"}
_KERNELS = {"codegen.tir", "codegen.parts", "families", "codegen.build"}
_TUNING = _NOUNS | _KERNELS | {"tuner"}
_COMPILING = _TUNING | {"cache", "report", "compiler"}
_DYNAMO = _NOUNS | {"compiler", "report", "devices", "text_tables"}
_RUNNING = _DYNAMO | {"background"}
_DYNAMO_PARTS = {"dynamo.lower", "dynamo.capture", "dynamo.run", "dynamo.sizes"}
MAY_IMPORT = {
    "exc": set(),
    "fork_locks": set(),
    "log": {"exc", "fork_locks"},
    "versions": {"exc", "fork_locks", "log"},
    "option_kinds": set(),
    "config": {"exc", "fork_locks", "log", "versions", "option_kinds"},
    "cards": set(),
    "cpus": set(),
    "target": _BASE - {"target", "fingerprint"},
    "fingerprint": _BASE - {"fingerprint"},
    "text_tables": set(),
    "report": {"exc", "fork_locks", "log", "text_tables"},
    "graph": _BASE,
    "task": _BASE | {"graph"},
    "pareto": _BASE | {"graph", "task"},
    "codegen": set(),
    "codegen.tir": _BASE | {"graph"},
    "codegen.parts": _NOUNS | {"codegen.tir"},
    "families": _NOUNS | {"codegen.tir", "codegen.parts"},
    "codegen.build": _NOUNS | {"codegen.tir", "codegen.parts", "families"},
    "cache": _NOUNS,
    "tuner": _NOUNS | _KERNELS,
    "compiler": _COMPILING - {"compiler"},
    "devices": _COMPILING,
    "background": _COMPILING | {"devices"},
    "dynamo.lower": _DYNAMO,
    "dynamo.capture": _DYNAMO | {"dynamo.lower"},
    "dynamo.run": _RUNNING | {"dynamo.lower", "dynamo.capture"},
    "dynamo.sizes": _RUNNING | {"dynamo.lower", "dynamo.capture", "dynamo.run"},
    "dynamo": _RUNNING | _DYNAMO_PARTS,
    "onnx": {"exc", "log", "config"},  # hands its graphs to torch.compile(backend="pruner")
    "cli": _COMPILING | {"devices", "dynamo", "dynamo.run", "onnx", "text_tables"},
    # The package itself: public names, looked up when used.
    "": {"exc", "dynamo", "onnx"},
}
_SPLIT = ("codegen", "dynamo")  # whose folders are packages of the picture
# External packages that a package of ours must not import, not even inside a function.
_TVM = {"tvm", "tvm_ffi"}
_LIGHT = (*_BASE, "text_tables", "report", "graph", "cache")
FORBIDDEN = {
    **{name: {"torch", *_TVM} for name in _LIGHT},
    **{name: {"torch"} for name in ("compiler", "families")},
    "task": _TVM,
    "pareto": {"torch", *_TVM},
    **dict.fromkeys(("devices", "background"), _TVM),
    **dict.fromkeys(("dynamo", *_DYNAMO_PARTS), _TVM),
    "onnx": _TVM,
}


class Edge(NamedTuple):
    importer: str
    imported: str
    where: str


@functools.cache
def _tree(module: Path) -> ast.Module:
    return ast.parse(module.read_text(), filename=str(module))


def _package_of(module: Path) -> str:
    return _part_of(_dotted(module))


def _dotted(module: Path) -> str:
    """The name of a module below the package: "" for the package itself."""
    parts = module.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {_dotted(m): m for m in MODULES}
_FOLDERS = {_dotted(m) for m in MODULES if m.name == "__init__.py"}


def _part_of(name: str) -> str:
    """Which package of the picture a dotted name below ours belongs to."""
    first, *rest = name.split(".")
    deeper = f"{first}.{rest[0]}" if rest else ""
    return deeper if deeper and first in _SPLIT and deeper in _FOLDERS else first


def _imported_names(module: Path) -> list[tuple[str, int]]:
    """Dotted names that a module imports anywhere, and where."""
    names = []
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module == "torch_pruner"
            parts = [f"{node.module}.{a.name}" for a in node.names] if whole else [node.module]
            names += [(name, node.lineno) for name in parts]
    return names


def _internal_edges() -> list[Edge]:
    edges = []
    for module in MODULES:
        for name, line in _imported_names(module):
            if name.startswith("torch_pruner."):
                where = f"{module.relative_to(ROOT)}:{line}"
                imported = _part_of(name.removeprefix("torch_pruner."))
                edges.append(Edge(_package_of(module), imported, where))
    return edges


def _files_imported(module: Path) -> set[str]:
    """Names of the files that a module imports at run time, even if only inside a function."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.ImportFrom) and (child.module or "").startswith(PACKAGE.name):
                base = (child.module or "").removeprefix(PACKAGE.name).lstrip(".")
                for alias in child.names:
                    full = f"{base}.{alias.name}".lstrip(".")
                    found.add(full if full in NAMES else base)
            visit(child)

    visit(_tree(module))
    return found - {_dotted(module)}


def test_no_files_import_each_other_in_a_circle() -> None:
    remaining = {
        name: _files_imported(module) & set(NAMES) for name, module in NAMES.items() if name
    }
    for needs in remaining.values():
        needs.discard("")
    while remaining:
        ready = {name for name, needs in remaining.items() if not needs & set(remaining)}
        assert ready, f"a circle among {sorted(remaining)}, or above one"
        remaining = {name: needs for name, needs in remaining.items() if name not in ready}


def test_every_package_is_in_the_picture() -> None:
    assert {_package_of(m) for m in MODULES} <= set(MAY_IMPORT)


def test_imports_point_down() -> None:
    edges = _internal_edges()
    wrong = [e for e in edges if e.imported not in MAY_IMPORT[e.importer] | {e.importer}]
    assert not [e for e in wrong if e.imported != "__version__"]


def test_the_picture_has_no_cycle() -> None:
    order: list[str] = []
    remaining = {k: set(v) for k, v in MAY_IMPORT.items() if k}
    while remaining:
        ready = [k for k, needs in remaining.items() if needs <= set(order)]
        assert ready, f"cycle among {sorted(remaining)}"
        order += ready
        remaining = {k: v for k, v in remaining.items() if k not in ready}


def test_no_forbidden_import() -> None:
    """docs/architecture.md, 'must not'. One test for all modules: each by itself takes longer to
    start than to run."""
    found = []
    for module in MODULES:
        forbidden = FORBIDDEN.get(_package_of(module), set())
        found += [
            f"{module}:{line}: {name}"
            for name, line in _imported_names(module)
            if name.split(".")[0] in forbidden
        ]
    assert not found


def _code_lines(text: str) -> set[int]:
    """Lines with code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    skip |= {tokenize.ENCODING, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            lines.difference_update(range(value.lineno, (value.end_lineno or 0) + 1))
    return lines


def _functions(module: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(_tree(module)) if isinstance(node, kinds)]


def _span(node: ast.FunctionDef | ast.AsyncFunctionDef) -> range:
    return range(node.lineno, (node.end_lineno or 0) + 1)


def test_sizes() -> None:
    """See CONTRIBUTING, 'Small modules'. What has few lines of any kind has few with code."""
    large = []
    for module in MODULES:
        text = module.read_text()
        long = [node for node in _functions(module) if len(_span(node)) > MAX_FUNCTION_LINES]
        if not long and text.count("\n") <= MAX_MODULE_LINES:
            continue
        lines = _code_lines(text)
        if len(lines) > MAX_MODULE_LINES:
            large.append(f"{module} has {len(lines)} lines of code")
        for node in long:
            own = lines & set(_span(node))
            if len(own) > MAX_FUNCTION_LINES:
                large.append(f"{module}: {node.name} has {len(own)} lines of code")
    assert not large


def _reads_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    if isinstance(node, ast.Attribute):
        return node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os"
    return (
        isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and any(alias.name in names for alias in node.names)
    )


def test_only_config_reads_the_environment() -> None:
    found = [
        f"{module}:{node.lineno}"
        for module in MODULES
        if module.name != "config.py"
        for node in ast.walk(_tree(module))
        if _reads_environment(node)
    ]
    assert not found, "take it from Config, or from config.environment()"


def test_only_emitters_of_families_import_tvm() -> None:
    found = []
    for module in (m for m in MODULES if _package_of(m) == "families"):
        light = len(_dotted(module).split(".")) < 3
        if light or module.name in ("__init__.py", "form.py", "space.py"):
            tvm = {n for n, _ in _imported_names(module) if n.split(".")[0] in _TVM}
            found += [f"{module}: {name}" for name in sorted(tvm)]
    assert not found, "TVM is for emit.py, resolved when it is used"


def test_the_list_of_devices_alone_knows_their_names() -> None:
    """Else a device would be more than a file and a line."""
    seams = {f"torch_pruner.devices.{name}" for name in ("base", "aten", "dtypes")}
    about = ("forked_threads", "openmp")  # of torch's own threads, whatever devices there are
    seams |= {"torch_pruner.devices", *(f"torch_pruner.devices.{name}" for name in about)}
    for module in (m for m in MODULES if _package_of(m) != "devices"):
        found = {n for n, _ in _imported_names(module) if n.startswith("torch_pruner.devices")}
        assert found <= seams, module


def test_only_the_command_line_prints() -> None:
    found = [
        f"{module}:{node.lineno}"
        for module in MODULES
        if _package_of(module) != "cli"
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not found


def test_modules_open_with_a_docstring_and_lazy_annotations() -> None:
    for module in MODULES:
        tree = _tree(module)
        assert ast.get_docstring(tree) or not tree.body, f"{module} says nothing about itself"
        if len(tree.body) > 1:
            assert "from __future__ import annotations" in module.read_text(), module


def _in_new_interpreter(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout.strip()


def test_import_is_cheap() -> None:
    heavy = ("torch", "tvm", "tvm_ffi", "numpy", "onnx", "transformers", "xgboost", "scipy")
    code = f"import sys, torch_pruner; print([m for m in {heavy} if m in sys.modules])"
    assert _in_new_interpreter(code) == "[]"


@pytest.mark.parametrize("name", ["config", "target", "versions", "log", "report", "cli.doctor"])
def test_light_modules_stay_light(name: str) -> None:
    code = (
        f"import sys, torch_pruner.{name}; print([m for m in ('torch', 'tvm') if m in sys.modules])"
    )
    assert _in_new_interpreter(code) == "[]"


def test_import_takes_under_50_ms() -> None:
    """The best of several tries: a busy machine only ever adds time."""
    code = (
        "import time; t = time.perf_counter(); import torch_pruner; print(time.perf_counter() - t)"
    )
    best = min(float(_in_new_interpreter(code)) for _ in range(5))
    assert best < 0.05, f"{best * 1e3:.0f} ms"
