"""Products with quantised operands, as modules of torchao's have them."""

from __future__ import annotations

from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments
from torch_pruner.dynamo.lower.aten.value import Value
from torch_pruner.graph import nibbles

aten = torch.ops.aten

_BLOCKS = (64, 32, 16, 0)  # columns that a processor's format has together; 0: pairs alone


@rule(aten._int_mm.default)
def int_mm(call: OpCall, a: Value, b: Value) -> Value:
    """Sums are exact: a product of bytes has 16 bits, and half a million of them fit 32."""
    return Value(a.builder, a.builder.append("matmul", (a.id, b.id), call.shape, "int32"))


@rule(aten._weight_int4pack_mm_for_cpu.default)
def int4pack_mm(call: OpCall, x: Value, packed: Value, group: int, scales: Value) -> Value:
    """Weights ``(number - 8) * scale + zero`` in a format that depends on the processor."""
    block = _column_block()
    if block is None:
        raise arguments("an unknown format of packed weights of four bits")
    b, depth = x.builder, x.shape[-1]
    columns, groups = packed.shape[0], scales.shape[0]
    shape = (depth // nibbles.per_word(4), columns)
    words = b.append("torch_words", (packed.id,), shape, "int32", block=block)
    planes = [
        b.append("plane", (scales.id,), (groups, columns), scales.dtype, at=i) for i in range(2)
    ]
    weights = b.append(
        "group_floats", (words, *planes), (depth, columns), x.dtype, bits=4, group=group
    )
    return x.matmul(Value(b, weights))


@cache
def _column_block() -> int | None:
    """How many columns lie together in the format that torch packs weights in here.

    Asked of torch itself, by packing a matrix of random numbers; None for a format that is unknown.
    """
    columns, depth = 144, 64  # whole blocks of every size, and one that is not whole
    with _disable_current_modes():
        random = torch.Generator().manual_seed(0)
        numbers = torch.randint(0, 16, (columns, depth), dtype=torch.int32, generator=random)
        packed = aten._convert_weight_to_int4pack_for_cpu(numbers, 1).numpy()
        expected = (numbers - 8).numpy().T
    if packed.shape != (columns, depth // 2):
        return None
    alike = (b for b in _BLOCKS if (nibbles.from_torch(packed, b) == expected).all())
    return next(alike, None)
