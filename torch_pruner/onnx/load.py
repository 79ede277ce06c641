"""Reads an ONNX model that somebody else made: checked, bounded, and kept in its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from torch_pruner.exc import UnsupportedModel
from torch_pruner.onnx.boundary import unsupported
from torch_pruner.onnx.files import Folder, content
from torch_pruner.onnx.graph import ONNX_DOMAINS, GraphReader, Key, OnnxGraph, TensorType, unfolded

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from onnx import ModelProto

    from torch_pruner.onnx.tensors import Array

OLDEST = 7
MAX_STEPS = 50_000  # nodes that one call may run, of all its functions, branches and loops


@dataclass(frozen=True, slots=True)
class Model:
    """A model ready to run: nodes, weights by name, and what goes in and comes out."""

    name: str
    graph: OnnxGraph
    functions: Mapping[Key, OnnxGraph]
    weights: Mapping[str, Array]
    inputs: tuple[str, ...]
    optional: frozenset[str]  # inputs that a weight stands in for
    outputs: tuple[str, ...]
    nodes: int  # in the file
    unfolded: int  # with every function where it is called
    sizes: Mapping[Key, int]  # of functions, unfolded

    @property
    def types(self) -> Mapping[str, TensorType]:
        return self.graph.types


def load(source: str | os.PathLike[str] | bytes | ModelProto) -> Model:
    """The model in a file, in bytes, or given.

    External data, of whatever tensor, is read from the model's own folder only.

    Raises:
        UnsupportedModel: It is damaged, too large, of an opset that is not known, calls its
            functions in a circle or too often, or its data lies outside of its folder.
    """
    if isinstance(source, onnx.ModelProto):
        with unsupported("the model", "reading it"):
            name = source.graph.name[:100] or "the model"
        return _model(name, source, None)
    if isinstance(source, bytes):
        return _model("the model", _parsed("the model", source), None)
    path = Path(source)
    name = str(path)
    return _model(name, _parsed(name, content(path)), Folder(name, path))


def _model(name: str, proto: ModelProto, folder: Folder | None) -> Model:
    with unsupported(name, "reading it"):
        reader = GraphReader(name, folder, _opset(name, proto))
        graph = reader.graph(proto.graph)
        functions = {(f.domain, f.name): reader.function(f) for f in proto.functions}
        if len(functions) < len(proto.functions):
            raise UnsupportedModel(name, "two functions have the same name")
        total, sizes = unfolded(name, graph, functions, MAX_STEPS)
        _check(name, proto)
    weights, given = graph.initial, graph.inputs
    return Model(
        name,
        graph,
        functions,
        weights,
        tuple(n for n in given if n not in weights),
        frozenset(n for n in given if n in weights),
        graph.outputs,
        reader.count,
        total,
        sizes,
    )


def _parsed(name: str, data: bytes) -> ModelProto:
    from google.protobuf.message import DecodeError

    try:
        return onnx.load_model_from_string(data)
    except DecodeError as err:
        raise UnsupportedModel(name, f"this is no ONNX model: {err}", "") from err


def _check(name: str, proto: ModelProto) -> None:
    """ONNX's own checker. It would look for external data in the working directory; that was read
    already, so it is shown a model with empty tensors in those places."""
    if any(uses_external_data(t) for t in _tensors(proto)):
        shown = onnx.ModelProto()
        shown.CopyFrom(proto)
        for tensor in _tensors(shown):
            if uses_external_data(tensor):
                kept = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0])
                kept.raw_data = b""
                tensor.CopyFrom(kept)
        proto = shown
    try:
        onnx.checker.check_model(proto)
    except (onnx.checker.ValidationError, ValueError) as err:
        lines = str(err).strip().splitlines() or [type(err).__name__]
        raise UnsupportedModel(name, f"the checker refuses it: {lines[0]}", "") from err


def _tensors(message: Any) -> Iterator[TensorProto]:
    """Every tensor in a message, at any depth."""
    if isinstance(message, TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for inner in value if _several(value) else (value,):
            yield from _tensors(inner)


def _several(value: Any) -> bool:
    return hasattr(value, "extend")


def _opset(name: str, proto: ModelProto) -> int:
    newest = onnx.defs.onnx_opset_version()
    versions = [o.version for o in proto.opset_import if o.domain in ONNX_DOMAINS]
    opset = versions[0] if versions else newest
    if not OLDEST <= opset <= newest:
        reason = f"opset {opset}; {OLDEST} to {newest} are known"
        raise UnsupportedModel(name, reason, "convert it with onnx.version_converter")
    return int(opset)
