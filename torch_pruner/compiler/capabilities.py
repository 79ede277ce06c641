"""What kernels of a device can be, as far as cutting a graph into kernels depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.graph.attention import any_attention

if TYPE_CHECKING:
    from torch_pruner.graph.attention import Takes


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Plain values, which a device gives its compiler. The defaults are the CPU's."""

    attention: Takes = any_attention
    """Which attention is one kernel; what is not becomes a kernel for each product."""
    gradients: bool = True
    """Whether the gradient of attention may be one kernel."""
    few_queries: bool = True
    """Whether attention of a few queries, as decoding has it, may be one kernel, too."""
    values_masked: bool = True
    """Whether kernels of attention leave out values behind the keys that count."""
    mixed_operands: bool = True
    """Whether products of two dtypes, as float32 with bfloat16 weights, are as fast as others."""
    narrow_rows: int | None = None
    """Rows up to which products with weights of few bits are as fast as others; None: any."""
    approximations: bool = True
    """Whether ``fast_math`` lets kernels be less exact than float32."""
    tf32: frozenset[str] = frozenset()
    """Contractions whose float32 operands may be rounded to ten bits."""
