"""Kernels are run by a worker before this process loads them.

In: the kernels of a graph, and how each is to run. What no worker of this device has run yet is
built there, run on seeded data and compared with the reference, while this process builds the
graph's library: an illegal access costs a worker its context, and not the user theirs. What came of
it is a tuning record, so it is found by later processes, for the same device and version; what a
search has timed was checked by that. A kernel that fails gives way to another draft, to the
vendor's library or, as a ``CompileError``, to eager.
"""

from __future__ import annotations

import hashlib
import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from torch_pruner import exc, families
from torch_pruner.compiler import drafting, kernels, objectives
from torch_pruner.compiler.choice import Choice
from torch_pruner.compiler.executors import release_later
from torch_pruner.compiler.remembered import history
from torch_pruner.families.library import FAMILY as LIBRARY
from torch_pruner.log import logger
from torch_pruner.task import Candidate, MeasureInput, MeasureResult, MeasureStatus, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_pruner.cache import KernelStore
    from torch_pruner.compiler.context import Context
    from torch_pruner.compiler.vendor import Vendor
    from torch_pruner.config import Config
    from torch_pruner.log import PhaseTimer
    from torch_pruner.tuner.measure.base import MeasureExecutor

    Choices = Mapping[str, Choice]  # by workload
    Checked = Callable[[], None]

T = TypeVar("T")

log = logger(__name__)

NEAR = 2.0  # times the best draft's predicted latency: slower ones come after the library
MAX_REASON = 200


class FailedKernelsError(Exception):
    """Kernels that are not to run here: why, by workload."""

    def __init__(self, failed: Mapping[str, str]) -> None:
        super().__init__(", ".join(failed.values()))
        self.failed = failed


@dataclass(frozen=True, slots=True)
class Checks:
    """The checks of one graph's kernels. ``notes`` says what was replaced, and why."""

    config: Config
    store: KernelStore
    context: Context
    executor: Callable[[], MeasureExecutor]
    vendor: Vendor | None
    timer: PhaseTimer
    notes: list[str] = field(default_factory=list)
    _results: dict[tuple[str, str], MeasureResult] = field(default_factory=dict)

    def linked(
        self, tasks: Sequence[Task], choices: Choices, link: Callable[[Choices, Checked], T]
    ) -> T:
        """What ``link`` makes of ``choices``, or of others where these fail.

        ``link`` calls what it is given before it loads anything.

        Raises ``CompileError`` for a kernel that cannot be replaced, ``MeasureError`` where no
        worker runs, ``CacheMiss`` under ``on_miss="error"`` for what was not checked.
        """
        while True:
            try:
                checked = self._begin(tasks, choices)
                try:
                    return link(choices, checked)
                except exc.CompileError:
                    checked()  # the worker will have met the same
                    raise
            except FailedKernelsError as err:
                choices = {**choices, **self._others(tasks, choices, err.failed)}

    def unchecked(self, tasks: Sequence[Task], choices: Choices) -> list[Task]:
        """Tasks whose kernels were not run with success on this device."""
        open_ = [t for t in tasks if _is_open(choices[t.workload])]
        return [t for t in open_ if not self._passed(t, choices[t.workload])]

    def failures(self, task: Task) -> list[MeasureResult]:
        """What was checked or timed for a task, and failed."""
        return [r for r in self._known(task).values() if r.status is not MeasureStatus.OK]

    def _passed(self, task: Task, choice: Choice) -> bool:
        known = self._known(task).get(choice.digest)
        return known is not None and known.status is MeasureStatus.OK

    def _known(self, task: Task) -> dict[str, MeasureResult]:
        """Results by the candidate's digest, of this process where the store keeps none."""
        key = self.context.kernel_key(task.workload)
        results, _ = history.of(self.store, key, lambda _: True)
        found = {r.candidate.digest: r for r in results}
        return found | {d: r for (w, d), r in self._results.items() if w == task.workload}

    def _begin(self, tasks: Sequence[Task], choices: Choices) -> Checked:
        """Start the checks that are due; what waits for them raises ``FailedKernelsError``."""
        due = self.unchecked(tasks, choices)
        if due and self.config.on_miss == "error":
            raise not_run_yet(due, self.context)
        failed, asked = {}, []
        for task in due:
            candidate = choices[task.workload].candidate
            known = self._known(task).get(candidate.digest)
            if known is None:
                asked.append(MeasureInput(task, candidate))
            else:
                failed[task.workload] = reason_of(known)
        if failed:
            raise FailedKernelsError(failed)
        if not asked:
            return _nothing
        log.info("%d kernels are run by workers now, for the first time here", len(asked))
        running = _Beside(lambda: self._run(asked))

        def checked() -> None:
            with self.timer.phase("measure"):
                if failed := running.result():
                    raise FailedKernelsError(failed)

        return checked

    def _run(self, asked: Sequence[MeasureInput]) -> dict[str, str]:
        """Have kernels run and note what came of it; of those that failed why, by workload."""
        keys = sorted(self.context.kernel_key(i.task.workload).digest() for i in asked)
        name = hashlib.sha256("".join(["checks", *keys]).encode()).hexdigest()
        with self.store.claim(name):  # whoever comes second finds the work done
            left = [i for i in asked if i.candidate.digest not in self._known(i.task)]
            try:
                results = self.executor().measure(left) if left else []
            finally:
                release_later()
            for given, result in zip(left, results, strict=True):
                workload = given.task.workload
                self._results[workload, result.candidate.digest] = result
                key = self.context.kernel_key(workload)
                self.store.add_records(key, [history.record_of(result)])
        found = [(i.task, self._known(i.task)[i.candidate.digest]) for i in asked]
        return {t.workload: reason_of(r) for t, r in found if r.status is not MeasureStatus.OK}

    def _others(
        self, tasks: Sequence[Task], choices: Choices, failed: Mapping[str, str]
    ) -> dict[str, Choice]:
        """What runs in place of kernels that failed, published for later processes."""
        found = {}
        for task in (t for t in tasks if t.workload in failed):
            why = failed[task.workload]
            candidate = self._next(task)
            if candidate is None:
                reason = f"none of its kernels passed its check on this device, the last one: {why}"
                raise exc.CompileError(task.name, reason)
            library = candidate.sketch == LIBRARY.name
            choice = Choice(candidate, "library" if library else "untuned")
            before = choices[task.workload].sketch
            self.notes.append(f"{task.name}: {candidate.sketch} runs in place of {before}: {why}")
            log.warning("%s", self.notes[-1])
            if self.config.on_miss != "error":
                known = self.store.get_kernel(self.context.kernel_key(task.workload))
                effort = known.effort if known is not None else ""
                own = (self.store, self.context)
                finalists = objectives.alone(task, choice)
                kernels.publish(task, choice, *own, effort=effort, finalists=finalists)
            found[task.workload] = choice
        return found

    def _next(self, task: Task) -> Candidate | None:
        """The best way to run a kernel that has not failed, by prediction."""
        failed = {r.candidate.digest for r in self.failures(task)}
        drafts = drafting.drafts(task)
        near = [c for seconds, c in drafts if seconds <= NEAR * drafts[0][0]]
        ways = [c for c in near if c.digest not in failed]
        if self.vendor is not None and self.config.library and self.vendor.runs(task.spec):
            ways.append(Candidate(LIBRARY.name))
        ways += [c for _, c in drafts if c.digest not in failed]
        return next(iter(ways), None)


class _Beside:
    """Something done by a thread of its own, which no process waits for when it ends."""

    def __init__(self, work: Callable[[], dict[str, str]]) -> None:
        self._work = work
        self._found: dict[str, str] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="torch_pruner checks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._work()
        except BaseException as err:  # whoever waits for it raises it
            self._error = err

    def result(self) -> dict[str, str]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found


def not_run_yet(tasks: Sequence[Task], context: Context) -> exc.CacheMiss:
    """Says that these kernels were not checked on this device."""
    names = [f"{task.name}, which was not run on this device yet" for task in tasks]
    return exc.CacheMiss(names[0], {}, context.hint, names[1:])


def _is_open(choice: Choice) -> bool:
    """Whether a kernel may be unchecked: what was timed was, and the library's needs no check."""
    return math.isinf(choice.latency_s) and families.named(choice.sketch).generated


def reason_of(result: MeasureResult) -> str:
    """A failure in one line."""
    lines = result.error.strip().splitlines() or ["no reason is known"]
    return f"{result.status}: {lines[0][:MAX_REASON]}"


def _nothing() -> None:
    """There is nothing to wait for."""
