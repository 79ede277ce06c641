"""A model on disk, and an api that answers at once: no command here compiles anything."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from torch_pruner.cli.main import main
from torch_pruner.config import Config
from torch_pruner.dynamo import api
from torch_pruner.dynamo.api import Explanation, GraphExplanation, TaskExplanation
from torch_pruner.report import GraphReport, OpFallback, Report, TaskReport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL = """
import torch
from torch import nn

print("the user's code prints")


def make():
    return nn.Linear(4, 2), (torch.zeros(3, 4),)


def bare():
    return nn.Linear(4, 2)


module = nn.Linear(4, 2)


def number():
    return 7


def fails():
    raise ValueError("first line\\nsecond line")


def leaves():
    raise SystemExit(3)


def two_shapes():
    return [(torch.zeros(1, 4),), {"input": torch.zeros(2, 4)}]


def tensor():
    return torch.zeros(5, 4)


def misfit():
    return (torch.zeros(5, 7),)


def text():
    return "no inputs"


def nothing():
    return []


def probabilistic():
    return nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4)), (torch.zeros(3, 4),)
"""
TUNED = TaskReport("matmul_3x2", "a" * 64, 1, 48.0, "tuned", 2e-6, 1e-6, 8, "d" * 64, "contraction")
PLANNED = TaskExplanation(
    "matmul_3x2", "a" * 64, "3x2", "float32", 1, 48.0, cached=False, differs={}
)
SORT = OpFallback("aten.sort.default (%sort)", "unsupported_op", "no kernel sorts")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user with a ``net.py``."""
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    return tmp_path


def report(*tasks: TaskReport, fallback: tuple[OpFallback, ...] = ()) -> Report:
    graph = GraphReport("graph0", 2, 2 - len(fallback), 48, 48, 1, fallback, tasks)
    return Report((graph,))


def explanation(*tasks: TaskExplanation) -> Explanation:
    graph = GraphExplanation("graph0", 2, 2, 48, 48, ("compiled: 1 operators",), tasks, (SORT,))
    return Explanation((graph,))


class Api:
    """Stands in for ``torch_pruner.dynamo.api``: records calls, answers what the test says."""

    def __init__(self) -> None:
        self.report = report(TUNED)
        self.explanation = explanation(PLANNED)
        self.calls: list[dict[str, Any]] = []
        self.seen: list[Any] = []
        self.error: BaseException | None = None

    def tune_seen(self, options: Any = None) -> Report:
        self.seen.append(options)
        return self.report

    def tune(
        self, model: Any, inputs: Any, options: Any = None, mode: Any = None, backward: bool = False
    ) -> Report:
        self._called("tune", model, inputs, options, backward=backward)
        return self.report

    def explain(self, model: Any, inputs: Any, options: Any = None) -> Explanation:
        self._called("explain", model, inputs, options)
        return self.explanation

    def last_report(self) -> Report | None:
        return self.report

    def _called(self, name: str, model: Any, inputs: Any, options: Any, **more: Any) -> None:
        Config.from_options(options=options)
        self.calls.append({"name": name, "model": model, "inputs": inputs, "options": options})
        self.calls[-1] |= more
        if self.error is not None:
            raise self.error


@pytest.fixture
def fake_api(monkeypatch: pytest.MonkeyPatch, here: Path) -> Api:
    fake = Api()
    for name in ("tune", "tune_seen", "explain", "last_report"):
        monkeypatch.setattr(api, name, getattr(fake, name))
    return fake


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line: its exit status, standard output and standard error."""

    def command(*argv: str) -> tuple[int, str, str]:
        status = main(argv)
        return status, *capfd.readouterr()

    return command
