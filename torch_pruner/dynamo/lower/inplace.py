"""Which updates of an input may write into it: a token must not copy the key/value cache.

AOTAutograd hands over a functional graph: ``cache.index_copy_(...)`` becomes ``index_copy``, which
copies the whole cache, and at the end its result is copied back. An update whose old value nobody
else reads may write into the input itself; whoever copies back (``run/written_back.py``, or torch)
finds that source and destination are the same tensor and does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.fx.node import Argument, Target

__all__ = [
    "IN_PLACE",
    "UPDATES",
    "updates_in_place",
    "without_copies",
    "writes_as_results",
    "written_by_eager",
]

aten = torch.ops.aten

# Operators that may hand on their operand's memory though their schema does not say so.
_SILENT = frozenset((aten._unsafe_view.default, aten.reshape.default, aten.contiguous.default))

_PARTS = frozenset((aten.slice.Tensor, aten.select.int, aten.view.default))

# Writing the same values twice changes nothing, so the first-call check may run them again.
IN_PLACE: Mapping[Target, torch._ops.OpOverload] = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
}


# What kernels may do in place: a slice has no operator of eager's that does.
UPDATES = frozenset((*IN_PLACE, aten.slice_scatter.default, aten.select_scatter.default))


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
        if not isinstance(node, fx.Node) or node.target not in UPDATES:
            continue
        cache: fx.Node = placeholders[position]
        if node.args[0] is not cache or _accumulates(node):
            continue
        if any(user is not node and not _overwritten(user) for user in cache.users):
            continue
        if node.all_input_nodes.count(cache) > 1 or sum(r is node for r in results) > 1:
            continue
        same = cache.meta["val"].stride() == node.meta["val"].stride()
        if same and not _aliased(node, output):
            found.add(node)
    return frozenset(found)


def writes_as_results(gm: fx.GraphModule) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """``gm`` without the copies into inputs at its end: their sources are its first results.

    With the positions of these inputs. So an ATen graph stays one that can be run twice.
    """
    inputs = {node: k for k, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    copies = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    writes = {node: inputs[node.args[0]] for node in copies if node.args[0] in inputs}
    if not writes:
        return gm, ()
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in writes:
            new[node] = new[node.args[1]]
        elif node.op != "output":
            new[node] = graph.node_copy(node, lambda n: new[n])
    results = cast("Sequence[Argument]", gm.graph.output_node().args[0])
    first = [new[node] for node in writes]
    graph.output((*first, *(new[r] if isinstance(r, fx.Node) else r for r in results)))
    return fx.GraphModule(gm, graph), tuple(writes.values())


def written_by_eager(gm: fx.GraphModule) -> frozenset[int]:
    """Positions of the inputs that a step of eager's writes into."""
    inputs = list(gm.graph.find_nodes(op="placeholder"))
    writers = [n for n in gm.graph.nodes if n.target in IN_PLACE.values()]
    return frozenset(inputs.index(n.args[0]) for n in writers)


def without_copies(gm: fx.GraphModule, mutated: Sequence[int]) -> fx.GraphModule:
    """``gm`` whose outputs that replace inputs are not copied before torch copies them.

    ``cache.copy_(new)`` becomes a ``copy``, of which torch then copies the result into the cache;
    ``new`` does as well, unless it shares memory with an input. ``mutated`` is as above.
    """
    results = list(cast("Sequence[Argument]", gm.graph.output_node().args[0]))
    sources = [_copied(r) if k < len(mutated) else r for k, r in enumerate(results)]
    if all(source is result for source, result in zip(sources, results, strict=True)):
        return gm
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(gm.graph, copies)
    graph.output(tuple(copies[s] if isinstance(s, fx.Node) else s for s in sources))
    return fx.GraphModule(gm, graph)


def _copied(result: Argument) -> Argument:
    """What a copy that an output is was made of, if that will do."""
    if not isinstance(result, fx.Node) or result.target is not aten.copy.default:
        return result
    source = result.args[1]
    if not isinstance(source, fx.Node) or source.op != "call_function":
        return result
    mine, given = result.meta["val"], source.meta["val"]
    same = mine.shape == given.shape and mine.dtype == given.dtype
    return source if same and not _may_alias(source.target) else result


def _overwritten(view: fx.Node) -> bool:
    """Whether nobody reads the elements of a view: a slice that is assigned to is copied over."""
    if view.target not in _PARTS or not view.users:
        return False
    return all(
        (user.target is aten.copy.default and user.args[1] is not view) or _overwritten(user)
        for user in view.users
    )


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
