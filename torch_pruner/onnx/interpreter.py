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
from torch_pruner.onnx.graph import MAX_DEPTH, GraphReader, OnnxGraph, OnnxNode
from torch_pruner.onnx.operators import TABLE, DataDependentError, OperatorCall
from torch_pruner.onnx.operators.types import TORCH_DTYPES
from torch_pruner.onnx.values import Array, Env, OnnxValue, tensor_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch_pruner.onnx.bounds import Memory, StepBudget
    from torch_pruner.onnx.load import Model

HOST_NUMEL = 4096  # numbers of larger tensors are nobody's shape


@dataclass(slots=True, eq=False)
class Derived:
    """What interpreters of one model have made of it, for all of them and all calls.

    By the id of what it was made of, which stands beside it and so stays.
    """

    bodies: dict[Any, tuple[OnnxNode, OnnxGraph]] = field(default_factory=dict)
    bound: dict[int, tuple[OnnxNode, OnnxGraph]] = field(default_factory=dict)
    initial: dict[int, tuple[OnnxGraph, Env]] = field(default_factory=dict)


class Interpreter:
    """Runs the nodes of one model, as many as ``budget`` allows, with tensors no larger than
    ``memory`` does.

    Whatever a node raises is an ``UnsupportedModel`` with the node's name. When ``tracing``, what
    runs is to be one graph.
    """

    def __init__(
        self,
        model: Model,
        budget: StepBudget,
        memory: Memory,
        derived: Derived,
        *,
        tracing: bool = False,
    ) -> None:
        self.model, self.name, self.budget, self.memory = model, model.name, budget, memory
        self.derived, self.tracing = derived, tracing

    def run(self, graph: OnnxGraph, env: Env, depth: int = 0) -> None:
        """Run all nodes; ``env`` holds what is known by name and takes what is computed."""
        if depth > 2 * MAX_DEPTH:
            raise UnsupportedModel(self.name, f"subgraphs more than {2 * MAX_DEPTH} deep", "")
        self.run_nodes(graph.nodes, env, graph.opset, depth)

    def run_nodes(self, nodes: Iterable[OnnxNode], env: Env, opset: int, depth: int) -> None:
        """Some of a graph's nodes, in order."""
        for node in nodes:
            self.budget.take()
            try:
                results = self.results(node, env, opset, depth)
            except DataDependentError:
                raise
            except ERRORS as err:
                raise_typed(self.name, f"node {(node.name or node.op)[:100]!r} ({node.op})", err)
            pairs = zip(node.outputs, results, strict=False)
            env.update({name: value for name, value in pairs if name})

    def inside(self, graph: OnnxGraph, env: Env, given: Mapping[str, Any], depth: int) -> list[Any]:
        """The outputs of a subgraph, which sees what is outside of it."""
        own = {name: env[name] for name in graph.outside} | self.initial(graph) | dict(given)
        self.run(graph, own, depth + 1)
        return [own[name] for name in graph.outputs]

    def repeated(
        self, graph: OnnxGraph, env: Env, given: Mapping[str, Any], depth: int
    ) -> list[Any]:
        """``inside``, of a body that runs once for every step."""
        return self.inside(graph, env, given, depth)

    def initial(self, graph: OnnxGraph) -> Env:
        """The weights of a subgraph."""
        known = self.derived.initial
        if id(graph) not in known:
            made: Env = {name: OnnxValue.of(array) for name, array in graph.initial.items()}
            known[id(graph)] = graph, made
        return known[id(graph)][1]

    def counter(self, number: int) -> OnnxValue:
        """The number of a loop's step."""
        return OnnxValue.of(np.array(number, dtype=np.int64))

    def results(
        self, node: OnnxNode, env: Env, opset: int, depth: int
    ) -> Sequence[OnnxValue | None]:
        """The results of one node."""
        inputs = [env[name] if name else None for name in node.inputs]
        if not node.domain and node.op in control.TABLE:
            return control.TABLE[node.op](self, node, inputs, env, opset, depth)
        if node.key in self.model.functions:
            return self._call(self.bound(node), inputs, depth)
        if node.domain or node.op not in TABLE:
            return self._call(self._body(node, inputs, opset), inputs, depth)
        return self._operator(node, inputs, opset)

    def bound(self, node: OnnxNode) -> OnnxGraph:
        """The body of the function that ``node`` calls."""
        known = self.derived.bound
        if id(node) not in known:
            known[id(node)] = node, self.model.functions[node.key].bound(node)
        return known[id(node)][1]

    def _body(self, node: OnnxNode, inputs: Sequence[OnnxValue | None], opset: int) -> OnnxGraph:
        """The nodes by which ONNX defines the operator."""
        tensors = [None if v is None or v.items is not None else v.tensor() for v in inputs]
        types = [None if t is None else (t.dtype, tuple(t.shape)) for t in tensors]
        key = id(node), opset, *types
        known = self.derived.bodies
        if key not in known:
            proto = body_of(node.proto(), opset, types)
            if proto is None:
                what = f"{node.domain}::{node.op}" if node.domain else node.op
                raise UnsupportedModel(self.name, f"operator {what} is not known", "")
            graph = GraphReader(self.name, None, opset).function(proto).bound(node)
            known[key] = node, graph
        return known[key][1]

    def _operator(
        self, node: OnnxNode, inputs: Sequence[OnnxValue | None], opset: int
    ) -> Sequence[OnnxValue | None]:
        numbers = tuple(None if v is None else v.numbers for v in inputs)
        afford, spend = self.memory.afford, self.budget.take
        given = OperatorCall(
            node.op, node.attrs, opset, len(node.outputs), numbers, spend=spend, afford=afford
        )
        function = TABLE[node.op]
        if node.op in ("Shape", "Size"):
            (x,) = inputs
            if x is None:
                raise TypeError("without an input")
            shape = x.host.shape if x.host is not None else x.tensor().shape
            return [OnnxValue.of(_shape(given, tuple(int(d) for d in shape)))]
        if all(v is None or _small(v) for v in inputs) and any(v is not None for v in inputs):
            with _disable_current_modes(), torch.no_grad():
                real = [None if v is None else tensor_of(v.numbers()) for v in inputs]
                self.memory.try_out(node, node.op, lambda *a: function(given, *a), real)
                return [_folded(r) for r in _listed(function(given, *real))]
        tensors = [None if v is None else v.tensor() for v in inputs]
        if _plain(tensors):
            self.memory.try_out(node, node.op, lambda *a: function(given, *a), tensors)
        made = function(given, *tensors)
        return [None if t is None else OnnxValue(device=t) for t in _listed(made)]

    def _call(
        self, function: OnnxGraph, inputs: Sequence[OnnxValue | None], depth: int
    ) -> Sequence[OnnxValue | None]:
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


def _shape(n: OperatorCall, shape: tuple[int, ...]) -> Array:
    if n.op == "Size":
        return np.array(int(np.prod(shape, dtype=np.int64)), dtype=np.int64)
    return np.array(shape[slice(n.attr("start", 0), n.attr("end"))], dtype=np.int64)


def _small(value: OnnxValue) -> bool:
    """Whether this is numbers, and few. Weights are tensors, also those of few elements: what is
    computed from them is for the compiler to hoist."""
    return value.fixed and value.host is not None and value.host.size <= HOST_NUMEL


def _folded(result: torch.Tensor | None) -> OnnxValue | None:
    if result is None:
        return None
    if result.numel() > HOST_NUMEL or result.dtype not in _ON_HOST:
        return OnnxValue(device=result)
    return OnnxValue.of(result.numpy())


_ON_HOST = frozenset(TORCH_DTYPES.values()) - {
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2,
    torch.float8_e5m2fnuz,
}  # fmt: skip


def _listed(result: Any) -> Sequence[torch.Tensor | None]:
    return result if isinstance(result, (tuple, list)) else (result,)
