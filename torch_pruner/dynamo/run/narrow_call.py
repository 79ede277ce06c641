"""A region whose weights are read in a narrower dtype, as long as that loses nothing of them."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

from torch_pruner.devices.dtypes import DTYPES
from torch_pruner.dynamo.run.arrays import from_numpy, to_numpy
from torch_pruner.dynamo.run.narrow_weights import NotNarrowError
from torch_pruner.dynamo.run.runtime import RegionCall
from torch_pruner.graph.coded import NotCodedError
from torch_pruner.graph.reference import evaluate
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from torch_pruner.compiler.compiled import CompiledGraph
    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.lower.tensors import TensorSpec
    from torch_pruner.dynamo.run.failures import Fallback
    from torch_pruner.graph.ir import Graph

    _Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

log = logger(__name__)


class NarrowRegionCall(RegionCall):
    """Runs a program for narrow weights; another once they hold what narrow ones cannot.

    Weights are looked at again when they changed, before anything is computed. The other program is
    built then, and stays: weights that are trained are never narrow again. It is for float32, or,
    where they have too many exponents for twelve bits, for sixteen. Thread safe.
    """

    def __init__(
        self,
        name: str,
        compiled: CompiledGraph,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        static: Sequence[int],
        device: Device,
        narrow: Mapping[int, str],
        graph: Graph,
        build_wide: Callable[[ValueError], _Run],
        fallback: Fallback,
    ) -> None:
        """``graph`` is the region as it was captured, ``build_wide`` makes its other program.

        It is called with the error that says why one is needed. Where that cannot be made,
        ``fallback`` has the graph interpreted.
        """
        super().__init__(name, compiled, inputs, outputs, static, device, narrow)
        self._narrow_bytes = sum(
            math.prod(inputs[s.index].shape) * DTYPES[narrow[s.index]].itemsize
            for s in compiled.plan.slots
            if s.kind == "input" and s.index in narrow
        )
        self._graph, self._build_wide, self._fallback = graph, build_wide, fallback
        self._wide: _Run | None = None
        self._widening = threading.Lock()

    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes + self._narrow_bytes

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        wide = self._wide
        if wide is None:
            try:
                return super().__call__(inputs)
            except (NotNarrowError, NotCodedError) as err:
                wide = self._widened(err)
        return wide(inputs)

    def _widened(self, why: ValueError) -> _Run:
        with self._widening:
            if self._wide is None:
                log.info("%s is built for wider weights: %s", self.name, why)
                self._wide = self._fallback.unless_broken(
                    lambda: self._build_wide(why),
                    lambda: self._interpreted,
                    instead="is interpreted, slowly",
                )
                self.packed.drop()
            return self._wide

    def _interpreted(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The graph by its definition, in numpy."""
        results = evaluate(self._graph, [to_numpy(t) for t in inputs])
        nodes = self._graph.nodes
        made = (
            from_numpy(a, nodes[o].dtype) for a, o in zip(results, self._graph.outputs, strict=True)
        )
        return [self._new(s).copy_(t) for s, t in zip(self._outputs, made, strict=True)]
