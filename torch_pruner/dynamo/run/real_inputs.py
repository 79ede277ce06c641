"""Inputs of one of the user's calls, kept to try a compiled graph on beside the calls that follow.

Parameters are the user's own, since what is packed of them is to serve later calls, too. All else
is copied: the user, or the graph, may write to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch_pruner.dynamo.lower.calls import DynamoCall, RuntimeValue

MAX_BYTES = 256 << 20  # that are copied; with more, the user's own call is the first one


@dataclass(frozen=True, slots=True)
class RealInputs:
    """Arguments of a graph of Dynamo's, and torch's modes when they were given."""

    values: tuple[RuntimeValue, ...]
    inference: bool

    @staticmethod
    def of(inputs: Sequence[RuntimeValue], static: Collection[int]) -> RealInputs | None:
        """A copy of all ``inputs`` but the ``static`` ones; None where a copy is not the same.

        That is where tensors share memory, are no plain ones of the CPU, or are too large.
        """
        varying = [
            v for k, v in enumerate(inputs) if isinstance(v, torch.Tensor) and k not in static
        ]
        if not all(map(_is_plain, varying)):
            return None
        storages = [v.untyped_storage() for v in varying]
        fixed = {
            v.untyped_storage().data_ptr()
            for k, v in enumerate(inputs)
            if isinstance(v, torch.Tensor) and k in static
        }
        places = {s.data_ptr() for s in storages}
        if len(places) < len(storages) or places & fixed:
            return None
        if sum(v.nbytes for v in varying) > MAX_BYTES:
            return None
        copies = [
            v if k in static or not isinstance(v, torch.Tensor) else _copied(v)
            for k, v in enumerate(inputs)
        ]
        return RealInputs(tuple(copies), torch.is_inference_mode_enabled())

    def call(self, compiled: DynamoCall) -> None:
        """``compiled`` of these, in the modes in which they were given, for its side effects."""
        with torch.inference_mode() if self.inference else torch.no_grad():
            compiled(*self.values)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg())
        and torch.ops.aten.is_non_overlapping_and_dense(_without_repetition(tensor))
    )


def _without_repetition(tensor: torch.Tensor) -> torch.Tensor:
    """Of every dimension along which all is one element in memory, that element."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the same strides elsewhere."""
    given = tensor.detach()
    once = _without_repetition(given)
    copy = torch.empty_strided(once.shape, once.stride(), dtype=given.dtype).copy_(once)
    return copy.as_strided(given.shape, given.stride())
