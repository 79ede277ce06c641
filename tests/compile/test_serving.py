"""A serving process on a warm cache: no compiler, no tuner, nothing written; a miss is an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tvm
ROOT = Path(__file__).resolve().parents[2]

# Runs a model with what only tuning needs out of reach. Prints which of it was imported all the
# same, and every file that was opened for writing below the cache.
SCRIPT = """
import json, os, sys

role, cache = sys.argv[1], sys.argv[2]
if role != "tune":
    for name in ("xgboost", "matplotlib", "onnx", "onnxruntime", "tornado", "cloudpickle"):
        sys.modules[name] = None  # as if it were not installed
written, spawned = [], []

def hook(event, args):
    if event == "open" and str(args[0]).startswith(cache):
        mode, flags = args[1], args[2] or 0
        if any(c in str(mode or "") for c in "wax+") or flags & (os.O_WRONLY | os.O_RDWR):
            written.append(str(args[0]))
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
        spawned.append(str(args[0]))

sys.addaudithook(hook)
import torch, torch_pruner as tp
options = {"cache_dir": cache, "strict": True, "threads": 1, "library": False}
options |= {"effort": "quick", "trials": 4} if role == "tune" else {"on_miss": "error"}
def fn(x, w):
    return torch.softmax(x @ w, -1)
torch.manual_seed(0)
x, w = torch.randn(24, 40), torch.randn(40, 56)
compiled = torch.compile(fn, backend="pruner", options=options)
torch.testing.assert_close(compiled(x, w), fn(x, w))
tasks = [t for g in tp.last_report().graphs for t in g.tasks]
tuner = [n for n in sys.modules if n.startswith("torch_pruner.tuner")]
print(json.dumps({"written": written, "spawned": spawned, "tuner": tuner,
                  "tvm": "tvm" in sys.modules,
                  "sources": sorted({t.source for t in tasks})}))
"""


def run(role: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, role, str(cache)],
        capture_output=True, text=True, timeout=300, cwd=ROOT, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """Every file, when it was written and how long it is.

    Directories change all the same where they can be written: SQLite's readers share a file there.
    """
    files = (p for p in sorted(root.rglob("*")) if p.is_file())
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in files}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("warm")
    done = run("tune", cache)
    assert done.returncode == 0, done.stderr[-3000:]
    return cache


@pytest.mark.rotated(6)
def test_a_warm_model_needs_no_compiler_and_no_tuner(warm, tmp_path) -> None:
    done = run("serve", warm, PATH=str(tmp_path), CC="")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sources"] == ["cache"]
    assert not found["tvm"]
    assert not found["tuner"]
    assert not found["spawned"]
    assert not found["written"]


def test_a_warm_model_is_served_from_a_directory_that_cannot_be_written(warm) -> None:
    modes = {p: p.stat().st_mode for p in (warm, *warm.rglob("*"))}
    try:
        for path in modes:
            path.chmod(0o500 if path.is_dir() else 0o400)
        before = snapshot(warm)
        done = run("serve", warm)
        assert done.returncode == 0, done.stderr[-3000:]
        assert snapshot(warm) == before
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def test_a_cold_model_raises_before_anything_runs(tmp_path) -> None:
    done = run("serve", tmp_path / "cold")
    assert done.returncode != 0
    assert "CacheMiss" in done.stderr
    assert "torch-pruner tune" in done.stderr
