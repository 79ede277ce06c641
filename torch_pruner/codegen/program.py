"""Kernels and their decisions to one compiled program of several entry functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_pruner.codegen._tvm import tvm
from torch_pruner.codegen.build import Call, compile_module, export_library, program_module
from torch_pruner.codegen.checksum import checksum_functions
from torch_pruner.codegen.kernel import schedule
from torch_pruner.codegen.stock import schedule_stock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.memory import Place
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Candidate


def build_program(
    kernels: Mapping[str, tuple[Graph, Candidate]],
    calls: Mapping[str, Sequence[tuple[str, tuple[Place, ...]]]],
    slots: int,
    target: TargetSpec,
) -> Any:
    """Machine code with one entry per key of ``calls``, and ``CHECKSUMS``; ``kernels`` by workload.

    Raises ``CompileError``.
    """
    used = {workload for sequence in calls.values() for workload, _ in sequence}
    scheduled = {}
    for workload, (spec, candidate) in kernels.items():
        if workload not in used:
            continue
        if candidate.sketch == "stock":
            scheduled[f"kernel_{workload[:16]}"] = schedule_stock(spec, candidate, target)
        else:
            scheduled[f"kernel_{workload[:16]}"] = schedule(
                spec, candidate.sketch, dict(candidate.decisions)
            )
    programs = {
        entry: [Call(f"kernel_{workload[:16]}", places) for workload, places in sequence]
        for entry, sequence in calls.items()
    }
    module = program_module(scheduled, programs, slots)
    module.update(tvm.IRModule(checksum_functions()))
    return compile_module(module, target)


def link(library: Any, path: Path) -> None:
    """Write a compiled program as a shared library. Raises ``CompileError``."""
    export_library(library, path)
