"""Parts of a library, each an object file of its own: kernels, what every library has, entries.

A kernel's code is the same whatever graph it is in, so it is built once and kept; what is new for a
graph are its entries, which call kernels. Kernels are built by several processes at once, and LLVM
takes less for many small functions than for all of them inlined into one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.codegen.build.lower import entry_module, kernel_module, object_code
from torch_pruner.codegen.build.masks import mask_functions
from torch_pruner.codegen.build.row_copies import copy_functions
from torch_pruner.codegen.build.weight_checksum import checksum_functions
from torch_pruner.codegen.tir.builders import IRModule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch_pruner.codegen.build.kernel_object import Division
    from torch_pruner.graph.memory import KernelCall, Place
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Scheduled


def write_kernel(
    name: str, kernel: Scheduled, target: TargetSpec, path: Path
) -> tuple[Division, ...]:
    """Write a kernel's object file; its parts. Raises ``CompileError``, ``OSError``, and what an
    emitter raises for decisions that are none of its space."""
    module, parts = kernel_module(name, families.scheduled(kernel, target))
    object_code(module, target, path)
    return parts


def write_own(target: TargetSpec, path: Path) -> None:
    """Write the object file of what every library has. Raises ``CompileError``, ``OSError``."""
    object_code(IRModule(checksum_functions() | copy_functions()), target, path)


def write_masks(target: TargetSpec, path: Path) -> None:
    """Write the object file of the entry ``MASKS``. Raises ``CompileError``, ``OSError``."""
    object_code(IRModule(mask_functions()), target, path)


def write_entries(
    kernels: Mapping[str, Sequence[Division]],
    programs: Mapping[str, Sequence[KernelCall]],
    slots: int,
    threads: int,
    lines: Place | None,
    target: TargetSpec,
    path: Path,
) -> None:
    """Write the object file of entries that call ``kernels``. Raises ``CompileError``, ``OSError``.

    ``threads``: for how many the calls were planned; ``lines``: memory by which they help each
    other, None where they do not.
    """
    module = entry_module(kernels, programs, slots, threads, lines, target)
    object_code(module, target, path, optimised=False)
