"""The open kernel stores of this process: of each cache directory one, and one that only reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner import forking
from torch_pruner.cache import KernelStore

if TYPE_CHECKING:
    from torch_pruner.config import Config

_lock = forking.lock()
_stores: dict[tuple[str, int, bool], KernelStore] = {}


def store_for(config: Config) -> KernelStore:
    """The store of this configuration's cache directory, opened at first use.

    Under ``on_miss="error"`` it is only read, which not even notes when a kernel was used; a cache
    that is not there yet is looked for again by the next compilation.
    """
    reads = config.on_miss == "error"
    key = (str(config.cache_root), config.cache_max_bytes, reads)
    with _lock:
        if (known := _stores.get(key)) is not None:
            return known
        store = KernelStore.open(
            config.cache_root, max_bytes=config.cache_max_bytes, read_only=reads
        )
        if not (reads and store.degraded):
            _stores[key] = store
        return store
