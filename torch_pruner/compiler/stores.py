"""The open kernel stores of this process: of each cache directory one, and one that only reads."""

from __future__ import annotations

import contextlib
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from torch_pruner import fork_locks
from torch_pruner.cache import KernelStore, location

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_pruner.config import Config

_lock = fork_locks.lock()
_stores: dict[tuple[str, int, bool], KernelStore] = {}
_looking: ContextVar[bool] = ContextVar("looking", default=False)


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """In the block, stores are only read, and one that is not there is empty and is not made."""
    token = _looking.set(True)
    try:
        yield
    finally:
        _looking.reset(token)


def store_for(config: Config) -> KernelStore:
    """The store of this configuration's cache directory, opened at first use.

    Under ``on_miss="error"`` it is only read, which not even notes when a kernel was used; a cache
    that is not there yet is looked for again by the next compilation.
    """
    size = config.cache_max_bytes
    reads = config.on_miss == "error" or _looking.get()
    if _looking.get() and not location.Layout(config.cache_root).home.is_dir():
        return KernelStore(None, max_bytes=size, read_only=False, clock=time.time)
    key = (str(config.cache_root), size, reads)
    with _lock:
        if (known := _stores.get(key)) is not None:
            return known
        store = KernelStore.open(config.cache_root, max_bytes=size, read_only=reads)
        if not (reads and store.degraded):
            _stores[key] = store
        return store
