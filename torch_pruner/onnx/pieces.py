"""Runs a model that cannot be one compiled graph: what lies between loops is, and so are bodies.

A graph is cut at nodes that only a run with real numbers can decide on (loops, branches, shapes
that depend on data). What lies between two of them is a *piece*: recorded and compiled once for
each set of shapes it meets. A loop's body is compiled when it has met the same shapes a few times.
What meets too many sets of shapes, one for each step say, runs operator by operator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_pruner.exc import UnsupportedModel
from torch_pruner.onnx import tracing
from torch_pruner.onnx.bounds import StepBudget
from torch_pruner.onnx.control import TABLE as CONTROL
from torch_pruner.onnx.interpreter import HOST_NUMEL, Derived, Interpreter
from torch_pruner.onnx.operators import DataDependentError
from torch_pruner.onnx.values import Env, OnnxValue, array_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_pruner.onnx.bounds import Memory
    from torch_pruner.onnx.graph import OnnxGraph, OnnxNode
    from torch_pruner.onnx.load import Model

MAX_SHAPES = 8  # sets of shapes that one piece may meet and still be compiled for another
_SMALL = 64  # nodes of a function that is part of its caller's pieces
MEETINGS = 4  # of a loop's body with the same shapes before it is compiled
_CALL_STEPS = 4  # that one call of a compiled piece counts as
MAX_PIECES = 64  # compiled pieces of one model
SHAPE_NUMEL = 64  # so few numbers may be shapes, axes, limits or scales
# Shapes of their results depend on numbers, or they take as many steps as their input is long.
_ALONE = (frozenset(CONTROL) - {"Constant", "Identity"}) | {
    "Compress", "GRU", "LSTM", "NonMaxSuppression", "NonZero", "RNN", "Unique",
}  # fmt: skip


@dataclass(slots=True, eq=False)
class Piece:
    """Consecutive nodes, the names that they read and those that are used after them."""

    nodes: list[OnnxNode]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    compiled: dict[Any, Compiled | None] = field(default_factory=dict)
    by_numbers: set[Any] = field(default_factory=set)  # shapes whose few integers must be known
    met: dict[Any, int] = field(default_factory=dict)  # how often, of shapes in a loop


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled piece: what it is called with, and which of its results are known already."""

    call: Callable[..., Sequence[torch.Tensor]]
    inputs: tuple[str, ...]
    results: tuple[OnnxValue | None, ...]  # None for what the call computes, in order


@dataclass(slots=True, eq=False)
class Plan:
    """How a model is cut, and what of it is compiled, for all calls.

    ``weights`` are the ids of tensors that stay; ``compile`` takes a module.
    """

    weights: frozenset[int]
    compile: Callable[[torch.nn.Module], Callable[..., Any]]
    parts: dict[int, tuple[OnnxGraph, list[Piece | OnnxNode]]] = field(default_factory=dict)
    room: int = MAX_PIECES


class Pieces(Interpreter):
    """An interpreter of one call that compiles what it can, and keeps it in the plan."""

    def __init__(
        self, model: Model, budget: StepBudget, memory: Memory, derived: Derived, plan: Plan
    ) -> None:
        super().__init__(model, budget, memory, derived)
        self._plan = plan
        self._loops = 0  # that are running, in each other

    def run(self, graph: OnnxGraph, env: Env, depth: int = 0) -> None:
        for part in self._parted(graph):
            if isinstance(part, Piece):
                self._run_piece(part, env, graph.opset, depth)
            else:
                self.run_nodes((part,), env, graph.opset, depth)

    def counter(self, number: int) -> OnnxValue:
        # A tensor: as a number it would be a piece of its own at every step.
        return OnnxValue(device=torch.tensor(number))

    def repeated(
        self, graph: OnnxGraph, env: Env, given: Mapping[str, Any], depth: int
    ) -> list[Any]:
        self._loops += 1
        try:
            return self.inside(graph, env, given, depth)
        finally:
            self._loops -= 1

    def _parted(self, graph: OnnxGraph) -> list[Piece | OnnxNode]:
        known = self._plan.parts
        if id(graph) not in known:
            known[id(graph)] = graph, self._cut(graph)
        return known[id(graph)][1]

    def _cut(self, graph: OnnxGraph) -> list[Piece | OnnxNode]:
        parts: list[Piece | OnnxNode] = []
        for node in graph.nodes:
            if self._alone(node):
                parts.append(node)
            elif parts and isinstance(parts[-1], Piece):
                parts[-1].nodes.append(node)
            else:
                parts.append(Piece([node]))
        later = set(graph.outputs)
        for part in reversed(parts):
            nodes = part.nodes if isinstance(part, Piece) else [part]
            if isinstance(part, Piece):
                made = dict.fromkeys(n for s in nodes for n in s.outputs if n)
                part.writes = tuple(n for n in made if n in later)
                part.reads = tuple(dict.fromkeys(_read(nodes)))
            later.update(n for s in nodes for n in _used(s))
        return parts

    def _alone(self, node: OnnxNode) -> bool:
        if node.key in self.model.functions:
            if self.model.sizes.get(node.key, 0) > _SMALL:
                return True  # its body is cut in turn, and compiled for all its callers
            return any(self._alone(inner) for inner in self.model.functions[node.key].nodes)
        return not node.domain and node.op in _ALONE

    def _run_piece(self, piece: Piece, env: Env, opset: int, depth: int) -> None:
        values = {name: env[name] for name in piece.reads if name in env}
        compiled = self._for_these(piece, values, opset, depth)
        if compiled is None:
            self.run_nodes(piece.nodes, env, opset, depth)
            return
        self.budget.take(_CALL_STEPS)
        made = iter(compiled.call(*(_tensor(values[name]) for name in compiled.inputs)))
        for name, known in zip(piece.writes, compiled.results, strict=True):
            env[name] = OnnxValue(device=next(made)) if known is None else known

    def _for_these(
        self, piece: Piece, values: dict[str, OnnxValue | None], opset: int, depth: int
    ) -> Compiled | None:
        """The compiled piece for these shapes; None where operators run one by one."""
        if not piece.writes or any(v is not None and v.items is not None for v in values.values()):
            return None
        shapes = tuple(self._shape(v) for v in values.values())
        if shapes not in piece.met:
            if len(piece.met) > MAX_SHAPES:
                return None
            piece.met[shapes] = 0
        piece.met[shapes] += 1
        if self._loops and piece.met[shapes] < MEETINGS:
            return None
        for _ in range(1 if self._loops else 2):
            numbers = shapes in piece.by_numbers
            key = shapes, tuple(_content(v) for v in values.values()) if numbers else ()
            if key in piece.compiled:
                return piece.compiled[key]
            if len(piece.compiled) > MAX_SHAPES or self._plan.room <= 0:
                return None
            try:
                made = self._compiled(piece, values, opset, depth, numbers=numbers)
            except (DataDependentError, UnsupportedModel):  # a real run finds out whether it can
                made = None
            if made is not None or numbers or self._loops:
                piece.compiled[key] = made
                self._plan.room -= made is not None
                return made
            piece.by_numbers.add(shapes)
        return None

    def _shape(self, value: OnnxValue | None) -> Any:
        if value is None:
            return None
        if _fixed(value):
            return _bytes(value)
        tensor = value.tensor()
        return (
            id(tensor) if id(tensor) in self._plan.weights else (tuple(tensor.shape), tensor.dtype)
        )

    def _compiled(
        self,
        piece: Piece,
        values: dict[str, OnnxValue | None],
        opset: int,
        depth: int,
        *,
        numbers: bool,
    ) -> Compiled | None:
        known: Env = {}
        weights: dict[str, OnnxValue] = {}
        free: dict[str, torch.Tensor] = {}
        for name, value in values.items():
            if value is None or _fixed(value):
                known[name] = value
            elif id(value.device) in self._plan.weights:
                weights[name] = value
            elif numbers and _may_be_shape(value.tensor()):
                known[name] = OnnxValue.of(array_of(value.tensor()))
            else:
                free[name] = value.tensor()
        results: list[OnnxValue | None] = []

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            env: Env = dict(known)
            rest = iter(tensors)
            env |= {n: OnnxValue(device=next(rest), host=v.host) for n, v in weights.items()}
            env |= {n: OnnxValue(device=next(rest)) for n in free}
            # Names of the model, none of its loops: whatever is alone is in no piece.
            budget = StepBudget(len(piece.nodes) * _SMALL + tracing.UNROLLED, _too_long)
            plain = Interpreter(self.model, budget, self.memory, self.derived, tracing=True)
            plain.run_nodes(piece.nodes, env, opset, depth)
            made = [env[name] for name in piece.writes]
            if any(v is None or v.items is not None for v in made):
                raise DataDependentError("a result is a sequence, or absent")
            results[:] = [v if v is not None and _fixed(v) else None for v in made]
            return [_tensor(v) for v in made if v is None or not _fixed(v)]

        kept = [_tensor(v) for v in weights.values()]
        gm = tracing.record(run, kept, list(free.values()), self.memory)
        if all(r is not None for r in results):
            return Compiled(lambda *_: (), (), tuple(results))
        if not free:
            return None  # computed from weights alone; nothing to call a graph with
        return Compiled(self._plan.compile(gm), tuple(free), tuple(results))


def _too_long() -> Exception:
    return DataDependentError("it is too long to be unrolled")


def _read(nodes: Sequence[OnnxNode]) -> list[str]:
    """What nodes use and do not make themselves before."""
    made: set[str] = set()
    found = []
    for node in nodes:
        found += [n for n in _used(node) if n not in made]
        made.update(node.outputs)
    return found


def _used(node: OnnxNode) -> list[str]:
    return [n for n in (*node.inputs, *(n for g in node.graphs for n in g.outside)) if n]


def _fixed(value: OnnxValue) -> bool:
    return value.fixed and value.host is not None and value.host.size <= HOST_NUMEL


def _bytes(value: OnnxValue) -> Any:
    host = np.asarray(value.host)
    return host.shape, host.dtype.str, host.tobytes()


def _content(value: OnnxValue | None) -> Any:
    if value is None or _fixed(value) or not _may_be_shape(value.tensor()):
        return None
    return tuple(value.tensor().reshape(-1).tolist())


def _tensor(value: OnnxValue | None) -> torch.Tensor:
    if value is None:
        raise TypeError("nothing where a tensor should be")
    return value.tensor()


def _may_be_shape(tensor: torch.Tensor) -> bool:
    few = tensor.dim() <= 1 and tensor.numel() <= SHAPE_NUMEL
    return few and tensor.dtype in (torch.int64, torch.int32)
