"""Contractions in one canonical form: batch, row, column and reduction axes of any operator.

The form is what sketches reason about and what the emitter walks; it holds extents and roles, no
expressions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_pruner.graph.ir import Builder, Graph, Node, Shape
from torch_pruner.graph.ops import ITEMSIZE, OpKind


@dataclass(frozen=True, slots=True)
class ConvShape:
    """Geometry of a convolution; a transposed one is an ordinary one on a dilated input."""

    kernel: Shape
    stride: Shape
    dilation: Shape
    lo: Shape  # zeros before the input, per spatial dim
    dilate_input: Shape  # distance of neighbouring input elements (transposed convolution), else 1
    padded: Shape  # spatial extents of the padded input that the kernel reads
    copies_input: (
        bool  # rows read outside the input or between its elements: a padded copy is made first
    )


@dataclass(frozen=True, slots=True)
class Contraction:
    """One contraction of a kernel graph: ``out[g, m, n] = sum_k a[g, m, k] * b[g, k, n]``.

    ``m`` and ``k`` are lists of extents (a convolution's rows are batch and output positions, its k
    kernel offsets and channels). ``depthwise``: there is one group and ``a`` depends on n instead
    of a channel of k.
    """

    anchor: int  # node position
    form: str  # "matmul" | "conv" | "conv_transpose" | "depthwise"
    batch: Shape
    m: Shape
    n: int
    k: Shape
    a: int  # node positions of the operands
    b: int
    conv: ConvShape | None
    acc_dtype: str

    @property
    def groups(self) -> int:
        return math.prod(self.batch)

    @property
    def rows(self) -> int:
        return math.prod(self.m)

    @property
    def depth(self) -> int:
        return math.prod(self.k)

    @property
    def flops(self) -> int:
        return 2 * self.groups * self.rows * self.n * self.depth


def accumulator(dtype: str) -> str:
    """The dtype sums are kept in (see ``graph.ops``)."""
    return "float32" if dtype in ("float32", "float16", "bfloat16") else dtype


def contraction_of(graph: Graph) -> Contraction:
    """The contraction of a kernel graph that has exactly one."""
    anchors = [i for i, n in enumerate(graph.nodes) if n.kind is OpKind.CONTRACT]
    if len(anchors) != 1:
        raise ValueError(f"the kernel graph has {len(anchors)} contractions, not one")
    anchor = anchors[0]
    node = graph.nodes[anchor]
    return _matmul(graph, anchor, node) if node.op == "matmul" else _conv(graph, anchor, node)


def _matmul(graph: Graph, anchor: int, node: Node) -> Contraction:
    a, b = node.inputs
    *batch, rows, depth = graph.nodes[a].shape
    return Contraction(
        anchor,
        "matmul",
        tuple(batch),
        (rows,),
        node.shape[-1],
        (depth,),
        a,
        b,
        None,
        accumulator(node.dtype),
    )


def _conv(graph: Graph, anchor: int, node: Node) -> Contraction:
    a, b = node.inputs
    x, w = graph.nodes[a].shape, graph.nodes[b].shape
    groups, kernel, dilation = node.attr("groups"), w[2:], node.attr("dilation")
    reach = tuple(d * (k - 1) for d, k in zip(dilation, kernel, strict=True))
    if node.op == "conv_transpose":
        lo = tuple(r - p for r, p in zip(reach, node.attr("lo"), strict=True))
        stride, dilate = (1,) * len(kernel), tuple(node.attr("stride"))
        per_group = w[1]
    else:
        lo, stride, dilate = tuple(node.attr("lo")), tuple(node.attr("stride")), (1,) * len(kernel)
        per_group = w[0] // groups
    out = node.shape[2:]
    padded = tuple((o - 1) * s + r + 1 for o, s, r in zip(out, stride, reach, strict=True))
    transposed = node.op == "conv_transpose"
    outside = any(lo) or transposed or any(p > i for p, i in zip(padded, x[2:], strict=True))
    conv = ConvShape(kernel, stride, dilation, lo, dilate, padded, outside)
    depthwise = not transposed and groups == x[1] and per_group == 1 and groups > 1
    if depthwise:
        return Contraction(
            anchor,
            "depthwise",
            (1,),
            (x[0], *out),
            groups,
            kernel,
            a,
            b,
            conv,
            accumulator(node.dtype),
        )
    return Contraction(
        anchor, node.op, (groups,), (x[0], *out), per_group, (*kernel, x[1] // groups), a, b, conv,
        accumulator(node.dtype),
    )  # fmt: skip


def constant_operand(graph: Graph, contraction: Contraction) -> tuple[int, Graph] | None:
    """(input index, view graph) when the second operand is only views of one static input.

    None if anything else reads that input.
    """
    chain: list[int] = []
    at = contraction.b
    users = graph.users()
    while graph.nodes[at].kind is OpKind.VIEW and graph.nodes[at].op != "broadcast":
        if len(users[at]) != 1:
            return None
        chain.append(at)
        at = graph.nodes[at].inputs[0]
    node = graph.nodes[at]
    if (
        node.op != "input"
        or not node.attr("static")
        or len(users[at]) != 1
        or contraction.a == contraction.b
    ):
        return None
    builder = Builder()
    x = builder.input(0, node.shape, node.dtype)
    for step in reversed(chain):
        view = graph.nodes[step]
        x = builder.append(view.op, (x,), view.shape, view.dtype, **dict(view.attrs))
    return node.attr("index"), builder.finish([x])


def traffic_bytes(graph: Graph) -> int:
    """Bytes of all inputs and outputs of a kernel graph, each counted once."""
    places = (*graph.inputs, *graph.outputs)
    return sum(graph.nodes[i].numel * ITEMSIZE[graph.nodes[i].dtype] for i in places)
