"""Emits elementwise kernels of a concatenation: one loop per part, so that no element asks whose.

An element of a concatenation read at any index is a chain of conditions, as long as there are
parts. Where the output's innermost axis is the joined one, or many lines lie before it, each line
is written part by part instead, and in every loop it is known which operand is read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import VECTORIZED, Expr, Stmt, loop, seq
from torch_pruner.codegen.tir.reader import Index, Reader, unlinear
from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.graph.ir import Graph

# Elements; shorter parts are not worth a loop of their own, unless the others are long enough.
_MIN_PART, _MIN_MEAN = 4, 16
_MIN_INNER, _MIN_LINES = 16, 32  # of another axis: neighbours, and lines, which tasks share out


def joined_innermost(spec: Graph) -> tuple[int, int] | None:
    """The one concatenation along the axis that lies innermost in every output, or along one
    before which enough lines lie, and that axis, counted from the end. None if there is none.

    It is looked for through elementwise operators and permutations.
    """
    found: set[tuple[int, int]] = set()
    for output in spec.outputs:
        rank = len(spec.nodes[output].shape)
        todo = [(output, tuple(range(rank)))]
        seen = set()
        while todo:
            at, axes = todo.pop()  # axes[d]: the output's axis that dimension d of the node is
            if (at, axes) in seen:
                continue
            seen.add((at, axes))
            node = spec.nodes[at]
            if node.op == "cat":
                found.add((at, axes[node.attr("dim")] - rank))
            elif node.op == "permute":
                inner = [0] * rank
                for d, p in enumerate(node.attr("perm")):
                    inner[p] = axes[d]
                todo.append((node.inputs[0], tuple(inner)))
            elif node.kind is OpKind.POINTWISE:
                todo += [(j, axes) for j in node.inputs if spec.nodes[j].shape == node.shape]
    if len(found) != 1:
        return None
    at, axis = next(iter(found))
    node = spec.nodes[at]
    after = {at}
    for i, reader in enumerate(spec.nodes):
        if any(j in after for j in reader.inputs):
            if reader.kind is not OpKind.POINTWISE and reader.op != "permute":
                return None  # it may want an element of another part
            after.add(i)
    sizes = [spec.nodes[j].shape[node.attr("dim")] for j in node.inputs]
    shape = spec.nodes[spec.outputs[0]].shape
    behind = math.prod(shape[axis:][1:])
    within = axis == -1 or (shape[-1] >= _MIN_INNER and math.prod(shape[:axis]) >= _MIN_LINES)
    long = min(sizes) * behind >= _MIN_PART or sum(sizes) * behind >= _MIN_MEAN * len(sizes)
    return (at, axis) if within and long else None


def over_parts(
    spec: Graph,
    reader: Reader,
    joined: tuple[int, int],
    vl: int,
    store: Callable[[Index], Stmt],
    lines: Callable[[int, int, Callable[[Expr], Stmt]], Stmt],
) -> Stmt:
    """``store(index)`` for every element of the output, line by line and part by part.

    ``joined``: what ``joined_innermost`` found. A line is all that lies behind the axes before.
    ``lines(n, vectors, body)`` runs ``body`` for n lines of so many vectors each.
    """
    cat, axis = joined
    node, shape = spec.nodes[cat], spec.nodes[spec.outputs[0]].shape
    lead, dim = shape[:axis], node.attr("dim")

    def part(line: Index, operand: int, start: int) -> Stmt:
        def read(index: Index) -> Expr:
            own = tuple(e - start if d == dim else e for d, e in enumerate(index))
            return reader.at(operand, own)

        extent = spec.nodes[operand].shape[dim]
        reader.overrides[cat] = read
        if axis == -1:
            return reader.line(line, lambda: vectors(line, start, extent))
        own = (extent, *shape[axis + 1 : -1])

        def row(r: Expr) -> Stmt:
            first, *rest = unlinear(r, own)
            at = (*line, start + first, *rest)
            return reader.line(at, lambda: vectors(at, 0, shape[-1]))

        return loop(math.prod(own), row, name="r")

    def vectors(line: Index, start: int, extent: int) -> Stmt:
        """A row of neighbours from ``start`` on."""

        def vector(first: Expr, lanes: int) -> Stmt:
            return loop(lanes, lambda v: store((*line, first + v)), VECTORIZED, "v")

        whole, rest = divmod(extent, vl)
        done = start + whole * vl
        blocks = loop(whole, lambda o: vector(start + o * vl, vl), name="o") if whole else None
        tail = loop(rest, lambda e: store((*line, done + e)), name="rest") if rest else None
        return seq([blocks, tail])

    def one_line(p: Expr) -> Stmt:
        line, start, parts = unlinear(p, lead), 0, []
        for operand in node.inputs:
            parts.append(part(line, operand, start))
            start += spec.nodes[operand].shape[dim]
        del reader.overrides[cat]
        return seq(parts)

    return lines(math.prod(lead), max(math.prod(shape[axis:]) // vl, 1), one_line)
