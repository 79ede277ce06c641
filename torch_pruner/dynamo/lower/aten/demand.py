"""What an operator demands of its operands' values, and eager's error where they do not meet it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["KINDS", "Demand", "Range"]


@dataclass(frozen=True, slots=True)
class Range:
    """``low <= value < high``, of what the operator of this ``kind`` (a key of ``KINDS``) uses.

    An index is along ``axis`` of a tensor of ``rank`` dimensions.
    """

    low: int
    high: int
    kind: str
    axis: int = 0
    rank: int = 1

    def fail(self, values: torch.Tensor) -> None:
        """Raise what eager raises for ``values``, some of which lie outside."""
        shape = [1] * self.rank
        shape[self.axis] = self.high
        KINDS[self.kind](torch.zeros(()).expand(shape), self.axis, values)
        raise IndexError(f"index out of range: needs {self.low} <= index < {self.high}")


@dataclass(frozen=True, slots=True)
class Demand:
    """All elements of node ``value``, integers, have to be in ``range``."""

    value: int
    range: Range


def _gather(x: torch.Tensor, axis: int, values: torch.Tensor) -> torch.Tensor:
    shape = [1] * x.dim()
    shape[axis] = -1
    return torch.gather(x, axis, values.reshape(shape).long())


def _index(x: torch.Tensor, axis: int, values: torch.Tensor) -> torch.Tensor:
    return x[(*(torch.zeros_like(values) for _ in range(axis)), values)]


def _index_copy(x: torch.Tensor, axis: int, values: torch.Tensor) -> torch.Tensor:
    positions = values.flatten().long()
    shape = [len(positions) if k == axis else n for k, n in enumerate(x.shape)]
    return torch.index_copy(x, axis, positions, x.new_zeros(shape))


def _index_add(x: torch.Tensor, axis: int, values: torch.Tensor) -> torch.Tensor:
    positions = values.flatten()
    shape = [len(positions) if k == axis else n for k, n in enumerate(x.shape)]
    return torch.index_add(x, axis, positions, x.new_zeros(shape))


def _scatter_add(x: torch.Tensor, axis: int, values: torch.Tensor) -> torch.Tensor:
    positions = values.flatten()
    shape = [len(positions) if k == axis else 1 for k in range(x.dim())]
    where = positions.reshape(shape)
    return torch.scatter_add(x, axis, where, x.new_zeros(shape))


def _index_put(x: torch.Tensor, axis: int, values: torch.Tensor) -> torch.Tensor:
    indices = (*(torch.zeros_like(values) for _ in range(axis)), values)
    return torch.index_put(x, indices, x.new_zeros(()))


def _loss(x: torch.Tensor, axis: int, values: torch.Tensor) -> torch.Tensor:
    classes = values.flatten().long()
    logits = torch.zeros(classes.shape[0], x.shape[axis])
    return torch.nn.functional.nll_loss(logits, classes, ignore_index=0)


def _divide(_x: torch.Tensor, _axis: int, values: torch.Tensor) -> torch.Tensor:
    return values // torch.zeros_like(values)


# What eager does with such values: it raises, in its own words.
KINDS: Mapping[str, Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda x, _axis, values: torch.embedding(x.reshape(-1, 1), values),
    "index_select": lambda x, axis, values: torch.index_select(x, axis, values.flatten()),
    "gather": _gather,
    "index": _index,
    "index_copy": _index_copy,
    "index_add": _index_add,
    "scatter_add": _scatter_add,
    "index_put": _index_put,
    "nll_loss": _loss,
    "division": _divide,
}
