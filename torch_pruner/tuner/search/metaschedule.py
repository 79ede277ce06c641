"""TVM MetaSchedule behind the same seam: the baseline that draft-then-verify is compared with.

Its own space (``PostOrderApply``), its own evolution and its own cost model; only building, timing
and the budget are ours. Candidates carry ``sketch="metaschedule"`` and the trace as JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_pruner.task import MeasureResult, MeasureStatus, Task
from torch_pruner.tuner.search.base import SearchStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import Candidate

EMPTY_ROUNDS = 3  # without a new candidate, after which the space counts as exhausted


class MetaScheduleSearch(SearchStrategy):
    """Hands out rounds of ``round_size`` candidates in pieces and reports a round when measured.

    A round costs an evolution of some thousand replays (seconds), so it must not be as small as a
    batch of measurements. ``cost_model`` is one of MetaSchedule's; the sketches are not used. With
    more than one of ``threads`` for the evolution a seed does not fix the proposals.
    """

    def __init__(self, cost_model: Any = None, *, round_size: int = 64, threads: int = 1) -> None:
        self._given_model, self._round_size, self._threads = cost_model, round_size, threads

    def start(
        self,
        task: Task,
        sketches: Sequence[Sketch],
        *,
        rng: np.random.Generator,
        history: Sequence[MeasureResult] = (),
    ) -> None:
        from torch_pruner.families.metaschedule.emit import workload_module
        from torch_pruner.tuner.search import _tvm  # seconds, and only the baseline needs it

        seed = int(rng.integers(1, 1 << 30))
        model = self._given_model or _tvm.make_cost_model(seed, self._threads)
        # Our arithmetic (NaN kept, no product fused with a sum) is more than its rules can inline:
        # they would leave the epilogue outside of the tiles, or raise.
        module = workload_module(task.spec, plain=True)
        self._evolution = _tvm.Evolution(
            module, task.target, model, seed, self._round_size, self._threads
        )
        self._seen = {r.candidate for r in history}
        self._queue: list[tuple[Candidate, Any]] = []
        self._out: dict[Candidate, Any] = {}
        self._results: list[tuple[Any, float | None]] = []
        self._exhausted = False

    def propose(self, n: int) -> list[Candidate]:
        while not self._exhausted and not self._queue:
            self._next_round()
        batch, self._queue = self._queue[:n], self._queue[n:]
        self._out.update(batch)
        return [candidate for candidate, _ in batch]

    def observe(self, results: Sequence[MeasureResult]) -> None:
        for result in results:
            native = self._out.pop(result.candidate, None)
            if native is not None:
                seconds = result.latency_s if result.status is MeasureStatus.OK else None
                self._results.append((native, seconds))

    def _next_round(self) -> None:
        from torch_pruner.families.metaschedule.emit import candidate_of

        if self._results:
            natives, seconds = zip(*self._results, strict=True)
            self._evolution.notify(natives, seconds)
            self._results = []
        for _ in range(EMPTY_ROUNDS):
            for native in self._evolution.generate():
                candidate = candidate_of(native.sch)
                if candidate not in self._seen:
                    self._seen.add(candidate)
                    self._queue.append((candidate, native))
            if self._queue:
                return
        self._exhausted = True
