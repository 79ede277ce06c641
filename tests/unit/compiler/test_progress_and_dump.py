"""The progress line and the files for bug reports."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

from torch_pruner.compiler.choice import Choice
from torch_pruner.compiler.dump import dump_graph, dump_turns
from torch_pruner.compiler.progress import ProgressLine
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.phases import Turn
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureResult, MeasureStatus, Task

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _task() -> Task:
    b = GraphBuilder()
    spec = b.finish([b.pointwise("relu", b.input(0, (4,), "float32"))])
    return Task("relu_4", spec, TargetSpec.detect(1), 1)


def _result() -> MeasureResult:
    return MeasureResult(Candidate("elementwise"), MeasureStatus.OK, (2e-6,))


def test_line_on_a_terminal_only() -> None:
    for stream, wanted, written in (
        (Terminal(), "auto", True),
        (io.StringIO(), "auto", False),
        (io.StringIO(), True, True),
        (Terminal(), False, False),
    ):
        line = ProgressLine(wanted, 3, stream)
        line.update(_task(), _result())
        line.close()
        assert ("1/3 kernels, 1 trials; relu_4 2 us" in stream.getvalue()) is written


def test_files_read_back(tmp_path: Path) -> None:
    task = _task()
    choices = {task.workload: Choice(Candidate("elementwise", (("vl", 16),)), "untuned")}
    dump_graph(str(tmp_path), "ab" * 32, task.spec, [task], choices)
    place = tmp_path / ("ab" * 8)
    assert Graph.from_json(json.loads((place / "graph.json").read_text())) == task.spec
    (kernel,) = json.loads((place / "kernels.json").read_text())
    assert Graph.from_json(kernel["spec"]).digest() == task.workload
    assert kernel["candidate"]["decisions"] == {"vl": 16}
    for turns, everywhere in ([Turn(0, everywhere=True)], True), (None, False):
        dump_turns(str(tmp_path), "ab" * 32, [task.workload], turns)
        (turn,) = json.loads((place / "turns.json").read_text())
        assert turn == {"workload": task.workload, "phase": 0, "everywhere": everywhere} | {
            "prologue": False,
            "epilogue": False,
            "more": 0,
        }


def test_a_place_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    task = _task()
    choices = {task.workload: Choice(Candidate("elementwise"), "untuned")}
    dump_graph(str(tmp_path / "file"), "ab" * 32, task.spec, [task], choices)
    assert "cannot write to debug_dir" in caplog.text
