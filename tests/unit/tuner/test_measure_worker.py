"""The worker without its pipes: groups, answers, and times taken at slow moments."""

from __future__ import annotations

import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests import fakes
from torch_pruner.graph.extents import Bound, bounded
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate
from torch_pruner.tuner.measure import check
from torch_pruner.tuner.measure.base import EvaluatorSpec
from torch_pruner.tuner.measure.builder import BuiltKernel
from torch_pruner.tuner.measure.worker import Worker

SPEC = EvaluatorSpec(repeat=3, min_repeat_s=1e-3, flush_bytes=1 << 12, early_out=0.0)


class Machine:
    """A builder and its clock: kernels take ``us`` of their candidate, times ``slowness``.

    What reads a kernel's results takes ``far`` microseconds more, once. Where less counts than the
    kernel has room for it takes ``less`` microseconds.
    """

    def __init__(self) -> None:
        self.now, self.slowness, self.noise = 0.0, 1.0, 0.0
        self.rng = np.random.default_rng(1)
        self.renewed, self.renewals, self.far = [], 0, 0.0
        self.bound = []

    def build(self, spec, target, threads, candidate):
        good = fakes.FakeBuilder().build(spec, target, threads, fakes.candidate())
        decisions = dict(candidate.decisions)
        given, far = decisions["us"] * 1e-6, decisions.get("far", 0) * 1e-6
        most = {spec.inputs.index(i): n for i, n in check.counted(spec).items()}

        def bind(arrays):
            self.bound.append(arrays)
            less = any(int(arrays[i]) < n for i, n in most.items())
            seconds = decisions["less"] * 1e-6 if less else given
            right = good.bind(arrays)
            done = SimpleNamespace(once=False)

            def call():
                self.now += seconds * self.slowness * (1 + self.noise * self.rng.random())
                self.far = far
                if not done.once:
                    right()
                    done.once = True

            return call

        return BuiltKernel(bind, good.packs, good.outputs, good.scratch)

    def seconds(self, calls, number):
        return None

    def set_threads(self, threads):
        pass

    def renewal(self, target, arrays):
        self.renewed.append([a.shape for a in arrays])
        return self.renew

    def renew(self):
        self.now += 1e-6 + self.far  # takes time, of which nobody has the first
        self.far = 0.0
        self.renewals += 1


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def worker(machine):
    worker = Worker(machine, lambda: machine.now)
    task = {"task": "t", "threads": 1, "seed": 0}
    task |= {"spec": fakes.linear_spec().to_json(), "target": TargetSpec.detect().to_json()}
    assert worker.task(task)["ok"]
    return worker


def timed(worker, *us, far=0):
    """Median microseconds of candidates that take turns."""
    first = max(worker.built, default=-1) + 1
    jobs = list(range(first, first + len(us)))
    for job, value in zip(jobs, us, strict=True):
        assert worker.build("t", job, Candidate("fake", (("us", value), ("far", far))))["ok"]
    replies = []
    message = {"cmd": "time", "jobs": jobs, "best_s": None, "evaluator": SPEC.to_json()}
    worker.handle(message, replies.append)
    assert [r["job"] for r in replies] == [*jobs, *jobs]
    assert all(r["ran"] for r in replies[: len(jobs)])
    return [statistics.median(r["run_secs"]) * 1e6 for r in replies[len(jobs) :]]


def test_times_are_in_the_order_asked(worker) -> None:
    assert timed(worker, 30, 10, 20) == pytest.approx([30, 10, 20])


def test_activations_are_renewed_before_every_timed_call(worker, machine) -> None:
    """Weights are not: they come from memory. The time of it is not counted."""
    spec = fakes.linear_spec()
    activations = [spec.nodes[i].shape for i in spec.inputs if not spec.nodes[i].attr("static")]
    assert timed(worker, 100) == pytest.approx([100])
    results = [spec.nodes[i].shape for i in spec.outputs]
    assert machine.renewed == [activations, results]
    assert machine.renewals >= 3 * 10  # three repeats of a millisecond


def test_candidates_of_one_layout_have_weights_of_their_own(worker, machine) -> None:
    """What one had read would be near for the next, but not for those of other layouts."""
    spec = fakes.linear_spec()
    weights = [k for k, i in enumerate(spec.inputs) if spec.nodes[i].attr("static")]
    for _ in range(2):
        machine.bound.clear()
        timed(worker, 100, 90)
        calls = len(machine.bound) // 2
        assert calls > 1
        for k in range(len(spec.inputs)):
            halves = machine.bound[:calls], machine.bound[calls:]
            one, other = ({id(a[k]) for a in half} for half in halves)
            assert not one & other if k in weights else one == other
            assert len(one) == (calls if k in weights else 1)


def test_results_that_lie_far_from_their_reader_cost_their_kernel(worker, machine) -> None:
    assert timed(worker, 100, 90) == pytest.approx([100, 90])
    assert timed(worker, 90, far=20) == pytest.approx([110])


def test_a_kernel_takes_some_time_however_fast_its_reader(worker) -> None:
    assert 0 < timed(worker, 1e-3)[0] < 0.1


def test_an_anchor_gets_all_its_repeats_and_the_others_need_not(worker) -> None:
    for job, us in enumerate((1000, 1000, 10)):
        assert worker.build("t", job, Candidate("fake", (("us", us), ("far", 0))))["ok"]
    evaluator = replace(SPEC, early_out=2.0)
    message = {"cmd": "time", "jobs": [0, 1, 2], "best_s": 10e-6, "anchor": 0}
    replies = []
    worker.handle({**message, "evaluator": evaluator.to_json()}, replies.append)
    assert [len(r["run_secs"]) for r in replies if "run_secs" in r] == [3, 1, 3]


def test_what_counts_less_weighs_as_much(machine) -> None:
    """Kernels of one length alone were chosen: in chunks that leave little to each at others."""
    b = GraphBuilder()
    x, count = b.input(0, (64, 4), "float32"), b.input(1, (), "int32", counts=True)
    spec = b.finish([bounded(b, b.pointwise("relu", x), [Bound(4, 64, count)])])
    assert [int(n) for n in check.fewer(spec).values()] == [8]
    worker = Worker(machine, lambda: machine.now)
    task = {"task": "t", "threads": 1, "seed": 0, "target": TargetSpec.detect().to_json()}
    assert worker.task({**task, "spec": spec.to_json()})["ok"]
    for job, (us, less) in enumerate(((100, 20), (110, 10), (400, 10))):
        candidate = Candidate("fake", (("us", us), ("less", less)))
        assert worker.build("t", job, candidate)["ok"]
    replies = []
    message = {"cmd": "time", "jobs": [0, 1, 2], "best_s": None, "evaluator": SPEC.to_json()}
    worker.handle(message, replies.append)
    found = [statistics.median(r["run_secs"]) * 1e6 for r in replies if "run_secs" in r]
    assert found == pytest.approx([100 * 2**0.5, (100 * 110) ** 0.5, 200])
