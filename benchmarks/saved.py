"""One network that torch saved ahead of time (``.aot_compile()``) and a fresh process loads.

In: a ``SavedJob`` as JSON on the command line; out: JSON in the file named after it
(``job.launch``). The process that saves compiles; one that loads traces nothing and compiles
nothing: "first call" is from ``load_compiled_function`` to the first result, all modules imported
and the module with its weights built before.
"""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START = time.perf_counter()  # imports are timed
import torch  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from benchmarks import accuracy, models  # noqa: E402
from benchmarks.job import ProcessJob, answer_with, timed  # noqa: E402


@dataclass(frozen=True, slots=True)
class SavedJob(ProcessJob):
    """What to build, and the ``file`` to save it in or, with ``load``, to load it from."""

    network: str
    file: str
    load: bool = False
    precision: str = "float32"
    layers: int | None = None
    backend: str = "pruner"
    preload: tuple[str, ...] = ()


class Tensors(torch.nn.Module):
    """A network that returns its outputs as a tuple.

    torch 2.13 cannot load what returns an output class: its module is a name of the process that
    saved it.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *values: torch.Tensor, **named: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = tree_leaves(self.network(*values, **named))
        return tuple(x for x in outputs if isinstance(x, torch.Tensor))


def run(job: SavedJob) -> dict[str, Any]:
    for name in job.preload:
        importlib.import_module(name)
    result: dict[str, Any] = {"status": "ok", "report": None}
    result["import_s"] = time.perf_counter() - START
    job.use_threads()
    network, inputs = models.load(job.network, models.PRECISIONS[job.precision], 1, job.layers)
    module = Tensors(network)
    given: Any = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with torch.no_grad():
        if not job.load:
            _, result["first_call_s"] = timed(lambda: _save(job, module, given))
            return result
        output, result["first_call_s"] = timed(lambda: _load(job, module, given))
        result["difference"] = accuracy.difference(output, module(*given[0], **given[1]))
    if not result["difference"] <= accuracy.bound(job.precision, 0.0):
        result["status"] = "mismatch"
    return result


def _save(job: SavedJob, module: torch.nn.Module, given: Any) -> None:
    # Guards on a module's methods cannot be written; the shapes are this benchmark's own.
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, **job.options}
    compiled: Any = torch.compile(module, fullgraph=True, backend=job.backend, options=options)
    compiled.forward.aot_compile(given).save_compiled_function(job.file)


def _load(job: SavedJob, module: torch.nn.Module, given: Any) -> object:
    with Path(job.file).open("rb") as file:
        compiled = torch.compiler.load_compiled_function(file)
    return compiled(module, *given[0], **given[1])


def main() -> None:
    job = SavedJob.from_json(sys.argv[1])
    answer_with(lambda: run(job), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
