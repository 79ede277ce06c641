"""Asks the system to back large memory that is kept with huge pages.

A page of 4 KB costs a fault at its first use and an entry of the translation buffers ever after.
Where huge pages are off, or the system is not Linux, nothing changes. NumPy asks for its arrays
likewise. Results are not asked for: where memory is in pieces, the system moves some to make a huge
page, and a call that waited for that took longer than one with small pages.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PAGE, _MADV_HUGEPAGE = 2 << 20, 14
LEAST_BYTES = 4 << 20  # as much is sure to hold a page


def _function() -> Any:
    try:
        function = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


_madvise = _function() if sys.platform == "linux" else None


def ask_for(memory: torch.Tensor) -> torch.Tensor:
    """``memory`` itself, which is dense; its pages are asked for if it is large and a CPU's."""
    if memory.nbytes >= LEAST_BYTES and _madvise is not None and memory.device.type == "cpu":
        first = -(-memory.data_ptr() // _PAGE) * _PAGE
        end = (memory.data_ptr() + memory.nbytes) // _PAGE * _PAGE
        if end > first:
            _madvise(first, end - first, _MADV_HUGEPAGE)
    return memory
