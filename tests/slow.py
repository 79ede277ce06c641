"""Which tests are slow, by measurement, and whose turn it is.

Continuous integration has a limit of time. What takes seconds runs at one commit in eight: the
slow tests are dealt to eight turns of about equal length, and the commit says which one it is.
``pytest --every`` runs all, ``pytest --every --note-slow`` writes the list anew.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

FILE = Path(__file__).with_name("slow.json")
TURNS = 8
PROPERTY = "cpu_seconds"  # of a test's reports, from whichever process ran it
_SLOW = 1.0  # seconds of a test that take turns


def turns(file: Path = FILE) -> dict[str, int]:
    """The turn of each slow test: longest first, each to the turn that is shortest so far."""
    seconds: dict[str, float] = json.loads(file.read_text())
    lengths = [0.0] * TURNS
    turn_of = {}
    for test in sorted(seconds, key=lambda t: (-seconds[t], t)):
        turn_of[test] = lengths.index(min(lengths))
        lengths[turn_of[test]] += seconds[test]
    return turn_of


def runs(turn_of: Mapping[str, int], test: str, commit: bytes) -> bool:
    """Whether a test runs at a commit; one that is not slow always does."""
    return test not in turn_of or turn_of[test] == zlib.crc32(commit) % TURNS


class Notes:
    """Notes what tests take: processor time of theirs and of processes that they waited for.

    A process that many tests use is waited for by one: no test is noted with more than it lasted.
    """

    def __init__(self) -> None:
        self._lasted: dict[str, float] = {}
        self._used: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test, in whichever process it ran."""
        self._lasted[report.nodeid] = self._lasted.get(report.nodeid, 0.0) + report.duration
        for name, value in report.user_properties:
            if name == PROPERTY:
                self._used[report.nodeid] = float(str(value))

    def pytest_sessionfinish(self) -> None:
        """Writes the list."""
        noted = {t: round(min(s, self._lasted[t]), 1) for t, s in self._used.items() if s >= _SLOW}
        slow = {t: s for t, s in sorted(noted.items()) if s >= _SLOW}
        FILE.write_text(json.dumps(slow, indent=1) + "\n")


def processor_seconds() -> float:
    """Of this process and of those it has waited for."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system
