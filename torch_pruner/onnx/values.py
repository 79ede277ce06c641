"""Values of a running ONNX model: tensors, numbers, or both; and how one becomes the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_pruner.exc import UnsupportedModel
from torch_pruner.onnx.operators import DataDependentError

Array = np.ndarray[Any, Any]
Env = dict[str, "OnnxValue | None"]


@dataclass(slots=True, eq=False)
class OnnxValue:
    """A tensor, numbers, or both; or a sequence of values.

    What is ``fixed`` was made of numbers, not of anything that goes into the model.
    """

    device: torch.Tensor | None = None
    host: Array | None = None
    items: list[OnnxValue | None] | None = None
    fixed: bool = False

    @staticmethod
    def of(array: Array) -> OnnxValue:
        return OnnxValue(host=np.asarray(array), fixed=True)

    def tensor(self) -> torch.Tensor:
        if self.device is None:
            if self.host is None:
                raise TypeError("a sequence where a tensor should be")
            with _disable_current_modes():  # a real one, also while torch traces
                self.device = tensor_of(self.host)
        return self.device

    def numbers(self) -> Array:
        """The numbers. Raises ``DataDependentError`` where only a real run has them."""
        if self.host is None:
            if self.device is None:
                raise TypeError("a sequence where a tensor should be")
            self.host = array_of(self.device)
        return self.host


def tensor_of(array: Array) -> torch.Tensor:
    """A tensor of an array; element types that numpy lacks come as those of ``ml_dtypes``."""
    name = array.dtype.name
    special = {
        "bfloat16": (torch.bfloat16, np.int16), "float8_e4m3fn": (torch.float8_e4m3fn, np.uint8),
        "float8_e4m3fnuz": (torch.float8_e4m3fnuz, np.uint8),
        "float8_e5m2": (torch.float8_e5m2, np.uint8),
        "float8_e5m2fnuz": (torch.float8_e5m2fnuz, np.uint8),
    }  # fmt: skip
    if name in special:
        kind, carrier = special[name]
        return torch.from_numpy(np.array(array.view(carrier))).view(kind)
    try:
        return torch.from_numpy(np.array(array))
    except TypeError as err:
        raise UnsupportedModel("the model", f"torch has no element type {name}", "") from err


def array_of(tensor: torch.Tensor) -> Array:
    """The numbers of a real tensor. Raises ``DataDependentError`` for any other."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(tensor, FakeTensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise DataDependentError("the numbers of a tensor are needed before there are any")
    with _disable_current_modes():  # a real one has its numbers also while torch traces
        kept = tensor.detach()
        if kept.dtype == torch.bfloat16 or (kept.dtype.itemsize == 1 and kept.is_floating_point()):
            kept = kept.float()
        return np.asarray(kept.cpu().numpy())
