"""The smallest family that works: elementwise kernels in plain loops."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from torch_pruner.families.base import Family
from torch_pruner.families.kinds import is_elementwise
from torch_pruner.families.space import Sketch, Symbols

N = TypeVar("N")


class ToyDecisions(NamedTuple, Generic[N]):
    par: N  # 1: the outermost axis is shared out to threads


class ToySketch(Sketch):
    name = "toy"
    decisions = ToyDecisions

    @cached_property
    def domains(self) -> tuple[np.ndarray, ...]:
        return (np.array([0, 1]),)

    def symbols(self, decisions: np.ndarray) -> Symbols:
        ones = np.ones(len(decisions))
        seconds = 1e-12 * self.task.spec.nodes[self.task.spec.outputs[0]].numel * ones
        return Symbols(*(ones,) * 8, seconds / (1 + self.columns(decisions).par))

    def default(self) -> np.ndarray:
        return self.best_predicted()


class Toy(Family):
    name = "toy"
    decisions = ToyDecisions

    def matches(self, task) -> bool:
        spec = task.spec
        return is_elementwise(spec) and len(spec.outputs) == 1 and len(task_shape(task)) > 0

    def space(self) -> type[Sketch]:
        return ToySketch

    def emit(self, spec, decisions, signature, *, host: bool = False):
        from torch_pruner.codegen.parts.kernel import Emitted, parameters
        from torch_pruner.codegen.parts.sweeps import store_outputs
        from torch_pruner.codegen.tir.builders import PARALLEL, SERIAL, loop
        from torch_pruner.codegen.tir.reader import Reader

        inputs, outputs, scratch = parameters(signature)
        reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
        shape = spec.nodes[spec.outputs[0]].shape

        def nest(index: tuple[Any, ...]) -> Any:
            axis = len(index)
            if axis == len(shape):
                return store_outputs(spec, reader, outputs, index)
            kind = PARALLEL if decisions.par and not axis else SERIAL
            return loop(shape[axis], lambda i: nest((*index, i)), kind, f"i{axis}")

        return Emitted(nest(()), inputs, outputs, scratch)


def task_shape(task) -> tuple[int, ...]:
    return task.spec.nodes[task.spec.outputs[0]].shape
