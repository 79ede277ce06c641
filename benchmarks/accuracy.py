"""How far a compiled network's outputs are from eager's, and how far they may be."""

from __future__ import annotations

import copy
import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.models import Inputs, call

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

INCOMPARABLE = sys.float_info.max
"""Stands for an infinite difference, which JSON cannot hold."""

FLOAT32_BOUND = 1e-3
HALF_BOUND = 2e-2
HALF_FACTOR = 2.0
"""In half precision our error may be this many times eager's own, both against float32."""


def difference(actual: object, expected: object) -> float:
    """Largest ``max|actual - expected| / max|expected|`` over all tensors of two outputs.

    ``INCOMPARABLE`` where structure, shapes or integers differ, or where a value is not finite.
    """
    ours = [x for x in tree_leaves(actual) if isinstance(x, torch.Tensor)]
    theirs = [x for x in tree_leaves(expected) if isinstance(x, torch.Tensor)]
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return INCOMPARABLE
    return max((_difference(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else INCOMPARABLE
    if expected.numel() == 0:
        return 0.0
    gap = (actual.double() - expected.double()).abs().max().item()
    scale = max(expected.double().abs().max().item(), 1e-30)
    return gap / scale if math.isfinite(gap) else INCOMPARABLE


@torch.no_grad()
def float32_outputs(module: nn.Module, inputs: Inputs) -> object:
    """What the module would compute with the same weights and inputs in float32."""

    def widen(x: object) -> object:
        return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return call(copy.deepcopy(module).float(), tree_map(widen, inputs))


class _Double(TorchFunctionMode):
    """Computes in float64 what a module asks to be computed in float32.

    Normalisations and rotary embeddings of language models cast to float32 by name.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = tree_map(_double_dtype, (args, kwargs or {}))
        return func(*args, **kwargs)


def _double_dtype(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


@torch.no_grad()
def float64_outputs(module: nn.Module, inputs: Inputs) -> object:
    """What the module would compute with the same weights and inputs in float64 throughout."""

    def widen(x: object) -> object:
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    wide = copy.deepcopy(module).double()
    if hasattr(wide, "set_experts_implementation"):  # torch multiplies no doubles in groups
        wide.set_experts_implementation("eager")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Double():
            return call(wide, tree_map(widen, inputs))
    finally:
        torch.set_default_dtype(before)


def exact_outputs(module: nn.Module, inputs: Inputs, precision: str) -> object:
    """The reference for a precision: float64 for float32, float32 for half precision."""
    widened = float64_outputs if precision == "float32" else float32_outputs
    return widened(module, inputs)


def bound(precision: str, eager_difference: float) -> float:
    """The largest difference that passes; ``eager_difference`` is eager's own, against float32."""
    if precision == "float32":
        return FLOAT32_BOUND
    return max(HALF_BOUND, HALF_FACTOR * eager_difference)
