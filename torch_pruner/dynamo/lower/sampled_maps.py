"""Maps that are read at computed positions, as they lay before a copy took their channels apart.

Deformable attention makes a map of each head from rows of all heads. For one image that is a view;
for several, torch copies the rows so that channels lie apart. Whatever reads a position wants all
of its channels, and kernels read what was copied.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import has_free_symbols

from torch_pruner.dynamo.lower.tensors import dense_strides
from torch_pruner.graph.layout import channels_last

if TYPE_CHECKING:
    from torch.fx.node import Argument

aten = torch.ops.aten

_SAMPLERS = (aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def with_channels_together(gm: fx.GraphModule) -> fx.GraphModule:
    """``gm``, or a copy in which such maps have the channels of a position beside each other."""
    found = {n for n in gm.graph.nodes if n.target in _SAMPLERS and _taken_apart(n.args[0])}
    if not found:
        return gm
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        new = copies[node] = graph.node_copy(node, lambda n: copies[n])
        if node in found:
            value = node.args[0].meta["val"]
            how: dict[str, Argument] = {"memory_format": _FORMATS[value.dim()]}
            with graph.inserting_before(new):
                together = graph.call_function(aten.clone.default, (new.args[0],), how)
            strides = dense_strides(value.shape, channels_last(value.dim()))
            together.meta["val"] = value.new_empty_strided(value.shape, strides)
            new.update_arg(0, together)
    return fx.GraphModule(gm, graph)


def _taken_apart(node: fx.Node) -> bool:
    """Whether a copy made this from channels that lay beside each other."""
    value, copy = node.meta["val"], node
    while copy.target in _VIEWS:
        copy = copy.all_input_nodes[0]
    if copy.target is not aten.clone.default or value.dtype is not torch.float32:
        return False  # of other dtypes eager's operator reads them, as they are
    copied, source = copy.meta["val"], copy.all_input_nodes[0].meta["val"]
    if any(has_free_symbols(v) for v in (value, copied, source)):
        return False
    if not value.is_contiguous() or not copied.is_contiguous():
        return False
    apart = math.prod(value.shape[2:])  # from one channel to the next
    axes = zip(source.shape, source.stride(), copied.stride(), strict=True)
    return any(
        lay == 1 and lies == apart and size % value.shape[1] == 0 for size, lay, lies in axes
    )
