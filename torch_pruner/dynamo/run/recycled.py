"""Memory of large results, which is used again once nobody has it.

What glibc takes from the system for an allocation of 32 MB or more goes back when it is freed, so
every call would have its pages made and cleared anew: 12 500 faults for 51 MB, a third of a first
layer's time. So a program keeps the memory of such a result until its next call, and gives it out
again if no tensor, view, array or graph of autograd has it by then.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

LEAST_BYTES = 32 << 20
"""What glibc never keeps when it is freed (the most that M_MMAP_THRESHOLD can be)."""

_owners: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class Recycled:
    """``make`` of (shape, strides, dtype), which are the same at every call. Safe for threads."""

    def __init__(self, make: Callable[..., torch.Tensor]) -> None:
        self._make = make
        self._kept: torch.UntypedStorage | None = None

    def __call__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        kept, self._kept = self._kept, None  # another thread finds none, and makes its own
        if kept is not None and sys.getrefcount(kept) == _ALONE and _is_free(kept):
            out = torch.empty(0, dtype=dtype, device="cpu").set_(kept, 0, shape, strides)
        else:
            out = self._make(shape, strides, dtype)
            kept = out.untyped_storage()
        self._kept = kept
        return out


def _references() -> int:
    """What Python counts of an object that one local variable has, in this version of it."""
    only = torch.empty(0, device="cpu").untyped_storage()
    return sys.getrefcount(only)


_ALONE = _references()  # storages in Python are one object, which torch counts once


def _is_free(memory: torch.UntypedStorage) -> bool:
    """Whether torch has it nowhere else, and it was neither shrunk nor moved to where other
    processes read it."""
    assert _owners is not None
    return (
        _owners(memory._cdata) == 1
        and memory.nbytes() >= LEAST_BYTES
        and not memory.is_shared()
        and memory.resizable()
    )


def recycled(make: Callable[..., torch.Tensor], nbytes: int) -> Callable[..., torch.Tensor]:
    """``make`` itself for results that are not large, or where torch does not count owners."""
    return Recycled(make) if nbytes >= LEAST_BYTES and _owners is not None else make
