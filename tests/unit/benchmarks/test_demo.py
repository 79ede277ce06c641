"""The demonstration says what a newcomer must see, with the backend replaced by eager."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import demo, reports


def _task(source: str, trials: int) -> SimpleNamespace:
    return SimpleNamespace(source=source, trials=trials)


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    tasks: list[SimpleNamespace] = []
    report = SimpleNamespace(
        ops_total=12,
        ops_compiled=12,
        flops_total=1e9,
        flops_compiled=1e9,
        tasks=tasks,
        seconds={"build": 2.0, "measure": 1.0},
    )
    monkeypatch.setattr(reports, "last", lambda backend: report if backend == "pruner" else None)
    monkeypatch.setattr(demo, "compiled", lambda module, _backend, _options: module)
    return tasks


COMMAND = ["--networks", "dcgan", "--against", "", "--rounds", "1", "--cache-dir", "somewhere"]


def test_a_cold_run_says_what_was_tuned(
    tasks: list[SimpleNamespace], capsys: pytest.CaptureFixture[str]
) -> None:
    tasks += [_task("tuned", 32), _task("library", 4)]
    assert demo.main(COMMAND) == 0
    text = capsys.readouterr().out
    assert "Tuned 1 kernels by measuring 36 candidates" in text
    assert "12 of 12 compiled, 0 left to eager" in text
    assert "somewhere" in text
    assert text.isascii()
    assert max(map(len, text.splitlines())) < 100


def test_a_warm_run_says_that_nothing_was_tuned(
    tasks: list[SimpleNamespace], capsys: pytest.CaptureFixture[str]
) -> None:
    tasks += [_task("cache", 32), _task("cache", 32)]
    demo.main(COMMAND)
    assert "Nothing was tuned" in capsys.readouterr().out


def test_a_wrong_result_fails(
    tasks: list[SimpleNamespace],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(module, _backend, _options):
        return lambda x: module(x) * 1.01

    monkeypatch.setattr(demo, "compiled", wrong)
    assert demo.main(COMMAND) == 1
    assert "FAILED" in capsys.readouterr().out
