"""Attention in half precision that torch broke up in float32, put together again.

Where torch captures ``scaled_dot_product_attention`` with a mask for a GPU, it takes the operator's
mathematical form: operands cast to float32, two products, a softmax. Eager runs a fused kernel of
half-precision operands there, and so do we: tensor cores multiply what the casts hide, and what the
products give never goes to memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Collection

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)
_SHAPES = (aten.view.default, aten.expand.default, aten._unsafe_view.default, aten.reshape.default)
_SCALED = (aten.mul.Scalar, aten.mul.Tensor)


class _Found(NamedTuple):
    """An attention: its operands, all with four dimensions, and what scales the scores."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    scale: float


def put_together(gm: fx.GraphModule) -> fx.GraphModule:
    """``gm``, or a copy in which attentions of half precision are one operator each."""
    found = {node: a for node in gm.graph.nodes if (a := _attention(node)) is not None}
    if not found:
        return gm
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in found:
            of = found[node]
            operands = [copies[n] if n is not None else None for n in of[:4]]
            heads = {n.meta["val"].shape[1] for n in of[:3]}
            copies[node] = graph.call_function(
                aten.scaled_dot_product_attention.default,
                (*operands, 0.0, False),
                {"scale": of.scale, "enable_gqa": len(heads) > 1},
            )
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    for node in reversed(list(graph.nodes)):  # what only the parts have read
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return fx.GraphModule(gm, graph)


def _attention(node: fx.Node) -> _Found | None:
    """What the cast ``node`` is the result of, if that is attention that nobody else looks into."""
    if not _casts(node, _HALVES) or (out := _product(node.args[0])) is None:
        return None
    weights = _through(out.args[0])
    value = _cast_from(_repeats(_through(out.args[1])), node)
    if weights is None or weights.target is not aten._safe_softmax.default or value is None:
        return None
    axis = weights.args[1] if len(weights.args) > 1 else None
    if axis not in (-1, 3) or len(weights.args) > 2 or _rank(weights) != 4:
        return None
    scores, mask = _unmasked(weights.args[0])
    if scores is None or (product := _product(scores)) is None:
        return None
    query, by_query = _scaled(_through(product.args[0]))
    key, by_key = _scaled(_through(product.args[1]))
    if key is not None and key.target is aten.permute.default:
        if list(key.args[1]) != [0, 1, 3, 2]:  # type: ignore[arg-type]
            return None
        key, more = _scaled(_own(key.args[0]))
        by_key *= more
    elif key is not None:
        return None
    query, key = _cast_from(query, node), _cast_from(_repeats(key), node)
    if query is None or key is None or key.meta["val"].shape[1] != value.meta["val"].shape[1]:
        return None
    if mask is not None and mask.meta["val"].dtype != node.meta["val"].dtype:
        return None  # eager's operator would refuse it
    return _Found(query, key, value, mask, by_query * by_key)


def _own(node: object) -> fx.Node | None:
    """A node that one other reads: what is put together does not make it."""
    if not isinstance(node, fx.Node):
        return None
    readers = [user for user in node.users if user.users or user.op == "output"]
    return node if len(readers) == 1 else None


def _rank(node: fx.Node) -> int:
    return len(node.meta["val"].shape)


def _through(node: object) -> fx.Node | None:
    """What lies before views of three dimensions: a node of four."""
    found = _own(node)
    while found is not None and found.target in _SHAPES and _rank(found) == 3:
        found = _own(found.args[0])
    while found is not None and found.target is aten.expand.default and _keeps(found):
        found = _own(found.args[0])
    return found if found is not None and _rank(found) == 4 else None


def _keeps(node: fx.Node) -> bool:
    """Whether an expansion leaves a shape as it is."""
    before: fx.Node = node.args[0]  # type: ignore[assignment]
    return bool(before.meta["val"].shape == node.meta["val"].shape)


def _repeats(node: fx.Node | None) -> fx.Node | None:
    """Heads that one node repeats for those of the queries, or the node itself."""
    found = node
    for target in (*_SHAPES[:1], aten.clone.default, aten.expand.default, aten.unsqueeze.default):
        if found is None or found.target is not target:
            return node
        one_by_one = target is not aten.unsqueeze.default or found.args[1] == 2
        found = _own(found.args[0]) if one_by_one else None
    return found if found is not None and _rank(found) == 4 else node


def _product(node: object) -> fx.Node | None:
    found = _own(node)
    while found is not None and found.target in _SHAPES:
        found = _own(found.args[0])
    return found if found is not None and found.target is aten.bmm.default else None


def _casts(node: fx.Node, dtypes: Collection[torch.dtype]) -> bool:
    return node.target is aten._to_copy.default and node.kwargs.get("dtype") in dtypes


def _cast_from(node: fx.Node | None, like: fx.Node) -> fx.Node | None:
    """What a cast to float32 was made of: four dimensions, and the dtype of ``like``."""
    if node is None or not _casts(node, (torch.float32,)):
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or _rank(source) != 4:
        return None
    return source if source.meta["val"].dtype == like.meta["val"].dtype else None


def _scaled(node: fx.Node | None) -> tuple[fx.Node | None, float]:
    """What a node is a multiple of, and the factor."""
    if node is not None and node.target in _SCALED and isinstance(node.args[1], (int, float)):
        return _own(node.args[0]), float(node.args[1])
    return node, 1.0


def _unmasked(node: object) -> tuple[fx.Node | None, fx.Node | None]:
    """Scores, and the mask that is added to them. (None, None): it is nothing of the kind."""
    found = _own(node)
    if found is None or found.target is not aten.add.Tensor:
        return found, None
    scores, mask = found.args
    if "alpha" in found.kwargs or not isinstance(mask, fx.Node):
        return None, None
    shape = mask.meta["val"].shape
    return (_own(scores), mask) if len(shape) in (2, 4) else (None, None)
