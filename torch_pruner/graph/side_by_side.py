"""Products of one operand with several constant ones, as one product whose result is taken apart.

Queries, keys and values of an attention, or the gate and the other half of a gated layer, multiply
the same rows. As one product these are read once, and wider tiles are possible; its parts are read
through slices, which elementwise work and layouts no longer follow. Whether it pays is asked of
whoever can estimate it. Rows of constants that are added to each result are added to all at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.ir import Graph, GraphBuilder, Node
from torch_pruner.graph.ops import FLOATS
from torch_pruner.graph.quantize import static_nodes
from torch_pruner.graph.taken_apart import row_added

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def joinable(graph: Graph) -> list[tuple[int, ...]]:
    """Positions of the products of each group of at least two that may become one.

    There are none in graphs of which parts are counted: rows behind are masked product by product.
    """
    if any(node.is_count for node in graph.nodes):
        return []
    static = static_nodes(graph)
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, node in enumerate(graph.nodes):
        if node.op != "matmul" or node.inputs[1] not in static or node.inputs[0] in static:
            continue
        x, weight = (graph.nodes[j] for j in node.inputs)
        if len(weight.shape) != 2 or node.dtype != weight.dtype or weight.dtype not in FLOATS:
            continue
        key = node.inputs[0], x.shape, weight.shape[0], weight.dtype, node.dtype
        groups.setdefault(key, []).append(i)
    return [tuple(found) for found in groups.values() if len(set(found)) > 1]


def side_by_side(graph: Graph, firsts: Collection[int]) -> Graph:
    """``graph`` with the groups of ``joinable`` that begin with ``firsts`` as one product each."""
    groups = [group for group in joinable(graph) if group[0] in firsts]
    if not groups:
        return graph
    static, users = static_nodes(graph), graph.users()
    first_of = {i: group for group in groups for i in group}
    added = {i: _added(graph, users, static, i) for i in first_of}
    parts: dict[int, int] = {}  # of what is replaced: a slice in the new graph
    b, new = GraphBuilder(), dict[int, int]()
    order = _with_operands_first(graph, groups, added)
    for i in order:
        node = graph.nodes[i]
        if i in parts:
            new[i] = parts[i]
        elif i in first_of:
            group = first_of[i]
            parts |= _joined(b, graph, group, [added[k] for k in group], new)
            new[i] = parts[i]
        else:
            new[i] = b.again(node, (new[j] for j in node.inputs))
    return b.finish([new[o] for o in graph.outputs])


def _added(
    graph: Graph, users: Sequence[Sequence[int]], static: set[int], product: int
) -> tuple[int, int] | None:
    """(the sum, the constants) where all that is made of a product is to add constants to rows,
    into whatever axes these are taken apart before."""
    before = product
    while True:
        if before in graph.outputs or len(users[before]) != 1:
            return None
        at = users[before][0]
        node = graph.nodes[at]
        if node.op != "reshape" or node.shape[-1:] != graph.nodes[product].shape[-1:]:
            break
        before = at
    row = row_added(graph, static, at, before)
    return None if row is None else (at, row)


def _with_operands_first(
    graph: Graph, groups: Sequence[tuple[int, ...]], added: dict[int, tuple[int, int] | None]
) -> list[int]:
    """All nodes in an order in which a group's constants come before the first of its products."""
    wanted: dict[int, list[int]] = {}
    for group in groups:
        rows = [row[1] for k in group if (row := added[k]) is not None]
        wanted[group[0]] = [graph.nodes[k].inputs[1] for k in group] + rows
    order: list[int] = []
    placed: set[int] = set()

    def place(root: int) -> None:
        stack = [root]
        while stack:
            i = stack[-1]
            below = (*graph.nodes[i].inputs, *wanted.get(i, ()))
            missing = [j for j in below if j not in placed]
            if i in placed or not missing:
                stack.pop()
                if i not in placed:
                    placed.add(i)
                    order.append(i)
                continue
            stack.extend(reversed(missing))

    for i in range(len(graph.nodes)):
        place(i)
    return order


def _joined(
    b: GraphBuilder,
    graph: Graph,
    group: Sequence[int],
    added: Sequence[tuple[int, int] | None],
    new: dict[int, int],
) -> dict[int, int]:
    """What stands for the products of a group, or for their sums, by their positions."""
    nodes: list[Node] = [graph.nodes[i] for i in group]
    x = new[nodes[0].inputs[0]]
    columns = [node.shape[-1] for node in nodes]
    weights = [new[node.inputs[1]] for node in nodes]
    depth, dtype = b.shape(weights[0])[0], nodes[0].dtype
    weight = b.append("cat", weights, (depth, sum(columns)), b.dtype(weights[0]), dim=1)
    made = b.matmul(x, weight, dtype=dtype)
    rows = [row for row in added if row is not None]
    whole = len(rows) == len(group)
    if whole:
        parts = [new[row[1]] for row in rows]
        row = b.append("cat", parts, (sum(columns),), dtype, dim=0)
        made = b.pointwise("add", made, b.broadcast(row, b.shape(made)))
    found: dict[int, int] = {}
    start = 0
    rank = len(b.shape(made))
    for i, width, row_ in zip(group, columns, added, strict=True):
        starts = (*([0] * (rank - 1)), start)
        part = b.slice(made, starts, (*b.shape(made)[:-1], width))
        found[i] = part
        if whole and row_ is not None:
            found[row_[0]] = b.reshape(part, graph.nodes[row_[0]].shape)
        start += width
    return found
