"""``torch-pruner tune``: status 0 means tuned, a budget is wall time, Ctrl-C ends it at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.tvm

ROOT = Path(__file__).resolve().parents[2]
NET = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))
    return net.eval(), (torch.randn(16, 96),)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def heard() -> None:
    """A shell in the background has its children ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def command(place: Path, *arguments: str) -> subprocess.Popen[str]:
    given = ["tune", "net.py:make", "--threads", "1", "--cache-dir", "kernels", *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "torch_pruner.cli.main", *given],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=heard,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def planned(place: Path) -> list[dict[str, object]]:
    out, err = command(place, "--dry-run", "--json").communicate(timeout=120)
    tasks: list[dict[str, object]] = json.loads(out or f'"{err}"')["tasks"]
    return tasks


@pytest.mark.rotated(6)
def test_a_budget_that_leaves_kernels_untuned_is_told_again_and_gone_on_with(place: Path) -> None:
    """The next ``tune`` said complete, and ``--dry-run`` that nothing was left."""
    first = command(place, "--time-budget", "0.01")
    _, err = first.communicate(timeout=150)
    assert first.returncode == 1, err
    assert "a library of" in err  # what is built beyond the budget is named
    assert not any(task["cached"] for task in planned(place))
    again = command(place, "--time-budget", "0.01")
    out, err = again.communicate(timeout=150)
    assert (again.returncode, "incomplete: kernels not tuned" in out) == (1, True), out + err


@pytest.mark.rotated(6)
def test_ctrl_c_is_status_130_at_once_and_what_was_measured_stays(place: Path) -> None:
    """It took 18 s, and ended in ``KeyError``."""
    running = command(place, "--effort", "full", "--set", "progress=1")
    assert running.stderr is not None
    text = ""
    while "trials" not in text and running.poll() is None:
        text += running.stderr.read(1)
    asked = time.monotonic()
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    took = time.monotonic() - asked
    assert running.returncode == 130, text + err
    assert "KeyError" not in err
    assert took < 10, took  # under two seconds on an idle machine; tests run beside others
    tasks = planned(place)
    assert sum(int(str(task["trials"])) for task in tasks) > 0
    assert not any(task["cached"] for task in tasks)
