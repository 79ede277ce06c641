"""ONNX operators on torch tensors; importing this fills the table."""

from __future__ import annotations

from torch_pruner.onnx.operators import (
    attention,
    convolutions,
    elementwise,
    layers,
    linear,
    recurrent,
    reductions,
    resampling,
    shapes,
    signals,
    types,
)
from torch_pruner.onnx.operators.registry import TABLE, DataDependentError, OperatorCall

__all__ = [
    "TABLE", "DataDependentError", "OperatorCall", "attention", "convolutions", "elementwise",
    "layers", "linear", "recurrent", "reductions", "resampling", "shapes", "signals", "types",
]  # fmt: skip
