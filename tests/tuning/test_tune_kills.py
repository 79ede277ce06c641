"""SIGKILL at random moments of tuning: nothing that was committed is lost, no worker stays.

The default run kills a few times; ``pytest -m stress`` 200 times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tvm
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.rotated(6)
@pytest.mark.parametrize("kills", [1, pytest.param(200, marks=pytest.mark.stress)])
def test_tuning_killed_at_random_moments(tmp_path: Path, kills: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress.tuning", str(tmp_path / "cache"), str(kills), "0"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=280 + 30 * kills, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["killed"] == kills
    assert len(said["last"]) == 2
    # A child may have committed what it tuned just before it was killed.
    assert set(said["last"]) <= {"tuned", "cache"}
