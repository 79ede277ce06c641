"""Which nodes of an fx graph can be imported, as far as it does not depend on the operator.

In: a node with fake tensors in ``meta["val"]``. Out: nothing, or ``Unsupported`` with the reason.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import has_free_symbols, statically_known_true

from torch_pruner.dynamo.lower.aten import RejectionKind, Unsupported, dtype_name, rule_of

if TYPE_CHECKING:
    from collections.abc import Collection

_RANDOM = "random numbers are drawn by eager, so that they equal eager's"
_MANY = 1 << 16  # numbers: fewer are copied in the time that one more region takes
_DYNAMIC = "a dimension is symbolic; compile with dynamic=False to have it compiled"


def output_fakes(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """The fake tensors a node results in; None for an output that is not a tensor."""
    fake = node.meta["val"]
    fakes = fake if isinstance(fake, (tuple, list)) else (fake,)
    return tuple(f if isinstance(f, torch.Tensor) else None for f in fakes)


def used_outputs(node: fx.Node) -> frozenset[int]:
    """Which outputs of a node somebody reads."""
    if not isinstance(node.meta["val"], (tuple, list)):
        return frozenset((0,))
    found = set()
    for user in node.users:
        if user.target is operator.getitem and isinstance(user.args[1], int):
            found.add(user.args[1])
        else:
            return frozenset(range(len(node.meta["val"])))
    return frozenset(found)


def check(node: fx.Node, dtypes: Collection[str], device: torch.device) -> None:
    """What holds for every operator: known, pure, static, dense, of these dtypes, on ``device``."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        raise Unsupported(RejectionKind.UNSUPPORTED_OP, "not an ATen operator")
    if op._schema.is_mutable:
        raise Unsupported(RejectionKind.MUTATION, "writes to one of its arguments")
    if rule_of(op) is None:
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise Unsupported(RejectionKind.RANDOM, _RANDOM)
        raise Unsupported(RejectionKind.UNSUPPORTED_OP, "no rule for this operator")
    if "val" not in node.meta:
        raise Unsupported(RejectionKind.ARGUMENTS, "the captured node has no fake tensor")
    if not node.all_input_nodes and _takes_tensors(op):
        raise Unsupported(RejectionKind.ARGUMENTS, "Python numbers in place of all tensors")
    used = used_outputs(node)
    fakes = [f for i, f in enumerate(output_fakes(node)) if i in used]
    if any(f is None for f in fakes):
        raise Unsupported(RejectionKind.ARGUMENTS, "a result that is not a tensor")
    for arg in node.all_input_nodes:
        value = arg.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Unsupported(RejectionKind.DYNAMIC_SHAPE, _DYNAMIC)
        if not isinstance(value, (torch.Tensor, tuple, list)):
            raise Unsupported(RejectionKind.ARGUMENTS, f"argument {arg.name} is not a tensor")
        if isinstance(value, torch.Tensor) and not _ignored(op, value):
            fakes.append(value)
    for fake in fakes:
        assert fake is not None
        _check_tensor(fake, dtypes, device)


def turns(node: fx.Node) -> bool:
    """Whether a node copies what lies along one axis to lie along another one.

    Eager reads or writes it number by number, lines apart. False of few numbers, and where symbols
    decide, which asking would fix.
    """
    if node.target is not torch.ops.aten.clone.default:
        return False
    made, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    if has_free_symbols((made, source)) or made.numel() < _MANY:
        return False
    ends = [d for t in (made, source) for d in _innermost(t)]
    return len(ends) == 2 and ends[0] != ends[1]


def _innermost(fake: torch.Tensor) -> list[int]:
    """The axis along which neighbours in memory lie, if there is one."""
    found = [d for d in range(fake.dim()) if fake.shape[d] != 1 and fake.stride(d) == 1]
    return found[:1]


def _takes_tensors(op: torch._ops.OpOverload) -> bool:
    """Whether tensors are what an operator computes from; numbers may stand for them."""
    return any(isinstance(a.type, torch.TensorType) for a in op._schema.arguments)


def _ignored(op: torch._ops.OpOverload, arg: torch.Tensor) -> bool:
    """Concatenation leaves out tensors without elements, such as a cache that is still empty, or
    the part of a head that no rotary embedding turns."""
    # A size that depends on values is no number yet, and asking would fail.
    empty = (statically_known_true(extent == 0) for extent in arg.shape)
    return op is torch.ops.aten.cat.default and any(empty)


def _check_tensor(fake: torch.Tensor, dtypes: Collection[str], device: torch.device) -> None:
    if not dtypes:
        raise Unsupported(RejectionKind.DEVICE, f"no code generator for {fake.device.type}")
    if fake.layout != torch.strided:
        raise Unsupported(RejectionKind.LAYOUT, f"{fake.layout} tensors are not compiled")
    if fake.is_quantized or dtype_name(fake.dtype) not in dtypes:
        name = str(fake.dtype).removeprefix("torch.")
        raise Unsupported(RejectionKind.DTYPE, f"{name} tensors are not compiled on this device")
    if any(isinstance(d, torch.SymInt) for d in fake.shape):
        raise Unsupported(RejectionKind.DYNAMIC_SHAPE, _DYNAMIC)
    if fake.numel() == 0:
        raise Unsupported(RejectionKind.EMPTY, "a tensor without elements")
    if fake.device != device:
        why = f"a tensor of {fake.device} in a graph that is compiled for {device}"
        raise Unsupported(RejectionKind.DEVICE, why)
