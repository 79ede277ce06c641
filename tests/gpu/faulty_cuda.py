"""What workers of a real card build with where kernels are to fail there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner.graph.ops import OpKind
from torch_pruner.tuner.measure._cuda import CudaBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Candidate
    from torch_pruner.tuner.measure.builder import Array, BuiltKernel

NOWHERE = 1 << 20  # no memory of anybody's: an access there is an illegal one


class LostProducts(CudaBuilder):
    """Products get addresses at which there is no memory."""

    def __init__(self) -> None:
        super().__init__()
        self._faulty = False

    def build(
        self, spec: Graph, target: TargetSpec, threads: int, candidate: Candidate
    ) -> BuiltKernel:
        built = super().build(spec, target, threads, candidate)
        if not any(node.kind is OpKind.CONTRACT for node in spec.nodes):
            return built

        def bind(arrays: Sequence[Array]) -> Callable[[], object]:
            self._faulty = True
            try:
                return built.bind(arrays)
            finally:
                self._faulty = False

        return replace(built, bind=bind)

    def _take(self, array: Array) -> int:
        address = super()._take(array)
        return NOWHERE if self._faulty else address
