"""Reads an ONNX model that somebody else made: checked, bounded, and kept in its folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from torch_pruner.exc import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from onnx import FunctionProto, GraphProto, ModelProto, TensorProto

MAX_FILE_BYTES = 2 << 30  # what a protobuf can be
MAX_WEIGHT_BYTES = 256 << 30
OLDEST = 7

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """A model ready to run: nodes, weights by name, and what goes in and comes out."""

    name: str
    graph: GraphProto
    opset: int
    functions: Mapping[tuple[str, str], FunctionProto]
    weights: Mapping[str, Array]
    inputs: tuple[str, ...]
    optional: frozenset[str]  # inputs that a weight stands in for
    outputs: tuple[str, ...]


def load(source: str | os.PathLike[str] | bytes | ModelProto) -> Model:
    """The model in a file, in bytes, or given.

    External data is read from the model's own folder only.

    Raises:
        UnsupportedModel: It is damaged, too large, of an opset that is not known, or its data lies
            outside of its folder.
    """
    folder: Path | None = None
    if isinstance(source, onnx.ModelProto):
        name, proto = source.graph.name or "the model", source
    elif isinstance(source, bytes):
        name, proto = "the model", _parsed("the model", source)
    else:
        path = Path(source)
        name, folder = str(path), path.resolve().parent
        proto = _parsed(name, _content(path))
    opset = _opset(name, proto)
    weights = {t.name: _array(name, t, folder) for t in _initializers(name, proto, folder)}
    _check(name, proto)
    given = [i.name for i in proto.graph.input]
    functions = {(f.domain, f.name): f for f in proto.functions}
    return Model(
        name,
        proto.graph,
        opset,
        functions,
        weights,
        tuple(n for n in given if n not in weights),
        frozenset(n for n in given if n in weights),
        tuple(o.name for o in proto.graph.output),
    )


def _content(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise UnsupportedModel(str(path), f"the file has {size} bytes", "use external data")
        return path.read_bytes()
    except OSError as err:
        raise UnsupportedModel(str(path), err.strerror or str(err), "check the path") from err


def _parsed(name: str, content: bytes) -> ModelProto:
    from google.protobuf.message import DecodeError

    try:
        return onnx.load_model_from_string(content)
    except DecodeError as err:
        raise UnsupportedModel(name, f"this is no ONNX model: {err}", "") from err


def _check(name: str, proto: ModelProto) -> None:
    try:
        onnx.checker.check_model(proto)
    except (onnx.checker.ValidationError, ValueError) as err:
        # Data in other files was read by us already; the checker cannot find it without a path.
        if any(uses_external_data(t) for t in proto.graph.initializer):
            return
        reason = str(err).strip().splitlines()[0]
        raise UnsupportedModel(name, f"the checker refuses it: {reason}", "") from err


def _opset(name: str, proto: ModelProto) -> int:
    newest = onnx.defs.onnx_opset_version()
    versions = [o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")]
    opset = versions[0] if versions else newest
    if not OLDEST <= opset <= newest:
        reason = f"opset {opset}; {OLDEST} to {newest} are known"
        raise UnsupportedModel(name, reason, "convert it with onnx.version_converter")
    return int(opset)


def _initializers(name: str, proto: ModelProto, folder: Path | None) -> Iterator[TensorProto]:
    total = 0
    for tensor in proto.graph.initializer:
        total += int(np.prod(tensor.dims, dtype=np.int64)) * 8
        if any(d < 0 for d in tensor.dims) or total > MAX_WEIGHT_BYTES * 8:
            raise UnsupportedModel(name, f"the size of {tensor.name!r} makes no sense", "")
        yield tensor
    if proto.graph.sparse_initializer:
        raise UnsupportedModel(name, "it has sparse weights", "make them dense")


def _array(name: str, tensor: TensorProto, folder: Path | None) -> Array:
    if uses_external_data(tensor):
        return _external(name, tensor, folder)
    try:
        found: Array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError) as err:
        raise UnsupportedModel(name, f"weight {tensor.name!r} is damaged: {err}", "") from err
    return found


def _external(name: str, tensor: TensorProto, folder: Path | None) -> Array:
    try:
        info = ExternalDataInfo(tensor)
    except ValueError as err:
        raise UnsupportedModel(name, f"weight {tensor.name!r}: {err}", "") from err
    if folder is None:
        raise UnsupportedModel(name, f"weight {tensor.name!r} is in another file", "give the path")
    path = (folder / info.location).resolve()
    inside = path.is_relative_to(folder) and path.is_file()
    if not inside or not info.location or os.path.isabs(info.location):
        reason = f"weight {tensor.name!r} is said to be in {info.location!r}"
        raise UnsupportedModel(name, reason, "external data lies in the model's folder")
    kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    count = int(np.prod(tensor.dims, dtype=np.int64))
    begin = int(info.offset or 0)
    size = count * kind.itemsize
    if (info.length is not None and int(info.length) != size) or begin < 0:
        raise UnsupportedModel(name, f"weight {tensor.name!r} has not the length it should", "")
    if begin + size > path.stat().st_size:
        raise UnsupportedModel(name, f"{info.location!r} ends before weight {tensor.name!r}", "")
    with path.open("rb") as file:
        file.seek(begin)
        return np.frombuffer(file.read(size), dtype=kind).reshape(tuple(tensor.dims))
