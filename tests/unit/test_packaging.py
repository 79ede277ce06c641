"""What is built from this tree: metadata, files, entry points, and the commands of the Makefile."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import torch_pruner
from tests.wheels import build_wheel
from torch_pruner import versions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this tree."""
    pytest.importorskip("setuptools")
    return zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("build")))


def read(wheel: zipfile.ZipFile, suffix: str) -> str:
    return wheel.read(next(n for n in wheel.namelist() if n.endswith(suffix))).decode()


def test_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "torch_pruner/constraints.txt" in names
    assert "torch_pruner/py.typed" in names
    assert any(n.endswith("LICENSE") for n in names)
    assert {n.split("/")[0].split("-")[0] for n in names} == {"torch_pruner"}
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "torch_pruner").rglob("*.py")}
    assert modules <= set(names), "a folder lacks its __init__.py"


def test_metadata(wheel: zipfile.ZipFile) -> None:
    meta = Parser().parsestr(read(wheel, "/METADATA"))
    assert meta["Version"] == torch_pruner.__version__
    assert meta["Requires-Python"] == ">=3.11"
    pins = versions.pins()
    needs = set(meta.get_all("Requires-Dist", []))
    assert {
        "torch<2.16,>=2.11",
        f"apache-tvm[popen-pool]=={pins['apache-tvm']}",
        f"apache-tvm-ffi=={pins['apache-tvm-ffi']}",
        *("filelock", "numpy", "onnx", "platformdirs", "typing_extensions"),
    } == {n for n in needs if "extra ==" not in n}
    extras = set(meta.get_all("Provides-Extra", []))
    known = {"cuda", "curve", "demo", "dev", "peers", "rpc", "search", "triton", "xgboost"}
    assert extras == known | {"decode-peers", "llama-cpp"}


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    text = read(wheel, "/entry_points.txt")
    assert "[torch_dynamo_backends]\npruner = torch_pruner.dynamo.backend:pruner" in text
    assert "[console_scripts]\ntorch-pruner = torch_pruner.cli.main:main" in text


def test_the_backend_is_registered_only_by_its_entry_point() -> None:
    """With the decorator as well, torch.compile fails with `duplicate name: pruner`."""
    for module in (ROOT / "torch_pruner").rglob("*.py"):
        assert "register_backend(" not in module.read_text(), module


def test_public_names_are_lazy_and_exact() -> None:
    assert set(torch_pruner.__all__) <= set(dir(torch_pruner))
    with pytest.raises(AttributeError, match="no attribute 'tone'"):
        _ = torch_pruner.tone


def test_ci_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert lines[-1] == "exec make test"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("goal", "runs"),
    [
        ("test", f"-m pytest --numprocesses {min(4, len(os.sched_getaffinity(0)) + 1)};"),
        ("demo", "-m benchmarks.demo"),
        ("lint", "-m mypy"),
    ],
)
def test_make_installs_torch_first_and_with_the_pins(tmp_path: Path, goal: str, runs: str) -> None:
    command = ["make", "--dry-run", "-C", str(ROOT), f"VENV={tmp_path}/venv", goal]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("make")]
    installs = [line for line in lines if "pip install" in line]
    assert [line.split()[-1] for line in installs] == ["torch", "'.[dev,demo]'"]
    assert all("--constraint torch_pruner/constraints.txt" in line for line in installs)
    assert any(runs in line for line in lines[lines.index(installs[-1]) :])
