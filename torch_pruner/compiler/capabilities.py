"""What kernels of a device can be, as far as cutting a graph into kernels depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.graph.attention import any_attention
from torch_pruner.graph.int4 import takes_words
from torch_pruner.graph.quantize import takes_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.graph.attention import Takes
    from torch_pruner.graph.int4 import TakesWords


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
    takes_bytes: Callable[[int, str, str], bool] = takes_bytes
    """Which products read int8 weights as they are, by rows and dtypes."""
    takes_words: TakesWords = takes_words
    """Which read words of several weights of few bits as they are."""
    approximations: bool = True
    """Whether ``fast_math`` lets kernels be less exact than float32."""
    tf32: frozenset[str] = frozenset()
    """Contractions whose float32 operands may be rounded to ten bits."""
