"""Rewrites a graph to a smaller one that computes the same.

Every rule preserves values exactly, NaN, infinity and the sign of zeros included, with one licence:
constants are folded in the interpreter's arithmetic.
Rules look at one node and its operands in the new graph; passes repeat until nothing changes.
"""

from __future__ import annotations

from torch_pruner.graph import _simplify_halves, _simplify_pointwise, _simplify_views
from torch_pruner.graph.ir import Graph, GraphBuilder, Node
from torch_pruner.graph.ops import OpKind

_MAX_PARTS = 64  # operands of one concatenation: each is an argument of its kernel


def simplify(graph: Graph) -> Graph:
    """An equal graph without dead, repeated or needless nodes. Inputs keep their indices."""
    while (smaller := _once(graph)) != graph:
        graph = smaller
    return graph


def _once(graph: Graph) -> Graph:
    builder = GraphBuilder()
    new: list[int] = []
    for node in graph.nodes:
        new.append(_rewrite(builder, node, tuple(new[i] for i in node.inputs)))
    return builder.finish([new[i] for i in graph.outputs])


def _rewrite(b: GraphBuilder, node: Node, inputs: tuple[int, ...]) -> int:
    """The position in ``b`` of a node equal to ``node`` applied to ``inputs``."""
    match node.kind:
        case OpKind.LEAF if node.op == "iota" and node.shape[node.attr("dim")] == 1:
            return b.broadcast(b.const(0, node.dtype), node.shape)
        case OpKind.POINTWISE:
            return _simplify_pointwise.rewrite(b, node, inputs)
        case OpKind.VIEW:
            return _simplify_views.rewrite(b, node, inputs[0])
        case OpKind.REDUCE:
            return _reduce(b, node, inputs[0])
        case OpKind.CONTRACT if node.op == "conv":
            return _conv(b, node, inputs)
        case OpKind.INJECTIVE:
            if node.op == "pad":
                return _pad(b, node, inputs[0])
            if node.op == "cat":
                return _cat(b, node, inputs)
    return b.again(node, inputs)


def _reduce(b: GraphBuilder, node: Node, x: int) -> int:
    """An axis of extent one is dropped by a reshape."""
    shape, axes = b.shape(x), node.attr("axes")
    if node.op.startswith("arg"):
        if shape[axes[0]] == 1:
            return b.broadcast(b.const(0, node.dtype), node.shape)
        return b.append(node.op, (x,), node.shape, node.dtype, axes=axes)
    flat = {i for i in axes if shape[i] == 1}
    if flat == set(axes):
        return b.reshape(b.cast(x, node.dtype), node.shape)
    kept = [i for i in range(len(shape)) if i not in flat]
    x = b.reshape(x, [shape[i] for i in kept])
    rest = tuple(kept.index(i) for i in axes if i not in flat)
    return b.append(node.op, (x,), node.shape, node.dtype, axes=rest)


def _pad(b: GraphBuilder, node: Node, x: int) -> int:
    lo, hi, value = node.attr("lo"), node.attr("hi"), node.attr("value")
    if not any(lo) and not any(hi):
        return x
    inner = b.nodes[x]
    if inner.op == "pad" and inner.attr("value") == value:
        lo = tuple(a + c for a, c in zip(lo, inner.attr("lo"), strict=True))
        hi = tuple(a + c for a, c in zip(hi, inner.attr("hi"), strict=True))
        x = inner.inputs[0]
    return b.append("pad", (x,), node.shape, node.dtype, lo=lo, hi=hi, value=value)


def _conv(b: GraphBuilder, node: Node, inputs: tuple[int, ...]) -> int:
    """Zeros that are put around the input are padding of the convolution's own."""
    inner = b.nodes[inputs[0]]
    if inner.op != "pad" or inner.attr("value") != 0:
        return b.again(node, inputs)
    before, after = inner.attr("lo"), inner.attr("hi")
    if any(before[:2]) or any(after[:2]):
        return b.again(node, inputs)
    lo = tuple(p + q for p, q in zip(node.attr("lo"), before[2:], strict=True))
    hi = tuple(p + q for p, q in zip(node.attr("hi"), after[2:], strict=True))
    others = {name: node.attr(name) for name in ("stride", "dilation", "groups")}
    operands = (inner.inputs[0], inputs[1])
    return b.append("conv", operands, node.shape, node.dtype, lo=lo, hi=hi, **others)


def _cat(b: GraphBuilder, node: Node, inputs: tuple[int, ...]) -> int:
    dim = node.attr("dim")
    parts: list[int] = []
    for x in _flat(b, inputs, dim):
        if b.shape(x)[dim] == 0:
            continue
        joined = _join_slices(b, parts[-1], x, dim) if parts else None
        if joined is None:
            parts.append(x)
        else:
            parts[-1] = joined
    if not parts:
        return inputs[0]
    if len(parts) == 1:
        return parts[0]
    if (view := _simplify_halves.as_view(b, parts, node.shape, dim)) is not None:
        return view
    return b.append("cat", parts, node.shape, node.dtype, dim=dim)


def _flat(b: GraphBuilder, inputs: tuple[int, ...], dim: int) -> list[int]:
    """The operands, those of a concatenation along the same axis in its place.

    A network that appends to one value layer by layer then reads what it appended where it lies.
    """
    flat: list[int] = []
    for x in inputs:
        inner = b.nodes[x]
        again = inner.op == "cat" and inner.attr("dim") == dim
        flat.extend(inner.inputs if again else (x,))
    return flat if len(flat) <= _MAX_PARTS else list(inputs)


def _join_slices(b: GraphBuilder, left: int, right: int, dim: int) -> int | None:
    """One slice for two that are neighbours along ``dim``."""
    first, second = b.nodes[left], b.nodes[right]
    if first.op != "slice" or second.op != "slice" or first.inputs != second.inputs:
        return None
    starts, steps = first.attr("starts"), first.attr("steps")
    after = tuple(
        s + first.shape[dim] * steps[dim] if i == dim else s for i, s in enumerate(starts)
    )
    if second.attr("steps") != steps or second.attr("starts") != after:
        return None
    if any(
        p != q for i, (p, q) in enumerate(zip(first.shape, second.shape, strict=True)) if i != dim
    ):
        return None
    shape = (*first.shape[:dim], first.shape[dim] + second.shape[dim], *first.shape[dim + 1 :])
    return b.slice(first.inputs[0], starts, shape, steps)
