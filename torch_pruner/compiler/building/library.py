"""A library of kernels on CPUs: object files, kept or built now, linked together."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch_pruner import exc
from torch_pruner.codegen.build.kernel_object import KernelObject
from torch_pruner.codegen.build.link import link_objects
from torch_pruner.compiler.building.jobs import (
    answer,
    entries_job,
    kernel_job,
    launch_job,
    masks_job,
    own_job,
    parts_of,
)
from torch_pruner.compiler.executors import build_pool, release_later
from torch_pruner.graph.memory import LAUNCH, MASKS
from torch_pruner.graph.ops import OpKind
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.compiler.toolchain import Calls, Kept, Kernels
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.memory import Place
    from torch_pruner.target import TargetSpec
    from torch_pruner.tuner.measure.protocol import Message

log = logger(__name__)

OWN = "own"  # what every library has, kept beside kernels
FEW = 2  # jobs that are done here where TVM is imported already


class LinkedLibrary:
    """Object files in a folder of their own, which lives as long as this does."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torch_pruner")
        self.folder = Path(self._folder.name)
        self._objects: list[Path] = []

    def add(self, name: str) -> Path:
        """The file of another object, for who writes it."""
        self._objects.append(self.folder / f"{name}.o")
        return self._objects[-1]

    def link(self, path: Path) -> None:
        """Write the library. Raises ``CompileError``, ``OSError``."""
        link_objects(self._objects, path)


def build_library(
    kernels: Kernels,
    calls: Calls,
    slots: int,
    target: TargetSpec,
    threads: int,
    kept: Kept,
    lines: Place | None = None,
    *,
    beside: bool,
) -> LinkedLibrary:
    """What ``codegen.build.program.build_program`` gives, as files.

    Kernels that are ``kept`` are not built again, those that are built are kept. ``lines``: memory
    by which threads help each other. ``beside``: processes of their own may build. Raises
    ``CompileError``, ``OSError``.
    """
    library, parts = LinkedLibrary(), {}
    used = {call.kernel for sequence in calls.values() for call in sequence}
    jobs: dict[str, Message] = {}
    for workload in sorted(used, key=lambda w: _work(kernels[w].spec), reverse=True):
        name, kernel = _name(workload), kernels[workload]
        path = library.add(name)
        if (found := kept.find(workload, kernel)) is None:
            jobs[workload] = kernel_job(name, kernel, target, path)
        else:
            path.write_bytes(found.code)
            parts[name] = found.parts
    shared = {OWN: own_job, LAUNCH: launch_job} | ({MASKS: masks_job} if MASKS in calls else {})
    for name, job_of in shared.items():
        path = library.add(name)
        if (found := kept.find(name, None)) is None:
            jobs[name] = job_of(target, path)
        else:
            path.write_bytes(found.code)
    for (key, job), reply in zip(
        jobs.items(), _answers(list(jobs.values()), threads, beside=beside), strict=True
    ):
        made = KernelObject(Path(job["path"]).read_bytes(), parts_of(reply))
        kept.keep(key, kernels.get(key), made)
        parts[_name(key)] = made.parts
    programs = {e: of for e, of in calls.items() if e != MASKS}
    named = {e: [replace(c, kernel=_name(c.kernel)) for c in of] for e, of in programs.items()}
    entries = entries_job(parts, named, slots, threads, lines, target, library.add("entries"))
    for reply in _answers([entries], threads, beside=beside):
        parts_of(reply)
    return library


def _answers(jobs: Sequence[Message], threads: int, *, beside: bool) -> list[Message]:
    """What the jobs give, done by other processes where that is faster."""
    here = not beside or ("tvm" in sys.modules and len(jobs) <= FEW)
    if jobs and not here:
        try:
            return build_pool(threads).build(jobs)
        except exc.WorkerDied as err:
            raise exc.CompileError("kernels", f"a process that builds them died: {err}") from err
        except OSError as err:
            log.info("kernels are built by this process, no other can be started: %s", err)
        finally:
            release_later()
    return [answer(job) for job in jobs]


def _name(workload: str) -> str:
    return f"kernel_{workload[:16]}"


def _work(spec: Graph) -> int:
    """Kernels of products take longest to build: they are begun first."""
    return sum(node.kind is OpKind.CONTRACT for node in spec.nodes)
