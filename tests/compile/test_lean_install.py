"""The bare wheel in a clean environment without a compiler: what a serving image has.

The kernels come in a bundle from the environment of the tests, which tuned them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.wheels import ROOT, build_wheel, lean_environment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.tvm

# Runs a model, and prints where its kernels came from and what of a tuner's modules is there.
SCRIPT = """
import importlib.util, json, sys
import torch, torch_pruner as tp

role, cache = sys.argv[1], sys.argv[2]
options = {"cache_dir": cache, "threads": 1, "library": False}
options |= {"tune": {"effort": "quick", "trials": 4, "strict": True},
            "serve": {"on_miss": "error"}, "cold": {"effort": "none"}}[role]
def fn(x, w):
    return torch.softmax(x @ w, -1)
torch.manual_seed(0)
x, w = torch.randn(24, 40), torch.randn(40, 56)
compiled = torch.compile(fn, backend="pruner", options=options)
torch.testing.assert_close(compiled(x, w), fn(x, w))
report = tp.last_report()
beside = ("xgboost", "transformers", "pytest", "pip", "benchmarks", "tests")
print(json.dumps({"sources": sorted({t.source for g in report.graphs for t in g.tasks}),
                  "file": tp.__file__, "tuner": any("torch_pruner.tuner" in m for m in sys.modules),
                  "found": [name for name in beside if importlib.util.find_spec(name)]}))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build machine ships."""
    folder = tmp_path_factory.mktemp("build-machine")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for command in (
        ["-c", SCRIPT, "tune", folder / "cache"],
        ["-m", "torch_pruner.cli.main", "bundle", "create", folder / "kernels.bundle",
         "--cache-dir", folder / "cache"],
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    return folder / "kernels.bundle"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and what it requires."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("lean")
    return lean_environment(folder, build_wheel(folder))


def run(command: list[object], home: Path) -> subprocess.CompletedProcess[str]:
    """A process with next to no environment: no compiler on its path, none by name."""
    nothing = home / "nothing"
    nothing.mkdir(exist_ok=True)
    environment = {"PATH": str(nothing), "HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment["TORCH_PRUNER_LOG"] = "warning"
    return subprocess.run(
        [str(part) for part in command], env=environment, cwd=home, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.rotated(6)
def test_a_bundle_is_loaded_and_served(python, bundle, tmp_path) -> None:
    cache = tmp_path / "cache"
    tool = python.with_name("torch-pruner")
    loaded = run([tool, "bundle", "load", bundle, "--cache-dir", cache], tmp_path)
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    done = run([python, "-c", SCRIPT, "serve", cache], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["sources"] == ["cache"]
    assert not said["tuner"]
    assert not said["found"]
    assert said["file"].startswith(str(python.parents[1]))


def test_without_a_compiler_nothing_is_kept_and_the_log_says_why(python, tmp_path) -> None:
    """A cold model is built in memory by LLVM; only linking needs a compiler."""
    done = run([python, "-c", SCRIPT, "cold", tmp_path / "cache"], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cannot be kept" in done.stderr
    assert "no C compiler found" in done.stderr


def test_doctor_names_what_is_missing(python, tmp_path) -> None:
    done = run([python.with_name("torch-pruner"), "doctor"], tmp_path)
    assert done.returncode == 1
    assert "compiler" in done.stdout
