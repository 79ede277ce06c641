"""Operators that ONNX itself defines by others: what has no implementation of ours runs so.

Most of the newer operators have such a body. Some depend on the types and shapes of the inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
from onnx import FunctionProto, NodeProto, TypeProto, helper

from torch_pruner.onnx.operators.types import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_ELEMENTS = {dtype: element for element, dtype in TORCH_DTYPES.items()}


def body_of(
    node: NodeProto, opset: int, inputs: Sequence[tuple[torch.dtype, Sequence[int]] | None]
) -> FunctionProto | None:
    """The nodes that ``node`` stands for at ``opset``, given its inputs' types and shapes.

    None where ONNX does not say.
    """
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return None
    if schema.has_function:
        # The newest that this opset has: bodies are written for certain opsets.
        versions = [v for v in schema.function_opset_versions if v <= opset]
        text = schema.get_function_with_opset_version(max(versions)) if versions else b""
    elif schema.has_context_dependent_function:
        text = schema.get_context_dependent_function(
            node.SerializeToString(), [_type(given) for given in inputs]
        )
    else:
        return None
    return FunctionProto.FromString(text) if text else None


def _type(given: tuple[torch.dtype, Sequence[int]] | None) -> bytes:
    made = TypeProto()
    if given is not None and given[0] in _ELEMENTS:
        made = helper.make_tensor_type_proto(_ELEMENTS[given[0]], list(given[1]))
    return bytes(made.SerializeToString())
