"""Rules of ``simplify`` for views: they compose, and move inside broadcasts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_pruner.graph.ir import GraphBuilder, Node, Shape


def rewrite(b: GraphBuilder, node: Node, x: int) -> int:
    """The position of a node equal to the view ``node`` of ``x``."""
    if (scalar := x if b.shape(x) == () else _repeated(b, x)) is not None:
        return b.broadcast(scalar, node.shape)
    match node.op:
        case "reshape":
            return b.reshape(x, node.shape)
        case "permute":
            return _permute(b, node, x)
        case "broadcast":
            return _broadcast(b, node.shape, x)
        case "slice":
            return _slice(b, node, x)
        case "flip":
            return _flip(b, node, x)
    raise AssertionError(node.op)


def _repeated(b: GraphBuilder, x: int) -> int | None:
    """The one value that ``x`` repeats, as a node of shape ()."""
    node = b.nodes[x]
    if node.op != "broadcast" or b.nodes[node.inputs[0]].numel != 1:
        return None
    return b.reshape(node.inputs[0], ())


def _padded(shape: Shape, rank: int) -> Shape:
    return (1,) * (rank - len(shape)) + shape


def _permute(b: GraphBuilder, node: Node, x: int) -> int:
    perm, inner = node.attr("perm"), b.nodes[x]
    if inner.op == "broadcast":
        source = b.reshape(inner.inputs[0], _padded(b.shape(inner.inputs[0]), len(perm)))
        shape = b.shape(source)
        moved = [p for p in perm if shape[p] != 1]
        if moved == sorted(moved):
            return b.broadcast(b.reshape(source, [shape[p] for p in perm]), node.shape)
        return b.broadcast(b.permute(source, perm), node.shape)
    moved = [p for p in perm if inner.shape[p] != 1]
    if moved == sorted(moved):
        return b.reshape(x, node.shape)
    return b.permute(x, perm)


def _broadcast(b: GraphBuilder, shape: Shape, x: int) -> int:
    while b.nodes[x].op == "broadcast" or _only_pads(b, x):
        x = b.nodes[x].inputs[0]
    return b.broadcast(x, shape)


def _only_pads(b: GraphBuilder, x: int) -> bool:
    """A reshape that a broadcast does by itself."""
    node = b.nodes[x]
    return node.op == "reshape" and node.shape == _padded(b.shape(node.inputs[0]), len(node.shape))


def _slice(b: GraphBuilder, node: Node, x: int) -> int:
    starts, steps = node.attr("starts"), node.attr("steps")
    steps = tuple(1 if d == 1 else h for d, h in zip(node.shape, steps, strict=True))
    inner = b.nodes[x]
    if inner.op == "slice":
        pairs = zip(starts, inner.attr("starts"), inner.attr("steps"), strict=True)
        starts = tuple(t + s * h for s, t, h in pairs)
        steps = tuple(h * g for h, g in zip(steps, inner.attr("steps"), strict=True))
        return b.slice(inner.inputs[0], starts, node.shape, steps)
    if inner.op == "broadcast":
        return _slice_broadcast(b, inner.inputs[0], starts, steps, node.shape)
    if inner.op == "cat" and (part := _slice_cat(b, inner, starts, steps, node.shape)) is not None:
        return part
    return b.slice(x, starts, node.shape, steps)


def _slice_broadcast(b: GraphBuilder, x: int, starts: Shape, steps: Shape, shape: Shape) -> int:
    source = b.shape(x)
    lead = len(shape) - len(source)
    kept = [d == 1 for d in source]
    inner = b.slice(
        x,
        [0 if k else s for k, s in zip(kept, starts[lead:], strict=True)],
        [1 if k else d for k, d in zip(kept, shape[lead:], strict=True)],
        [1 if k else h for k, h in zip(kept, steps[lead:], strict=True)],
    )
    return _broadcast(b, shape, inner)


def _slice_cat(b: GraphBuilder, cat: Node, starts: Shape, steps: Shape, shape: Shape) -> int | None:
    """The slice of the only operand that it reads."""
    dim = cat.attr("dim")
    if shape[dim] == 0:
        return None
    first, last, begin = starts[dim], starts[dim] + (shape[dim] - 1) * steps[dim], 0
    for part in cat.inputs:
        end = begin + b.shape(part)[dim]
        if begin <= first and last < end:
            moved = tuple(s - begin if i == dim else s for i, s in enumerate(starts))
            return b.slice(part, moved, shape, steps)
        begin = end
    return None


def _flip(b: GraphBuilder, node: Node, x: int) -> int:
    dims = {d for d in node.attr("dims") if node.shape[d] != 1}
    if b.nodes[x].op == "flip":
        dims ^= set(b.nodes[x].attr("dims"))
        x = b.nodes[x].inputs[0]
    return b.append("flip", (x,), node.shape, node.dtype, dims=tuple(sorted(dims))) if dims else x
