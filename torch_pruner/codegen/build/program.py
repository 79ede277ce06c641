"""Kernels and their decisions to one compiled program of several entry functions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.codegen.build.lower import compile_module, program_module
from torch_pruner.codegen.build.masks import mask_functions
from torch_pruner.codegen.build.row_copies import copy_functions
from torch_pruner.codegen.build.weight_checksum import checksum_functions
from torch_pruner.codegen.tir.builders import IRModule
from torch_pruner.graph.memory import MASKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.codegen.build.lower import Compiled
    from torch_pruner.graph.memory import KernelCall
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Scheduled


def build_program(
    kernels: Mapping[str, Scheduled],
    calls: Mapping[str, Sequence[KernelCall]],
    slots: int,
    target: TargetSpec,
    threads: int = 1,
) -> Compiled:
    """Machine code with one entry per key of ``calls``, ``CHECKSUMS`` and ``COPIES``.

    ``kernels`` by workload; ``threads``: for how many the calls were planned. ``MASKS`` among
    ``calls``, with none of its own, is the entry of that name. Raises ``CompileError``.
    """
    used = {call.kernel for sequence in calls.values() for call in sequence}
    scheduled = {
        f"kernel_{workload[:16]}": families.scheduled(kernel, target)
        for workload, kernel in kernels.items()
        if workload in used
    }
    programs = {
        entry: [replace(call, kernel=f"kernel_{call.kernel[:16]}") for call in sequence]
        for entry, sequence in calls.items()
        if entry != MASKS
    }
    module = program_module(scheduled, programs, slots, threads)
    masks = mask_functions() if MASKS in calls else {}
    module.update(IRModule(checksum_functions() | copy_functions() | masks))
    return compile_module(module, target)
