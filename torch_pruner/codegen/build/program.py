"""Kernels and their decisions to one compiled program of several entry functions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.codegen.build.lower import (
    compile_module,
    export_library,
    program_module,
)
from torch_pruner.codegen.build.weight_checksum import checksum_functions
from torch_pruner.codegen.tir.builders import IRModule

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from torch_pruner.codegen.build.lower import Compiled
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.memory import KernelCall
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Candidate


def build_program(
    kernels: Mapping[str, tuple[Graph, Candidate]],
    calls: Mapping[str, Sequence[KernelCall]],
    slots: int,
    target: TargetSpec,
    threads: int = 1,
    past_caches: Collection[str] = (),
) -> Compiled:
    """Machine code with one entry per key of ``calls``, and ``CHECKSUMS``; ``kernels`` by workload.

    ``threads``: for how many the calls were planned. ``past_caches``: workloads whose kernels leave
    to others what is in the caches. Raises ``CompileError``.
    """
    used = {call.kernel for sequence in calls.values() for call in sequence}
    scheduled = {}
    for workload, (spec, candidate) in kernels.items():
        if workload not in used:
            continue
        past = workload in past_caches
        kernel = families.named(candidate.sketch).schedule(
            spec, candidate, target, past_caches=past
        )
        scheduled[f"kernel_{workload[:16]}"] = kernel
    programs = {
        entry: [replace(call, kernel=f"kernel_{call.kernel[:16]}") for call in sequence]
        for entry, sequence in calls.items()
    }
    module = program_module(scheduled, programs, slots, threads)
    module.update(IRModule(checksum_functions()))
    return compile_module(module, target)


def link(library: Compiled, path: Path) -> None:
    """Write a compiled program as a shared library. Raises ``CompileError``."""
    export_library(library, path)
