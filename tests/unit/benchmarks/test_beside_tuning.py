"""Requests beside a search: windows are told apart by what others use. No compiler."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks import beside_tuning

if TYPE_CHECKING:
    import pytest


def test_a_window_counts_what_processes_of_ours_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_tuning, "WINDOW_S", 0.3)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            assert process.pid in beside_tuning.started_by_us()
            found = beside_tuning.window(lambda: None, 0.01)
        finally:
            process.kill()
    assert found["cores"] > 0.0
    assert found["latencies_s"]


def test_all_requests_are_compared_with_calm_ones() -> None:
    calm = {"cores": 0.0, "latencies_s": [1.0, 1.0, 1.0]}
    beside = {"cores": 0.9, "latencies_s": [2.0]}
    found = beside_tuning.summary([calm, beside])
    assert found["tuning"] == 0.5
    assert (found["calm_mean_s"], found["all_mean_s"], found["beside_mean_s"]) == (1.0, 1.25, 2.0)
    text = beside_tuning.render({"bert_tiny": {"status": "ok", "summary": found}})
    assert "1.25 (medians 1.00)" in text
