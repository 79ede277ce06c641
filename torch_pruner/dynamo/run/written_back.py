"""What a graph wrote into its inputs, put there.

In: a call whose first results are new values of inputs. Out: one that has the others, after those
are where they belong. AOTAutograd can do it too, one tensor after another in Python; here it is one
call for all that have not been written in place already.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, cast

import torch

from torch_pruner.dynamo.lower.calls import picker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.dynamo.lower.calls import BoxedCall, RuntimeValue


def written_back(call: BoxedCall, written: Sequence[int]) -> BoxedCall:
    """``call``; its first results are copied into the inputs at the positions ``written``."""
    return _WritesBack(call, written) if written else call


class _WritesBack:
    """See the module. As thread safe as what it calls; autograd records nothing of it."""

    def __init__(self, call: BoxedCall, written: Sequence[int]) -> None:
        self._boxed_call = True
        self._call, self._count = call, len(written)
        self._inputs: Callable[[Sequence[RuntimeValue]], Sequence[RuntimeValue]] = picker(written)

    def __call__(self, args: list[RuntimeValue]) -> list[RuntimeValue]:
        inputs = cast("Sequence[torch.Tensor]", self._inputs(args))
        results = self._call(args)
        new = cast("Sequence[torch.Tensor]", results[: self._count])
        if not all(map(operator.is_, inputs, new)):
            pairs = [(old, made) for old, made in zip(inputs, new, strict=True) if old is not made]
            olds, made = zip(*pairs, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(olds, made)
        return results[self._count :]
