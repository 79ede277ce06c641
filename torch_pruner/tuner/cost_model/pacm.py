"""The pattern-aware cost model, trained online from nothing.

Three parts add up: the draft model's logarithm of the latency, the network's correction of it
(shared by all tasks, trained to rank within each), and the residual model's regression on what both
leave unexplained of a task's own measurements. Until a dozen candidates were measured the network
corrects nothing, and the model is the residual one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.cost_model import network
from torch_pruner.tuner.cost_model.analytic import log_latency
from torch_pruner.tuner.cost_model.base import Array, CostModel, Decisions
from torch_pruner.tuner.cost_model.features import decisions_of, seconds_of
from torch_pruner.tuner.cost_model.pattern import patterns
from torch_pruner.tuner.cost_model.residual import ResidualModel
from torch_pruner.tuner.cost_model.training import ONLINE, Adam, Scaling, TaskList, train_step
from torch_pruner.tuner.cost_model.trust import Trust

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import MeasureResult, Task
    from torch_pruner.tuner.cost_model.pattern import Patterns

MIN_MEASURED = 12  # in all, before the network is trained
MIN_LIST = 4  # of a task, before its list is trained on
STEPS = 4  # after every batch of results
LISTS = 2  # of a step: the task that has news, and another
BOUND = 6.0  # the largest correction, in units of the logarithm of the latency


class PatternAwareModel(CostModel):
    """Minus the logarithm of the corrected latency. ``local=False`` leaves the regression out.

    With ``prior=False`` the draft model is left out: the network ranks by itself, as in the paper,
    and is believed from the start.
    """

    def __init__(
        self, seed: int = 0, *, local: bool = True, prior: bool = True, steps: int = STEPS
    ) -> None:
        self._rng = np.random.default_rng([seed, 0x9ACC])
        self._flat = network.initial(self._rng)
        self._scaling: Scaling | None = None
        self._optimiser = Adam(ONLINE)
        self._lists: dict[str, TaskList] = {}
        self._steps = steps
        self._local = ResidualModel(self._log_seconds) if local else None
        self._prior = prior
        self._trust = Trust(share=0.0 if prior else 1.0)
        self._trained = 0  # how often what is predicted has changed
        self._fitted: dict[str, int] = {}  # for which parameters a task's regression holds

    def predict(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array:
        if self._local is None:
            return -self._log_seconds(task, sketch, decisions)
        if self._fitted.get(task.workload, self._trained) != self._trained:
            self._local.refit(task)
            self._fitted[task.workload] = self._trained
        return self._local.predict(task, sketch, decisions)

    def update(
        self, task: Task, sketches: Sequence[Sketch], results: Sequence[MeasureResult]
    ) -> None:
        found = []
        for sketch in sketches:
            own = [r for r in results if r.candidate.sketch == sketch.name]
            if own:
                decisions = decisions_of(sketch, (r.candidate for r in own))
                seen, seconds = self._patterns(task, sketch, decisions), seconds_of(own)
                self._lists.setdefault(task.workload, TaskList()).add(seen, seconds)
                found.append((seen, np.array(seconds)))
        judged = self._judge(found)
        if self._learn(task.workload) or judged:
            self._trained += 1
        if self._local is not None:
            self._local.update(task, sketches, results)
            self._fitted[task.workload] = self._trained

    def _judge(self, found: Sequence[tuple[Patterns, Array]]) -> bool:
        """Ask how well the network would have done on new results; whether its share changes."""
        before = self._trust.share
        if self._prior and self._scaling is not None and found:
            prior = np.concatenate([p.prior for p, _ in found])
            score = np.concatenate([self._score(p) for p, _ in found])
            seconds = np.concatenate([s for _, s in found])
            good = np.isfinite(seconds)
            self._trust.judge(prior[good], score[good], np.log(seconds[good]))
        return self._trust.share != before

    def _score(self, found: Patterns) -> Array:
        """The network's correction of the logarithm of the latency, bounded."""
        assert self._scaling is not None
        score = network.forward(self._flat, self._scaling.batch(found))
        return np.asarray(np.clip(score, -BOUND, BOUND), dtype=np.float64)

    def _learn(self, workload: str) -> bool:
        """Train on what there is, the task with news in every batch; whether anything changed."""
        lists = {w: t for w, t in self._lists.items() if t.measured >= MIN_LIST}
        if sum(t.measured for t in lists.values()) < MIN_MEASURED:
            return False
        if self._scaling is None:
            self._scaling = Scaling.fit(lists.values())
        others = [t for w, t in lists.items() if w != workload]
        own = [lists[workload]] if workload in lists else []
        for _ in range(self._steps):
            some = self._rng.permutation(len(others))[: LISTS - len(own)]
            batch = [*own, *(others[i] for i in some)]
            train_step(self._flat, self._optimiser, batch, self._scaling, self._rng)
        return True

    def _patterns(self, task: Task, sketch: Sketch, decisions: Decisions) -> Patterns:
        found = patterns(task, sketch, decisions)
        return found if self._prior else replace(found, prior=np.zeros(len(decisions)))

    def _log_seconds(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array:
        """The draft model's logarithm of the seconds, less the network's correction."""
        if self._scaling is None or not len(decisions) or not self._trust.share:
            return log_latency(sketch, decisions) if self._prior else np.zeros(len(decisions))
        found = self._patterns(task, sketch, decisions)
        return np.asarray(-found.prior - self._trust.share * self._score(found))
