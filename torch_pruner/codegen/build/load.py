"""Loads built libraries.

Needs TVM's runtime library but not TVM's Python package, which takes seconds to import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch_pruner import exc
from torch_pruner.codegen.build import team
from torch_pruner.config import set_thread_defaults, use_one_thread
from torch_pruner.log import logger
from torch_pruner.versions import check_tvm_versions

Entry = Callable[[int], object]

log = logger(__name__)
_launch = 0  # the address of TVM's launch, once its runtime is loaded


@cache
def _runtime() -> Any:
    """tvm_ffi with TVM's runtime loaded into the process."""
    check_tvm_versions()
    import tvm_ffi

    spec = importlib.util.find_spec("tvm")
    if spec is None or not spec.submodule_search_locations:
        raise exc.IncompatibleTVM("no apache-tvm", "apache-tvm", "pip install apache-tvm")
    library = Path(spec.submodule_search_locations[0]) / "lib" / "libtvm_runtime.so"
    global _launch
    launch = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL).TVMBackendParallelLaunch
    _launch = ctypes.cast(launch, ctypes.c_void_p).value or 0
    os.register_at_fork(after_in_child=_without_pool)
    return tvm_ffi


def _without_pool() -> None:
    """In a child that was forked: only the thread that forked goes on. Neither OpenMP's threads nor
    TVM's are there, and TVM's pool does not wait for them where there is one thread to run on."""
    team.forked()
    use_one_thread()
    log.info(
        "process %d was forked from one that had loaded kernels: they run on one thread here;"
        " start processes by spawn or forkserver for more",
        os.getpid(),
    )


def set_threads(threads: int, openmp: team.OpenMP | None = None) -> None:
    """Let kernels use ``threads`` CPU threads, not pinned to cores: those of ``openmp`` where a
    library can (``launch.py``), else TVM's, whose own default is half of them, pinned.
    """
    most = set_thread_defaults(threads)
    configure = _runtime().get_global_func("runtime.config_threadpool")
    configure(1, threads)  # 1: count from the big cores; on ordinary CPUs these are all
    if openmp is not None and most >= threads:
        team.share(openmp, _launch, threads)


def bound(entry: Entry, arrays: Sequence[Any]) -> Callable[[], None]:
    """A call without arguments of ``entry`` on numpy arrays, which it keeps alive."""
    table = (ctypes.c_int64 * max(len(arrays), 1))(*(a.ctypes.data for a in arrays))
    address = ctypes.addressof(table)

    def call(_keep: object = (list(arrays), table)) -> None:
        entry(address)

    return call


def load_entries(path: Path, names: list[str]) -> list[Entry]:
    """The named functions of a shared library. Raises ``CorruptEntry`` if it is not one of ours."""
    ffi = _runtime()
    try:
        module = ffi.get_global_func("ffi.Module.load_from_file.so")(str(path), "so")
        return [module[name] for name in names]
    except (RuntimeError, OSError, AttributeError, ValueError) as err:
        raise exc.CorruptEntry(path, f"cannot be loaded: {err}") from err
