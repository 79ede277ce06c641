"""ONNX models through the same compiler: ``torch_pruner.onnx.compile("model.onnx")``.

Every set of shapes is traced once; weights are parameters of what is compiled.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_pruner.onnx.backend import PrunerBackend
    from torch_pruner.onnx.function import OnnxFunction, compile  # noqa: A004

__all__ = ["OnnxFunction", "PrunerBackend", "compile"]

_WHERE = {"OnnxFunction": "function", "PrunerBackend": "backend", "compile": "function"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"torch_pruner.onnx.{_WHERE[name]}"), name)
