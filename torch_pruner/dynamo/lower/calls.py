"""What goes through a captured graph when it runs, and how it is called."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch

RuntimeValue: TypeAlias = (
    torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | int | float | str | None
)
"""An argument or a result of a graph. Symbols are there while it is compiled, not when it runs."""

BoxedCall: TypeAlias = Callable[[list[RuntimeValue]], list[RuntimeValue]]
"""A whole graph as AOTAutograd calls it: it empties the list that it is given."""

StepCall: TypeAlias = Callable[[Sequence[RuntimeValue]], Sequence[RuntimeValue]]
"""A part of a graph: it leaves what it is given alone."""

DynamoCall: TypeAlias = Callable[..., Sequence[RuntimeValue]]
"""A whole graph as Dynamo calls it: each input is an argument."""

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

Item = TypeVar("Item")


def picker(indices: Sequence[int]) -> Callable[[Sequence[Item]], Sequence[Item]]:
    """A function from a sequence to its items at ``indices``, without a frame of Python's."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    # An item getter of one index gives no sequence; a slice does.
    first = indices[0] if indices else 0
    return operator.itemgetter(slice(first, first + len(indices)))


def forwarded(attribute: str) -> property:
    """The ``__call__`` of a class whose instances do what their ``attribute`` does.

    The interpreter looks ``__call__`` up on the class, as it does any property, and calls what it
    gets: no frame of Python's lies in between, however often graphs are called.
    """
    return property(operator.attrgetter(attribute))
