"""What a kernel graph is called and how much it computes, for reports and decisions by size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.attention_gradient import gradient_of
from torch_pruner.graph.contraction import contraction_at
from torch_pruner.graph.ops import FLOATS, OpKind

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Node


_ANCHORS = (
    OpKind.CONTRACT, OpKind.REDUCE, OpKind.WINDOW, OpKind.UPDATE, OpKind.RECURRENCE,
    OpKind.GROUPED,
)  # fmt: skip


def recurrence_flops(node: Node, weights: Node) -> int:
    """Two per multiply-add of states and the weights of a recurrence."""
    steps, rows = node.shape[:2]
    return 2 * steps * rows * weights.numel


def grouped_flops(node: Node, matrices: Node) -> int:
    """Two per multiply-add of rows in groups, all of which are in one."""
    return 2 * node.numel * matrices.shape[1]


def flops_of(spec: Graph) -> float:
    """Floating-point operations of a kernel graph: two per multiply-add, one per other element."""
    total = 0.0
    for i, node in enumerate(spec.nodes):
        if node.kind is OpKind.CONTRACT:
            total += contraction_at(spec, i).flops
        elif node.kind is OpKind.RECURRENCE:
            total += recurrence_flops(node, spec.nodes[node.inputs[1]])
        elif node.kind is OpKind.GROUPED:
            total += grouped_flops(node, spec.nodes[node.inputs[1]])
        elif node.kind is OpKind.POINTWISE and node.dtype in FLOATS:
            total += node.numel
        elif node.kind is OpKind.REDUCE:
            total += spec.nodes[node.inputs[0]].numel
        elif node.kind is OpKind.WINDOW:
            total += node.numel * math.prod(node.attr("kernel"))
    return total


def name_of(spec: Graph) -> str:
    """A name for people: the operators that characterise the kernel and its largest output."""
    anchors = [n.op for n in spec.nodes if n.kind in _ANCHORS]
    rest = [
        n.op
        for n in spec.nodes
        if n.kind in (OpKind.POINTWISE, OpKind.INJECTIVE) and n.op != "cast"
    ]
    if attention_of(spec) is not None:
        anchors, rest = ["attention"], []
    if gradient_of(spec) is not None:
        anchors, rest = ["attention_gradient"], []
    words = (
        list(dict.fromkeys([*anchors, *rest]))
        or [n.op for n in spec.nodes if n.kind is OpKind.VIEW][:1]
    )
    shape = "x".join(str(d) for d in spec.nodes[spec.outputs[0]].shape) or "scalar"
    return "_".join(words[:4] or ["copy"]) + f"_{shape}"
