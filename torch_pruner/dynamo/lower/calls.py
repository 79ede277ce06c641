"""What goes through a captured graph when it runs, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

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
