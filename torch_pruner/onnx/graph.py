"""A model's nodes as they are run: read once, with attributes as Python's own.

In: protobufs from anywhere. Out: ``Graph`` and ``Step``, in which every name is text, every tensor
an array, and how deep and how much there is has been counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, helper

from torch_pruner.exc import UnsupportedModel
from torch_pruner.onnx.tensors import Array, array

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch_pruner.onnx.files import Folder

MAX_DEPTH = 32  # of subgraphs and functions in each other
ONNX_DOMAINS = ("", "ai.onnx")

Key = tuple[str, str]  # domain and name


@dataclass(frozen=True, slots=True)
class Ref:
    """An attribute that a function takes from its caller."""

    name: str


@dataclass(frozen=True, slots=True)
class Type:
    """The element type of a tensor and its extents, 0 where they are open; 0 for no tensor."""

    element: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One node. ``protos`` are its attributes as they came, for who wants the node itself."""

    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    protos: tuple[AttributeProto, ...]

    @property
    def key(self) -> Key:
        return self.domain, self.op

    @property
    def graphs(self) -> Iterator[Graph]:
        return (v for v in self.attrs.values() if isinstance(v, Graph))

    def proto(self) -> NodeProto:
        node = NodeProto(op_type=self.op, domain=self.domain, name=self.name)
        node.input.extend(self.inputs)
        node.output.extend(self.outputs)
        node.attribute.extend(self.protos)
        return node


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Steps in order, with what goes in and comes out by name.

    ``outside`` are the names that it uses without computing them or being given them.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opset: int
    initial: Mapping[str, Array] = field(default_factory=dict)
    types: Mapping[str, Type] = field(default_factory=dict)
    defaults: Sequence[AttributeProto] = ()
    outside: frozenset[str] = frozenset()
    has_refs: bool = False

    def bound(self, caller: Step) -> Graph:
        """This function's body with its caller's attributes in their places."""
        given = {a.name: a for a in (*self.defaults, *caller.protos)}
        values = {a.name: _default(a) for a in self.defaults} | dict(caller.attrs)
        return _bound(self, given, values) if self.has_refs else self


def _default(a: AttributeProto) -> Any:
    return Reader("the model", None, 0).attribute(a, 0)


def _bound(graph: Graph, given: Mapping[str, AttributeProto], values: Mapping[str, Any]) -> Graph:
    steps = []
    for step in graph.steps:
        attrs, protos = {}, []
        for a in step.protos:
            value = step.attrs[a.name]
            if not isinstance(value, Ref):
                inner = isinstance(value, Graph) and value.has_refs
                attrs[a.name] = _bound(value, given, values) if inner else value
                protos.append(a)
            elif value.name in given:
                copy = AttributeProto()
                copy.CopyFrom(given[value.name])
                copy.name = a.name
                attrs[a.name] = values[value.name]
                protos.append(copy)
        steps.append(replace(step, attrs=attrs, protos=tuple(protos)))
    return replace(graph, steps=tuple(steps), has_refs=False)


class Reader:
    """Reads the graphs of one model. ``count`` is the number of nodes that were read."""

    def __init__(self, model: str, folder: Folder | None, opset: int) -> None:
        self.model, self.folder, self.opset = model, folder, opset
        self.count = 0

    def graph(self, proto: GraphProto, depth: int = 0, *, weights: bool = True) -> Graph:
        """A graph; with its initializers unless ``weights`` is off."""
        if proto.sparse_initializer:
            raise UnsupportedModel(self.model, "it has sparse weights", "make them dense")
        initial: dict[str, Array] = {}
        for tensor in proto.initializer if weights else ():
            if tensor.name in initial:
                raise UnsupportedModel(self.model, f"two weights are named {tensor.name!r}")
            initial[tensor.name] = array(self.model, tensor, self.folder)
        inputs = tuple(i.name for i in proto.input)
        if len(set(inputs)) < len(inputs):
            raise UnsupportedModel(self.model, "two inputs have the same name")
        steps = self._steps(proto.node, depth)
        outputs = tuple(o.name for o in proto.output)
        types = {i.name: _type(i) for i in (*proto.input, *proto.output)}
        known = {*inputs, *(t.name for t in proto.initializer)}
        return Graph(
            steps, inputs, outputs, self.opset, initial, types, (),
            _outside(steps, outputs, known), _refs(steps),
        )  # fmt: skip

    def function(self, proto: FunctionProto) -> Graph:
        """A function of the model, or the body that ONNX gives an operator."""
        versions = [o.version for o in proto.opset_import if o.domain in ONNX_DOMAINS]
        opset, self.opset = self.opset, versions[0] if versions else self.opset
        try:
            steps = self._steps(proto.node, 0)
            return Graph(
                steps, tuple(proto.input), tuple(proto.output), self.opset,
                defaults=tuple(proto.attribute_proto), has_refs=_refs(steps),
            )  # fmt: skip
        finally:
            self.opset = opset

    def _steps(self, nodes: Iterable[NodeProto], depth: int) -> tuple[Step, ...]:
        if depth > MAX_DEPTH:
            raise UnsupportedModel(self.model, f"subgraphs are more than {MAX_DEPTH} deep")
        return tuple(self._step(node, depth) for node in nodes)

    def _step(self, node: NodeProto, depth: int) -> Step:
        self.count += 1
        attrs = {a.name: self.attribute(a, depth) for a in node.attribute}
        if len(attrs) < len(node.attribute):
            reason = f"node {node.name or node.op_type!r} has an attribute twice"
            raise UnsupportedModel(self.model, reason)
        domain = "" if node.domain in ONNX_DOMAINS else node.domain
        names = tuple(node.input), tuple(node.output)
        return Step(node.name, node.op_type, domain, *names, attrs, tuple(node.attribute))

    def attribute(self, a: AttributeProto, depth: int) -> Any:
        """An attribute as Python's own; a tensor as an array."""
        if a.ref_attr_name:
            return Ref(a.ref_attr_name)
        value = helper.get_attribute_value(a)
        if a.type == AttributeProto.TENSOR:
            return array(self.model, value, self.folder)
        if a.type == AttributeProto.TENSORS:
            return [array(self.model, v, self.folder) for v in value]
        if a.type == AttributeProto.GRAPH:
            return self.graph(value, depth + 1)
        if a.type == AttributeProto.STRING:
            return value.decode()
        if a.type == AttributeProto.STRINGS:
            return [v.decode() for v in value]
        if a.type in (AttributeProto.INTS, AttributeProto.FLOATS):
            return list(value)
        return value


def _type(info: Any) -> Type:
    kind = info.type.tensor_type
    return Type(kind.elem_type, tuple(d.dim_value for d in kind.shape.dim))


def _refs(steps: Iterable[Step]) -> bool:
    values = [v for step in steps for v in step.attrs.values()]
    return any(isinstance(v, Ref) or (isinstance(v, Graph) and v.has_refs) for v in values)


def _outside(steps: Iterable[Step], outputs: Iterable[str], known: set[str]) -> frozenset[str]:
    found: set[str] = set()
    have = set(known)
    for step in steps:
        for names in (step.inputs, *(g.outside for g in step.graphs)):
            found.update(name for name in names if name and name not in have)
        have.update(step.outputs)
    found.update(name for name in outputs if name not in have)
    return frozenset(found)


def unfolded(
    model: str, graph: Graph, functions: Mapping[Key, Graph], most: int
) -> tuple[int, Mapping[Key, int]]:
    """How many nodes run when every function is put where it is called, and every subgraph once;
    of the graph, and of each function that it calls.

    Raises:
        UnsupportedModel: A function calls itself, they are too deep in each other, or it is more
            than ``most``.
    """
    known: dict[Key, int] = {}
    open_: list[Key] = []

    def count(inner: Graph) -> int:
        return sum(1 + called(s) + sum(count(g) for g in s.graphs) for s in inner.steps)

    def called(step: Step) -> int:
        key = step.key
        if key not in functions:
            return 0
        if key in open_:
            raise UnsupportedModel(model, f"function {key[1]!r} calls itself")
        if len(open_) >= MAX_DEPTH:
            raise UnsupportedModel(model, f"functions are more than {MAX_DEPTH} deep in each other")
        if key not in known:
            open_.append(key)
            known[key] = count(functions[key])
            open_.pop()
        return known[key]

    total = count(graph)
    if total > most:
        raise UnsupportedModel(model, f"{total} nodes run at each call, and {most} may")
    return total, known
