"""Products of rows in groups, as experts of a mixture have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.registry import OpCall, foreign_rule, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments

if TYPE_CHECKING:
    from torch_pruner.dynamo.lower.aten.value import Value

aten = torch.ops.aten

_DTYPES = ("float32", "float16", "bfloat16")
_FEW = 4
"""Rows of a group, up to which products of bfloat16 pay whose matrices lie along their columns: at
4 they took two thirds of eager's time, at 8 to 16 as much or more, at 64 1.4 times (an AMD Zen 4;
docs/experiments.md)."""


@rule(aten._grouped_mm.default)
def grouped_mm(
    call: OpCall,
    x: Value,
    matrices: Value,
    offs: Value | None = None,
    bias: Value | None = None,
    out_dtype: torch.dtype | None = None,
) -> Value:
    """(S, K) x (E, K, N) with the ends of E groups of rows."""
    del out_dtype  # the fake tensor says it
    if offs is None or bias is not None or x.ndim != 2 or matrices.ndim != 3:
        raise arguments("groups that are no rows")
    return _grouped(call, x, matrices, offs)


@foreign_rule("transformers::grouped_mm_fallback")
def grouped_mm_fallback(call: OpCall, x: Value, matrices: Value, offs: Value) -> Value:
    """The same, as models of transformers ask for it where torch's does not take a dtype."""
    return _grouped(call, x, matrices, offs)


def _grouped(call: OpCall, x: Value, matrices: Value, offs: Value) -> Value:
    if x.dtype != matrices.dtype or x.dtype not in _DTYPES:
        raise arguments(f"rows of {x.dtype} in groups, and matrices of {matrices.dtype}")
    if call.dtype != x.dtype:
        raise arguments("a product of groups in another dtype than its rows")
    along_k = matrices.fake is not None and matrices.fake.stride(-2) == 1
    many = x.shape[0] > _FEW * matrices.shape[0]
    if x.dtype == "bfloat16" and many and not along_k:
        raise arguments("large groups of bfloat16 rows, whose matrices lie along their columns")
    operands = (x.id, matrices.id, offs.id)
    return type(x)(x.builder, x.builder.append("grouped_mm", operands, call.shape, x.dtype))
