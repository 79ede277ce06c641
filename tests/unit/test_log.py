"""Loggers are silent unless asked, warnings come once, phases add up."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from torch_pruner import log


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_loggers_are_children_of_the_root() -> None:
    assert log.logger().name == "torch_pruner"
    assert log.logger("tuner").name == "torch_pruner.tuner"
    assert log.logger("torch_pruner.tuner.session") is log.logger("tuner.session")


def test_configure_adds_one_handler_and_takes_it_away(capsys: pytest.CaptureFixture[str]) -> None:
    root = log.logger()
    before = list(root.handlers)
    log.configure("info")
    log.configure("debug")
    assert len(root.handlers) == len(before) + 1
    log.logger("tuner").debug("best %d ms", 3)
    assert "torch_pruner.tuner: best 3 ms" in capsys.readouterr().err
    log.configure(None)
    assert root.handlers == before
    assert root.level == logging.NOTSET


def test_silent_without_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    log.logger("tuner").info("nobody asked")
    assert capsys.readouterr() == ("", "")


def test_warn_once_warns_once_for_each_key(caplog: pytest.LogCaptureFixture) -> None:
    for key in ("a", "a", "b"):
        log.warn_once(log.logger("tuner"), key, "look at %s", key)
    assert [r.getMessage() for r in caplog.records] == ["look at a", "look at b"]
    assert caplog.records[0].filename == "test_log.py"


def test_inner_phases_take_their_time_from_outer_ones() -> None:
    clock = Clock()
    timer = log.PhaseTimer(clock)
    with timer.phase("other"):
        clock.now = 1.0
        with timer.phase("build"):
            clock.now = 3.0
            with timer.phase("build"):
                clock.now = 4.0
        clock.now = 4.5
    clock.now = 100.0
    with timer.phase("measure"):
        clock.now = 101.0
    expected = {"other": 1.5, "build": 3.0, "measure": 1.0}
    assert timer.seconds == {**dict.fromkeys(log.PHASES, 0.0), **expected}
    assert timer.total_s == 5.5


def test_a_phase_ends_when_its_body_raises() -> None:
    clock = Clock()
    timer = log.PhaseTimer(clock)

    def fail() -> None:
        with timer.phase("build"):
            clock.now = 2.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    clock.now = 9.0
    assert timer.total_s == 2.0


def test_threads_add_up() -> None:
    timer = log.PhaseTimer()

    def work() -> None:
        for _ in range(500):
            timer.add("build", 1.0)
            with timer.phase("draft"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timer.seconds["build"] == 2000.0


def test_one_thread_s_phase_is_not_interrupted_by_another_s() -> None:
    clock = Clock()
    timer = log.PhaseTimer(clock)

    def other() -> None:
        with timer.phase("measure"):
            clock.now += 2.0

    with timer.phase("draft"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert timer.seconds["draft"] == 2.0
    assert timer.seconds["measure"] == 2.0


SILENT = """
import logging, sys
from torch_pruner import log
log.logger("x").info("nobody asked")
log.logger("x").warning("hear %s", "this")
logging.basicConfig(format="app: %(message)s")
log.logger("x").warning("and this")
"""


def test_a_warning_reaches_a_user_who_set_up_no_logging() -> None:
    """An unusable cache directory said nothing: the package's handler took it, and dropped it."""
    done = subprocess.run(
        [sys.executable, "-c", SILENT], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == ""
    assert done.stderr == "torch_pruner: hear this\napp: and this\n"
