"""Kernels seen: those that ran untuned are noted, and tuned later with no model at hand.

A note is an entry without completed effort, whose schedule was never timed; a search that was
killed leaves one, too, with the best that it had timed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from torch_pruner.cache.entry import KernelEntry
from torch_pruner.compiler import choice, kernels
from torch_pruner.graph.ir import Graph
from torch_pruner.log import logger
from torch_pruner.task import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.cache import KernelStore
    from torch_pruner.compiler.context import Context
    from torch_pruner.compiler.driver import Compiler
    from torch_pruner.report import TaskReport

log = logger(__name__)


def noted(store: KernelStore, context: Context) -> list[Task]:
    """The kernels of this device, these threads and this version that are noted as untuned.

    What does not compute what its key says is left out, with a warning.
    """
    tasks = []
    for listed in store.ls():
        entry = listed.entry
        if not isinstance(entry, KernelEntry) or entry.effort:
            continue
        workload = entry.key.workload
        if entry.key != context.kernel_key(workload):
            continue
        try:
            spec = Graph.from_json(json.loads(entry.workload_text))
            sound = spec.digest() == workload
        except (ValueError, KeyError, TypeError, IndexError) as err:
            log.debug("kernel %s: %s", workload, err)
            sound = False
        if sound:
            tasks.append(Task(entry.task, spec, context.target, context.threads, 1))
        else:
            log.warning("kernel %s (%s) is noted without its graph", entry.task, workload[:12])
    return sorted(tasks, key=lambda task: task.workload)


def tune_noted(compiler: Compiler) -> Sequence[TaskReport]:
    """Tune what is noted, as far as the compiler's budget goes."""
    tasks = noted(compiler.store, compiler.context)
    choices = kernels.choose(
        tasks,
        compiler.config,
        compiler.store,
        compiler.context,
        compiler.vendor,
        compiler.timer,
        compiler.tunings,
        executor=compiler.executor,
    )
    return tuple(choice.report(task, choices[task.workload]) for task in tasks)
