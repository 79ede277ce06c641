"""Stages of an unscheduled TIR function: values by index, and when they get a loop of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from tvm import te

from torch_pruner.codegen.tir.builders import Expr, T

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.graph.ir import Node, Shape

Tensor = Any
Read: TypeAlias = (
    "Callable[..., Expr]"  # index expressions -> value expression; a tensor is one, too
)
Order: TypeAlias = "Shape | None"  # None for the order of the node's own axes
# (operator, operands, dtype of the result) -> value expression
Apply: TypeAlias = "Callable[[str, Sequence[Expr], str], Expr]"


def compute(node: Node, name: str, element: Read, order: Shape | None = None) -> Read:
    """A tensor of ``element`` at the node's indices, its axes stored in ``order``."""
    return tensor(node.shape, name, element, order)


def tensor(shape: Shape, name: str, element: Read, order: Shape | None) -> Read:
    if order is None or order == tuple(range(len(shape))):
        plain: Read = te.compute(shape, element, name=name)
        return plain
    back = [order.index(axis) for axis in range(len(order))]

    def stored(*index: Expr) -> Expr:
        return element(*(index[k] for k in back))

    made = te.compute(tuple(shape[axis] for axis in order), stored, name=name)
    return lambda *index: made(*(index[axis] for axis in order))


def inside(index: Sequence[Expr], shape: Sequence[int]) -> list[Expr]:
    conditions = []
    for i, extent in zip(index, shape, strict=True):
        conditions += [i >= 0, i < extent]
    return conditions


def guarded(conditions: Sequence[Expr], value: Expr, other: Expr) -> Expr:
    return T.if_then_else(T.all(*conditions), value, other) if conditions else value
