"""Measured records as JSON lines: nothing is lost, damage costs one line, splits are by task."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import records, rows
from tests import fakes
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureResult, MeasureStatus

DEVICE = DeviceFingerprint.detect()


def result(value: int, *seconds: float) -> MeasureResult:
    status = MeasureStatus.OK if seconds else MeasureStatus.TIMEOUT
    return MeasureResult(Candidate("contraction", (("tm", value),)), status, seconds)


def test_records_survive_a_file(tmp_path) -> None:
    path, tasks = tmp_path / "new" / "records.jsonl", [fakes.make_task(8), fakes.make_task(16)]
    for task in tasks:
        records.append(path, [records.task_line(task, DEVICE)])
        lines = [records.result_line(task, DEVICE, r) for r in (result(1, 2e-6), result(2))]
        records.append(path, lines)
    found, damaged = records.read([path, tmp_path / "missing"])
    assert damaged == 0
    assert [m.task.spec for m in found] == [t.spec for t in tasks]
    assert [m.task.target for m in found] == [t.target for t in tasks]
    assert found[0].results == [result(1, 2e-6), result(2)]


def test_constants_of_a_processor_are_those_known_today(tmp_path) -> None:
    zen4 = TargetSpec.from_dict({"kind": "llvm", "mcpu": "znver4"}, 2)
    assert zen4.reads_ahead
    task = replace(fakes.make_task(8), target=replace(zen4, reads_ahead=False, l3_bytes=1 << 25))
    records.append(tmp_path / "old.jsonl", [records.task_line(task, DEVICE)])
    [found] = records.read([tmp_path / "old.jsonl"])[0]
    assert found.task.target == replace(zen4, l3_bytes=1 << 25)


def test_packed_records_are_read_like_the_file_itself(tmp_path, monkeypatch) -> None:
    path, task = tmp_path / "records.jsonl", fakes.make_task()
    records.append(path, [records.task_line(task, DEVICE)])
    records.append(path, [records.result_line(task, DEVICE, result(n, 2e-6)) for n in range(99)])
    packed = records.pack(path)
    assert packed.name == "records.jsonl.xz"
    assert packed.stat().st_size < path.stat().st_size / 5
    assert records.read([packed]) == records.read([path])
    monkeypatch.setattr(records, "MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(ValueError, match="larger than"):
        records.read([packed])


def test_a_killed_run_costs_a_line_and_a_repeated_candidate_counts_once(tmp_path) -> None:
    path, task = tmp_path / "records.jsonl", fakes.make_task()
    records.append(path, [records.task_line(task, DEVICE)])
    with path.open("a") as file:
        file.write('{"kind": "result", "workl')
    records.append(path, [records.result_line(task, DEVICE, result(1, 2e-6))])
    records.append(path, [records.result_line(task, DEVICE, result(1, 1e-6))])
    found, damaged = records.read([path])
    assert damaged == 1
    assert found[0].results == [result(1, 1e-6)]
    assert found[0].earlier == {result(1, 2e-6).candidate: result(1, 2e-6)}


def test_a_workload_is_on_one_side_of_a_split_only() -> None:
    measured = [
        records.Measured(fakes.make_task(rows, threads=threads), "device")
        for rows in range(4, 40)
        for threads in (1, 2)
    ]
    sides = []
    for fold in range(3):
        train, held = records.split(measured, 3, fold)
        assert len(train) + len(held) == len(measured)
        assert not {m.task.workload for m in train} & {m.task.workload for m in held}
        sides += [id(m) for m in held]
    assert len(sides) == len(set(sides)) == len(measured)


def test_rows_keep_no_directory_of_the_machine() -> None:
    settings = {"network": "dcgan", "options": {"cache_dir": "/a/folder", "effort": "none"}}
    kept = rows.portable(settings)
    assert kept == {"network": "dcgan", "options": {"effort": "none"}}
    assert rows.portable(kept) == kept
