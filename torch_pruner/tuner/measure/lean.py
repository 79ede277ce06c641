"""Importing TVM in a process that needs no torch."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """In the block torch cannot be imported, unless it is already.

    ``tvm_ffi`` imports torch wherever it is installed, for a second of the processor and 200 MB,
    and does without where it is not.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # what the import system takes for "no"
    try:
        yield
    finally:
        del sys.modules["torch"]
