"""The only loop that measures: asks strategies for candidates, has them timed, tells everyone.

In: tasks, a strategy for each, an executor and a budget. Out: the best schedule of every task,
which is there at any moment, also after Ctrl-C. Knows no files: a caller who wants results kept
passes ``on_result``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.log import PhaseTimer, logger
from torch_pruner.pareto import LATENCY, TIE, Footprint, Objective
from torch_pruner.task import Candidate, MeasureInput, MeasureResult, MeasureStatus, Task
from torch_pruner.tuner.roofline import roofline_s
from torch_pruner.tuner.scheduler import GradientScheduler, TaskProgress
from torch_pruner.tuner.search.space import SketchSpace
from torch_pruner.tuner.task_run import TaskOutcome, TaskRun, fastest, result_of

if TYPE_CHECKING:
    from torch_pruner.config import Budget
    from torch_pruner.families.space import Sketch
    from torch_pruner.tuner.measure.base import MeasureExecutor
    from torch_pruner.tuner.search.base import SearchStrategy

log = logger(__name__)

History = Mapping[str, Sequence[MeasureResult]]

SIMILAR = 6  # tasks whose best schedules are drafts for another
LATE = 1.1  # times the budget: no more finals
METERED_S = 1.0  # that reading a meter takes for the finalists of a task


@dataclass(frozen=True, slots=True)
class SessionResult:
    """The outcome for each workload, and what it cost."""

    tasks: Mapping[str, TaskOutcome]
    trials: int
    seconds: Mapping[str, float]  # by phase
    stopped: str
    interrupted: bool = False
    curve: tuple[tuple[float, int, float], ...] = ()
    """(seconds since the start, trials, sum of weight times best latency), as it changed, from when
    every task has a latency."""


@dataclass(slots=True)
class TuningSession:
    """Tunes ``tasks`` (distinct workloads) until the first part of ``budget`` is used up.

    The same seed gives the same proposals for the same measured latencies, whatever the order of
    tasks; of other tasks a strategy hears what is best for them now. ``history`` holds earlier
    results by workload: they are not repeated, and they count as trials, so that a session that was
    killed is continued and not begun anew. ``seeds`` are schedules that were good elsewhere: those
    that are points of a sketch are measured right after the first draft.

    With ``to_build`` kernels the budget's time is wall time from start to end: ``spent_s`` of it
    was over before, some is left for building so many, and what is being measured when it ends is
    let go.

    Batches of one task are measured at different moments of the machine. So in the end the best of
    each batch and the first draft are raced side by side, and the races decide. Of kernels that are
    as fast, one that packs no operand is taken. ``footprint`` tells what a schedule needs in
    memory, ``objective`` who else is raced for what it costs; outcomes have the finalists.
    """

    tasks: Sequence[Task]
    strategy_factory: Callable[[Task], SearchStrategy]
    sketches_for: Callable[[Task], Sequence[Sketch]]
    executor: MeasureExecutor
    budget: Budget
    on_result: Callable[[Task, MeasureResult], None] = lambda task, result: None
    seed: int = 0
    history: History = field(default_factory=dict)
    seeds: Mapping[str, Sequence[Candidate]] = field(default_factory=dict)
    bound_s: Callable[[Task], float] = roofline_s
    objective: Objective = LATENCY
    footprint: Callable[[Task, Candidate], Footprint] | None = None
    spent_s: float = 0.0
    to_build: int = 0
    batch_size: int = 8
    first_batch_size: int = 2  # what is built at once: every task gets it before any gets more
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    clock: Callable[[], float] = time.monotonic
    best: dict[str, MeasureResult] = field(default_factory=dict, init=False)
    trials: int = field(default=0, init=False)
    _begin: float = field(default=0.0, init=False)
    _trial_s: float = field(default=0.0, init=False)  # of the last batch; 0 before there is one
    _build_s: float = field(default=0.0, init=False)  # of that, building
    _runs: list[TaskRun] = field(default_factory=list, init=False)
    _curve: list[tuple[float, int, float]] = field(default_factory=list, init=False)

    def run(self) -> SessionResult:
        """Tune. Returns what was found when Ctrl-C ends it; ``interrupted`` tells."""
        self._begin = self.clock() - self.spent_s
        stopped, interrupted = "", False
        try:
            with self.timer.phase("draft"):
                for task in self.tasks:
                    if self._over():
                        break
                    self._runs.append(self._start(task))
            stopped = self._loop()
            self._finals()
        except KeyboardInterrupt:
            log.warning("tuning interrupted after %d trials; keeping the best so far", self.trials)
            stopped, interrupted = "interrupted", True
        outcomes = {run.task.workload: run.outcome() for run in self._runs}
        seconds, curve = self.timer.seconds, tuple(self._curve)
        return SessionResult(outcomes, self.trials, seconds, stopped, interrupted, curve)

    def _start(self, task: Task) -> TaskRun:
        known = self.history.get(task.workload, ())
        strategy = self.strategy_factory(task)
        sketches = self.sketches_for(task)
        # By content and not by position: a task's proposals do not depend on its neighbours.
        sequence = np.random.SeedSequence([self.seed, int(task.workload[:16], 16)])
        strategy.start(task, sketches, rng=np.random.default_rng(sequence), history=known)
        first = strategy.propose(1)
        progress = TaskProgress(
            weight=task.weight,
            predicted_s=_predicted_s(sketches, first),
            bound_s=self.bound_s(task),
            max_trials=self.budget.trials_per_task,
            trials=len(known),
        )
        if progress.max_trials is not None and progress.trials >= progress.max_trials:
            progress.stopped = "trials used up"
        seeds = [c for c in self.seeds.get(task.workload, ()) if _possible(c, sketches)]
        measured = {r.candidate for r in known}
        queued = [c for c in dict.fromkeys((*first, *seeds)) if c not in measured]
        draft = first[0] if first else None
        run = TaskRun(task, strategy, progress, queued, frozenset(queued), draft=draft)
        run.unpacked = frozenset(s.name for s in sketches if not s.packs)
        run.objective, run.footprint = self.objective, self.footprint
        run.note(known)
        good = [r for r in known if r.status is MeasureStatus.OK]
        if good:
            run.best = self.best[task.workload] = min(good, key=lambda r: r.latency_s)
            run.winners.append(run.best)
            progress.best_s = run.best.latency_s
        return run

    def _loop(self) -> str:
        scheduler = GradientScheduler([run.progress for run in self._runs])
        while True:
            if self._trials_left() <= 0:
                return "trials used up"
            if self.budget.trials_per_task == 0:
                return "trials used up"
            if self.budget.time_s is not None and self._elapsed_s() >= self._searching_s():
                return "time used up"
            i = scheduler.next()
            if i is None:
                return "nothing left to gain"
            run = self._runs[i]
            batch = self._propose(run)
            if not batch:
                scheduler.exhausted(i)
                continue
            results = self._measure(run, batch)
            best_s = min((r.latency_s for r in results), default=math.inf)
            scheduler.report(i, len(results), best_s)

    def _trials_left(self) -> float:
        """The trials of the graph's budget that are left after this session's and its history's."""
        if self.budget.trials is None:
            return math.inf
        return self.budget.trials - sum(run.progress.trials for run in self._runs)

    def _searching_s(self) -> float:
        """Seconds of the budget less those that the finals will take."""
        assert self.budget.time_s is not None
        finals = sum(len(f) + 2 for run in self._runs if (f := run.finalists()))
        metered_s = METERED_S * len(self._runs) if self.objective.metered else 0.0
        left_s = self._ends_s() - finals * self._trial_s - metered_s
        return max(0.5 * self.budget.time_s, left_s)

    def _ends_s(self) -> float:
        """Seconds of the budget less those of building, which is done one by one."""
        assert self.budget.time_s is not None
        building = 2 * self.to_build * self._build_s
        return max(0.5 * self.budget.time_s, self.budget.time_s - building)

    def _over(self) -> bool:
        """Whether the wall time is over, if that is the budget."""
        time_s = self.budget.time_s
        return bool(self.to_build) and time_s is not None and self._elapsed_s() >= self._ends_s()

    def _executed(
        self, run: TaskRun, batch: Sequence[Candidate], race: bool
    ) -> list[MeasureResult]:
        """The results of the executor in the time that is left; later ones are missing."""
        left = None
        if self.to_build and self.budget.time_s is not None:
            left = self._ends_s() - self._elapsed_s()
        inputs = [MeasureInput(run.task, c) for c in batch]
        with self.executor.within(left):
            return self.executor.race(inputs) if race else self.executor.measure(inputs)

    def _elapsed_s(self) -> float:
        return self.clock() - self._begin

    def _batch_size(self, run: TaskRun) -> int:
        """As many trials as every part of the budget still allows."""
        limits: list[float] = [self.batch_size if run.progress.batches else self.first_batch_size]
        limits.append(self._trials_left())
        if self.budget.trials_per_task is not None:
            limits.append(self.budget.trials_per_task - run.progress.trials)
        if self.budget.time_s is not None and self._trial_s:
            left = self._searching_s() - self._elapsed_s()
            limits.append(max(1, int(left / self._trial_s)))
        return max(1, int(min(limits)))

    def _propose(self, run: TaskRun) -> list[Candidate]:
        size = self._batch_size(run)
        with self.timer.phase("draft"):
            run.strategy.learn_from(self._elsewhere(run))
            run.strategy.draft()
        with self.timer.phase("verify"):
            if len(run.queued) < size:
                run.queued.extend(self._fresh(run, size - len(run.queued)))
        batch, run.queued = run.queued[:size], run.queued[size:]
        return batch

    def _elsewhere(self, run: TaskRun) -> list[Candidate]:
        """The best schedules of the tasks that take about as long as this one."""
        own = run.progress.predicted_s
        others = [r for r in self._runs if r is not run and r.best is not None]
        others.sort(key=lambda r: abs(math.log(r.progress.predicted_s / own)))
        return [r.best.candidate for r in others[:SIMILAR] if r.best is not None]

    def _fresh(self, run: TaskRun, n: int) -> list[Candidate]:
        """Up to ``n`` proposals that were not queued at the start; none if there are no more."""
        while proposed := run.strategy.propose(n):
            if fresh := [c for c in proposed if c not in run.seeded]:
                return fresh
        return []

    def _measure(self, run: TaskRun, batch: Sequence[Candidate]) -> list[MeasureResult]:
        before, begin = self.executor.phase_seconds.get("build", 0.0), self.clock()
        with self.timer.phase("measure"):
            results = self._executed(run, batch, race=False)
        building = self.executor.phase_seconds.get("build", 0.0) - before
        if results:
            self._trial_s = (self.clock() - begin) / len(results)
            self._build_s = building / len(results)
        self.timer.add("build", building)
        self.timer.add("measure", -building)
        self.trials += len(results)
        first = run.progress.batches == 0
        for result in results:
            if result.status is not MeasureStatus.OK:
                run.failed += 1
                log.debug("task %s: %s: %s", run.task.name, result.status, result.error)
            elif run.best is None or result.latency_s < run.best.latency_s:
                run.best = self.best[run.task.workload] = result
            if first:
                run.first_s = min(run.first_s, result.latency_s)
            self.on_result(run.task, result)
        if (winner := fastest(results)) is not None:
            run.winners.append(winner)
        run.note(results)
        self._note_curve()
        with self.timer.phase("train"):
            run.strategy.observe(results)
        return results

    def _finals(self) -> None:
        """Race what may be the best of each task, the longest task first, as far as time goes.

        A processor that is shared is faster and slower for seconds at a time, and not equally so
        for all schedules: a race is one such moment, and whoever wins it was lucky, too. So what
        beat the draft meets it once more at another, and only that race says by how much. What an
        objective prefers to the winner has to be as fast there, too.
        """
        again: list[tuple[TaskRun, list[Candidate]]] = []
        for run in sorted(self._runs, key=lambda r: -r.progress.weight * r.progress.latency_s):
            results = self._race(run, run.finalists())
            run.raced = [r for r in results if r.status is MeasureStatus.OK]
            if (winner := run.chosen(results)) is None:
                unpacked = run.best_unpacked
                if run.best and unpacked and unpacked is run.chosen([run.best, unpacked]):
                    self._settle(run, unpacked)
                continue
            drafts = [run.draft] if run.draft and result_of(results, run.draft) else []
            again.append((run, list(dict.fromkeys([*drafts, winner.candidate, *run.preferred()]))))
            self._settle(run, winner)
        for run, entered in again:
            assert run.best is not None
            results = self._race(run, entered)
            run.note_again(results, run.best)
            first, second = (result_of(results, c) for c in (run.draft, run.best.candidate))
            packs = run.draft is None or run.draft.sketch not in run.unpacked
            ahead_by = 1 / TIE if packs and run.best.candidate.sketch in run.unpacked else TIE
            same = first is second
            if first and second and not same and first.latency_s < second.latency_s * ahead_by:
                self._settle(run, first)

    def _race(self, run: TaskRun, candidates: Sequence[Candidate]) -> list[MeasureResult]:
        """The results of a race that is worth while and that there is time for, or none."""
        late = self.budget.time_s is not None and self._elapsed_s() > self.budget.time_s * LATE
        # Without its joules a task counts as not tuned for them, and would be raced once more.
        late = late and not self.objective.metered
        if len(candidates) < 2 or late or self._over():
            return []
        with self.timer.phase("measure"):
            return self._executed(run, candidates, race=True)

    def _settle(self, run: TaskRun, best: MeasureResult) -> None:
        run.best = self.best[run.task.workload] = best
        self._note_curve()

    def _note_curve(self) -> None:
        if all(run.best for run in self._runs):
            total = sum(run.progress.weight * run.best.latency_s for run in self._runs if run.best)
            if not self._curve or self._curve[-1][2] != total:
                self._curve.append((self._elapsed_s(), self.trials, total))


def _predicted_s(sketches: Sequence[Sketch], first: Sequence[Candidate]) -> float:
    """The analytic latency of the first proposal; a guess of a millisecond for other spaces."""
    for sketch in sketches:
        for candidate in first:
            if candidate.sketch == sketch.name:
                taken = dict(candidate.decisions)
                row = np.array([[taken[n] for n in sketch.names]], dtype=np.int64)
                return float(sketch.symbols(row).latency_s[0])
    return 1e-3


def _possible(candidate: Candidate, sketches: Sequence[Sketch]) -> bool:
    """Whether a candidate from elsewhere is a valid point of one of the sketches."""
    spaces = [SketchSpace(s) for s in sketches if s.name == candidate.sketch]
    return any(len(space.valid(space.rows_of_candidates([candidate]))) for space in spaces)
