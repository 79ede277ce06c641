"""Rounds of the generator: what is written is measured, told on one scale, and learned from."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import collect, records, tlm, tlm_rounds
from benchmarks.pools import Pool
from benchmarks.tlm_learning import Known, train
from tests import fakes
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.task import MeasureInput, MeasureResult, MeasureStatus
from torch_pruner.tuner.generator.model import Generator
from torch_pruner.tuner.search.space import SketchSpace

SKETCH = fakes.FakeSketch()
SLOWER = 3.0  # the machine, since the records were made


def known(rows: int = 8, points: int = 20) -> Known:
    task, space = fakes.make_task(rows), SketchSpace(SKETCH)
    found = space.unique(space.random(8 * points, np.random.default_rng(rows)))[:points]
    results = [fakes.invented([SKETCH], c) for c in space.candidates(found)]
    return Known.of(Pool(task, {SKETCH.name: SKETCH}, results))


def slow_machine(broken: bool = False) -> fakes.FakeExecutor:
    def measure(given: MeasureInput):
        result = fakes.invented([SKETCH], given.candidate)
        if broken:
            return replace(result, status=MeasureStatus.RUN_ERROR, run_secs=())
        return replace(result, run_secs=tuple(s * SLOWER for s in result.run_secs))

    return fakes.FakeExecutor(measure)


def rounds(executor, plan, tasks, mine=(True, True)):
    generator = train(tasks, 4, 4, seed=0)
    before = generator.flat.copy()
    rng = np.random.default_rng(0)
    all_known, gains = tlm_rounds.improved(generator, tasks, mine, executor, plan, rng)
    return all_known, gains, bool((generator.flat != before).any())


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_written_is_known_on_the_scale_of_the_records(overlap: bool) -> None:
    tasks = [known(), known(16)]
    plan = tlm_rounds.Plan(rounds=2, written=5, steps=2, overlap=overlap)
    found, gains, learned = rounds(slow_machine(), plan, tasks)
    assert learned
    for own in found:
        assert len(own.pool.results) == 20 + 2 * 5
        for result in own.pool.results:
            told = fakes.invented([SKETCH], result.candidate)
            assert result.latency_s == pytest.approx(told.latency_s)
    for i, own in enumerate(tasks):
        first = min(r.latency_s for r in found[i].pool.results[20:25])
        assert gains[0][i] == pytest.approx(own.best_s / first)


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_written_twice(overlap: bool) -> None:
    executor, plan = slow_machine(), tlm_rounds.Plan(rounds=3, written=5, steps=1, overlap=overlap)
    rounds(executor, plan, [known()], [True])
    asked = [i.candidate for batch in executor.batches for i in batch[1:]]
    assert len(set(asked)) == len(asked) == 15


def test_tasks_of_another_machine_are_not_measured() -> None:
    executor, tasks = slow_machine(), [known(), known(16)]
    found, gains, _ = rounds(executor, tlm_rounds.Plan(1, 5, 1), tasks, [False, True])
    assert {i.task.workload for b in executor.batches for i in b} == {tasks[1].pool.task.workload}
    assert found[0] is tasks[0]
    assert len(gains[0]) == 1


def test_where_nothing_works_any_more_nothing_is_learned_of_a_task() -> None:
    tasks = [known()]
    found, gains, _ = rounds(slow_machine(broken=True), tlm_rounds.Plan(1, 5, 1), tasks, [True])
    assert found == tasks
    assert gains == [[0.0]]


def test_records_have_what_was_timed(tmp_path) -> None:
    out = tmp_path / "rounds.jsonl"
    rounds(slow_machine(), tlm_rounds.Plan(1, 5, 1, out=out), [known()], [True])
    ((kept,), damaged) = records.read([out])
    assert not damaged
    assert len(kept.results) == 6
    told = fakes.invented([SKETCH], kept.results[0].candidate)
    assert kept.results[0].latency_s == pytest.approx(SLOWER * told.latency_s)


def recorded(tmp_path, device: DeviceFingerprint) -> str:
    """A file of records of one small product, as ``device`` has measured them."""
    task, path = fakes.make_task(16), tmp_path / "records.jsonl"
    asked = collect.candidates(task, Namespace(seed=0, random=24, drafted=8))
    found = [MeasureResult(c, MeasureStatus.OK, (1e-3 + 1e-6 * k,)) for k, c in enumerate(asked)]
    lines = [records.result_line(task, device, r) for r in found]
    records.append(path, [records.task_line(task, device), *lines])
    return str(path)


def asked_for(tmp_path, monkeypatch, device: DeviceFingerprint) -> list[str]:
    executor = fakes.FakeExecutor(lambda i: MeasureResult(i.candidate, MeasureStatus.OK, (5e-4,)))
    monkeypatch.setattr("torch_pruner.tuner.measure.local.LocalExecutor", lambda *_, **__: executor)
    counts = {"folds": 1, "random-steps": 2, "steps": 2, "rounds": 2, "written": 3}
    small = [f"--{name}={count}" for name, count in (counts | {"round-steps": 1}).items()]
    ends = ["--out", str(tmp_path / "g"), "--records-out", str(tmp_path / "new.jsonl")]
    return [recorded(tmp_path, device), *small, *ends]


def test_the_command_measures_what_this_machine_has_records_of(tmp_path, monkeypatch) -> None:
    here = DeviceFingerprint.detect()
    assert tlm.main(asked_for(tmp_path, monkeypatch, here)) == 0
    Generator.from_bytes((tmp_path / "g").read_bytes())
    ((kept,), damaged) = records.read([tmp_path / "new.jsonl"])
    assert not damaged
    assert 6 < len(kept.results) <= 8  # three new ones a round, and who was the best before it


def test_without_records_of_this_machine_there_is_no_round(tmp_path, monkeypatch) -> None:
    elsewhere = replace(DeviceFingerprint.detect(), name="another", l2_bytes=1)
    with pytest.raises(SystemExit, match="none of the records are this machine's"):
        tlm.main(asked_for(tmp_path, monkeypatch, elsewhere))
