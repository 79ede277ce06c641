"""Runs an ONNX graph with torch's operators, on real tensors or while torch traces.

Values are kept twice where both are known: as a tensor, and as numbers (``host``) for whatever
needs numbers to decide on shapes. What is computed from such numbers alone is computed at once,
outside of any tracing, so that a traced graph holds no arithmetic on shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_pruner.exc import UnsupportedModel
from torch_pruner.onnx import control
from torch_pruner.onnx.bodies import body_of
from torch_pruner.onnx.boundary import ERRORS, raise_typed
from torch_pruner.onnx.graph import MAX_DEPTH, Graph, Reader, Step
from torch_pruner.onnx.operators import TABLE, DataDependentError, Node
from torch_pruner.onnx.operators.types import TORCH_DTYPES
from torch_pruner.onnx.values import Array, Env, Value, tensor_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch_pruner.onnx.bounds import Memory, Steps
    from torch_pruner.onnx.load import Model

HOST_NUMEL = 4096  # numbers of larger tensors are nobody's shape


@dataclass(slots=True, eq=False)
class Derived:
    """What interpreters of one model have made of it, for all of them and all calls.

    By the id of what it was made of, which stands beside it and so stays.
    """

    bodies: dict[Any, tuple[Step, Graph]] = field(default_factory=dict)
    bound: dict[int, tuple[Step, Graph]] = field(default_factory=dict)
    initial: dict[int, tuple[Graph, Env]] = field(default_factory=dict)


class Interpreter:
    """Runs the nodes of one model, as many as ``steps`` allows, with tensors no larger than
    ``memory`` does.

    Whatever a node raises is an ``UnsupportedModel`` with the node's name. When ``tracing``, what
    runs is to be one graph.
    """

    def __init__(
        self,
        model: Model,
        steps: Steps,
        memory: Memory,
        derived: Derived,
        *,
        tracing: bool = False,
    ) -> None:
        self.model, self.name, self.steps, self.memory = model, model.name, steps, memory
        self.derived, self.tracing = derived, tracing

    def run(self, graph: Graph, env: Env, depth: int = 0) -> None:
        """Run all nodes; ``env`` holds what is known by name and takes what is computed."""
        if depth > 2 * MAX_DEPTH:
            raise UnsupportedModel(self.name, f"subgraphs more than {2 * MAX_DEPTH} deep", "")
        self.run_steps(graph.steps, env, graph.opset, depth)

    def run_steps(self, steps: Iterable[Step], env: Env, opset: int, depth: int) -> None:
        """Some of a graph's nodes, in order."""
        for step in steps:
            self.steps.take()
            try:
                results = self.node(step, env, opset, depth)
            except DataDependentError:
                raise
            except ERRORS as err:
                raise_typed(self.name, f"node {(step.name or step.op)[:100]!r} ({step.op})", err)
            pairs = zip(step.outputs, results, strict=False)
            env.update({name: value for name, value in pairs if name})

    def inside(self, graph: Graph, env: Env, given: Mapping[str, Any], depth: int) -> list[Any]:
        """The outputs of a subgraph, which sees what is outside of it."""
        own = {name: env[name] for name in graph.outside} | self.initial(graph) | dict(given)
        self.run(graph, own, depth + 1)
        return [own[name] for name in graph.outputs]

    def repeated(self, graph: Graph, env: Env, given: Mapping[str, Any], depth: int) -> list[Any]:
        """``inside``, of a body that runs once for every step."""
        return self.inside(graph, env, given, depth)

    def initial(self, graph: Graph) -> Env:
        """The weights of a subgraph."""
        known = self.derived.initial
        if id(graph) not in known:
            made: Env = {name: Value.of(array) for name, array in graph.initial.items()}
            known[id(graph)] = graph, made
        return known[id(graph)][1]

    def counter(self, number: int) -> Value:
        """The number of a loop's step."""
        return Value.of(np.array(number, dtype=np.int64))

    def node(self, step: Step, env: Env, opset: int, depth: int) -> Sequence[Value | None]:
        """The results of one node."""
        inputs = [env[name] if name else None for name in step.inputs]
        if not step.domain and step.op in control.TABLE:
            return control.TABLE[step.op](self, step, inputs, env, opset, depth)
        if step.key in self.model.functions:
            return self._call(self.bound(step), inputs, depth)
        if step.domain or step.op not in TABLE:
            return self._call(self._body(step, inputs, opset), inputs, depth)
        return self._operator(step, inputs, opset)

    def bound(self, step: Step) -> Graph:
        """The body of the function that ``step`` calls."""
        known = self.derived.bound
        if id(step) not in known:
            known[id(step)] = step, self.model.functions[step.key].bound(step)
        return known[id(step)][1]

    def _body(self, step: Step, inputs: Sequence[Value | None], opset: int) -> Graph:
        """The nodes by which ONNX defines the operator."""
        tensors = [None if v is None or v.items is not None else v.tensor() for v in inputs]
        types = [None if t is None else (t.dtype, tuple(t.shape)) for t in tensors]
        key = id(step), opset, *types
        known = self.derived.bodies
        if key not in known:
            proto = body_of(step.proto(), opset, types)
            if proto is None:
                what = f"{step.domain}::{step.op}" if step.domain else step.op
                raise UnsupportedModel(self.name, f"operator {what} is not known", "")
            graph = Reader(self.name, None, opset).function(proto).bound(step)
            known[key] = step, graph
        return known[key][1]

    def _operator(
        self, step: Step, inputs: Sequence[Value | None], opset: int
    ) -> Sequence[Value | None]:
        numbers = tuple(None if v is None else v.numbers for v in inputs)
        afford, spend = self.memory.afford, self.steps.take
        given = Node(
            step.op, step.attrs, opset, len(step.outputs), numbers, spend=spend, afford=afford
        )
        function = TABLE[step.op]
        if step.op in ("Shape", "Size"):
            (x,) = inputs
            if x is None:
                raise TypeError("without an input")
            shape = x.host.shape if x.host is not None else x.tensor().shape
            return [Value.of(_shape(given, tuple(int(d) for d in shape)))]
        if all(v is None or _small(v) for v in inputs) and any(v is not None for v in inputs):
            with _disable_current_modes(), torch.no_grad():
                real = [None if v is None else tensor_of(v.numbers()) for v in inputs]
                self.memory.try_out(step, step.op, lambda *a: function(given, *a), real)
                return [_folded(r) for r in _listed(function(given, *real))]
        tensors = [None if v is None else v.tensor() for v in inputs]
        if _plain(tensors):
            self.memory.try_out(step, step.op, lambda *a: function(given, *a), tensors)
        made = function(given, *tensors)
        return [None if t is None else Value(device=t) for t in _listed(made)]

    def _call(
        self, function: Graph, inputs: Sequence[Value | None], depth: int
    ) -> Sequence[Value | None]:
        """A function's results."""
        env: Env = dict.fromkeys(function.inputs, None)
        env |= dict(zip(function.inputs, inputs, strict=False))
        self.run(function, env, depth + 1)
        return [env.get(name) for name in function.outputs]


def _plain(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether all are real, so that what is computed from them takes memory now."""
    real = (torch.Tensor, torch.nn.Parameter)
    known = [t for t in tensors if t is not None]
    return all(type(t) in real for t in known) and not torch._C._len_torch_dispatch_stack()


def _shape(n: Node, shape: tuple[int, ...]) -> Array:
    if n.op == "Size":
        return np.array(int(np.prod(shape, dtype=np.int64)), dtype=np.int64)
    return np.array(shape[slice(n.attr("start", 0), n.attr("end"))], dtype=np.int64)


def _small(value: Value) -> bool:
    """Whether this is numbers, and few. Weights are tensors, also those of few elements: what is
    computed from them is for the compiler to hoist."""
    return value.fixed and value.host is not None and value.host.size <= HOST_NUMEL


def _folded(result: torch.Tensor | None) -> Value | None:
    if result is None:
        return None
    if result.numel() > HOST_NUMEL or result.dtype not in _ON_HOST:
        return Value(device=result)
    return Value.of(result.numpy())


_ON_HOST = frozenset(TORCH_DTYPES.values()) - {
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2,
    torch.float8_e5m2fnuz,
}  # fmt: skip


def _listed(result: Any) -> Sequence[torch.Tensor | None]:
    return result if isinstance(result, (tuple, list)) else (result,)
