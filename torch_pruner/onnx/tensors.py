"""From a tensor of a model file to an array: nothing is believed before it was counted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from torch_pruner.exc import UnsupportedModel

if TYPE_CHECKING:
    from torch_pruner.onnx.files import Folder

MAX_WEIGHT_BYTES = 256 << 30
MAX_RANK = 64  # what torch and numpy know
_MAX_EXTENT = 1 << 56  # of a shape with a zero in it, whose other extents still are multiplied

Array = np.ndarray[Any, Any]


def array(model: str, tensor: TensorProto, folder: Folder | None) -> Array:
    """The numbers of a tensor, from the file or from one beside it.

    Raises:
        UnsupportedModel: Shape, type or data make no sense, or the data lies elsewhere.
    """
    what = f"weight {tensor.name[:200]!r}"
    count = elements(model, what, tensor.dims)
    if tensor.data_type == TensorProto.STRING:
        raise UnsupportedModel(model, f"{what} holds strings, of which torch has no tensors")
    try:
        kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        if uses_external_data(tensor):
            return _external(model, tensor, what, folder, kind, count)
        found: Array = numpy_helper.to_array(tensor)
    except KeyError as err:
        reason = f"{what} has the element type {tensor.data_type}, which there is not"
        raise UnsupportedModel(model, reason) from err
    except (ValueError, TypeError, ArithmeticError) as err:
        raise UnsupportedModel(model, f"{what} is damaged: {err}") from err
    return found


def elements(model: str, what: str, dims: Any) -> int:
    """How many elements a shape has."""
    sizes = [int(d) for d in dims]
    extent = math.prod(d for d in sizes if d)
    nonsense = any(d < 0 for d in sizes) or len(sizes) > MAX_RANK or extent > _MAX_EXTENT
    count = math.prod(sizes)
    if nonsense or count > MAX_WEIGHT_BYTES:
        raise UnsupportedModel(model, f"the size of {what} makes no sense: {sizes[:8]}")
    return count


def _external(
    model: str, tensor: TensorProto, what: str, folder: Folder | None, kind: Any, count: int
) -> Array:
    info = ExternalDataInfo(tensor)
    if folder is None:
        raise UnsupportedModel(model, f"{what} is in another file", "give the path")
    begin, size = int(info.offset or 0), _packed_bytes(tensor.data_type, kind, count)
    if info.length is not None and int(info.length) != size:
        raise UnsupportedModel(model, f"{what} has not the length it should")
    raw = TensorProto(dims=tensor.dims, data_type=tensor.data_type)
    data = folder.read(info.location, begin, size, what)
    if size == count * kind.itemsize:
        return np.frombuffer(data, dtype=kind).reshape(tuple(tensor.dims))
    raw.raw_data = data
    unpacked: Array = numpy_helper.to_array(raw)
    return unpacked


_BITS = {
    TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.FLOAT4E2M1: 4,
    **{getattr(TensorProto, n): 2 for n in ("INT2", "UINT2") if hasattr(TensorProto, n)},
}  # fmt: skip


def _packed_bytes(data_type: int, kind: Any, count: int) -> int:
    bits = _BITS.get(data_type)
    return count * int(kind.itemsize) if bits is None else -(-count * bits // 8)
