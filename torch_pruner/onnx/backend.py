"""ONNX's own interface to backends, for its test suite and whoever else speaks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from onnx import helper
from onnx.backend.base import Backend, BackendRep

from torch_pruner.onnx.function import OnnxFunction
from torch_pruner.onnx.function import compile as compile_onnx
from torch_pruner.onnx.values import tensor_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onnx import ModelProto, NodeProto


class PrunerRep(BackendRep):  # type: ignore[misc]
    """A model that is ready to run."""

    def __init__(self, function: OnnxFunction) -> None:
        self.function = function

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        """``inputs`` are arrays in order, or by name. Returns arrays."""
        if isinstance(inputs, dict):
            inputs = [inputs[name] for name in self.function.inputs]
        values = [_tensor(v) for v in inputs]
        result = self.function(*values)
        several = len(self.function.outputs) > 1
        return tuple(_array(r) for r in (result if several else (result,)))


class PrunerBackend(Backend):  # type: ignore[misc]
    """``prepare`` takes the options of the backend as keywords.

    Example:
        (y,) = PrunerBackend.prepare(onnx.load("model.onnx"), effort="none").run([x])
    """

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **options: Any) -> PrunerRep:
        return PrunerRep(compile_onnx(model, options=options))

    @classmethod
    def run_model(
        cls, model: ModelProto, inputs: Any, device: str = "CPU", **options: Any
    ) -> tuple[Any, ...]:
        return cls.prepare(model, device, **options).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """One node; types come from the inputs, and of the outputs only the names are needed."""
        named = [n for n in node.input if n]
        infos = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(np.asarray(v).dtype), np.shape(v)
            )
            for name, v in zip(named, inputs, strict=True)
        ]
        outputs = [helper.make_empty_tensor_value_info(n) for n in node.output if n]
        model = helper.make_model(helper.make_graph([node], "node", infos, outputs))
        return cls.run_model(model, inputs, device, **options)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.partition(":")[0] == "CPU"


def _tensor(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_tensor(v) for v in value]
    return tensor_of(np.asarray(value))


def _array(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_array(v) for v in value]
    import ml_dtypes

    kept = value.detach()
    if kept.dtype == torch.bfloat16:
        return kept.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if kept.is_floating_point() and kept.dtype.itemsize == 1:
        kind = getattr(ml_dtypes, str(kept.dtype).removeprefix("torch."))
        return kept.view(torch.uint8).numpy().view(kind)
    return kept.numpy()
