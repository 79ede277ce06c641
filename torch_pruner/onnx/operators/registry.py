"""The table of ONNX operators and what an implementation sees of a node.

An implementation takes the node and its inputs as torch tensors (None where one is left out) and
returns a tensor or a tuple of them. It works on real and on fake tensors alike. Whatever of an
input it needs as numbers (shapes, axes, limits) it asks the node for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor
Result = Any  # a tensor, or a tuple of tensors; a list for a sequence
Implementation = Callable[..., Result]

TABLE: dict[str, Implementation] = {}
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch stores them and computes little


class DataDependentError(Exception):
    """Numbers are needed that only a run with real inputs can tell."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """What an implementation is told of the node: operator, attributes, opset of the model."""

    op: str
    attrs: Mapping[str, Any]
    opset: int
    n_outputs: int
    numbers: Sequence[Callable[[], np.ndarray[Any, Any]] | None] = ()
    training: bool = False
    spend: Callable[[int], None] = lambda _: None  # for what takes many steps: how many
    afford: Callable[[int], None] = lambda _: None  # before an array is made: its bytes

    def attr(self, name: str, default: Any = None) -> Any:
        return self.attrs.get(name, default)

    def host(self, i: int) -> np.ndarray[Any, Any] | None:
        """Input ``i`` as numbers; None where it is left out.

        Raises:
            DataDependentError: It is computed from the model's inputs, which are not known yet.
        """
        read = self.numbers[i] if i < len(self.numbers) else None
        return None if read is None else read()

    def ints(self, i: int) -> list[int] | None:
        """Input ``i`` as a list of integers."""
        found = self.host(i)
        return None if found is None else [int(v) for v in np.asarray(found).reshape(-1)]

    def scalar(self, i: int, default: Any = None) -> Any:
        """Input ``i``, a single number."""
        found = self.host(i)
        return default if found is None else np.asarray(found).reshape(-1)[0].item()


def op(*names: str) -> Callable[[Implementation], Implementation]:
    """Register an implementation under the operators' names."""

    def add(implementation: Implementation) -> Implementation:
        for name in names:
            TABLE[name] = implementation
        return implementation

    return add


def in_range(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis


def wide(function: Implementation) -> Implementation:
    """``function`` of 64-bit integers where inputs are unsigned integers that torch cannot add."""

    def call(n: OperatorCall, *args: Tensor | None) -> Result:
        kinds = {a.dtype for a in args if isinstance(a, Tensor) and a.dtype in UNSIGNED}
        if not kinds:
            return function(n, *args)
        (kind,) = kinds
        widened = [
            a.to(torch.int64) if isinstance(a, Tensor) and a.dtype == kind else a for a in args
        ]
        result = function(n, *widened)
        if isinstance(result, Tensor):
            return result.to(kind) if result.dtype == torch.int64 else result
        return tuple(
            r.to(kind) if k == 0 and r is not None and r.dtype == torch.int64 else r
            for k, r in enumerate(result)
        )

    return call
