"""What torch shows of a compilation: logs, the trace that tlparse reads, the profiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.tvm
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch
fn = torch.compile(lambda x: (x @ x).relu(), backend="pruner", options={"effort": "none"})
fn(torch.randn(8, 8))
"""


def run(tmp_path: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **settings}
    environment["TORCH_PRUNER_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_logs_and_the_trace_of_torch_hold_the_report(tmp_path) -> None:
    done = run(tmp_path, TORCH_LOGS="+torch_pruner", TORCH_TRACE=str(tmp_path / "trace"))
    assert "compiled" in done.stderr
    text = "".join(path.read_text() for path in (tmp_path / "trace").iterdir())
    begin = text.index('"name": "torch_pruner_report_')
    payload = text[begin:].partition("\n")[2]
    lines = [line[1:] for line in payload.splitlines() if line.startswith("\t")]
    report, _ = json.JSONDecoder().raw_decode("\n".join(lines))
    assert report["ops_compiled"] == report["ops_total"] == 2
    assert report["graphs"]


@pytest.mark.rotated(6)
def test_nothing_is_said_unless_asked(tmp_path) -> None:
    done = run(tmp_path)
    assert done.stdout == ""
    assert "torch_pruner" not in done.stderr


def test_the_profiler_names_programs(backend) -> None:
    compiled = backend.compile(lambda x: (x @ x).relu())
    compiled(x := torch.randn(8, 8))
    with torch.profiler.profile() as profile:
        compiled(x)
    assert any("PrunerGraph" in event.key for event in profile.key_averages())
