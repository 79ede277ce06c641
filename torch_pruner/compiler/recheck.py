"""Kernels of the store run once more: whether they still give what their graph says.

For ``torch-pruner cache verify --run``: a compiler that was replaced, memory that fails, a CPU that
is not the one it says it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.cache import KernelEntry
from torch_pruner.compiler.context import codegen_version
from torch_pruner.compiler.executors import close_all, local_executor
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.graph.ir import Graph
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureInput, MeasureStatus, Task

if TYPE_CHECKING:
    from torch_pruner.cache import KernelStore
    from torch_pruner.config import Config

BATCH = 16


@dataclass(frozen=True, slots=True)
class Recheck:
    """``checked`` kernels ran, ``problems`` says which of them failed and how.

    ``skipped`` are the library's, and those of other devices and versions.
    """

    checked: int
    skipped: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def recheck(store: KernelStore, config: Config) -> Recheck:
    """Build every kernel of this device anew and compare its results with the reference."""
    device, version = DeviceFingerprint.detect().digest(), codegen_version()
    entries = [item.entry for item in store.ls() if isinstance(item.entry, KernelEntry)]
    mine = [e for e in entries if (e.key.device, e.key.codegen) == (device, version)]
    problems: list[str] = []
    by_threads: dict[int, list[tuple[KernelEntry, MeasureInput]]] = {}
    checked = 0
    for entry in mine:
        try:
            given = _input(entry)
        except (ValueError, KeyError, TypeError) as err:
            checked += 1
            problems.append(f"kernel {entry.key.digest()[:12]} ({entry.task}): {err}")
            continue
        if given is not None:
            by_threads.setdefault(entry.key.threads, []).append((entry, given))
    try:
        for threads, pairs in sorted(by_threads.items()):
            executor = local_executor(threads, config.seed)
            for start in range(0, len(pairs), BATCH):
                batch = pairs[start : start + BATCH]
                results = executor.measure([given for _, given in batch])
                checked += len(batch)
                problems += [
                    f"kernel {entry.key.digest()[:12]} ({entry.task}): {r.status} {r.error}".strip()
                    for (entry, _), r in zip(batch, results, strict=True)
                    if r.status is not MeasureStatus.OK
                ]
    finally:
        close_all()
    return Recheck(checked, len(entries) - checked, tuple(problems))


def _input(entry: KernelEntry) -> MeasureInput | None:
    """The task and schedule to run; None for what is not ours to run."""
    candidate = Candidate.from_json(entry.candidate)
    target = TargetSpec.resolve("auto", entry.key.threads)
    if (
        not families.knows(candidate.sketch)
        or not families.named(candidate.sketch).generated
        or target.key() != entry.key.target
    ):
        return None
    spec = Graph.from_json(json.loads(entry.workload_text))
    if spec.digest() != entry.key.workload:
        raise ValueError("its graph is not the one of its key")
    return MeasureInput(Task(entry.task, spec, target, entry.key.threads), candidate)
