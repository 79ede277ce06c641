"""A ``torch.compile`` backend that tunes kernels with TVM: draft many, verify few, measure fewer.

``torch.compile(model, backend="pruner")`` needs no import of this package, and importing it is
cheap: torch and TVM are imported when a function below is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_pruner import exc

if TYPE_CHECKING:
    from torch_pruner import onnx
    from torch_pruner.dynamo.api import (
        Report,
        check_ready,
        explain,
        free_originals,
        last_report,
        load_bundle,
        save_bundle,
        sync_cache,
        tune,
        tune_seen,
        wait,
    )

__version__ = "0.1.0"
__all__ = [
    "Report",
    "__version__",
    "check_ready",
    "exc",
    "explain",
    "free_originals",
    "last_report",
    "load_bundle",
    "onnx",
    "save_bundle",
    "sync_cache",
    "tune",
    "tune_seen",
    "wait",
]

_API = frozenset(__all__) - {"__version__", "exc", "onnx"}


def __getattr__(name: str) -> Any:
    if name == "onnx":
        return importlib.import_module("torch_pruner.onnx")
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("torch_pruner.dynamo.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
