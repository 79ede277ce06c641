"""MetaSchedule's searches of an earlier run: when they count still, and what is said of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import references, search, search_table, timing

JOB = search.SearchJob("tasks", "w", 2, ("tlm",), (0,), (0,), 64, reference_trials=1000)
MACHINE = {"cpu": "a CPU", "cores": 2, "versions": {"apache-tvm": "1"}, "commit": "now"}
EVENTS = [
    {"seconds": 1.0, "trial": 8, "latency_s": 2.0, "digest": "a"},
    {"seconds": 9.0, "trial": 900, "latency_s": 1.0, "digest": "b", "candidate": {"best": 1}},
]


def one(name: str) -> dict:
    phases = dict.fromkeys(("draft", "verify", "build", "measure", "train"), 1.0)
    trials = 1000 if name == "metaschedule" else 64
    return {"search": name, "seed": 0, "trials": trials, "seconds": 9.0, "events": EVENTS,
            "phases": phases}  # fmt: skip


def plan(**changes) -> search.Plan:
    return search.Plan("conv", replace(JOB, **changes), 1.0)


@pytest.fixture
def content(monkeypatch) -> dict:
    monkeypatch.setattr(references, "code_identity", lambda parts, commit="": "the same")
    row = {
        "status": "ok", "cpu": "a CPU", "commit": "then", "settings": plan().settings,
        "searches": [one("metaschedule"), one("tlm")], "name": "conv",
        "again": {"a": 2.0, "b": 1.0},
    }  # fmt: skip
    return {"machine": MACHINE, "rows": {plan().key: row}}


def found(content, machine=MACHINE, **changes) -> list[dict]:
    now = plan(**changes)
    return references.of_row(content, now.key, now.settings, machine)


def test_the_references_search_is_kept_and_says_from_when(content) -> None:
    (kept,) = found(content)
    assert kept == one("metaschedule") | {references.KEPT: "then"}
    content["rows"][plan().key].update(searches=[kept], commit="later")
    assert found(content)[0][references.KEPT] == "then"


def test_what_ours_do_may_be_another(content) -> None:
    assert found(content, searches=("draft-verify/moa",), trials=10, seeds=(1, 2))


def test_it_is_run_again_where_anything_of_it_differs(content, monkeypatch) -> None:
    assert not found(content, reference_trials=2000)
    assert not found(content, reference_seeds=(0, 1))
    assert not found(content, machine=MACHINE | {"cpu": "another"})
    assert not found(content, machine=MACHINE | {"versions": {"apache-tvm": "2"}})
    assert not found({"machine": MACHINE, "rows": {}})
    content["rows"][plan().key]["status"] = "timeout"
    assert not found(content)
    content["rows"][plan().key]["status"] = "ok"
    monkeypatch.setattr(references, "code_identity", lambda parts, commit="": commit)
    assert not found(content)


def test_the_code_that_drives_metaschedule_is_there() -> None:
    assert all((timing.ROOT / part).exists() for part in references.PARTS)


def test_kept_searches_are_read_in_place_of_running_them(content, tmp_path) -> None:
    kept = references.write(found(content), tmp_path / "kept.json")
    assert search.reference(None, replace(JOB, kept=kept)) == json.loads(json.dumps(found(content)))
    assert references.write([], tmp_path / "none.json") == ""
    assert not (tmp_path / "none.json").exists()
    assert plan(kept=kept).settings == plan().settings


def test_the_page_says_nothing_of_its_first_trials(content) -> None:
    row = content["rows"][plan().key]
    row["searches"][0] = found(content)[0]
    machine = timing.machine() | MACHINE
    page = search_table.render({"rows": {"conv": row}, "machine": machine}, "data.json")
    assert "MetaSchedule searched at then;" in page
    cells = next(line for line in page.splitlines() if line.startswith("| metaschedule"))
    assert [c.strip() for c in cells.split("|")[2:-1]] == [*[""] * 5, "1.00 (1.00)"]
