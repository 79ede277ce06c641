"""Gradients of the weights of depthwise convolutions, as backward graphs have them.

They are lowered to convolutions in as many groups as there are channels, whose images are the
channels, whose input channels the images, and whose kernel is as large as an image of the result's
gradient (``dynamo.lower.aten.contractions``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.strided import strided

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph, Shape


@dataclass(frozen=True, slots=True)
class DepthwiseGradient:
    """``out[c, t] = sum over n, p of x[n, c, t * stride + p * dilation - lo] * grad[n, c, p]``.

    ``t``: taps, by spatial dimension; ``p``: positions of the convolution's result. ``stride`` and
    ``dilation`` are those of ``con.conv``, and the other one each of the convolution.
    """

    con: Contraction
    x: int  # node position of the convolution's input as (1, channels, images, *space)
    images: int
    channels: int

    @property
    def taps(self) -> Shape:
        return self.con.m[1:]

    @property
    def positions(self) -> Shape:
        """Spatial extents of the result."""
        return self.con.k[: len(self.taps)]


def gradient_of(graph: Graph) -> DepthwiseGradient | None:
    """What the graph's contraction is the gradient of; None if it is another one, or if channels do
    not lie next to each other."""
    con = contraction_of(graph)
    if con.conv is None or con.m[0] != 1 or con.acc_dtype != "float32":
        return None
    if con.form == "conv" and con.groups > 1 and con.n == 1 and con.k[-1] > 1:
        images, channels = con.k[-1], con.groups
        split = graph.nodes[con.a].inputs
        x = split[0] if graph.nodes[con.a].op == "reshape" else con.a
        if graph.nodes[x].shape[:3] != (1, channels, images):
            return None
    elif con.form == "depthwise" and math.prod(con.m) <= con.depth:
        images, channels, x = 1, con.n, con.a
    else:
        return None
    if constant_operand(graph, con) is not None:
        return None
    first, second = strided(graph, x), strided(graph, con.b)
    if first is None or second is None or (first.strides[1], second.strides[0]) != (1, 1):
        return None
    return DepthwiseGradient(con, x, images, channels)
