"""ONNX's element types, and conversions between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_pruner.exc import UnsupportedModel
from torch_pruner.onnx.operators.registry import OperatorCall, Tensor, op

if TYPE_CHECKING:
    from collections.abc import Mapping

# By the numbers of onnx.TensorProto.
TORCH_DTYPES: Mapping[int, torch.dtype] = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16,
    6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64,
    12: torch.uint32, 13: torch.uint64, 14: torch.complex64, 15: torch.complex128,
    16: torch.bfloat16, 17: torch.float8_e4m3fn, 18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz,
}  # fmt: skip


class UnknownTypeError(UnsupportedModel, TypeError):
    """torch has no such element type (strings, integers of four bits)."""


def torch_dtype(number: int) -> torch.dtype:
    """The dtype behind a number of ``TensorProto.DataType``."""
    if number not in TORCH_DTYPES:
        raise UnknownTypeError("the model", f"torch has no element type {number} of ONNX")
    return TORCH_DTYPES[number]


def converted(x: Tensor, kind: torch.dtype, *, saturate: bool = True) -> Tensor:
    """Numbers as ``kind``: floats to integers towards zero, anything to bool by being not zero.

    What a float of eight bits cannot hold becomes its largest number, or is no number any more.
    """
    if kind == torch.bool:
        return x != 0
    if kind.is_floating_point and kind.itemsize == 1:
        most = torch.finfo(kind).max
        wide = x.float()
        made = wide.clamp(-most, most).to(kind)
        if saturate:
            return made
        # Half of the last step above the largest number still rounds to it.
        bits = 2 if "e5m2" in str(kind) else 3
        beyond = wide.abs() > most * (1 + 2.0 ** -(bits + 2))
        lost = float("inf") if kind == torch.float8_e5m2 else float("nan")
        replaced = torch.full_like(wide, lost).copysign(wide).to(kind)
        chosen = torch.where(beyond, replaced.view(torch.uint8), made.view(torch.uint8))
        return chosen.view(kind)
    if x.is_floating_point() and kind in (torch.uint16, torch.uint32, torch.uint64):
        return x.to(torch.int64).to(kind)
    return x.to(kind)


@op("Cast")
def _cast(n: OperatorCall, x: Tensor) -> Tensor:
    return converted(x, torch_dtype(n.attr("to")), saturate=bool(n.attr("saturate", 1)))


@op("CastLike")
def _cast_like(n: OperatorCall, x: Tensor, like: Tensor) -> Tensor:
    return converted(x, like.dtype, saturate=bool(n.attr("saturate", 1)))


@op("BitCast")
def _bit_cast(n: OperatorCall, x: Tensor) -> Tensor:
    return x.view(torch_dtype(n.attr("to")))


def numpy_of(value: Any) -> Any:
    """An attribute's tensor as an array."""
    from onnx import numpy_helper

    return numpy_helper.to_array(value)
