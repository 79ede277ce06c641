"""Which threads kernels run on: those of the OpenMP that the process has, or TVM's pool.

Libraries read one table of the process at every launch (``launch.py``). Needs no TVM.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class OpenMP(NamedTuple):
    """Addresses of functions of an OpenMP runtime; GNU's, or one with GNU's entry points."""

    parallel: int  # GOMP_parallel
    thread_num: int  # omp_get_thread_num
    num_threads: int  # omp_get_num_threads
    max_threads: int  # omp_get_max_threads
    in_parallel: int  # omp_in_parallel


_FIELDS: Final = len(OpenMP._fields)
# Then TVM's launch, and how many threads a launch has that does not say; 0: TVM's pool has it.
_table: Final = (ctypes.c_int64 * (_FIELDS + 2))()
_forked = False  # an OpenMP's threads are not in a child
_joined = False  # libraries in memory have no entry ``LAUNCH``, and stay on TVM's pool


def share(openmp: OpenMP, tvm_launch: int, threads: int) -> None:
    """From now on launches of ``threads`` tasks run on the threads of ``openmp``. Does nothing in a
    child that was forked."""
    if _forked:
        return
    _table[: _FIELDS + 1] = [*openmp, tvm_launch]
    _table[_FIELDS + 1] = threads


def forked() -> None:
    """In a child that was forked launches run on TVM's pool, of libraries loaded before as well."""
    global _forked
    _forked = True
    _table[_FIELDS + 1] = 0


def join(launch: Callable[[int], object]) -> None:
    """Have a library, whose entry ``LAUNCH`` this is, read the table at every launch."""
    global _joined
    launch(ctypes.addressof(_table))
    _joined = True


def is_shared(threads: int) -> bool:
    """Whether launches of so many tasks run on an OpenMP's threads, of libraries that can."""
    return _joined and bool(_table[_FIELDS + 1] == threads)
