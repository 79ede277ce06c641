"""Optimizer steps: fused ones change parameters without moving torch's version counter.

A hook that torch calls after every step of any optimizer notes which optimizer it was, and nothing
more; whoever keeps something of parameters compares one number at a call, and asks which memory was
written only when it has moved.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer


class Steps:
    """Counts the steps of all optimizers of the process."""

    def __init__(self) -> None:
        self.count = 0
        self._last: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def note(self, optimizer: Optimizer, args: object = (), kwargs: object = None) -> None:
        """Called after a step of ``optimizer``."""
        if torch.compiler.is_compiling():
            return  # compiled steps write by operators that move the counter
        self.count += 1
        self._last[optimizer] = self.count

    def by_storage(self) -> Mapping[int, int]:
        """For the storage of each parameter (its identity) the number of its last step."""
        found: dict[int, int] = {}
        for optimizer, count in list(self._last.items()):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    key = storage_key(parameter)
                    found[key] = max(count, found.get(key, 0))
        return found


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the memory that a tensor is a view of; 0 for tensors without such."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse, and of other layouts
        return 0


steps = Steps()
register_optimizer_step_post_hook(steps.note)
