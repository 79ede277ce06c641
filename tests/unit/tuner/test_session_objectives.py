"""Finalists of a session: whom an objective has raced, and what is told of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import fakes
from torch_pruner.config import Budget
from torch_pruner.pareto import MOST, Footprint, Objective
from torch_pruner.task import MeasureResult, MeasureStatus
from torch_pruner.tuner.cost_model.residual import ResidualModel
from torch_pruner.tuner.search.draft_verify import DraftThenVerify
from torch_pruner.tuner.session import TuningSession

SKETCHES = (
    fakes.FakeSketch("lean", (4, 4), (2, 2), (3, 3)),
    fakes.FakeSketch("large", (4, 4), (2, 2), (2, 2)),
)
SIZES = {"lean": 100, "large": 900}
BUDGET = Budget(trials=32, trials_per_task=None, time_s=None)
MEMORY, ENERGY = Objective("memory"), Objective("energy")


def footprint(task, candidate) -> Footprint:
    """Also the larger, the larger the decisions."""
    size = SIZES[candidate.sketch] + sum(value for _, value in candidate.decisions)
    return Footprint(size, size, 0)


def executor(slower: float = 1.02, joules=lambda candidate: None):
    def one(given):
        result = fakes.invented(SKETCHES, given.candidate)
        factor = slower if given.candidate.sketch == "lean" else 1.0
        seconds = tuple(s * factor for s in result.run_secs)
        return replace(result, run_secs=seconds, joules=joules(given.candidate))

    return fakes.FakeExecutor(one)


def outcome(objective=MEMORY, budget=BUDGET, **kwargs):
    task, by = fakes.make_task(), kwargs.pop("executor", None) or executor()
    model = ResidualModel()
    it = TuningSession(
        [task], lambda task: DraftThenVerify(model, model), lambda task: SKETCHES, by, budget,
        objective=objective, footprint=footprint, **kwargs,
    )  # fmt: skip
    return it.run().tasks[task.workload], by


@pytest.mark.parametrize(("slower", "taken"), [(1.02, "lean"), (1.05, "large")])
def test_the_leaner_of_two_that_are_as_fast_is_among_the_finalists(slower, taken) -> None:
    found, _ = outcome(executor=executor(slower))
    assert MEMORY.choose(found.finalists).candidate.sketch == taken
    assert found.best.candidate.sketch == "large", "the fastest stays what it is"
    assert found.finalists[0].candidate.sketch == "large"


@pytest.mark.parametrize(("later", "taken"), [(1.02, "lean"), (1.06, "large")])
def test_what_the_objective_takes_has_to_be_as_fast_at_another_moment(later, taken) -> None:
    """In the first race the lean one takes 1.01 of the fastest's time, in the second ``later``."""
    by = executor()

    def race(inputs):
        by.races.append(list(inputs))
        factor = 1.01 if len(by.races) == 1 else later
        return [
            MeasureResult(
                i.candidate, MeasureStatus.OK, (1e-3 * (factor if is_lean(i.candidate) else 1.0),)
            )
            for i in inputs
        ]

    by.race = race
    found, _ = outcome(executor=by)
    assert len(by.races) == 2
    assert any(is_lean(i.candidate) for i in by.races[1])
    assert MEMORY.choose(found.finalists).candidate.sketch == taken


def is_lean(candidate) -> bool:
    return candidate.sketch == "lean"


def test_the_second_race_counts_for_the_draft_too() -> None:
    """It is as fast as the winner there, and so it is among those that an objective chooses of."""
    by = executor()

    def race(inputs):
        by.races.append(list(inputs))
        slow = 1.2 if len(by.races) == 1 else 1.01
        first = inputs[0].candidate if len(by.races) > 1 else None
        drafts.append(first)
        return [
            MeasureResult(
                i.candidate, MeasureStatus.OK, (1e-3 * (slow if i.candidate == draft() else 1.0),)
            )
            for i in inputs
        ]

    drafts: list = []

    def draft():
        return by.batches[0][0].candidate

    by.race = race
    found, _ = outcome(Objective(), executor=by)
    assert found.draft == draft()
    assert found.best.candidate == draft()
    lasting = [f for f in found.finalists if f.candidate == draft()]
    assert all(f.latency_s == pytest.approx(1.01e-3) for f in lasting)


def test_the_lean_are_raced_beside_the_fastest() -> None:
    found, by = outcome()
    raced = {i.candidate for i in by.races[0]}
    assert {f.candidate for f in found.finalists} <= raced
    assert len(raced) <= 8


def test_of_one_batch_and_of_what_was_measured_before_finalists_are_raced_too() -> None:
    one = Budget(trials=4, trials_per_task=4, time_s=None)
    kept = []
    found, by = outcome(
        budget=one, executor=alike(), on_result=lambda task, result: kept.append(result)
    )
    assert by.races
    assert len(found.finalists) > 1
    again, by = outcome(budget=one, executor=alike(), history={found.task.workload: kept}, seed=1)
    assert (by.n_measured, again.trials) == (0, 4)
    assert again.finalists == found.finalists


def alike():
    """All are as fast, but for a little."""

    def one(given):
        seconds = 1e-4 * (1 + 1e-4 * sum(value for _, value in given.candidate.decisions))
        return MeasureResult(given.candidate, MeasureStatus.OK, (seconds,))

    return fakes.FakeExecutor(one)


def test_under_latency_nothing_more_is_raced_and_finalists_are_told() -> None:
    plain, by = outcome(Objective())
    assert by.races
    few = Budget(trials=2, trials_per_task=None, time_s=None)
    _, alone = outcome(Objective(), budget=few, executor=alike())
    assert not alone.races
    assert 1 <= len(plain.finalists) <= MOST
    assert all(f.joules is None for f in plain.finalists)


def test_who_asks_for_no_footprints_gets_no_finalists() -> None:
    task, by, model = fakes.make_task(), executor(), ResidualModel()
    it = TuningSession(
        [task], lambda task: DraftThenVerify(model, model), lambda task: SKETCHES, by, BUDGET
    )
    assert it.run().tasks[task.workload].finalists == ()


def test_joules_decide_where_they_were_counted() -> None:
    found, _ = outcome(ENERGY, executor=executor(joules=lambda c: 1.0 + (c.sketch == "large")))
    assert ENERGY.decides(found.finalists)
    assert ENERGY.choose(found.finalists).candidate.sketch == "lean"


def test_a_meter_that_told_nothing_leaves_energy_undecided() -> None:
    found, by = outcome(ENERGY)
    assert by.races
    assert not ENERGY.decides(found.finalists)
    assert found.best is not None


def test_energy_is_counted_even_late() -> None:
    """A task without its joules would be raced again by the next process."""
    for objective in (ENERGY, MEMORY):
        by = executor()
        late = Budget(trials=None, trials_per_task=32, time_s=20.0)
        clock = lambda by=by: 1e3 if by.n_measured >= 16 else 0.0  # noqa: E731
        outcome(objective, budget=late, executor=by, clock=clock)
        assert bool(by.races) == objective.metered


def test_what_failed_is_no_finalist() -> None:
    by = executor()
    whole = by._measure_one

    def one(given):
        result = whole(given)
        bad = given.candidate.sketch == "lean"
        return replace(result, status=MeasureStatus.WRONG_RESULT, run_secs=()) if bad else result

    by._measure_one = one
    found, _ = outcome(executor=by)
    assert {f.candidate.sketch for f in found.finalists} == {"large"}
