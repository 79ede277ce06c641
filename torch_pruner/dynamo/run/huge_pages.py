"""Asks the system to back large memory with huge pages.

A page of 4 KB costs a fault at its first use and an entry of the translation buffers ever after.
What glibc takes from the system for an allocation of 32 MB or more goes back when it is freed, so
such results fault anew at every call. Where huge pages are off, or the system is not Linux, nothing
changes. NumPy asks for its arrays likewise.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PAGE, _MADV_HUGEPAGE = 2 << 20, 14
LASTING_BYTES = 4 << 20  # of memory that is kept: as much is sure to hold a page
RESULT_BYTES = 32 << 20  # of a result: what glibc never keeps when it is freed (M_MMAP_THRESHOLD)


def _function() -> Any:
    try:
        function = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


_madvise = _function() if sys.platform == "linux" else None


def ask_for(memory: torch.Tensor, least: int = LASTING_BYTES) -> torch.Tensor:
    """``memory`` itself; its pages are asked for if it is dense, on the CPU, and so large."""
    if memory.nbytes >= least and _madvise is not None and memory.device.type == "cpu":
        first = -(-memory.data_ptr() // _PAGE) * _PAGE
        end = (memory.data_ptr() + memory.nbytes) // _PAGE * _PAGE
        if end > first:
            _madvise(first, end - first, _MADV_HUGEPAGE)
    return memory
