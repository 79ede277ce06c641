"""The names of dtypes that kernels exist for, and torch's objects for them."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16,
    "bfloat16": torch.bfloat16, "int64": torch.int64, "int32": torch.int32, "int16": torch.int16,
    "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip

# Compiled on every device; float16 where vectors of it become float32 in one instruction.
DEFAULT_DTYPES = frozenset(DTYPES) - {"float16"}
