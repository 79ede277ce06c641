"""What a graph wrote into its inputs, put there.

In: a call whose first results are new values of inputs. Out: one that has the others, after those
are where they belong. AOTAutograd can do it too, one tensor after another in Python; here what was
written in place already is left alone.
"""

from __future__ import annotations

import ctypes
import operator
from typing import TYPE_CHECKING, cast

import torch

from torch_pruner.dynamo.lower.calls import picker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.dynamo.lower.calls import BoxedCall, RuntimeValue


_HOST = torch.device("cpu")


def written_back(call: BoxedCall, written: Sequence[int]) -> BoxedCall:
    """``call``; its first results are copied into the inputs at the positions ``written``."""
    return _WritesBack(call, written) if written else call


class _WritesBack:
    """See the module. As thread safe as what it calls; autograd records nothing of it."""

    def __init__(self, call: BoxedCall, written: Sequence[int]) -> None:
        self._boxed_call = True
        self._call, self._count = call, len(written)
        self._inputs: Callable[[Sequence[RuntimeValue]], Sequence[RuntimeValue]] = picker(written)
        self._numbers: tuple[int, ...] | None = None  # see ``_number``

    def __call__(self, args: list[RuntimeValue]) -> list[RuntimeValue]:
        inputs = cast("Sequence[torch.Tensor]", self._inputs(args))
        results = self._call(args)
        new = cast("Sequence[torch.Tensor]", results[: self._count])
        if not all(map(operator.is_, inputs, new)):
            self._put(inputs, new)
        return results[self._count :]

    def _put(self, inputs: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        numbers = self._numbers
        if numbers is None:  # Dynamo's guards and the program see that they stay what they are
            numbers = self._numbers = tuple(map(_number, inputs, new))
        olds, made = [], []
        for old, value, size in zip(inputs, new, numbers, strict=True):
            if old is value or _same(old, value):
                continue
            if size and old.nbytes == value.nbytes == size:
                ctypes.memmove(old.data_ptr(), value.data_ptr(), size)
            else:
                olds.append(old)
                made.append(value)
        if olds:
            with torch.no_grad():
                torch._foreach_copy_(olds, made)


def _same(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether two tensors are the same memory: of a recording the result is a tensor of its own."""
    if old.device == _HOST or old.device != new.device or old.data_ptr() != new.data_ptr():
        return False
    alike = old.dtype == new.dtype and old.shape == new.shape and old.stride() == new.stride()
    return alike and old.is_neg() == new.is_neg() and old.is_conj() == new.is_conj()


def _number(old: torch.Tensor, new: torch.Tensor) -> int:
    """The bytes of a single number in host memory, or 0 if it takes torch to copy it.

    Counters of positions are that, one a layer. AOTAutograd has raised the versions of what is
    written.
    """
    plain = old.numel() == new.numel() == 1 and old.dtype == new.dtype
    here = old.device == new.device == _HOST and not (old.is_neg() or new.is_neg())
    return old.nbytes if plain and here and not old.dtype.is_complex else 0
