"""Every example runs as a new user would run it, but for the search."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tvm
ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "fleet": "tornado",
    "hf_bert": "transformers",
    "hf_llama_generate": "transformers",
    "narrow_cache": "transformers",
    "resnet": "transformers",
}
SHORT = {
    "fleet": ["--trials", "2"],
    "hf_llama_generate": ["--prompt", "8", "--tokens", "4", "--layers", "1"],
    "hf_bert": ["--length", "16"],
    "resnet": ["--effort", "none"],
}
NAMES = sorted(p.stem for p in (ROOT / "examples").glob("*.py"))
FIRST = ["hf_bert", "matmul"]  # what a new user tries


@pytest.mark.parametrize("name", FIRST)
def test_the_first_run(name: str, tmp_path: Path) -> None:
    _runs(name, tmp_path)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [n for n in reversed(NAMES) if n not in FIRST])
def test_runs(name: str, tmp_path: Path) -> None:
    _runs(name, tmp_path)


def _runs(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    settings = {"EFFORT": "none", "CACHE_DIR": str(tmp_path)}
    environment = {**os.environ, **{f"TORCH_PRUNER_{k}": v for k, v in settings.items()}}
    environment["OMP_NUM_THREADS"] = "1"  # other tests run beside this one
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py", *SHORT.get(name, [])],
        cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert any(unit in done.stdout for unit in (" ms", " us", " s", "tokens/s")), "no figure"
