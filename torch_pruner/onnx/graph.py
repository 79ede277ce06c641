"""A model's nodes as they are run: read once, with attributes as Python's own.

In: protobufs from anywhere. Out: ``OnnxGraph`` and ``OnnxNode``, in which every name is text, every
tensor an array, and how deep and how much there is has been counted.
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
class TensorType:
    """The element type of a tensor and its extents, 0 where they are open; 0 for no tensor."""

    element: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OnnxNode:
    """One node of a model. ``protos`` are its attributes as they came, for ``proto``."""

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
    def graphs(self) -> Iterator[OnnxGraph]:
        return (v for v in self.attrs.values() if isinstance(v, OnnxGraph))

    def proto(self) -> NodeProto:
        made = NodeProto(op_type=self.op, domain=self.domain, name=self.name)
        made.input.extend(self.inputs)
        made.output.extend(self.outputs)
        made.attribute.extend(self.protos)
        return made


@dataclass(frozen=True, slots=True, eq=False)
class OnnxGraph:
    """Nodes in order, with what goes in and comes out by name.

    ``outside`` are the names that it uses without computing them or being given them.
    """

    nodes: tuple[OnnxNode, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opset: int
    initial: Mapping[str, Array] = field(default_factory=dict)
    types: Mapping[str, TensorType] = field(default_factory=dict)
    defaults: Sequence[AttributeProto] = ()
    outside: frozenset[str] = frozenset()
    has_refs: bool = False

    def bound(self, caller: OnnxNode) -> OnnxGraph:
        """This function's body with its caller's attributes in their places."""
        given = {a.name: a for a in (*self.defaults, *caller.protos)}
        values = {a.name: _default(a) for a in self.defaults} | dict(caller.attrs)
        return _bound(self, given, values) if self.has_refs else self


def _default(a: AttributeProto) -> Any:
    return GraphReader("the model", None, 0).attribute(a, 0)


def _bound(
    graph: OnnxGraph, given: Mapping[str, AttributeProto], values: Mapping[str, Any]
) -> OnnxGraph:
    nodes = []
    for node in graph.nodes:
        attrs, protos = {}, []
        for a in node.protos:
            value = node.attrs[a.name]
            if not isinstance(value, Ref):
                inner = isinstance(value, OnnxGraph) and value.has_refs
                attrs[a.name] = _bound(value, given, values) if inner else value
                protos.append(a)
            elif value.name in given:
                copy = AttributeProto()
                copy.CopyFrom(given[value.name])
                copy.name = a.name
                attrs[a.name] = values[value.name]
                protos.append(copy)
        nodes.append(replace(node, attrs=attrs, protos=tuple(protos)))
    return replace(graph, nodes=tuple(nodes), has_refs=False)


class GraphReader:
    """Reads the graphs of one model. ``count`` is the number of nodes that were read."""

    def __init__(self, model: str, folder: Folder | None, opset: int) -> None:
        self.model, self.folder, self.opset = model, folder, opset
        self.count = 0

    def graph(self, proto: GraphProto, depth: int = 0, *, weights: bool = True) -> OnnxGraph:
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
        nodes = self._nodes(proto.node, depth)
        outputs = tuple(o.name for o in proto.output)
        types = {i.name: _type(i) for i in (*proto.input, *proto.output)}
        known = {*inputs, *(t.name for t in proto.initializer)}
        return OnnxGraph(
            nodes, inputs, outputs, self.opset, initial, types, (),
            _outside(nodes, outputs, known), _refs(nodes),
        )  # fmt: skip

    def function(self, proto: FunctionProto) -> OnnxGraph:
        """A function of the model, or the body that ONNX gives an operator."""
        versions = [o.version for o in proto.opset_import if o.domain in ONNX_DOMAINS]
        opset, self.opset = self.opset, versions[0] if versions else self.opset
        try:
            nodes = self._nodes(proto.node, 0)
            return OnnxGraph(
                nodes, tuple(proto.input), tuple(proto.output), self.opset,
                defaults=tuple(proto.attribute_proto), has_refs=_refs(nodes),
            )  # fmt: skip
        finally:
            self.opset = opset

    def _nodes(self, protos: Iterable[NodeProto], depth: int) -> tuple[OnnxNode, ...]:
        if depth > MAX_DEPTH:
            raise UnsupportedModel(self.model, f"subgraphs are more than {MAX_DEPTH} deep")
        return tuple(self._node(proto, depth) for proto in protos)

    def _node(self, proto: NodeProto, depth: int) -> OnnxNode:
        self.count += 1
        attrs = {a.name: self.attribute(a, depth) for a in proto.attribute}
        if len(attrs) < len(proto.attribute):
            reason = f"node {proto.name or proto.op_type!r} has an attribute twice"
            raise UnsupportedModel(self.model, reason)
        domain = "" if proto.domain in ONNX_DOMAINS else proto.domain
        names = tuple(proto.input), tuple(proto.output)
        return OnnxNode(proto.name, proto.op_type, domain, *names, attrs, tuple(proto.attribute))

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


def _type(info: Any) -> TensorType:
    kind = info.type.tensor_type
    return TensorType(kind.elem_type, tuple(d.dim_value for d in kind.shape.dim))


def _refs(nodes: Iterable[OnnxNode]) -> bool:
    values = [v for node in nodes for v in node.attrs.values()]
    return any(isinstance(v, Ref) or (isinstance(v, OnnxGraph) and v.has_refs) for v in values)


def _outside(nodes: Iterable[OnnxNode], outputs: Iterable[str], known: set[str]) -> frozenset[str]:
    found: set[str] = set()
    have = set(known)
    for node in nodes:
        for names in (node.inputs, *(g.outside for g in node.graphs)):
            found.update(name for name in names if name and name not in have)
        have.update(node.outputs)
    found.update(name for name in outputs if name not in have)
    return frozenset(found)


def unfolded(
    model: str, graph: OnnxGraph, functions: Mapping[Key, OnnxGraph], most: int
) -> tuple[int, Mapping[Key, int]]:
    """How many nodes run when every function is put where it is called, and every subgraph once;
    of the graph, and of each function that it calls.

    Raises:
        UnsupportedModel: A function calls itself, they are too deep in each other, or it is more
            than ``most``.
    """
    known: dict[Key, int] = {}
    open_: list[Key] = []

    def count(inner: OnnxGraph) -> int:
        return sum(1 + called(s) + sum(count(g) for g in s.graphs) for s in inner.nodes)

    def called(node: OnnxNode) -> int:
        key = node.key
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
