"""How values lie that a forward graph keeps for its backward: as kernels want them.

Nobody but the backward sees them, so they need not have eager's strides. What convolutions make or
read lies channels last inside of both graphs; kept in any other order it would be turned twice.
AOTAutograd asks for the strides of what a compiled forward returns (``TracingContext``) and hands
values with these strides to whoever compiles the backward.

Eager's operators must not see them so: torch's gradients of attention and of convolutions in groups
trust that what the forward kept lies as eager keeps it, and are wrong without a word where it does
not (torch 2.13, on CPUs). So a backward graph gives them copies in eager's order. Kernels read what
is copied.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, cast

import torch
from torch import fx

from torch_pruner.dynamo.lower.tensors import dense_strides
from torch_pruner.graph.layout import channels_last

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.fx.node import Argument

    from torch_pruner.dynamo.lower.calls import RuntimeValue

aten = torch.ops.aten

_DATA = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""Of a convolution how many arguments in front are images, or gradients of such."""


_PARTS = (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default)
"""Views that leave axes where they are."""


def keep_channels_last(
    outputs: Sequence[Argument], loose: Collection[int], made: Sequence[fx.Node]
) -> None:
    """Gives nodes among ``outputs`` other strides (in ``meta``), if they are ``made`` by kernels
    alone and for kernels alone.

    ``loose``: positions of outputs that no one but the backward reads.
    """
    seen = [o for k, o in enumerate(outputs) if k not in loose]
    kept = {o for k, o in enumerate(outputs) if k in loose and isinstance(o, fx.Node)}
    if not kept:
        return
    around = _around_convolutions(next(iter(kept)).graph)
    for node in made:
        if node in kept and node in around and node not in seen:
            node.meta["val"] = _channels_last(node.meta["val"])


def lie_alike(
    outputs: Sequence[Argument], changed: Sequence[Argument], loose: Collection[int]
) -> None:
    """Gives outputs of a graph at the positions ``loose`` the strides that those of a rewritten
    copy of it got, since a caller asks the graph itself (``report``)."""
    for k in loose:
        ours, theirs = outputs[k], changed[k]
        if isinstance(ours, fx.Node) and isinstance(theirs, fx.Node):
            ours.meta["val"] = theirs.meta["val"]


def keep_apart(gm: fx.GraphModule, loose: Collection[int], renewed: Collection[int]) -> None:
    """Has a forward graph keep copies of inputs that get new values before the backward reads them.

    Eager keeps what it has computed from them; torch's partitioner may rather keep the input, and
    then refuses to go backward (torch 2.13). ``loose`` as above, ``renewed``: positions of inputs.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    written = {inputs[k] for k in renewed}
    output = gm.graph.output_node()
    results = list(cast("Sequence[Argument]", output.args[0]))
    for k in loose:
        kept = results[k]
        if isinstance(kept, fx.Node) and kept in written:
            with gm.graph.inserting_before(output):
                results[k] = gm.graph.call_function(aten.clone.default, (kept,))
            cast("fx.Node", results[k]).meta["val"] = kept.meta["val"]
    if results != list(cast("Sequence[Argument]", output.args[0])):
        output.args = (tuple(results),)
        gm.recompile()


def keep_sources(gm: fx.GraphModule, loose: Collection[int]) -> None:
    """Has a forward graph keep values instead of copies of them.

    An operator in place whose gradient reads what it overwrites (``SiLU(inplace=True)``) keeps a
    copy; without side effects nothing is overwritten. ``loose`` as above. What a caller sees, or
    gave, is not kept in place of a copy: the caller may write to it.
    """
    output = gm.graph.output_node()
    results = list(cast("Sequence[Argument]", output.args[0]))
    seen = {_base(o) for k, o in enumerate(results) if k not in loose and isinstance(o, fx.Node)}
    for k in loose:
        kept = results[k]
        if not isinstance(kept, fx.Node) or kept.target is not aten.clone.default:
            continue
        source = cast("fx.Node", kept.args[0])
        base = _base(source)
        if base is not None and base not in seen and _lie_alike(kept, source):
            results[k] = source
    if results != list(cast("Sequence[Argument]", output.args[0])):
        output.args = (tuple(results),)
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _base(node: fx.Node) -> fx.Node | None:
    """The operator whose memory a value lies in, perhaps by views, or by what may be one
    (``contiguous``); None: an input's, or nobody knows."""
    while node.op == "call_function":
        made = node.all_input_nodes[0] if node.target is operator.getitem else node
        if not isinstance(made.target, torch._ops.OpOverload):
            return None
        aliases = any(r.alias_info is not None for r in made.target._schema.returns)
        if not aliases and made.target is not aten._unsafe_view.default:
            return node
        node = made.all_input_nodes[0]
    return None


def _lie_alike(one: fx.Node, other: fx.Node) -> bool:
    return _strides(one.meta.get("val")) == _strides(other.meta.get("val")) is not None


def report(outputs: Sequence[Argument]) -> None:
    """Tell AOTAutograd, if it asks, how ``outputs`` lie."""
    context = torch._guards.TracingContext.try_get()
    asked = getattr(context, "output_strides", None)
    values = [o.meta["val"] if isinstance(o, fx.Node) else None for o in outputs]
    if asked is not None and not asked:
        asked.extend(_strides(value) for value in values)


def adopt(gm: fx.GraphModule, example_inputs: Sequence[RuntimeValue]) -> None:
    """Placeholders of a backward graph as they will come, and not as eager would have kept them.

    Operators get copies that lie as those would.
    """
    found = list(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False))
    changed = False
    for node, given in found:
        known = node.meta.get("val")
        if not isinstance(known, torch.Tensor) or not isinstance(given, torch.Tensor):
            continue
        if _strides(known) != _strides(given):
            node.meta["val"] = given
            if known.is_contiguous():
                _copied(node, known)
                changed = True
    if changed:
        gm.recompile()


def _copied(node: fx.Node, known: torch.Tensor) -> None:
    """Gives a copy that lies as ``known`` does to all users of a value that lies otherwise."""
    users = set(node.users)
    first = next((n for n in node.graph.nodes if n in users), None)
    if first is None:
        return
    with node.graph.inserting_before(first):
        how: dict[str, Argument] = {"memory_format": torch.contiguous_format}
        copy = node.graph.call_function(aten.clone.default, (node,), how)
    copy.meta["val"] = known
    for user in users:
        user.replace_input_with(node, copy)


def _strides(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    strides = value.stride()
    return strides if all(type(s) is int for s in strides) else None


def _around_convolutions(graph: fx.Graph) -> set[fx.Node]:
    """What convolutions read but weights, their results, and what is computed from these without a
    change of dimensions."""
    operands: set[fx.Node] = set()
    found: dict[fx.Node, int] = {}  # and how many dimensions the value has, or the tuple's first
    for node in graph.nodes:
        value = node.meta.get("val")
        first = value[0] if isinstance(value, (tuple, list)) and value else value
        if node.op != "call_function" or not isinstance(first, torch.Tensor) or first.dim() < 3:
            continue
        near = any(found.get(a) == first.dim() for a in node.all_input_nodes)
        view = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
        view = view and node.target not in _PARTS
        if node.target in _DATA:
            data = node.args[: _DATA[node.target]]
            operands.update(a for a in data if isinstance(a, fx.Node))
        if node.target in _DATA or (near and not view):
            found[node] = first.dim()
    values = ((node, node.meta.get("val")) for node in (*found, *operands))
    return {node for node, v in values if isinstance(v, torch.Tensor) and v.dim() >= 3}


def _channels_last(value: torch.Tensor) -> torch.Tensor:
    """The same fake tensor in another order, if it lies in torch's default one now."""
    shape = value.shape
    fixed = all(type(d) is int for d in shape)
    if not fixed or not value.is_contiguous():
        return value
    return value.new_empty_strided(shape, dense_strides(shape, channels_last(len(shape))))
