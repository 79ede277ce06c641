"""A kernel graph as an unscheduled TIR function: what MetaSchedule's own space starts from.

One ``te.compute`` per node that computes; MetaSchedule inlines what it wants to. Views are indices
of whoever reads them: its rules inline nothing that changes the order of axes, so each would be a
loop of its own. Convolutions are written in the order of axes in which their data lie, as TVM's
operators for such data are. Arithmetic is ``scalar.apply``'s, so that kernels of either space
compute the same numbers, unless somebody asks for another (``plain.apply``). No schedule is decided
here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import te

from torch_pruner.codegen.tir import scalar
from torch_pruner.codegen.tir.builders import Expr, PrimFunc, T
from torch_pruner.codegen.tir.reader import reshape_index, safe_position, view_index
from torch_pruner.families.metaschedule.reducers import REDUCERS
from torch_pruner.families.metaschedule.stages import compute, guarded, inside
from torch_pruner.graph.ir import const_value
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.stored import stored_orders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.metaschedule.stages import Apply, Read, Tensor
    from torch_pruner.graph.ir import Graph, Node, Shape


def to_prim_func(spec: Graph, apply: Apply = scalar.apply) -> PrimFunc:
    """Parameters: the inputs of ``spec`` by index, then its outputs. Takes every operator that
    ``apply`` has, which ``scalar.apply`` is all of them.
    """
    orders = stored_orders(spec)
    values: list[Read] = []
    for i, node in enumerate(spec.nodes):
        values.append(_stage(spec, node, f"n{i}_{node.op}", values, apply, orders.get(i)))
    inputs = [values[i] for i in spec.inputs]
    outputs: list[Tensor] = []
    for k, i in enumerate(spec.outputs):
        value = values[i]
        fresh = isinstance(value, te.Tensor) and spec.nodes[i].op != "input"
        fresh = fresh and i not in spec.outputs[:k]
        outputs.append(value if fresh else compute(spec.nodes[i], f"out{k}", value))
    func: PrimFunc = te.create_prim_func([*inputs, *outputs])
    return func


def _stage(
    spec: Graph, node: Node, name: str, values: Sequence[Read], apply: Apply, order: Shape | None
) -> Read:
    """What reads one node: its tensor, or an expression for a constant and for a view."""
    if node.op == "input":
        placeholder: Read = te.placeholder(node.shape, node.dtype, name)
        return placeholder
    if node.op == "const":
        value = T.const(const_value(node), node.dtype)
        return lambda *index: value
    reads = [values[i] for i in node.inputs]
    if node.kind in (OpKind.REDUCE, OpKind.WINDOW, OpKind.CONTRACT):
        return REDUCERS[node.op](spec, node, name, reads, apply, order)
    shapes = [spec.nodes[i].shape for i in node.inputs]
    if node.kind is OpKind.VIEW:
        return _view(node, reads[0], shapes[0])
    return compute(node, name, _element(node, reads, shapes, apply), order)


def _element(
    node: Node, reads: Sequence[Read], shapes: Sequence[tuple[int, ...]], apply: Apply
) -> Read:
    """The value of a node that does not reduce, at given indices."""
    if node.kind is OpKind.POINTWISE:
        return lambda *index: apply(node.op, [r(*index) for r in reads], node.dtype)
    if node.op == "iota":
        return lambda *index: T.Cast(node.dtype, index[node.attr("dim")])
    if node.op == "cat":
        return _cat(node, reads, shapes)
    if node.op == "pad":
        return _pad(node, reads[0], shapes[0])
    return _indexed(node, reads, shapes)


def _view(node: Node, read: Read, shape: tuple[int, ...]) -> Read:
    """What reads a view at its own index."""
    if node.op == "reshape":
        return lambda *index: read(*reshape_index(index, node.shape, shape))
    attrs = dict(node.attrs)
    return lambda *index: read(*view_index(node.op, attrs, index, shape))


def _cat(node: Node, reads: Sequence[Read], shapes: Sequence[tuple[int, ...]]) -> Read:
    dim = node.attr("dim")

    def element(*index: Expr) -> Expr:
        value: Expr | None = None
        start = 0
        parts = []
        for read, shape in zip(reads, shapes, strict=True):
            if shape[dim]:
                parts.append((start, start + shape[dim], read))
            start += shape[dim]
        for begin, end, read in reversed(parts):
            moved = (*index[:dim], index[dim] - begin, *index[dim + 1 :])
            own = read(*moved)
            value = own if value is None else T.if_then_else(index[dim] < end, own, value)
        assert value is not None
        return value

    return element


def _pad(node: Node, read: Read, shape: tuple[int, ...]) -> Read:
    lo, fill = node.attr("lo"), node.attr("value")
    other = T.const(float(fill) if isinstance(fill, str) else fill, node.dtype)

    def element(*index: Expr) -> Expr:
        moved = tuple(i - before for i, before in zip(index, lo, strict=True))
        return guarded(inside(moved, shape), read(*moved), other)

    return element


def _indexed(node: Node, reads: Sequence[Read], shapes: Sequence[tuple[int, ...]]) -> Read:
    dim, extent, rank = node.attr("dim"), shapes[0][node.attr("dim")], len(shapes[1])

    def element(*index: Expr) -> Expr:
        if node.op == "gather":
            at = reads[1](*index)
            before, after = index[:dim], index[dim + 1 :]
        else:
            at = reads[1](*index[dim : dim + rank])
            before, after = index[:dim], index[dim + rank :]
        return reads[0](*before, safe_position(at, extent), *after)

    return element


# Reductions
