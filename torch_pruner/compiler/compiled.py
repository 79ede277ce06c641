"""What the driver makes of a graph: a program, and kernels in it that the vendor's library runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.codegen.build.load import Entry
    from torch_pruner.compiler.choice import Choice
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.memory import MemoryPlan, Place
    from torch_pruner.report import TaskReport


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """A kernel that the vendor's library runs: its graph and where its operands lie."""

    spec: Graph
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A program. Fill the address table as ``plan.slots`` say, then run ``steps`` in order.

    ``prepare`` computes, from the inputs ``sources``, the inputs that follow the graph's own.
    """

    steps: tuple[Entry | LibraryCall, ...]
    plan: MemoryPlan
    graph: Graph
    prepare: Graph | None
    sources: tuple[int, ...]
    tasks: tuple[TaskReport, ...]
    digest: str
    keep: Any = None  # the library, where it was never written to disk
    checksums: tuple[Entry, ...] = ()  # see ``graph.memory.CHECKSUMS``; none without a library
    copies: Entry | None = None  # see ``graph.memory.COPIES``
    weights: str = "checked"  # the option
    library: str = ""  # the sha256 of its file; none without one
    barriers: int = 0  # between the phases of a call
    choices: Mapping[str, Choice] = field(default_factory=dict)  # of each kernel, by workload
    overwrites: tuple[tuple[int, int], ...] = ()  # see ``graph.overwrites``
    notes: tuple[str, ...] = ()  # kernels that were replaced, and why
