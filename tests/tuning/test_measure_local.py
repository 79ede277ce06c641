"""LocalExecutor with real kernels: the contract, every kind of sketch, whole sessions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests import fakes
from tests.contracts.measure_executor import MeasureExecutorContract
from torch_pruner.config import Budget
from torch_pruner.families import sketches_for
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureInput, MeasureStatus, Task
from torch_pruner.tuner import make_cost_model, make_strategy
from torch_pruner.tuner.measure.base import EvaluatorSpec
from torch_pruner.tuner.measure.local import LocalExecutor
from torch_pruner.tuner.search.space import SketchSpace
from torch_pruner.tuner.session import TuningSession

pytestmark = pytest.mark.tvm
FAST = EvaluatorSpec(repeat=2, min_repeat_s=2e-4)


@pytest.fixture(scope="module")
def shared():
    with LocalExecutor(2, FAST) as it:
        it.start()
        yield it


def linear_task(rows=32, depth=64, columns=96, threads=2) -> Task:
    spec = fakes.linear_spec(rows, depth, columns)
    return Task("linear", spec, TargetSpec.detect(), threads)


def drafts(task, n):
    strategy = make_strategy("draft-verify", make_cost_model("analytic"))
    strategy.start(task, sketches_for(task), rng=np.random.default_rng(0))
    return strategy.propose(n)


class TestLocalExecutorWithTvm(MeasureExecutorContract):
    @pytest.fixture
    def executor(self, shared):
        return shared

    @pytest.fixture
    def task(self):
        return linear_task()

    @pytest.fixture
    def good(self, task):
        return drafts(task, 3)

    @pytest.fixture
    def bad(self):
        return [
            (Candidate("no such sketch"), MeasureStatus.BUILD_ERROR),
            (Candidate("metaschedule", trace="[[],[]"), MeasureStatus.BUILD_ERROR),
        ]

    def test_close_twice(self) -> None:
        executor = LocalExecutor(1)
        executor.start()
        executor.close()
        executor.close()


@pytest.mark.parametrize("kind", ["softmax", "pointwise", "conv"])
def test_random_points_of_each_sketch_compute_the_right_thing(shared, kind) -> None:
    b = GraphBuilder()
    if kind == "conv":
        x = b.input(0, (1, 16, 14, 14), "float32")
        w = b.input(1, (32, 16, 3, 3), "float32", static=True)
        out = b.append("conv", (x, w), (1, 32, 14, 14), "float32", stride=(1, 1), lo=(1, 1),
                       hi=(1, 1), dilation=(1, 1), groups=1)  # fmt: skip
    else:
        x = b.input(0, (48, 100), "float32")
        out = b.pointwise("exp", x)
        if kind == "softmax":
            out = b.pointwise("div", out, b.reduce("sum", out, (1,), keepdim=True))
    task = Task(kind, b.finish([out]), TargetSpec.detect(), 2)
    for sketch in sketches_for(task):
        space = SketchSpace(sketch)
        candidates = space.candidates(space.random(256, np.random.default_rng(0))[:4])
        results = shared.measure([MeasureInput(task, c) for c in candidates])
        assert {r.status for r in results} == {MeasureStatus.OK}, [r.error for r in results]


def test_integer_inputs_that_index(shared) -> None:
    b = GraphBuilder()
    table, index = b.input(0, (11, 16), "float32", static=True), b.input(1, (7,), "int64")
    spec = b.finish([b.append("take", (table, index), (7, 16), "float32", dim=0)])
    task = Task("embedding", spec, TargetSpec.detect(), 1)
    (result,) = shared.measure([MeasureInput(task, c) for c in drafts(task, 1)])
    assert result.status is MeasureStatus.OK, result.error


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["draft-verify", "metaschedule", "random"])
def test_a_session_end_to_end(shared, strategy) -> None:
    task = linear_task()
    session = TuningSession(
        [task],
        lambda t: make_strategy(strategy, make_cost_model("moa")),
        sketches_for,
        shared,
        Budget(trials=8, trials_per_task=None, time_s=None),
        bound_s=lambda task: 0.0,  # a busy machine's timing of half a microsecond may reach one
    )
    outcome = session.run().tasks[task.workload]
    assert outcome.trials == 8
    assert outcome.best is not None
    assert (outcome.candidate.sketch == "metaschedule") == (strategy == "metaschedule")


def test_a_kernel_that_never_ends_does_not_outlive_its_parent() -> None:
    """A worker stuck in generated code must still notice that its parent is gone."""
    script = """
import os, threading, time
from tests.tuning.test_measure_local import linear_task, drafts
from torch_pruner.task import MeasureInput
from torch_pruner.tuner.measure.base import EvaluatorSpec
from torch_pruner.tuner.measure.jobs import Limits
from torch_pruner.tuner.measure.local import LocalExecutor
forever = EvaluatorSpec(repeat=10**6, min_repeat_s=0.5)
executor = LocalExecutor(1, forever, n_workers=1, limits=Limits(run_s=600))
task = linear_task(threads=1)
inputs = [MeasureInput(task, c) for c in drafts(task, 1)]
threading.Thread(target=executor.measure, args=(inputs,), daemon=True).start()
while not executor._workers or not executor._workers[0].built:
    time.sleep(0.05)
time.sleep(0.3)
print(executor._workers[0].process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=120
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"
