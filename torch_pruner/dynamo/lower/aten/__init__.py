"""Rules from ATen operators to the graph IR. Importing this package fills ``TABLE``."""

from __future__ import annotations

from torch_pruner.dynamo.lower.aten import (
    activations,
    attention,
    contractions,
    creation,
    folding,
    grouped,
    indexing,
    losses,
    normalization,
    pointwise,
    pooling,
    pooling_gradients,
    quantized,
    recurrent,
    reductions,
    resampling,
    sampling,
    views,
)
from torch_pruner.dynamo.lower.aten.registry import TABLE, OpCall, dtype_name, rule_of
from torch_pruner.dynamo.lower.aten.rejection import Rejection, RejectionKind, Unsupported
from torch_pruner.dynamo.lower.aten.value import Value

__all__ = [
    "TABLE", "OpCall", "Rejection", "RejectionKind", "Unsupported", "Value", "activations",
    "attention", "contractions", "creation", "dtype_name", "folding", "grouped", "indexing",
    "losses", "normalization", "pointwise", "pooling", "pooling_gradients", "quantized",
    "recurrent", "reductions", "resampling", "rule_of", "sampling", "views",
]  # fmt: skip
