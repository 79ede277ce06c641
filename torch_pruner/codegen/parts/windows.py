"""Steps of windows: which elements each one covers, and where its largest lies."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import VECTORIZED, Buffer, Expr, S, Stmt, T, loop, seq, when
from torch_pruner.codegen.tir.reader import linear
from torch_pruner.codegen.tir.scalar import apply
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.graph.ops import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.codegen.tir.reader import Index, Reader
    from torch_pruner.graph.ir import Graph, Node, Shape


Place = tuple[Buffer, Expr]


def locating(spec: Graph, node: Node, among: Sequence[int]) -> int | None:
    """Which of these nodes says where the maximum ``node`` of a window lies."""
    if node.op != "window_max":
        return None
    same = (node.inputs, node.shape, node.attrs)
    for i in among:
        other = spec.nodes[i]
        if other.op == "window_argmax" and (other.inputs, other.shape, other.attrs) == same:
            return i
    return None


def over_window(
    spec: Graph,
    anchor: int,
    place: Callable[[Expr], Index],
    lanes: int,
    body: Callable[[Expr, Index], Stmt],
) -> Stmt:
    """Loops over a window's positions: ``body`` of each lane, at the operand's index, where that
    is no padding. ``place`` is the window's own index, of a lane."""
    node = spec.nodes[anchor]
    source = spec.nodes[node.inputs[0]].shape
    kernel, stride, dilation = node.attr("kernel"), node.attr("stride"), node.attr("dilation")
    lead = len(source) - len(kernel)

    def lane(v: Expr, done: Index) -> Stmt:
        index = place(v)
        at, inside = list(index[:lead]), []
        for k, r in enumerate(done):
            size, lo = source[lead + k], node.attr("lo")[k]
            position = index[lead + k] * stride[k] + r * dilation[k] - lo
            if lo:
                inside.append(position >= 0)
            if (node.shape[lead + k] - 1) * stride[k] + (kernel[k] - 1) * dilation[k] - lo >= size:
                inside.append(position < size)
            at.append(position)
        step = body(v, tuple(at))
        return when(T.all(*inside), step) if inside else step

    def visit(done: Index, rest: tuple[int, ...]) -> Stmt:
        if rest:
            return loop(rest[0], lambda r: visit((*done, r), rest[1:]), name="r")
        return loop(lanes, lambda v: lane(v, done), VECTORIZED, "v")

    return visit((), tuple(kernel))


def first_inside(node: Node, source: Shape, index: Index) -> Expr:
    """The first position of the window at ``index`` that is no padding, row-major."""
    lead = len(source) - len(node.attr("kernel"))
    rows = zip(
        index[lead:], node.attr("stride"), node.attr("lo"), node.attr("dilation"), strict=True
    )
    at = []
    for i, stride, lo, dilation in rows:
        start = i * stride - lo
        if lo:
            steps = T.floordiv(dilation - 1 - start, dilation) if dilation > 1 else -start
            start = T.Select(start < 0, start + steps * dilation, start)
        at.append(start)
    return linear(at, source[lead:])


def keep_largest(
    reader: Reader, node: Node, best: Place, found: Place, value: Callable[[], Expr], position: Expr
) -> Stmt:
    """``best`` and ``found``, its position, with one more element: the first of equals stays, and
    the last NaN counts."""
    source = reader.graph.nodes[node.inputs[0]]
    held = T.Var("value", value_dtype(source.dtype))
    more = T.Var("more", "bool")
    (largest, v), (positions, p) = best, found
    better = apply("gt", (held, largest[v]), "bool")
    if source.dtype in FLOATS:
        better = T.bitwise_or(better, apply("isnan", (held,), "bool"))

    def step() -> list[Stmt]:
        return [
            S.Bind(held, value()),
            S.Bind(more, better),
            store(largest, v, T.Select(more, held, largest[v])),
            store(positions, p, T.Select(more, position.astype(node.dtype), positions[p])),
        ]

    return reader.scope(step)


def located(
    spec: Graph,
    reader: Reader,
    anchor: int,
    place: Callable[[Expr], Index],
    best: Buffer,
    found: Buffer,
    lanes: int,
) -> Stmt:
    """The window's largest element, of which ``best`` has the least that it may be, and where it
    lies."""
    node = spec.nodes[anchor]
    source = spec.nodes[node.inputs[0]].shape
    lead = len(source) - len(node.attr("kernel"))

    def start(v: Expr) -> Stmt:
        return store(found, v, first_inside(node, source, place(v)).astype(node.dtype))

    def step(v: Expr, at: Index) -> Stmt:
        position = linear(at[lead:], source[lead:])
        read = partial(reader.at, node.inputs[0], at)
        return keep_largest(reader, node, (best, v), (found, v), read, position)

    return seq([loop(lanes, start, VECTORIZED, "v"), over_window(spec, anchor, place, lanes, step)])
