"""Graphs of tensor operators: nodes with shapes and dtypes, canonical JSON, digests.

A ``Graph`` describes a whole captured region or one kernel alike: a kernel is a small graph whose
inputs are buffers. Graphs are values: they hold no tensors, compare by content and survive JSON, so
the same text names a workload in the cache, travels to a measurement worker and reproduces a bug
report. No torch, no TVM.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch_pruner.graph.ops import COMPARISONS, DTYPES, ITEMSIZE, KINDS, OpKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Shape = tuple[int, ...]
Attr = int | float | bool | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One operator application. ``inputs`` are positions of earlier nodes in the same graph."""

    op: str
    inputs: tuple[int, ...]
    shape: Shape
    dtype: str
    attrs: tuple[tuple[str, Attr], ...] = ()

    @property
    def kind(self) -> OpKind:
        return KINDS[self.op]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def is_coded(self) -> bool:
        """Whether it is an input that needs no more than twelve bits (see ``graph.coded``)."""
        return ("coded", True) in self.attrs

    @property
    def is_count(self) -> bool:
        """Whether it is an input that says how much of an extent counts: what lies behind is masked
        wherever it would be summed, both operands of a product included (``graph.bucket``)."""
        return ("counts", True) in self.attrs

    def attr(self, name: str) -> Any:
        for key, value in self.attrs:
            if key == name:
                return value
        raise KeyError(f"{self.op} has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in topological order and the positions of the outputs.

    ``input`` nodes are numbered by attr ``index``.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """Positions of the input nodes, ordered by their index."""
        found = [i for i, n in enumerate(self.nodes) if n.op == "input"]
        return tuple(sorted(found, key=lambda i: self.nodes[i].attr("index")))

    def users(self) -> list[list[int]]:
        """For each node, the positions of the nodes that read it; a reader appears once."""
        table: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for j in dict.fromkeys(node.inputs):
                table[j].append(i)
        return table

    def to_json(self) -> list[Any]:
        rows = [[n.op, list(n.inputs), list(n.shape), n.dtype, dict(n.attrs)] for n in self.nodes]
        return [rows, list(self.outputs)]

    @staticmethod
    def from_json(data: Sequence[Any]) -> Graph:
        """Inverse of ``to_json``. Raises ``ValueError`` on what is not a well-formed graph."""
        try:
            rows, outputs = data
            builder = GraphBuilder()
            for op, inputs, shape, dtype, attrs in rows:
                builder.append(op, inputs, shape, dtype, **attrs)
            return builder.finish([int(i) for i in outputs])
        except (TypeError, KeyError, AttributeError) as err:
            raise ValueError(f"not a graph: {err}") from err

    def digest(self) -> str:
        """sha256 of the canonical JSON: equal for equal graphs in any process."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _freeze(value: Any) -> Attr:
    if isinstance(value, (list, tuple)):
        return tuple(int(v) for v in value)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, float) and value == 0 and math.copysign(1.0, value) < 0:
        return "-0.0"  # a number that compares equal to 0.0 would be taken for it
    if isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"attribute value {value!r} is not a number, a string or a list of integers")


def const_value(node: Node) -> float | int | bool:
    """The number that a ``const`` node stands for."""
    value = node.attr("value")
    return float(value) if isinstance(value, str) else value


@dataclass(slots=True)
class GraphBuilder:
    """Appends nodes, sharing equal ones (common subexpressions never appear twice)."""

    nodes: list[Node] = field(default_factory=list)
    _index: dict[Node, int] = field(default_factory=dict)

    def append(
        self, op: str, inputs: Iterable[int], shape: Iterable[int], dtype: str, **attrs: Any
    ) -> int:
        """Add one node and return its position. Raises ``ValueError`` if it is not well formed."""
        ins, dims = tuple(int(i) for i in inputs), tuple(int(d) for d in shape)
        if op not in KINDS:
            raise ValueError(f"unknown operator {op!r}")
        if dtype not in DTYPES:
            raise ValueError(f"unsupported dtype {dtype!r}")
        if any(d < 0 for d in dims) or any(not 0 <= i < len(self.nodes) for i in ins):
            raise ValueError(f"{op}: operand or dimension out of range")
        frozen = tuple(sorted((k, _freeze(v)) for k, v in attrs.items()))
        return self._place(Node(op, ins, dims, dtype, frozen))

    def again(self, node: Node, inputs: Iterable[int]) -> int:
        """The same operator with the same attributes and shape, of other operands.

        Sooner than ``append``, since a node was looked at when it was made. Raises ``ValueError``
        for an operand that is not there.
        """
        ins = tuple(inputs)
        if ins and not 0 <= min(ins) <= max(ins) < len(self.nodes):
            raise ValueError(f"{node.op}: operand out of range")
        return self._place(Node(node.op, ins, node.shape, node.dtype, node.attrs))

    def _place(self, node: Node) -> int:
        at = self._index.setdefault(node, len(self.nodes))
        if at == len(self.nodes):
            self.nodes.append(node)
        return at

    def finish(self, outputs: Sequence[int]) -> Graph:
        """The graph of what ``outputs`` need (and all inputs), renumbered without gaps."""
        keep = {i for i, n in enumerate(self.nodes) if n.op == "input"}
        stack = list(outputs)
        while stack:
            i = stack.pop()
            if i not in keep:
                keep.add(i)
                stack.extend(self.nodes[i].inputs)
        if len(keep) == len(self.nodes):
            return Graph(tuple(self.nodes), tuple(outputs))
        order = sorted(keep)
        new = {old: pos for pos, old in enumerate(order)}
        nodes = tuple(
            Node(n.op, tuple(new[i] for i in n.inputs), n.shape, n.dtype, n.attrs)
            for n in (self.nodes[i] for i in order)
        )
        return Graph(nodes, tuple(new[i] for i in outputs))

    # Conveniences used by importers; each infers the shape and, where it can, does nothing at all.

    def shape(self, x: int) -> Shape:
        return self.nodes[x].shape

    def dtype(self, x: int) -> str:
        return self.nodes[x].dtype

    def input(
        self,
        index: int,
        shape: Iterable[int],
        dtype: str,
        *,
        static: bool = False,
        coded: bool = False,
        counts: bool = False,
    ) -> int:
        known = ({"coded": True} if coded else {}) | ({"counts": True} if counts else {})
        return self.append("input", (), shape, dtype, index=index, static=static, **known)

    def const(self, value: float | bool, dtype: str) -> int:
        if dtype == "bool":
            value = bool(value)
        elif dtype in ("float64", "float32", "float16", "bfloat16"):
            value = float(value)
        else:
            value = int(value)
        return self.append("const", (), (), dtype, value=value)

    def cast(self, x: int, dtype: str) -> int:
        if self.dtype(x) == dtype:
            return x
        node = self.nodes[x]
        if node.op == "const" and (
            math.isfinite(const_value(node)) or not dtype.startswith(("int", "uint"))
        ):
            return self.const(const_value(node), dtype)
        return self.append("cast", (x,), self.shape(x), dtype)

    def reshape(self, x: int, shape: Iterable[int]) -> int:
        dims = tuple(shape)
        while self.nodes[x].op == "reshape":
            x = self.nodes[x].inputs[0]
        if self.shape(x) == dims:
            return x
        if math.prod(dims) != self.nodes[x].numel:
            raise ValueError(f"reshape of {self.shape(x)} to {dims}")
        return self.append("reshape", (x,), dims, self.dtype(x))

    def permute(self, x: int, perm: Iterable[int]) -> int:
        order = tuple(perm)
        if self.nodes[x].op == "permute":
            inner = self.nodes[x].attr("perm")
            x, order = self.nodes[x].inputs[0], tuple(inner[p] for p in order)
        if order == tuple(range(len(order))):
            return x
        source = self.shape(x)
        return self.append("permute", (x,), (source[p] for p in order), self.dtype(x), perm=order)

    def broadcast(self, x: int, shape: Iterable[int]) -> int:
        dims = tuple(shape)
        if self.shape(x) == dims:
            return x
        source = (1,) * (len(dims) - len(self.shape(x))) + self.shape(x)
        if len(source) != len(dims) or any(
            s not in (1, d) for s, d in zip(source, dims, strict=True)
        ):
            raise ValueError(f"cannot broadcast {self.shape(x)} to {dims}")
        return self.append("broadcast", (x,), dims, self.dtype(x))

    def slice(
        self,
        x: int,
        starts: Sequence[int],
        shape: Iterable[int],
        steps: Sequence[int] | None = None,
    ) -> int:
        dims, hops = tuple(shape), tuple(steps or (1,) * len(starts))
        if dims == self.shape(x) and not any(starts) and all(h == 1 for h in hops):
            return x
        return self.append("slice", (x,), dims, self.dtype(x), starts=tuple(starts), steps=hops)

    def pointwise(self, op: str, *args: int, dtype: str | None = None) -> int:
        """Apply a pointwise operator.

        Operands broadcast to one shape; constants of shape () stay scalars.
        """
        dims: Shape = ()
        for a in args:
            dims = broadcast_shapes(dims, self.shape(a))
        operands = [a if self.shape(a) == () else self.broadcast(a, dims) for a in args]
        result = dtype or ("bool" if op in COMPARISONS else self.dtype(args[-1]))
        return self.append(op, operands, dims, result)

    def reduce(
        self,
        op: str,
        x: int,
        axes: Iterable[int],
        *,
        dtype: str | None = None,
        keepdim: bool = False,
    ) -> int:
        source = self.shape(x)
        drop = tuple(sorted({a % max(len(source), 1) for a in axes}))
        dims = tuple(d for i, d in enumerate(source) if i not in drop)
        out = self.append(op, (x,), dims, dtype or self.dtype(x), axes=drop) if drop or dtype else x
        return (
            self.reshape(out, tuple(1 if i in drop else d for i, d in enumerate(source)))
            if keepdim
            else out
        )

    def matmul(self, a: int, b: int, dtype: str | None = None) -> int:
        left, right = self.shape(a), self.shape(b)
        if len(left) < 2 or left[:-2] != right[:-2] or left[-1] != right[-2]:
            raise ValueError(f"matmul of {left} and {right}")
        return self.append("matmul", (a, b), (*left[:-1], right[-1]), dtype or self.dtype(a))


def broadcast_shapes(a: Shape, b: Shape) -> Shape:
    """The shape that numpy's rules give. Raises ``ValueError`` where they give none."""
    rank = max(len(a), len(b))
    left, right = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    if any(x != y and 1 not in (x, y) for x, y in zip(left, right, strict=True)):
        raise ValueError(f"shapes {a} and {b} do not broadcast")
    return tuple(y if x == 1 else x for x, y in zip(left, right, strict=True))
