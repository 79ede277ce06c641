"""Where an anchor operator's result goes: its own index, and that index at the output."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.operands import phase
from torch_pruner.codegen.tir.reader import reshape_index, unlinear

if TYPE_CHECKING:
    from torch_pruner.codegen.tir.builders import Expr
    from torch_pruner.codegen.tir.reader import Index
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph


def anchor_index(con: Contraction, g: Expr, row: Index, column: Expr) -> Index:
    """Index of the contraction's own output."""
    if con.conv is None:
        return (*unlinear(g, con.batch), *row, column)
    image, *place = row
    if con.form == "conv_phases":
        rows = zip(place, con.batch, phase(con, g), strict=True)
        return (image, column, *(q * s + first for q, s, (_, first) in rows))
    channel = column if con.groups == 1 else g * con.n + column
    return (image, channel, *place)


def output_path(spec: Graph, anchor: int, output: int = 0) -> tuple[int, ...]:
    """Positions from the anchor to an output, each reading the one before."""
    reach = {anchor}
    for i, node in enumerate(spec.nodes):
        if any(j in reach for j in node.inputs):
            reach.add(i)
    path = [spec.outputs[output]]
    while path[-1] != anchor:
        path.append(next(i for i in spec.nodes[path[-1]].inputs if i in reach))
    return tuple(reversed(path))


def along(spec: Graph, path: tuple[int, ...], index: Index) -> Index:
    """Carry an index of ``path[0]`` to ``path[-1]`` through bijective views and pointwise nodes."""
    for before, after in itertools.pairwise(path):
        node, source = spec.nodes[after], spec.nodes[before]
        if node.op == "reshape":
            index = reshape_index(index, source.shape, node.shape)
        elif node.op == "permute":
            index = tuple(index[p] for p in node.attr("perm"))
    return index
