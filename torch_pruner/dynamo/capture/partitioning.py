"""Where a joint graph of forward and backward is cut: torch's way, with one thing settled before.

What the backward needs again of the forward is kept or computed once more, whichever torch finds
cheaper. Computed once more, by another kernel or by eager, it may have other last digits. That
matters where it is compared for equality: gradients of ``amax``, ``amin`` and ``median`` go where a
value equals the result, and are NaN where none does. So what they compare is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

aten = torch.ops.aten

_EXACT = (aten.eq.Tensor, aten.ne.Tensor)
_SAME = (aten.alias, aten.detach, aten.clone, aten.reshape, aten._unsafe_view)  # beside views
_TANGENTS = "tangents"  # how AOTAutograd's names of what comes from outside to a backward begin


def partition(
    joint: fx.GraphModule, joint_inputs: Sequence[object], **how: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph: a partition function for AOTAutograd."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    keep_compared(joint)
    return min_cut_rematerialization_partition(joint, joint_inputs, **how)


def keep_compared(joint: fx.GraphModule) -> None:
    """Marks what the forward computes and the backward may compare, for torch's partitioner.

    Not what a user has said is to be computed again (``torch.utils.checkpoint``): there all of it
    is.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    late: set[fx.Node] = set()  # what only the backward can compute
    for node in joint.graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith(_TANGENTS)
        if tangent or any(a in late for a in node.all_input_nodes):
            late.add(node)
        elif node.target in _EXACT:
            for operand in filter(_is_computed, map(_viewed, node.all_input_nodes)):
                operand.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _is_computed(node: fx.Node) -> bool:
    """Whether a value has last digits that may differ."""
    value = node.meta.get("val")
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return node.op == "call_function" and floats


def _viewed(node: fx.Node) -> fx.Node:
    """What a value is, or is another view of."""
    while isinstance(op := node.target, torch._ops.OpOverload):
        if not (op.is_view or op.overloadpacket in _SAME):
            break
        node = node.all_input_nodes[0]
    return node
