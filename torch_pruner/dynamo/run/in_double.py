"""A graph in double precision: which of two results that differ is the nearer one.

Sums that cancel, in half precision above all, may be further off in eager than what a bug is known
by. A kernel that rounds less often, or elsewhere, then differs from eager by as much, and is no
worse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from torch_pruner.dynamo.run.differences import Kept
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.dynamo.lower.calls import RuntimeValue

log = logger(__name__)

MOST_BYTES = 64 << 20
"""Of a graph's inputs and results together; in double precision they are up to four times that."""
_TIMES = 2.0  # a result may be off by so many times what eager's is
_LOST = 0.5  # of the largest number: if eager is off by more, double precision says nothing
_NOISE = 1e-3  # of eager's largest number: if double precision has no more, that is noise
_NOTHING, _LITTLE = 1e-9, 1e-3  # where all numbers are less than the first, as if they were that
_WIDE = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip


class _InDouble(fx.Interpreter):
    """Runs a graph with floats in double precision, whatever its operators say."""

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _widened(super().placeholder(target, args, kwargs))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return tree_map(_widened, super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(_wider, args), tree_map(_wider, kwargs)
        return tree_map(_widened, super().call_function(target, args, kwargs))


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype not in _WIDE:
        return value
    return value.to(_WIDE[value.dtype])


def _wider(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def bounds_by_double(
    gm: fx.GraphModule, inputs: Sequence[RuntimeValue], eager: Sequence[Kept], wanted: Sequence[int]
) -> dict[int, tuple[Kept, float]]:
    """Of the results ``wanted``, what they are in double precision, and how far others may be off.

    Relative to the largest magnitude, theirs or eager's. ``eager``: what eager gave, whole. Empty
    where double precision says nothing: it is too large, cannot be run, or is far from eager, too.
    """
    if sum(map(_nbytes, [*inputs, *(k.value for k in eager)])) > MOST_BYTES:
        return {}
    try:
        exact = _InDouble(gm).run(*inputs)
    except (RuntimeError, TypeError, ValueError, LookupError) as err:  # no such operator, or bits
        log.debug("no double precision", exc_info=err)
        return {}
    found = {}
    for k in wanted:
        truth, theirs = Kept.of(exact[k], 0, 1), _widened(eager[k].value)
        if not isinstance(theirs, torch.Tensor) or truth.shape != tuple(theirs.shape):
            continue
        scale = max(truth.scale, eager[k].scale)
        scale = _LITTLE if scale < _NOTHING else scale
        noise, truth = truth.scale < _NOISE * scale, replace(truth, scale=scale)
        off = truth.difference(theirs)
        found[k] = truth, _TIMES * off if noise or off <= _LOST else 0.0
    return found


def difference(truth: Kept, got: RuntimeValue) -> float:
    """How far a result is off from what it is in double precision."""
    return truth.difference(_widened(got))


def _nbytes(value: object) -> int:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    return value.nbytes
