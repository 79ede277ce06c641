"""Schedules that were tuned for one size are drafted for others."""

from __future__ import annotations

import pytest

from tests.families import kernels as K
from torch_pruner.compiler.alike import Tuned
from torch_pruner.compiler.drafting import draft
from torch_pruner.families import sketches_for
from torch_pruner.graph.extents import Bound, bounded
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, Task

TARGET = TargetSpec.detect(2)


def task_of(spec):
    return Task("k", spec, TARGET, 2)


def linear(rows, *, counted=False, columns=96):
    """A layer of some rows, of which perhaps only some count."""
    b = GraphBuilder()
    x, w = b.input(0, (rows, 64), "float32"), b.input(1, (columns, 64), "float32", static=True)
    y = b.pointwise("relu", b.matmul(x, b.permute(w, (1, 0))))
    if counted:
        y = bounded(b, y, [Bound(columns, rows, b.input(2, (), "int32", counts=True))])
    return b.finish([y])


def other_than_the_draft(task):
    """Some schedule of the draft's family."""
    drafted = draft(task)
    (sketch,) = [s for s in sketches_for(task) if s.name == drafted.sketch]
    for point in K.points(sketch, 5):
        candidate = Candidate(sketch.name, tuple(sorted(point.items())))
        if candidate != drafted:
            return candidate
    raise AssertionError("only one schedule")


def test_a_kernel_of_other_extents_takes_the_schedule():
    tuned, small = Tuned(), task_of(linear(128))
    candidate = other_than_the_draft(small)
    tuned.note(small, candidate)
    assert tuned.schedule_for(task_of(linear(512)), 1.0) == candidate
    assert tuned.schedule_for(task_of(linear(512, counted=True)), 1.0) == candidate


@pytest.mark.parametrize("other", [linear(128, columns=64), K.linear(128, 96, 64)])
def test_another_kernel_does_not(other):
    tuned, small = Tuned(), task_of(linear(128))
    tuned.note(small, other_than_the_draft(small))
    assert tuned.schedule_for(task_of(other), 1.0) is None


def test_the_nearest_size_is_taken():
    tuned = Tuned()
    tasks = {rows: task_of(linear(rows)) for rows in (64, 480)}
    tuned.note(tasks[64], other_than_the_draft(tasks[64]))
    tuned.note(tasks[480], draft(tasks[480]))
    assert tuned.schedule_for(task_of(linear(512)), 1.0) == draft(tasks[480])


def test_what_is_predicted_to_be_slow_is_not_taken():
    tuned, small = Tuned(), task_of(linear(128))
    tuned.note(small, other_than_the_draft(small))
    assert tuned.schedule_for(task_of(linear(512)), 1e-12) is None


def test_what_is_remembered_is_bounded():
    tuned = Tuned()
    for rows in range(100, 150):
        task = task_of(linear(rows))
        tuned.note(task, draft(task))
    assert max(len(alike) for alike in tuned._known.values()) <= 16
