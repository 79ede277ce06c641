"""A product whose result is only read part by part, as a product for each part.

The inverse of ``side_by_side``: networks write queries, keys and values, or both halves of a gated
layer, as one product and take its result apart. As products of their own the parts have buffers of
their own, and elementwise work of each follows its own product. Weights and rows that are added are
read through slices of what they were. Whether it pays is asked of whoever can estimate it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.ops import FLOATS
from torch_pruner.graph.quantize import static_nodes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


@dataclass(frozen=True, slots=True)
class _Parts:
    """How a product's result is read.

    ``steps`` are the nodes from the product to what the ``slices`` are of: views, and at most one
    sum with a row of constants, ``row``. ``axis`` is that of the first reshape whose elements are
    runs of columns, or the last one.
    """

    product: int
    steps: tuple[int, ...]
    row: int | None
    slices: tuple[int, ...]
    axis: int  # of what the slices are of


def separable(graph: Graph) -> list[int]:
    """The products whose results are only read part by part, in columns that lie together.

    There are none in graphs of which parts are counted: rows behind are masked product by product.
    """
    return [parts.product for parts in _found(graph)]


def taken_apart(graph: Graph, products: Collection[int]) -> Graph:
    """``graph`` with those of ``separable`` that are in ``products`` part by part."""
    chosen = [parts for parts in _found(graph) if parts.product in products]
    if not chosen:
        return graph
    of_slice = {s: parts for parts in chosen for s in parts.slices}
    b = GraphBuilder()
    new: list[int] = []
    for i, node in enumerate(graph.nodes):
        parts = of_slice.get(i)
        if parts is None:
            new.append(b.again(node, (new[j] for j in node.inputs)))
        else:
            new.append(_part(b, graph, parts, i, new))
    return b.finish([new[o] for o in graph.outputs])


def _found(graph: Graph) -> list[_Parts]:
    if any(node.is_count for node in graph.nodes):
        return []
    static, users = static_nodes(graph), graph.users()
    found = (
        _parts_of(graph, users, static, i)
        for i, node in enumerate(graph.nodes)
        if node.op == "matmul"
        and node.inputs[1] in static
        and len(node.shape) == 2
        and graph.nodes[node.inputs[1]].dtype in FLOATS
    )
    return [parts for parts in found if parts is not None]


def _parts_of(
    graph: Graph, users: Sequence[Sequence[int]], static: set[int], product: int
) -> _Parts | None:
    nodes = graph.nodes
    columns = nodes[product].shape[-1]
    at, axis, steps, row = product, len(nodes[product].shape) - 1, list[int](), None
    apart = False  # whether columns have been divided among axes
    while at not in graph.outputs:
        readers = users[at]
        if readers and all(_is_run(graph, u, axis) for u in readers):
            covers = sum(nodes[u].shape[axis] for u in readers) <= nodes[at].shape[axis]
            parts = _Parts(product, tuple(steps), row, tuple(readers), axis)
            return parts if covers and len(readers) > 1 else None
        if len(readers) != 1:
            return None
        node = nodes[u := readers[0]]
        if node.op == "reshape" and not apart:
            outermost = _outermost(node.shape, columns)
            if outermost is None:
                return None
            axis, apart = outermost, outermost != len(node.shape) - 1
        elif node.op == "permute":
            axis, apart = node.attr("perm").index(axis), True
        elif not apart and row is None and (added := row_added(graph, static, u, at)) is not None:
            row = added
        else:
            return None
        steps.append(u)
        at = u
    return None


def _is_run(graph: Graph, reader: int, axis: int) -> bool:
    """Whether a reader is a slice that takes a run of one axis, and all of the others."""
    node = graph.nodes[reader]
    if node.op != "slice" or any(step != 1 for step in node.attr("steps")):
        return False
    whole = graph.nodes[node.inputs[0]].shape
    return node.shape[axis] < whole[axis] and all(
        n == m for k, (n, m) in enumerate(zip(node.shape, whole, strict=True)) if k != axis
    )


def row_added(graph: Graph, static: set[int], total: int, other: int) -> int | None:
    """The row of constants that a sum adds to all rows of ``other``, if that is what it does."""
    node = graph.nodes[total]
    rest = [graph.nodes[j] for j in node.inputs if j != other]
    if node.op != "add" or len(rest) != 1 or rest[0].op != "broadcast":
        return None
    row = rest[0].inputs[0]
    source = graph.nodes[row]
    alike = source.shape == node.shape[-1:] and source.dtype == node.dtype
    return row if alike and row in static else None


def _part(b: GraphBuilder, graph: Graph, parts: _Parts, slice_: int, new: Sequence[int]) -> int:
    """What a slice takes, from a product of these columns alone."""
    nodes = graph.nodes
    node, product = nodes[slice_], nodes[parts.product]
    source = nodes[node.inputs[0]].shape
    each = product.shape[-1] // source[parts.axis]
    first, count = node.attr("starts")[parts.axis] * each, node.shape[parts.axis] * each
    x, weight = (new[j] for j in product.inputs)
    depth = b.shape(weight)[0]
    made = b.matmul(x, b.slice(weight, (0, first), (depth, count)), dtype=product.dtype)
    for step in parts.steps:
        view = nodes[step]
        if view.op == "add":
            assert parts.row is not None, "a sum adds a row"
            row = b.slice(new[parts.row], (first,), (count,))
            made = b.pointwise("add", made, b.broadcast(row, b.shape(made)))
        elif view.op == "permute":
            made = b.permute(made, view.attr("perm"))
        else:
            made = b.reshape(made, _narrower(view.shape, product.shape[-1], count))
    return made


def _narrower(shape: Sequence[int], columns: int, count: int) -> list[int]:
    """The shape of a reshape of all ``columns``, for ``count`` of them."""
    axis = _outermost(shape, columns)
    assert axis is not None, "columns are whole axes"
    inner = math.prod(shape[axis + 1 :])
    return [n if k != axis else count // inner for k, n in enumerate(shape)]


def _outermost(shape: Sequence[int], columns: int) -> int | None:
    """The first of the last axes that ``columns`` are divided among."""
    sizes = [math.prod(shape[k:]) for k in range(len(shape))]
    return len(sizes) - 1 - sizes[::-1].index(columns) if columns in sizes else None
