"""Kernels and their decisions to one GPU program of several entries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch_pruner import exc, families
from torch_pruner.codegen.build.gpu import together, triton
from torch_pruner.codegen.build.gpu.image import Calls, GpuProgram, Launch, launches_of
from torch_pruner.codegen.build.gpu.machine_code import machine_code
from torch_pruner.codegen.build.gpu.source import cuda_source
from torch_pruner.target import TargetSpec
from torch_pruner.task import Scheduled

if TYPE_CHECKING:
    from torch_pruner.cards import Card
    from torch_pruner.codegen.parts.triton.kernel import TritonKernel
    from torch_pruner.graph.memory import KernelCall


Kernels = Mapping[str, Scheduled]
Copies = Mapping[str, Collection[int]]  # of kernels by name: for how many calls at once, too
Compiled = Callable[[Kernels, "Card", Copies], tuple[tuple[bytes, ...], dict[str, Launch]]]


def build_gpu_program(
    kernels: Kernels,
    calls: Mapping[str, Sequence[KernelCall]],
    card: Card,
    *,
    compiled: Compiled | None = None,
) -> GpuProgram:
    """Machine code with one entry per key of ``calls``; ``kernels`` by workload.

    ``compiled`` makes images and the launches in them of kernels by name; by default, NVRTC and,
    of kernels in its language, Triton. Raises ``CompileError``.
    """
    used = {call.kernel for sequence in calls.values() for call in sequence}
    names = {workload: f"kernel_{workload[:16]}" for workload in used}
    named = {names[w]: of for w, of in kernels.items() if w in used}
    signatures = {w: families.signature_of(kernels[w].spec, kernels[w].candidate) for w in used}
    alone = {w for w in used if families.named(kernels[w].candidate.sketch).language != "tir"}
    grouped = {
        entry: together.runs(sequence, signatures, alone) for entry, sequence in calls.items()
    }
    copies: dict[str, set[int]] = {}
    for run in (run for runs in grouped.values() for run in runs if len(run) > 1):
        copies.setdefault(names[run[0].kernel], set()).add(len(run))
    images, launches = (compiled or compile_kernels)(named, card, copies)
    entries: Calls = {
        entry: [
            (name, [place for call in run for place in call.args])
            for run in runs
            for name in launches_of(together.key(names[run[0].kernel], len(run)), launches)
        ]
        for entry, runs in grouped.items()
    }
    return GpuProgram(card.arch, images, launches, entries)


def compile_kernels(
    kernels: Kernels, card: Card, copies: Copies
) -> tuple[tuple[bytes, ...], dict[str, Launch]]:
    """Images of kernels by name, and how each is launched. Raises ``CompileError``."""
    target = TargetSpec.cuda(card)
    texts = triton_texts(kernels)
    scheduled = {
        name: families.scheduled(kernel, target)
        for name, kernel in kernels.items()
        if name not in texts
    }
    images: list[bytes] = []
    launches: dict[str, Launch] = {}
    if scheduled:
        source, launches = cuda_source(scheduled, card.arch, copies)
        images.append(machine_code(source, card.arch)[0])
    if texts:
        built = triton.compile_kernels(triton.separate(texts), card.arch)
        most = max(one.shared_bytes for one in built.values())
        if most > card.shared_bytes_per_block:
            raise exc.CompileError("a Triton kernel", f"a {card.name} has no {most} bytes to share")
        more, found = triton.launches_of(texts, built, card.arch, len(images))
        images, launches = images + more, launches | found
    return tuple(images), launches


def triton_texts(kernels: Kernels) -> dict[str, tuple[TritonKernel, ...]]:
    """The texts of kernels by name, of those that are in Triton's language."""
    found = {}
    for name, kernel in kernels.items():
        family = families.named(kernel.candidate.sketch)
        if family.language == "triton":
            found[name] = family.texts(kernel.spec, kernel.candidate)
    return found
