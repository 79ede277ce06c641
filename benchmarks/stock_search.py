"""MetaSchedule as it comes, driven by its own code: the reference that nothing of ours touches.

Its builder, its runner, its defaults: 64 candidates a round, three calls of at least 0.1 s each.
Only the number of threads is given, because its own guess is half of the processors, and more time
to build. It says what it measured round by round, so a moment in its curve is the end of a round.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_pruner.task import Candidate, Task

# Its builder's workers are new in every round and first register the intrinsics of all targets,
# which takes longer than the 30 seconds that it gives them.
BUILD_LIMIT_S = 150.0


def search(
    task: Task, name: str, seed: int, trials: int, target: Any = None, builders: int = 0
) -> dict[str, Any]:
    """One search, as ``benchmarks.search`` describes them. Needs the extra ``search``.

    ``target``: TVM's, in place of the task's; ``builders``: candidates built at once, by default as
    many as the task has threads.
    """
    from torch_pruner.families.metaschedule.emit import candidate_of, workload_module
    from torch_pruner.tuner.search._tvm import ms, tvm

    os.environ["TVM_NUM_THREADS"] = str(task.threads)  # inherited by its workers
    begin, best, count, failed = time.perf_counter(), math.inf, 0, 0
    events: list[dict[str, Any]] = []

    @tvm.ir.utils.derived_object  # type: ignore[untyped-decorator]
    class Observer(ms.measure_callback.PyMeasureCallback):  # type: ignore[misc]
        def apply(self, _scheduler: Any, _task: int, given: Any, _built: Any, ran: Any) -> None:
            nonlocal best, count, failed
            elapsed = time.perf_counter() - begin
            for candidate, result in zip(given, ran, strict=True):
                count += 1
                failed += result.run_secs is None
                seconds = _mean(result.run_secs)
                if seconds < best:
                    best = seconds
                    found = candidate_of(candidate.sch)
                    events.append(event(elapsed, count, best, found))

    with tempfile.TemporaryDirectory(prefix="metaschedule-") as folder:
        ms.tune_tir(
            workload_module(task.spec, plain=True),
            target or tvm.target.Target(task.target.tvm_target()),
            folder,
            trials,
            num_tuning_cores=task.threads,
            builder=ms.builder.LocalBuilder(
                max_workers=builders or task.threads, timeout_sec=BUILD_LIMIT_S
            ),
            measure_callbacks=[*ms.MeasureCallback.create("default"), Observer()],
            seed=seed + 1,
        )
    seconds = time.perf_counter() - begin
    return {
        "search": name,
        "seed": seed,
        "trials": count,
        "failed": failed,
        "seconds": seconds,
        "phases": {"draft": 0.0, "verify": 0.0, "build": 0.0, "measure": seconds, "train": 0.0},
        "events": events,
    }


def event(seconds: float, trial: int, latency_s: float, candidate: Candidate) -> dict[str, Any]:
    """A moment at which a search had something better than before."""
    return {
        "seconds": seconds,
        "trial": trial,
        "latency_s": latency_s,
        "candidate": candidate.to_json(),
        "digest": candidate.digest,
    }


def _mean(run_secs: Any) -> float:
    seconds = [float(s) for s in run_secs or ()]
    return sum(seconds) / len(seconds) if seconds else math.inf
