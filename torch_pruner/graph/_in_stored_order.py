"""Elementwise kernels computed in the order of axes in which their results are stored.

``permute(relu(permute(x)))`` of a value whose channels lie last is ``relu(x)``: no reader need look
through the permutations, and what lies across a result is seen to (``graph.crossing``).
"""

from __future__ import annotations

from torch_pruner.graph import _simplify_views
from torch_pruner.graph.ir import Graph, GraphBuilder, Node, Shape
from torch_pruner.graph.ops import OpKind

_MOVABLE = frozenset((OpKind.LEAF, OpKind.POINTWISE, OpKind.VIEW))


def in_stored_order(spec: Graph) -> Graph:
    """An equal graph whose outputs are no permutations of what is computed elementwise.

    Graphs that do more than that are as they were, and so are those that store a value in two
    orders, of which one would be computed twice.
    """
    ends = {spec.nodes[o] for o in spec.outputs}
    if not any(_permutes_work(spec, end) for end in ends):
        return spec
    if len({end.attr("perm") if end.op == "permute" else None for end in ends}) > 1:
        return spec
    if any(node.kind not in _MOVABLE for node in spec.nodes):
        return spec
    builder = GraphBuilder()
    new: list[int] = []
    moved: dict[tuple[int, Shape], int] = {}

    def permuted(at: int, perm: Shape) -> int:
        """What is ``permute(at, perm)``, of permutations of leaves."""
        todo = [at]
        while todo:
            i = todo[-1]
            node = spec.nodes[i]
            if (i, perm) in moved:
                todo.pop()
            elif node.kind is OpKind.POINTWISE and _alike(spec, node):
                missing = [j for j in node.inputs if (j, perm) not in moved]
                todo += missing
                if not missing:
                    ins = [moved[j, perm] for j in node.inputs]
                    moved[i, perm] = builder.append(
                        node.op, ins, (node.shape[p] for p in perm), node.dtype, **dict(node.attrs)
                    )
            else:
                moved[i, perm] = _view(builder, new[i], perm)
        return moved[at, perm]

    for node in spec.nodes:
        if _permutes_work(spec, node):
            new.append(permuted(node.inputs[0], node.attr("perm")))
        else:
            new.append(builder.again(node, (new[i] for i in node.inputs)))
    return builder.finish([new[o] for o in spec.outputs])


def _permutes_work(spec: Graph, node: Node) -> bool:
    return node.op == "permute" and spec.nodes[node.inputs[0]].kind is OpKind.POINTWISE


def _alike(spec: Graph, node: Node) -> bool:
    return all(spec.nodes[i].shape == node.shape for i in node.inputs)


def _view(builder: GraphBuilder, at: int, perm: Shape) -> int:
    shape = tuple(builder.shape(at)[p] for p in perm)
    node = Node("permute", (at,), shape, builder.dtype(at), (("perm", perm),))
    return _simplify_views.rewrite(builder, node, at)
