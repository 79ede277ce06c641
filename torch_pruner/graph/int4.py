"""Products with weights of four bits: words of eight, a scale for every group of the reduction.

``quantize_weights`` makes such weights of floats, which the user has to ask for: what computes the
words is split off with everything that depends on parameters alone. ``keep_int4`` gives the words
themselves to the product where kernels read them; elsewhere they are made floats ahead. See
``graph.nibbles`` for what the words are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.nibbles import PER_WORD
from torch_pruner.graph.ops import FLOATS
from torch_pruner.graph.quantize import LEAST, rewritten, unpermuted

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, GraphBuilder, Node

GROUP = 64  # neighbours along the reduction that share a scale
SCALE = "bfloat16"  # a quarter of a bit for each weight; rounding it adds a thousandth of the error


def quantize_weights4(graph: Graph, group: int = GROUP) -> Graph:
    """Static float weights of matrix products as numbers of four bits.

    Symmetric, groups of ``group`` neighbours along the reduction, the scale of each such that the
    mean squared error is least (``nibbles.scales_of``). Weights of fewer than 64 columns or rows
    stay. A group with NaN or infinity is NaN.
    """

    def rewrite(b: GraphBuilder, node: Node, operands: tuple[int, int]) -> int | None:
        _, weight = unpermuted(b, operands[1])
        of = b.nodes[weight]
        parameter = of.op == "input" and of.attr("static") and of.dtype in FLOATS
        if not parameter or len(of.shape) != 2 or min(of.shape) < LEAST:
            return None
        depth, columns = b.shape(operands[1])
        scales = b.append(
            "scales4", (operands[1],), (-(-depth // group), columns), SCALE, group=group
        )
        words = b.append(
            "words4", (operands[1], scales), (-(-depth // PER_WORD), columns), "int32", group=group
        )
        weights = b.append("floats4", (words, scales), (depth, columns), of.dtype, group=group)
        return b.append(node.op, (operands[0], weights), node.shape, node.dtype)

    return rewritten(graph, rewrite)


def keep_int4(graph: Graph) -> Graph:
    """``a @ floats4(words, ...)`` as a product with the words themselves, in float32 sums."""
    if all(node.op != "floats4" for node in graph.nodes):
        return graph

    def rewrite(b: GraphBuilder, node: Node, operands: tuple[int, int]) -> int | None:
        made = b.nodes[operands[1]]
        if made.op != "floats4" or made.attr("group") % PER_WORD:
            return None
        given = (operands[0], *made.inputs)
        total = b.append("matmul4", given, node.shape, "float32", group=made.attr("group"))
        return b.cast(total, node.dtype)

    return rewritten(graph, rewrite)
