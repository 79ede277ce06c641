"""Runs an ONNX graph with torch's operators, on real tensors or while torch traces.

Values are kept twice where both are known: as a tensor, and as numbers (``host``) for whatever
needs numbers to decide on shapes. What is computed from such numbers alone is computed at once,
outside of any tracing, so that a traced graph holds no arithmetic on shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, helper, numpy_helper
from torch.utils._python_dispatch import _disable_current_modes

from torch_pruner.exc import UnsupportedModel
from torch_pruner.onnx.bodies import body_of
from torch_pruner.onnx.operators import TABLE, DataDependentError, Node
from torch_pruner.onnx.operators.types import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOST_NUMEL = 4096  # numbers of larger tensors are nobody's shape
MAX_DEPTH = 16  # of subgraphs and functions in each other
MAX_STEPS = 1_000_000  # of one loop

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Value:
    """A tensor, numbers, or both; or a sequence of values.

    What is ``fixed`` was made of numbers, not of anything that goes into the model.
    """

    device: torch.Tensor | None = None
    host: Array | None = None
    items: list[Value | None] | None = None
    fixed: bool = False

    @staticmethod
    def of(array: Array) -> Value:
        return Value(host=np.asarray(array), fixed=True)

    def tensor(self) -> torch.Tensor:
        if self.device is None:
            assert self.host is not None
            with _disable_current_modes():  # a real one, also while torch traces
                self.device = tensor_of(self.host)
        return self.device

    def numbers(self) -> Array:
        """The numbers. Raises ``DataDependentError`` where only a real run has them."""
        if self.host is None:
            assert self.device is not None
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
    kept = tensor.detach()
    if kept.dtype == torch.bfloat16 or (kept.dtype.itemsize == 1 and kept.is_floating_point()):
        kept = kept.float()
    return np.asarray(kept.cpu().numpy())


class Interpreter:
    """Runs the nodes of one model."""

    def __init__(
        self,
        opset: int,
        functions: Mapping[tuple[str, str], FunctionProto],
        name: str = "the model",
    ) -> None:
        self.opset, self.functions, self.name = opset, functions, name

    def run(
        self, graph: GraphProto | FunctionProto, env: dict[str, Value | None], depth: int = 0
    ) -> None:
        """Run all nodes; ``env`` holds what is known by name and takes what is computed."""
        if depth > MAX_DEPTH:
            raise UnsupportedModel(self.name, f"subgraphs more than {MAX_DEPTH} deep", "")
        for node in graph.node:
            results = self.node(node, env, depth)
            pairs = zip(node.output, results, strict=False)
            env.update({name: value for name, value in pairs if name})

    def node(
        self, node: NodeProto, env: dict[str, Value | None], depth: int
    ) -> Sequence[Value | None]:
        """The results of one node."""
        from torch_pruner.onnx import control

        inputs = [env[name] if name else None for name in node.input]
        if node.op_type in control.TABLE and node.domain in ("", "ai.onnx"):
            return control.TABLE[node.op_type](self, node, inputs, env, depth)
        key = (node.domain, node.op_type)
        if key in self.functions:
            return self._call(self.functions[key], node, inputs, depth)
        if node.domain not in ("", "ai.onnx") or node.op_type not in TABLE:
            tensors = [None if v is None or v.items is not None else v.tensor() for v in inputs]
            types = [None if t is None else (t.dtype, t.shape) for t in tensors]
            if (body := body_of(node, self.opset, types)) is not None:
                return self._call(body, node, inputs, depth)
            what = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            raise UnsupportedModel(self.name, f"operator {what} is not known", "")
        return self._operator(node, inputs)

    def _operator(self, node: NodeProto, inputs: Sequence[Value | None]) -> Sequence[Value | None]:
        attrs = {a.name: attribute(a) for a in node.attribute}
        numbers = tuple(None if v is None else v.numbers for v in inputs)
        given = Node(node.op_type, attrs, self.opset, len(node.output), numbers)
        function = TABLE[node.op_type]
        if node.op_type in ("Shape", "Size"):
            (x,) = inputs
            assert x is not None
            shape = x.host.shape if x.host is not None else x.tensor().shape
            return [Value.of(_shape(given, tuple(int(d) for d in shape)))]
        if all(v is None or _small(v) for v in inputs) and any(v is not None for v in inputs):
            with _disable_current_modes(), torch.no_grad():
                real = [None if v is None else tensor_of(v.numbers()) for v in inputs]
                return [_folded(r) for r in _listed(function(given, *real))]
        made = function(given, *(None if v is None else v.tensor() for v in inputs))
        return [None if t is None else Value(device=t) for t in _listed(made)]

    def _call(
        self, function: FunctionProto, node: NodeProto, inputs: Sequence[Value | None], depth: int
    ) -> Sequence[Value | None]:
        """A function of the model: its nodes with the caller's attributes in their places."""
        given = {a.name: a for a in (*function.attribute_proto, *node.attribute)}
        body = FunctionProto()
        body.CopyFrom(function)
        for inner in body.node:
            _substitute(inner, given)
        env = dict.fromkeys(function.input, None) | dict(zip(function.input, inputs, strict=False))
        opset = next((o.version for o in function.opset_import if not o.domain), self.opset)
        Interpreter(opset, self.functions, self.name).run(body, env, depth + 1)
        return [env.get(name) for name in function.output]


def _substitute(node: NodeProto, given: Mapping[str, AttributeProto]) -> None:
    kept = []
    for a in node.attribute:
        if not a.ref_attr_name:
            kept.append(a)
        elif a.ref_attr_name in given:
            copy = AttributeProto()
            copy.CopyFrom(given[a.ref_attr_name])
            copy.name = a.name
            kept.append(copy)
    copies = [AttributeProto.FromString(a.SerializeToString()) for a in kept]
    del node.attribute[:]
    node.attribute.extend(copies)


def attribute(a: AttributeProto) -> Any:
    """An attribute as Python's own; a tensor as an array."""
    value = helper.get_attribute_value(a)
    if a.type == AttributeProto.TENSOR:
        return numpy_helper.to_array(value)
    if a.type == AttributeProto.STRING:
        return value.decode()
    if a.type == AttributeProto.STRINGS:
        return [v.decode() for v in value]
    if a.type in (AttributeProto.INTS, AttributeProto.FLOATS):
        return list(value)
    return value


def _shape(n: Node, shape: tuple[int, ...]) -> Array:
    if n.op == "Size":
        return np.array(int(np.prod(shape, dtype=np.int64)), dtype=np.int64)
    return np.array(shape[slice(n.attr("start", 0), n.attr("end"))], dtype=np.int64)


def _small(value: Value) -> bool:
    """Whether this is numbers, and few. Weights are tensors, also those of few elements: what is
    computed from them is for the compiler to hoist."""
    return value.fixed and value.host is not None and value.host.size <= HOST_NUMEL


def _folded(result: torch.Tensor | None) -> Value | None:
    if result is None:
        return None
    if result.numel() > HOST_NUMEL or result.dtype not in _ON_HOST:
        return Value(device=result)
    return Value.of(result.numpy())


_ON_HOST = frozenset(TORCH_DTYPES.values()) - {
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2,
    torch.float8_e5m2fnuz,
}  # fmt: skip


def _listed(result: Any) -> Sequence[torch.Tensor | None]:
    return result if isinstance(result, (tuple, list)) else (result,)
