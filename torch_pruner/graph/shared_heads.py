"""How many neighbouring heads of attention share keys and values, as their views tell."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.graph.strided import offsets, only_viewed

if TYPE_CHECKING:
    from torch_pruner.graph.attention import Attention
    from torch_pruner.graph.ir import Graph


def heads_together(graph: Graph, att: Attention) -> int:
    """Neighbouring groups that read the same keys and the same values; it divides the groups.

    1 where keys or values are more than views of an input.
    """
    keys, values = graph.nodes[att.scores].inputs[1], graph.nodes[att.out].inputs[1]
    if not (only_viewed(graph, keys) and only_viewed(graph, values)):
        return 1
    return math.gcd(_together(graph, keys, att.groups), _together(graph, values, att.groups))


def heads_of_a_block(graph: Graph, att: Attention, most_rows: int) -> list[int]:
    """How many heads of the same keys a block of so many rows may have; causal ones each have keys
    of their own to end with."""
    together = 1 if att.causal else heads_together(graph, att)
    most = max(1, most_rows // att.queries)
    return [n for n in range(1, min(together, most) + 1) if together % n == 0]


def _together(graph: Graph, node: int, groups: int) -> int:
    """Neighbouring groups for which the node is the same."""
    batch = graph.nodes[node].shape[:-2]
    index = np.unravel_index(np.arange(groups), batch) if batch else ()
    zero = np.zeros(groups, np.int64)
    places = offsets(graph, node, (*index, zero, zero))
    run = 1
    for many in range(2, groups + 1):
        if groups % many == 0 and (places.reshape(-1, many) == places[::many, None]).all():
            run = many
    return run
