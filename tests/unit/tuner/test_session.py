"""The session's promises, with invented latencies and an invented clock."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests import fakes
from torch_pruner.config import Budget
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.log import PhaseTimer
from torch_pruner.task import MeasureResult, MeasureStatus
from torch_pruner.tuner import make_cost_model, make_strategy
from torch_pruner.tuner.cost_model.residual import ResidualModel
from torch_pruner.tuner.roofline import roofline_s
from torch_pruner.tuner.search.draft_verify import DraftThenVerify
from torch_pruner.tuner.search.random_search import RandomSearch
from torch_pruner.tuner.search.space import SketchSpace
from torch_pruner.tuner.session import TuningSession

SKETCH = fakes.FakeSketch("s", (8, 8, 6, 6), (5, 2, 3, 2), (3, 4, 3, 1))
SMALL = fakes.FakeSketch("small", (3, 3), (1, 1), (0, 1))
TRIALS = Budget(trials=40, trials_per_task=None, time_s=None)


class Clock:
    """Advances by ``step`` seconds whenever it is read."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def session(tasks, sketches, *, executor=None, budget=TRIALS, strategy=None, **kwargs):
    executor = executor or fakes.FakeExecutor(lambda i: fakes.invented(sketches, i.candidate))
    kwargs.setdefault("clock", Clock())

    def make(task):
        model = ResidualModel()
        return strategy() if strategy else DraftThenVerify(model, model)

    return TuningSession(tasks, make, lambda task: sketches, executor, budget, **kwargs)


class Drifting:
    """Measures ``SKETCH`` on a machine that is half as fast for its first ``slow`` measurements."""

    def __init__(self, slow: int) -> None:
        self.left = slow

    def __call__(self, given):
        result = fakes.invented([SKETCH], given.candidate)
        self.left -= 1
        factor = 2.0 if self.left >= 0 else 1.0
        return replace(result, run_secs=tuple(s * factor for s in result.run_secs))


def test_a_race_decides_and_not_the_moment_of_a_batch() -> None:
    """The best of a slow moment is as good as it is, whatever came later."""
    task = fakes.make_task()
    executor = fakes.FakeExecutor(Drifting(4))
    outcome = session([task], [SKETCH], executor=executor).run().tasks[task.workload]
    finalists, again = executor.races
    assert finalists[0].candidate == outcome.draft
    assert [f.candidate for f in again] == [outcome.draft, outcome.best.candidate]
    assert len({f.candidate for f in finalists}) == len(finalists) <= 8
    truth = [fakes.invented([SKETCH], f.candidate).latency_s for f in finalists]
    assert outcome.best.latency_s <= min(truth) * 1.03
    first = executor.batches[0]
    early = min(fakes.invented([SKETCH], i.candidate).latency_s for i in first)
    assert outcome.best.latency_s <= early * 1.03


@pytest.mark.parametrize(("later", "kept"), [(0.9, "draft"), (1.02, "draft"), (1.04, "winner")])
def test_what_beats_the_draft_must_do_so_at_another_moment_too(later: float, kept: str) -> None:
    """The first race gives a gain of 1.05, the second one of ``later``."""
    task = fakes.make_task()
    executor = fakes.FakeExecutor(lambda i: fakes.invented([SKETCH], i.candidate))
    races = []

    def race(inputs):
        races.append(inputs)
        gains = [1.0, *[1.05 if len(races) == 1 else later] * (len(inputs) - 1)]
        return [
            MeasureResult(i.candidate, MeasureStatus.OK, (1e-3 / gain,))
            for i, gain in zip(inputs, gains, strict=True)
        ]

    executor.race = race
    outcome = session([task], [SKETCH], executor=executor).run().tasks[task.workload]
    assert len(races) == 2
    assert (outcome.best.candidate == outcome.draft) == (kept == "draft")


def test_the_draft_wins_a_tie() -> None:
    task = fakes.make_task()
    executor = fakes.FakeExecutor(
        lambda i: MeasureResult(
            i.candidate, MeasureStatus.OK, (1e-3 * (1 - 1e-4 * len(executor.batches)),)
        )
    )
    outcome = session([task], [SKETCH], executor=executor).run().tasks[task.workload]
    assert len(executor.races) == 1
    assert outcome.best.candidate == outcome.draft


class Unpacked(fakes.FakeSketch):
    packs = False


@pytest.mark.parametrize("first", [4, 32])
@pytest.mark.parametrize(("slower", "kept"), [(1.02, "lying"), (1.05, "packed")])
def test_of_two_that_are_as_fast_the_one_that_packs_nothing_is_kept(first, slower, kept) -> None:
    """After races, and after one batch, which has none; whichever was drafted first."""
    for drafted in ("lying", "packed"):
        believed = {n: (2, 2) if n == drafted else (3, 3) for n in ("lying", "packed")}
        sketches = [
            kind(name, (4, 4), (2, 2), believed[name], scale_s=1e-4)
            for kind, name in ((Unpacked, "lying"), (fakes.FakeSketch, "packed"))
        ]

        def latency(given, sketches=sketches):
            result = fakes.invented(sketches, given.candidate)
            factor = slower if given.candidate.sketch == "lying" else 1.0
            return replace(result, run_secs=tuple(s * factor for s in result.run_secs))

        task, executor = fakes.make_task(), fakes.FakeExecutor(latency)
        budget = Budget(trials=32, trials_per_task=None, time_s=None)
        it = session([task], sketches, executor=executor, budget=budget, first_batch_size=first)
        assert it.run().tasks[task.workload].best.candidate.sketch == kept


def test_one_batch_needs_no_race() -> None:
    task = fakes.make_task()
    budget = Budget(trials=4, trials_per_task=None, time_s=None)
    it = session([task], [SKETCH], budget=budget, first_batch_size=4)
    it.run()
    assert not it.executor.races


def test_a_race_that_fails_leaves_the_best_as_it_was() -> None:
    task = fakes.make_task()
    executor = fakes.FakeExecutor(lambda i: fakes.invented([SKETCH], i.candidate))
    executor.race = lambda inputs: [
        MeasureResult(i.candidate, MeasureStatus.RUN_ERROR, (), "lost") for i in inputs
    ]
    outcome = session([task], [SKETCH], executor=executor).run().tasks[task.workload]
    measured = [fakes.invented([SKETCH], i.candidate) for b in executor.batches for i in b]
    assert outcome.best.latency_s == min(r.latency_s for r in measured)


def test_finds_a_good_schedule_and_reports_it() -> None:
    task, seen = fakes.make_task(), []
    it = session([task], [SKETCH], on_result=lambda t, r: seen.append((t, r)))
    result = it.run()
    outcome = result.tasks[task.workload]
    assert result.trials == outcome.trials == it.executor.n_measured == len(seen) == 40
    assert result.stopped == "trials used up"
    assert (
        outcome.best
        == it.best[task.workload]
        == min((r for _, r in seen), key=lambda r: r.latency_s)
    )
    assert outcome.best.latency_s < 2 * SKETCH.best_s()
    assert outcome.first_s >= outcome.best.latency_s
    assert set(result.seconds) >= {"draft", "verify", "build", "measure", "train"}


def test_seeds_are_measured_right_after_the_draft_and_once() -> None:
    task = fakes.make_task()
    space = SketchSpace(SKETCH)
    good, other = space.candidates(space.rows_of([[32, 4, 8, 4], [1, 1, 1, 2]]))
    alien = replace(good, sketch="of another version")
    unknown = replace(good, decisions=tuple((n, 3) for n, _ in good.decisions))
    seeds = {task.workload: [good, alien, unknown, other, good]}
    it = session([task], [SKETCH], seeds=seeds)
    outcome = it.run().tasks[task.workload]
    measured = [i.candidate for batch in it.executor.batches for i in batch]
    assert measured[:3] == [outcome.draft, good, other]
    assert len(set(measured)) == len(measured)
    known = {task.workload: [fakes.invented([SKETCH], c) for c in measured]}
    budget = replace(TRIALS, trials=len(measured) + 20)
    again = session([task], [SKETCH], seeds=seeds, history=known, budget=budget)
    again.run()
    later = [i.candidate for batch in again.executor.batches for i in batch]
    assert not set(later) & set(measured)


def test_the_curve_begins_when_every_task_has_a_latency_and_ends_with_the_result() -> None:
    tasks = [fakes.make_task(8, weight=3), fakes.make_task(16)]
    result = session(tasks, [SKETCH], clock=Clock(0.1)).run()
    seconds, trials, total = zip(*result.curve, strict=True)
    assert trials[0] == 4  # two first batches
    assert list(seconds) == sorted(seconds)
    assert list(trials) == sorted(trials)
    best = {w: outcome.best.latency_s for w, outcome in result.tasks.items()}
    assert total[-1] == pytest.approx(sum(t.weight * best[t.workload] for t in tasks))


def test_a_task_that_never_works_leaves_no_curve() -> None:
    executor = fakes.FakeExecutor(
        lambda i: MeasureResult(i.candidate, MeasureStatus.RUN_ERROR, (), "no")
    )
    assert session([fakes.make_task()], [SKETCH], executor=executor).run().curve == ()


def test_effort_none_measures_nothing_and_gives_the_top_draft() -> None:
    task = fakes.make_task()
    it = session([task], [SKETCH], budget=Budget(0, 0, 0.0))
    outcome = it.run().tasks[task.workload]
    assert it.executor.batches == []
    assert outcome.best is None
    assert dict(outcome.candidate.decisions) == {"t0": 8, "t1": 16, "t2": 8, "t3": 2}


def test_the_top_draft_is_measured_first() -> None:
    task = fakes.make_task()
    it = session([task], [SKETCH])
    draft = it.run().tasks[task.workload].draft
    assert it.executor.batches[0][0].candidate == draft
    everything = [i.candidate for b in it.executor.batches for i in b]
    assert len(everything) == len(set(everything))


def test_trials_per_task_bound_each_task() -> None:
    tasks = [fakes.make_task(r) for r in (2, 4, 8)]
    result = session(tasks, [SKETCH], budget=Budget(None, 12, None)).run()
    assert {o.trials for o in result.tasks.values()} == {12}
    assert result.stopped == "nothing left to gain"
    assert {o.stopped for o in result.tasks.values()} == {"trials used up"}


def test_time_ends_the_session_and_shrinks_the_last_batches() -> None:
    clock = Clock()

    def measure(i):
        clock.now += 1.0
        return fakes.invented([SKETCH], i.candidate)

    executor = fakes.FakeExecutor(measure)
    budget = Budget(None, None, 20.0)
    result = session(
        [fakes.make_task()], [SKETCH], executor=executor, budget=budget, clock=clock
    ).run()
    assert result.stopped == "time used up"
    raced = sum(map(len, executor.races))
    assert raced
    assert 20 <= result.trials + raced <= 22  # the last batch adds a finalist
    assert [len(b) for b in executor.batches] == [2, 8, result.trials - 10]


def test_every_task_is_tried_once_in_order_of_its_share() -> None:
    tasks = [
        fakes.make_task(2, weight=1),
        fakes.make_task(4, weight=9),
        fakes.make_task(8, weight=3),
    ]
    it = session(tasks, [SKETCH])
    it.run()
    order = [b[0].task.weight for b in it.executor.batches]
    assert order[:3] == [9, 3, 1]
    assert order[3] == 9


def test_exhausted_spaces_end_the_session() -> None:
    task = fakes.make_task()
    result = session([task], [SMALL], budget=Budget(None, None, None)).run()
    outcome = result.tasks[task.workload]
    assert outcome.trials <= 9
    assert outcome.stopped == "space exhausted"
    assert outcome.best.latency_s == pytest.approx(SMALL.best_s())


def test_a_task_at_its_bound_stops() -> None:
    task = fakes.make_task()
    result = session([task], [SKETCH], bound_s=lambda t: 1.0).run()
    assert result.tasks[task.workload].stopped == "at the bound"
    assert result.trials == 2


def test_a_task_without_improvement_stops() -> None:
    flat = fakes.FakeExecutor(lambda i: MeasureResult(i.candidate, MeasureStatus.OK, (1e-3,)))
    task = fakes.make_task()
    result = session([task], [SKETCH], executor=flat, budget=Budget(None, None, None)).run()
    assert result.tasks[task.workload].stopped == "no improvement"
    assert result.trials == 34


def test_failures_are_counted_and_never_best() -> None:
    def measure(i):
        if dict(i.candidate.decisions)["t0"] > 4:
            return MeasureResult(i.candidate, MeasureStatus.WRONG_RESULT, (), "wrong")
        return fakes.invented([SKETCH], i.candidate)

    task = fakes.make_task()
    outcome = (
        session([task], [SKETCH], executor=fakes.FakeExecutor(measure)).run().tasks[task.workload]
    )
    assert 0 < outcome.failed < 40
    assert outcome.best.status is MeasureStatus.OK


def test_nothing_works_leaves_the_draft_and_no_best() -> None:
    bad = fakes.FakeExecutor(
        lambda i: MeasureResult(i.candidate, MeasureStatus.BUILD_ERROR, (), "no")
    )
    task = fakes.make_task()
    outcome = session([task], [SKETCH], executor=bad).run().tasks[task.workload]
    assert outcome.best is None
    assert outcome.candidate == outcome.draft
    assert math.isinf(outcome.first_s)


def test_ctrl_c_keeps_the_best_so_far() -> None:
    def measure(i):
        if executor.n_measured > 16:
            raise KeyboardInterrupt
        return fakes.invented([SKETCH], i.candidate)

    executor = fakes.FakeExecutor(measure)
    task = fakes.make_task()
    result = session([task], [SKETCH], executor=executor).run()
    assert result.interrupted
    assert result.tasks[task.workload].best is not None
    assert result.trials == 10


def test_history_is_known_and_not_measured_again() -> None:
    task = fakes.make_task()
    first = session([task], [SKETCH])
    known = []
    first.on_result = lambda t, r: known.append(r)
    first.run()
    budget = Budget(len(known) + 8, None, None)
    second = session([task], [SKETCH], history={task.workload: known}, budget=budget)
    result = second.run()
    outcome = result.tasks[task.workload]
    assert result.trials == 8
    assert outcome.trials == len(known) + 8
    assert not {i.candidate for b in second.executor.batches for i in b} & {
        r.candidate for r in known
    }
    assert outcome.best.latency_s <= min(r.latency_s for r in known)
    budget = Budget(None, len(known), None)
    spent = session([task], [SKETCH], history={task.workload: known}, budget=budget)
    assert spent.run().trials == 0
    none = session([task], [SKETCH], history={task.workload: known}, budget=Budget(0, 0, 0.0))
    assert none.run().tasks[task.workload].best == min(known, key=lambda r: r.latency_s)


def test_proposals_depend_on_the_seed_and_not_on_the_other_tasks() -> None:
    def batches(tasks, seed):
        it = session(
            tasks, [SKETCH], seed=seed, strategy=RandomSearch, budget=Budget(None, 8, None)
        )
        it.run()
        return {b[0].task.name: [i.candidate for i in b] for b in it.executor.batches}

    a, b = fakes.make_task(2), fakes.make_task(4)
    assert batches([a, b], 0)[b.name] == batches([b], 0)[b.name]
    assert batches([b], 0) != batches([b], 1)
    assert batches([a, b], 0)[a.name] != batches([a, b], 0)[b.name]


def test_the_gradient_prefers_the_task_that_gains() -> None:
    """A task stuck at its optimum gets fewer batches than one of the same share that improves."""
    hard = fakes.FakeSketch("hard", (12, 12, 12, 12), (6, 6, 2, 9), (2, 3, 6, 4))
    tasks = [fakes.make_task(2), fakes.make_task(4)]

    def measure(i):
        if i.task is tasks[0]:
            return MeasureResult(i.candidate, MeasureStatus.OK, (1e-3,))
        return fakes.invented([hard], i.candidate)

    it = session(tasks, [hard], executor=fakes.FakeExecutor(measure), budget=Budget(96, None, None))
    result = it.run()
    trials = [result.tasks[t.workload].trials for t in tasks]
    assert trials[1] > trials[0]


def test_building_is_told_apart_from_measuring() -> None:
    clock = Clock()

    class Executor(fakes.FakeExecutor):
        building = 0.0

        @property
        def phase_seconds(self):
            return {"build": self.building}

        def measure(self, inputs):
            clock.now += 3
            self.building += 2
            return super().measure(inputs)

    executor = Executor(lambda i: fakes.invented([SKETCH], i.candidate))
    timer = PhaseTimer(clock)
    result = session([fakes.make_task()], [SKETCH], executor=executor, timer=timer).run()
    assert result.seconds["build"] == pytest.approx(12)
    assert result.seconds["measure"] == pytest.approx(6)


def test_the_roofline_bounds_contractions_only() -> None:
    task = fakes.make_task(256)
    flops = 2 * 256 * 16 * 8
    assert roofline_s(task) == pytest.approx(flops / task.target.peak_flops("float32", 1))
    b = GraphBuilder()
    pointwise = b.finish([b.pointwise("exp", b.input(0, (64,), "float32"))])
    assert roofline_s(replace(task, spec=pointwise)) == 0.0


@pytest.mark.parametrize("model", ["moa", "pacm", "residual", "analytic", "random", "xgb"])
def test_every_registered_composition_runs(model) -> None:
    if model == "xgb":
        pytest.importorskip("xgboost")
    cost_model = make_cost_model(model)
    for name in ("draft-verify", "random"):
        it = session(
            [fakes.make_task()], [SKETCH], strategy=lambda n=name: make_strategy(n, cost_model)
        )
        assert it.run().trials == 40
    assert np.isfinite(it.best[fakes.make_task().workload].latency_s)
