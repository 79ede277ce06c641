"""The wheel of this tree, and environments that hold it and what it asks for, nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def build_wheel(folder: Path) -> Path:
    """A wheel built from a copy, so that no build folder appears in the checkout."""
    source, out = folder / "source", folder / "wheel"
    source.mkdir()
    out.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("torch_pruner", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    command = [sys.executable, "-c", BUILD, str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = out.glob("*.whl")
    return wheel


def lean_environment(folder: Path, wheel: Path) -> Path:
    """A virtual environment with the wheel and what it requires without extras; its ``python``.

    pip installs the wheel without an index. What the wheel's metadata requires, and what that
    requires in turn, is linked from the environment that runs the tests: as much as an installer
    would have brought, and not one distribution more.
    """
    from benchmarks.install import required

    place = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=60)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", python, "install"]
    subprocess.run([*pip, "--no-index", "--no-deps", wheel], check=True, timeout=120)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    for distribution in required("torch-pruner").values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link = packages / name
            if not link.exists():  # two distributions may share a namespace package
                link.symlink_to(Path(str(distribution.locate_file(name))).resolve())
    return python
