"""Which elements of a contraction's operands lie next to each other in memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.graph.ops import ITEMSIZE, OpKind
from torch_pruner.graph.strided import matrix_strides, strided

_PIECE = 16  # weights that lie together at least

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph


def columns_adjacent(graph: Graph, con: Contraction) -> bool:
    """Whether the second operand's columns lie next to each other in memory.

    Those of what is computed on the way are as close as its own dimensions say.
    """
    axis = {"matmul": -1, "conv": 0}.get(con.form)
    if axis is None:
        return False
    if con.form == "matmul":
        strides = matrix_strides(graph, con.b)
        return graph.nodes[con.b].kind is not OpKind.VIEW if strides is None else strides[1] == 1
    place = strided(graph, con.b)
    return place is not None and place.strides[axis] == 1


def rows_adjacent(graph: Graph, con: Contraction) -> bool:
    """Whether the first operand's rows, and not its reduction, lie next to each other in memory.

    A view that no strides describe is taken to be turned as a whole, as one with two axes in each
    of its own is.
    """
    node = graph.nodes[con.a]
    if con.form != "matmul" or node.kind is not OpKind.VIEW:
        return False
    strides = matrix_strides(graph, con.a)
    return strides is None or (strides[1] > 1 and strides[0] == 1)


def reduction_stride(graph: Graph, con: Contraction) -> int:
    """Bytes between positions of a reduction in the first operand; 0: unknown.

    Of a matmul, and of a convolution whose rows are neighbours (the gradient of weights).
    """
    size = ITEMSIZE[graph.nodes[con.a].dtype]
    if con.form == "conv":
        place = strided(graph, con.a)
        turned = place is not None and place.strides[0] == 1 and min(place.strides[1:]) > 1
        return place.strides[-1] * size if place is not None and turned else 0
    strides = matrix_strides(graph, con.a) if con.form == "matmul" else None
    return strides[1] * size if strides else 0


def columns_apart(spec: Graph, con: Contraction) -> bool:
    """Whether the second operand's neighbours along the reduction lie together, not its columns.

    So do those of keys, which a product with queries reads transposed.
    """
    if con.form != "matmul":
        return False
    strides = matrix_strides(spec, con.b)
    return strides is not None and strides[0] == 1 and strides[1] != 1


def packs_in_squares(spec: Graph, con: Contraction, lanes: int) -> bool:
    """Whether the second operand is packed by turning squares of vectors of ``lanes`` numbers.

    So it is where neighbours along the reduction lie together and columns do not, as in the weights
    of a layer, those of a 1x1 convolution among them.
    """
    if con.acc_dtype != "float32" or spec.nodes[con.b].dtype != "float32" or con.k[-1] < lanes:
        return False
    if lanes < 2 or lanes & (lanes - 1):
        return False
    if con.form == "matmul":
        return columns_apart(spec, con)
    place = strided(spec, con.b) if con.form == "conv" else None
    return place is not None and place.strides[1] == 1 and place.strides[0] != 1


def kernels_together(graph: Graph, con: Contraction) -> str:
    """How the weights of a convolution lie whose offsets are in one piece: an even number of
    channels of one group.

    "columns apart": each column has all channels, one after another; "columns beside": each channel
    has all columns (a transposed convolution's). Else "".
    """
    place = strided(graph, con.b) if con.conv is not None and con.groups == 1 else None
    shape = graph.nodes[con.b].shape
    if place is None or con.k[-1] % 2 or con.form not in ("conv", "conv_transpose"):
        return ""
    taps = math.prod(shape[2:])
    within = tuple(math.prod(shape[d + 1 :]) for d in range(2, len(shape)))
    # Of an extent of one any stride is right.
    lies = all(
        n == 1 or s == w for n, s, w in zip(shape[2:], place.strides[2:], within, strict=True)
    )
    if not lies or place.strides[1] != taps or taps * shape[1] < _PIECE:
        return ""
    return "columns apart" if con.form == "conv" else "columns beside"


def rows_together(spec: Graph, con: Contraction) -> bool:
    """Whether threads should read neighbouring rows of the first operand, whose columns are apart.

    So in a gradient of weights, whose first operand is read transposed, and in a convolution whose
    channels are apart: its rows are positions of the output.
    """
    if con.conv is None:
        return rows_adjacent(spec, con)
    place = strided(spec, con.a)
    return place is not None and place.strides[-1] == 1 and place.strides[1] != 1
