"""Which elements of a value nobody needs, where a number that is known at run time says so.

Programs for several sizes compute at the largest (``graph/bucket.py``). What lies behind the size
that counts is needed by nobody, or by a mask that puts another number there. A ``Bound`` says so of
one axis, or of a factor of one; ``unneeded`` finds it for every node, from the readers backwards,
and kernels leave out what lies behind (``codegen/parts/beyond.py``). Positions are counted in
row-major order, in which a reshape changes nothing. No torch, no TVM.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch_pruner.graph.ir import Node, Shape

__all__ = [
    "Bound", "Bounds", "axis_counts", "bounded", "bounded_axes", "counts_by", "false_beyond",
    "said_once", "unneeded", "unspecified", "unwritten", "viewed",
]  # fmt: skip


class Bound(NamedTuple):
    """An element at row-major position ``p`` is not needed if ``(p // stride) % extent`` is
    ``number + more`` or larger.

    ``number`` is the position in the graph of a node of shape (), an integer. Windows reach so many
    elements ``more``, which are padding.
    """

    stride: int
    extent: int
    number: int
    more: int = 0


Bounds = frozenset[Bound]
_NONE: Bounds = frozenset()


def bounded(builder: GraphBuilder, x: int, bounds: Iterable[Bound]) -> int:
    """``x``, of which a kernel that makes it may leave out what lies behind the bounds.

    The counts are nodes of the graph that is built.
    """
    shape, dtype = builder.shape(x), builder.dtype(x)
    for stride, extent, count, more in sorted(bounds):
        attrs = {"stride": stride, "extent": extent} | ({"more": more} if more else {})
        x = builder.append("within", (x, count), shape, dtype, **attrs)
    return x


def axis_counts(shape: Shape, bounds: Bounds) -> dict[int, Bound]:
    """For each axis of a value of ``shape`` of which bounds speak the nearest one."""
    found: dict[int, Bound] = {}
    for axis, extent in enumerate(shape):
        inner = math.prod(shape[axis + 1 :])
        mine = [b for b in bounds if (b.stride, b.extent) == (inner, extent) and extent > 1]
        if mine:
            found[axis] = min(mine, key=lambda b: (b.more, b.number))
    return found


def bounded_axes(shape: Shape, bounds: Bounds) -> set[int]:
    """The axes of a value of ``shape`` of which bounds speak, or of a factor of which."""
    places = (_place(b.stride, b.extent, shape) for b in bounds)
    return {place[0] for place in places if place is not None}


def permuted(bounds: Bounds, shape: Shape, perm: Sequence[int]) -> Bounds:
    """Bounds of a value of ``shape`` as those of its permutation."""
    result = [shape[p] for p in perm]
    return _moved(bounds, shape, result, lambda axis: perm.index(axis))


def unspecified(graph: Graph, output: int) -> Bounds:
    """What of an output of ``graph`` holds anything: nobody writes it."""
    node = graph.nodes[output]
    if node.op == "within":
        return unspecified(graph, node.inputs[0]) | {_bound_of(node)}
    if node.op == "reshape":
        return unspecified(graph, node.inputs[0])
    if node.op == "permute":
        source = node.inputs[0]
        return permuted(unspecified(graph, source), graph.nodes[source].shape, node.attr("perm"))
    return _NONE


def unwritten(graph: Graph, path: Sequence[int]) -> Bounds:
    """What ``unspecified`` says of the output at the end of ``path``, said of its first node.

    Each node of the path reads the one before, elementwise or through a reshape or permutation.
    """
    found = _NONE
    for at in reversed(path[1:]):
        node = graph.nodes[at]
        if node.op == "within":
            found |= {_bound_of(node)}
        elif node.op == "permute":
            perm = node.attr("perm")
            source = graph.nodes[node.inputs[0]].shape
            found = _moved(found, node.shape, source, perm.__getitem__)
    return found


def unneeded(graph: Graph) -> list[Bounds]:
    """For every node what none of its readers needs of it. All of an output is needed."""
    found: list[Bounds | None] = [None] * len(graph.nodes)
    for output in graph.outputs:
        found[output] = _NONE
    hidden = false_beyond(graph)
    for i in reversed(range(len(graph.nodes))):
        node, own = graph.nodes[i], found[i]
        if own is None:  # nobody reads it
            own = found[i] = _NONE
        for k, x in enumerate(node.inputs):
            bounds = _of_operand(graph, node, k, own, hidden)
            before = found[x]
            found[x] = bounds if before is None else _either(before, bounds)
    return [b or _NONE for b in found]


def said_once(graph: Graph) -> Graph:
    """``graph`` with one say on each value that several read: what none of them needs.

    A reader that needs less than others would otherwise have a copy of the value, as a kernel that
    only leaves out what it does not need.
    """
    root: dict[int, int] = {}  # of each bounded value that which is bounded
    for i, node in enumerate(graph.nodes):
        if node.op == "within":
            root[i] = root.get(node.inputs[0], node.inputs[0])
    read: dict[int, set[int]] = {}  # of these values in which forms others read them
    users = graph.users()
    for i in {*root, *root.values()}:
        others = [
            u for u in users[i] if graph.nodes[u].op != "within" or graph.nodes[u].inputs[1] == i
        ]
        if others or i in graph.outputs:
            read.setdefault(root.get(i, i), set()).add(i)
    shared = {r for r, forms in read.items() if len(forms) > 1 and graph.nodes[r].op != "input"}
    if not shared:
        return graph
    bounds, builder, new = unneeded(graph), GraphBuilder(), dict[int, int]()

    def placed(i: int) -> int:
        if i not in new:
            new[i] = builder.again(graph.nodes[i], [new[x] for x in graph.nodes[i].inputs])
        return new[i]

    for i in range(len(graph.nodes)):
        if root.get(i) in shared:
            new[i] = new[root[i]]
            continue
        placed(i)
        if i in shared:
            counts = [b._replace(number=placed(b.number)) for b in bounds[i]]
            new[i] = bounded(builder, new[i], counts)
    return builder.finish([new[o] for o in graph.outputs])


def _either(one: Bounds, other: Bounds) -> Bounds:
    """What neither of two readers needs."""
    far = {b[:3]: b for b in sorted(one)}
    return frozenset(max(b, far[b[:3]]) for b in other if b[:3] in far)


def false_beyond(graph: Graph) -> list[Bounds]:
    """For every node of type bool behind which bounds it is false everywhere."""
    found: list[Bounds] = []
    for node in graph.nodes:
        found.append(_false_beyond(graph, node, found) if node.dtype == "bool" else _NONE)
    return found


def _false_beyond(graph: Graph, node: Node, known: Sequence[Bounds]) -> Bounds:
    operands = [known[x] for x in node.inputs]
    if node.op in ("lt", "gt"):
        place, count = node.inputs if node.op == "lt" else reversed(node.inputs)
        line, number = graph.nodes[place], graph.nodes[count]
        if line.op == "iota" and number.op == "input" and number.shape == ():
            dim = line.attr("dim")
            return frozenset((Bound(math.prod(line.shape[dim + 1 :]), line.shape[dim], count),))
    elif node.op in ("logical_and", "logical_or"):
        full = all(graph.nodes[x].shape == node.shape for x in node.inputs)
        left, right = operands
        return ((left | right) if node.op == "logical_and" else (left & right)) if full else _NONE
    elif node.op in ("reshape", "permute", "broadcast"):
        return viewed(graph, node, operands[0])
    return _NONE


def viewed(graph: Graph, node: Node, bounds: Bounds) -> Bounds:
    """Bounds of what ``node`` views as those of the view; none for views of another kind."""
    source = graph.nodes[node.inputs[0]].shape
    if node.op == "reshape":
        return bounds
    if node.op == "permute":
        return permuted(bounds, source, node.attr("perm"))
    if node.op == "broadcast":
        lead = len(node.shape) - len(source)
        return _moved(bounds, source, node.shape, lambda axis: axis + lead)
    return _NONE


def counts_by(graph: Graph, condition: int) -> int | None:
    """The number of elements along an axis that count, an input that says so of itself, where a
    condition holds for these and for nothing else."""
    node = graph.nodes[condition]
    while node.op in ("reshape", "permute", "broadcast"):
        node = graph.nodes[node.inputs[0]]
    if node.op != "lt" or graph.nodes[node.inputs[0]].op != "iota":
        return None
    number = graph.nodes[node.inputs[1]]
    return node.inputs[1] if number.is_count and number.shape == () else None


def _bound_of(node: Node) -> Bound:
    more = node.attr("more") if any(name == "more" for name, _ in node.attrs) else 0
    return Bound(node.attr("stride"), node.attr("extent"), node.inputs[1], more)


def _of_operand(graph: Graph, node: Node, k: int, own: Bounds, hidden: Sequence[Bounds]) -> Bounds:
    """What a reader does not need of its operand ``k``, ``own`` not being needed of itself."""
    source = graph.nodes[node.inputs[k]].shape
    if node.op == "within":
        return own | {_bound_of(node)} if k == 0 else _NONE
    if node.kind is OpKind.POINTWISE:
        if source != node.shape:
            return _NONE
        condition = node.inputs[0]
        masked = node.op == "where" and k == 1 and graph.nodes[condition].shape == node.shape
        return own | hidden[condition] if masked else own
    if node.op == "reshape":
        return own
    table = _axes(graph, node, k)
    return _moved(own, node.shape, source, table)


def _axes(graph: Graph, node: Node, k: int) -> Callable[[int], int | None]:
    """For an axis of a result the axis of operand ``k`` from which alone it is made, element for
    element, or None."""
    source = graph.nodes[node.inputs[k]].shape
    rank = len(node.shape)
    match node.op:
        case "permute":
            return lambda axis: int(node.attr("perm")[axis])
        case "broadcast":
            lead = rank - len(source)
            return lambda axis: axis - lead if axis >= lead else None
        case "sum" | "prod" | "max" | "min" | "any" | "all" | "argmax" | "argmin":
            kept = [a for a in range(len(source)) if a not in node.attr("axes")]
            return lambda axis: kept[axis]
        case "matmul":
            own = rank - 2 if k == 0 else rank - 1
            return lambda axis: axis if axis < rank - 2 or axis == own else None
        case "matmul_grouped":
            return lambda axis: 0 if axis == 0 and k == 0 else None
        case "conv" | "conv_transpose":
            return lambda axis: 0 if axis == 0 and k == 0 else None
        case "window_max" | "window_sum" | "window_argmax":
            whole = rank - len(node.attr("kernel"))
            return lambda axis: axis if axis < whole else None
        case "slice":
            return lambda axis: axis if _is_whole(node, axis) else None
        case "flip":
            return lambda axis: None if axis in node.attr("dims") else axis
        case "cat":
            return lambda axis: None if axis == node.attr("dim") else axis
        case "pad":
            added = [lo or hi for lo, hi in zip(node.attr("lo"), node.attr("hi"), strict=True)]
            return lambda axis: None if added[axis] else axis
        case "take":
            return _of_take(graph, node, k)
    return lambda _: None


def _is_whole(node: Node, axis: int) -> bool:
    return bool(node.attr("starts")[axis] == 0 and node.attr("steps")[axis] == 1)


def _of_take(graph: Graph, node: Node, k: int) -> Callable[[int], int | None]:
    dim, rank = node.attr("dim"), len(graph.nodes[node.inputs[1]].shape)
    if k == 1:
        return lambda axis: axis - dim if dim <= axis < dim + rank else None

    def of_source(axis: int) -> int | None:
        return axis if axis < dim else None if axis < dim + rank else axis - rank + 1

    return of_source


def _moved(
    bounds: Bounds, shape: Shape, target: Sequence[int], axes: Callable[[int], int | None]
) -> Bounds:
    """Bounds of a value of ``shape`` as those of one of shape ``target``, axis by axis.

    Those of axes that have none there are left out. An axis that is longer there, of which the
    first elements are read, has its bound where that is all of the axis.
    """
    found = set()
    for stride, extent, count, more in bounds:
        if (place := _place(stride, extent, shape)) is None:
            continue
        axis, inner = place
        if (other := axes(axis)) is None:
            continue
        outer = math.prod(target[other + 1 :])
        if target[other] == shape[axis]:
            found.add(Bound(inner * outer, extent, count, more))
        elif target[other] > shape[axis] and (inner, extent) == (1, shape[axis]):
            found.add(Bound(outer, target[other], count, more))
    return frozenset(found)


def _place(stride: int, extent: int, shape: Sequence[int]) -> tuple[int, int] | None:
    """The axis of which a bound is a factor, and how many elements of it lie within one."""
    step = 1
    for axis in reversed(range(len(shape))):
        end = step * shape[axis]
        if step <= stride and stride * extent <= end and extent > 1:
            fits = stride % step == 0 and end % (stride * extent) == 0
            return (axis, stride // step) if fits else None
        step = end
    return None
