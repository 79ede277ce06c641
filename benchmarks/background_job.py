"""One cold process that serves requests from its first call on: what each of them took.

In and out as of ``benchmarks.job``. Eager is timed in the same process, before anything compiles.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.job import ProcessJob, answer_with

EAGER_S = 2.0  # that eager is timed for
STEADY_S = 3.0  # that the last program is timed for


@dataclass(frozen=True, slots=True)
class ServingJob(ProcessJob):
    """A network and how it is compiled: "aot_eager" captures, and then eager runs it.

    ``pause_s`` passes between two requests. Serving ends when nothing is pending, or ``limit_s``
    after the first call.
    """

    network: str
    backend: str
    layers: int | None = None
    pause_s: float = 0.0
    limit_s: float = 120.0


def run(job: ServingJob) -> dict[str, Any]:
    """Serves; seconds are since the first call began."""
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx

    import torch_pruner.dynamo.backend  # noqa: F401  imports count among none of these times
    from benchmarks import models

    job.use_threads()
    module, inputs = models.load(job.network, torch.float32, 1, job.layers)
    ours = job.backend == "pruner"
    with torch.no_grad():
        eager = latencies(lambda: models.call(module, inputs), EAGER_S)
        options = {"options": job.options} if ours else {}
        compiled = torch.compile(module, backend=job.backend, dynamic=False, **options)
        begin = time.perf_counter()
        models.call(compiled, inputs)
        result: dict[str, Any] = {
            "status": "ok",
            "eager_s": statistics.median(eager[1:]),
            "threads": torch.get_num_threads(),
            "first_call_s": time.perf_counter() - begin,
        }
        if ours:
            result |= serve(lambda: models.call(compiled, inputs), begin, job)
        steady = latencies(lambda: models.call(compiled, inputs), STEADY_S)
        result["steady_s"] = statistics.median(steady[1:])
    return result


def latencies(call: Any, seconds: float) -> list[float]:
    """Of calls one after the other, for so long and at least three."""
    found: list[float] = []
    while len(found) < 3 or sum(found) < seconds:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def serve(call: Any, begin: float, job: ServingJob) -> dict[str, Any]:
    """Requests until nothing is pending: (when it began, seconds, what ran) of each."""
    import torch_pruner

    requests: list[tuple[float, float, str]] = []
    while True:
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        graphs = torch_pruner.last_report().graphs
        state = ",".join(sorted({graph.runs for graph in graphs}))
        requests.append((start - begin, end - start, state))
        if end - begin > job.limit_s or torch_pruner.wait(job.pause_s):
            break
    states = list(dict.fromkeys(state for *_, state in requests))
    return {
        "requests": len(requests),
        "done_s": requests[-1][0],
        "since_s": {s: next(at for at, _, now in requests if now == s) for s in states},
        "median_s": {s: statistics.median(t for _, t, now in requests if now == s) for s in states},
        "slowest_s": {s: max(t for _, t, now in requests if now == s) for s in states},
        "mean_s": {s: statistics.mean(t for _, t, now in requests if now == s) for s in states},
    }


def main() -> None:
    job = ServingJob.from_json(sys.argv[1])
    answer_with(lambda: run(job), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
