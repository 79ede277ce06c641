"""The OpenMP whose threads run eager's operators on the CPU."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from torch_pruner.codegen.build.team import OpenMP, is_shared

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMES: Final = ("libgomp*.so*", "libiomp5*.so*", "libomp*.so*")
_FUNCTIONS: Final = (
    "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads",
    "omp_in_parallel",
)  # fmt: skip


class Loaded(NamedTuple):
    """How many threads the calling thread's next parallel loop may have, and what kernels need to
    run on these threads; None where the library lacks some of it."""

    most: Callable[[], int]
    limit: Callable[[int], None]
    functions: OpenMP | None


@functools.cache
def loaded() -> Loaded | None:
    """The OpenMP that torch has loaded; None where it is not found."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    folder = Path(torch.__file__).with_name("lib")
    own = [str(path) for pattern in _NAMES for path in sorted(folder.glob(pattern))]
    for name in (*own, "libgomp.so.1", "libiomp5.so"):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            most, limit = library.omp_get_max_threads, library.omp_set_num_threads
        except (OSError, AttributeError):  # not loaded
            continue
        limit.restype = None
        return Loaded(most, limit, _functions(library))
    return None


def _functions(library: ctypes.CDLL) -> OpenMP | None:
    try:
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in _FUNCTIONS]
    except AttributeError:
        return None
    return OpenMP(*(function.value or 0 for function in found))


def functions() -> OpenMP | None:
    """What kernels need to run on the threads of torch's OpenMP, where torch uses that."""
    found = (
        loaded() if "ATen parallel backend: OpenMP" in torch.__config__.parallel_info() else None
    )
    return None if found is None else found.functions


def crowded() -> bool:
    """Whether torch's threads beside those of kernels are more than there are cores."""
    if is_shared(torch.get_num_threads()):
        return False
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return 2 * torch.get_num_threads() > (usable or 1)
