"""Kernels and their decisions to one GPU program of several entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.codegen.build.gpu import nvrtc
from torch_pruner.codegen.build.gpu.image import Calls, GpuProgram, Launch, launches_of
from torch_pruner.codegen.build.gpu.source import cuda_source
from torch_pruner.target import TargetSpec
from torch_pruner.task import Scheduled

if TYPE_CHECKING:
    from torch_pruner.cards import Card
    from torch_pruner.graph.memory import KernelCall


Kernels = Mapping[str, Scheduled]
Compiled = Callable[[Kernels, "Card"], tuple[bytes, dict[str, Launch]]]


def build_gpu_program(
    kernels: Kernels,
    calls: Mapping[str, Sequence[KernelCall]],
    card: Card,
    *,
    compiled: Compiled | None = None,
) -> GpuProgram:
    """Machine code with one entry per key of ``calls``; ``kernels`` by workload.

    ``compiled`` makes an image and the launches in it of kernels by name; by default, NVRTC. Raises
    ``CompileError``.
    """
    used = {call.kernel for sequence in calls.values() for call in sequence}
    names = {workload: f"kernel_{workload[:16]}" for workload in used}
    named = {names[w]: of for w, of in kernels.items() if w in used}
    image, launches = (compiled or compile_kernels)(named, card)
    entries: Calls = {
        entry: [
            (name, list(call.args))
            for call in sequence
            for name in launches_of(names[call.kernel], launches)
        ]
        for entry, sequence in calls.items()
    }
    return GpuProgram(card.arch, image, launches, entries)


def compile_kernels(kernels: Kernels, card: Card) -> tuple[bytes, dict[str, Launch]]:
    """An image of kernels by name, and how each is launched. Raises ``CompileError``."""
    target = TargetSpec.cuda(card)
    scheduled = {name: families.scheduled(kernel, target) for name, kernel in kernels.items()}
    source, launches = cuda_source(scheduled, card.arch)
    return nvrtc.compile_cubin(source, card.arch)[0], launches
