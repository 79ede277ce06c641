"""The builder that workers use: candidates to machine code, in process. Knows TVM's threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.codegen.build.lower import compile_kernel
from torch_pruner.codegen.build.renewal import renewer
from torch_pruner.codegen.tir.builders import tvm
from torch_pruner.exc import CompileError
from torch_pruner.tuner.measure.builder import BuiltKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Candidate
    from torch_pruner.tuner.measure.builder import Array

BIG_CORES = 1  # TVM's affinity mode: any core, biggest first


class TvmBuilder:
    """Implements ``builder.Builder``."""

    def __init__(self) -> None:
        self._threads = 0
        self._renewers: dict[int, Callable[[Sequence[Array]], Callable[[], None]]] = {}
        self._configure: Callable[[int, int], None] = tvm.get_global_func(
            "runtime.config_threadpool"
        )

    def build(
        self, spec: Graph, target: TargetSpec, threads: int, candidate: Candidate
    ) -> BuiltKernel:
        family = families.named(candidate.sketch)
        if not family.allowed():
            raise CompileError(candidate.sketch, "the system refuses such kernels")
        kernel = family.schedule(spec, candidate, target)
        built = compile_kernel(kernel, target)
        return BuiltKernel(
            bind=built.bind,  # takes the scratch that the worker adds in place of its own
            packs=kernel.packs,
            outputs=[(b.shape, b.dtype) for b in kernel.outputs],
            scratch=[(b.shape, b.dtype) for b in kernel.scratch],
        )

    def set_threads(self, threads: int) -> None:
        if threads != self._threads:
            self._configure(BIG_CORES, threads)
            self._threads = threads

    def seconds(self, calls: Sequence[Callable[[], object]], number: int) -> float | None:
        return None

    def renewal(self, target: TargetSpec, arrays: Sequence[Array]) -> Callable[[], object] | None:
        if self._threads < 2 or not arrays:
            return None
        if self._threads not in self._renewers:
            self._renewers[self._threads] = renewer(target, self._threads)
        return self._renewers[self._threads](arrays)
