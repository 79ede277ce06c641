"""Which updates of an input may write into it: a token must not copy the key/value cache.

AOTAutograd hands over a functional graph: ``cache.index_copy_(...)`` becomes ``index_copy``, which
copies the whole cache, and afterwards its result is copied back. An update whose old value nobody
else reads may write into the input itself; torch's copying back finds that source and destination
are the same tensor and does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.fx.node import Argument, Target

__all__ = ["IN_PLACE", "updates_in_place"]

aten = torch.ops.aten

# Operators that may hand on their operand's memory though their schema does not say so.
_SILENT = frozenset((aten._unsafe_view.default, aten.reshape.default, aten.contiguous.default))

# Writing the same values twice changes nothing, so the first-call check may run them again.
IN_PLACE: Mapping[Target, torch._ops.OpOverload] = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
}


def updates_in_place(gm: fx.GraphModule, mutated: Sequence[int]) -> frozenset[fx.Node]:
    """Nodes of ``gm`` that may write into their first operand, a placeholder.

    ``mutated[k]`` is the position of the input whose new value is the graph's output ``k``.
    """
    placeholders: Sequence[fx.Node] = list(gm.graph.find_nodes(op="placeholder"))
    output = gm.graph.output_node()
    results = cast("Sequence[Argument]", output.args[0])
    found = set()
    for k, position in enumerate(mutated):
        node = results[k]
        if not isinstance(node, fx.Node) or node.target not in IN_PLACE:
            continue
        cache: fx.Node = placeholders[position]
        if node.args[0] is not cache or set(cache.users) != {node} or _accumulates(node):
            continue
        if node.all_input_nodes.count(cache) > 1 or sum(r is node for r in results) > 1:
            continue
        same = cache.meta["val"].stride() == node.meta["val"].stride()
        if same and not _aliased(node, output):
            found.add(node)
    return frozenset(found)


def _accumulates(node: fx.Node) -> bool:
    return node.target is aten.index_put.default and len(node.args) > 3 and bool(node.args[3])


def _aliased(node: fx.Node, output: fx.Node) -> bool:
    """Whether a view of ``node`` leaves the graph: it must not become a view of the input."""
    stack = [user for user in node.users if user is not output]
    while stack:
        user = stack.pop()
        if not _may_alias(user.target):
            continue
        if output in user.users:
            return True
        stack.extend(user.users)
    return False


def _may_alias(op: Target) -> bool:
    """Whether a result of ``op`` may share memory with an operand."""
    if not isinstance(op, torch._ops.OpOverload) or op in _SILENT:
        return True
    return any(a.alias_info for a in op._schema.arguments)
