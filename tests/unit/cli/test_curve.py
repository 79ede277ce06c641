"""``torch-pruner curve``: searches joined into lines, a picture, and what is no report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from torch_pruner.cli import curve
from torch_pruner.cli.main import UNUSABLE, main
from torch_pruner.report import GraphReport, Report, Tuning

if TYPE_CHECKING:
    from pathlib import Path

GRAPH = GraphReport("graph0", 1, 1, 1, 1, 1)
FIRST = Tuning("draft-verify/moa", ((1.0, 4, 0.004), (2.0, 12, 0.002)))
SECOND = Tuning("draft-verify/moa", ((0.5, 4, 0.010), (3.0, 20, 0.008)))


def written(path: Path, *tunings: Tuning) -> Path:
    report = Report((replace(GRAPH, tunings=tunings[:1]), replace(GRAPH, tunings=tunings[1:])))
    path.write_text(json.dumps(report.to_json()))
    return path


def test_searches_of_a_report_go_on_where_the_last_one_ended(tmp_path) -> None:
    (line,) = curve.lines_of(written(tmp_path / "a.json", FIRST, SECOND))
    assert line.name == "draft-verify/moa"
    assert line.points == (
        (1.0, 4, pytest.approx(0.014)),
        (2.0, 12, pytest.approx(0.012)),
        (2.5, 16, pytest.approx(0.012)),
        (5.0, 32, pytest.approx(0.010)),
    )


def test_each_strategy_has_a_line(tmp_path) -> None:
    other = replace(SECOND, strategy="random/random")
    lines = curve.lines_of(written(tmp_path / "a.json", FIRST, other, Tuning("none", ())))
    assert [line.name for line in lines] == ["draft-verify/moa", "random/random"]


def test_reports_are_drawn_and_summed_up(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    reports = [written(tmp_path / f"{name}.json", FIRST) for name in ("here", "there")]
    assert main(["curve", *map(str, reports)]) == 0
    assert (tmp_path / "here.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "there: draft-verify/moa: 4.000 ms at first, 2.000 ms after 12 trials and 2.0 s" in said


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"tunings": 3}',
        '{"tunings": [{"strategy": "s", "points": [[1, 2, Infinity]]}]}',
    ],
)
def test_what_is_no_report_is_one_line_and_status_2(tmp_path, capsys, content: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    assert main(["curve", str(path)]) == UNUSABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert "not a report" in line


def test_a_missing_or_huge_file_or_nothing_tuned_is_status_2(
    tmp_path, capsys, monkeypatch: Any
) -> None:
    assert main(["curve", str(tmp_path / "missing.json")]) == UNUSABLE
    path = written(tmp_path / "none.json")
    assert main(["curve", str(path)]) == UNUSABLE
    assert "nothing was tuned" in capsys.readouterr().err
    monkeypatch.setattr(curve, "MAX_BYTES", 10)
    assert main(["curve", str(path)]) == UNUSABLE
    assert "larger than" in capsys.readouterr().err
