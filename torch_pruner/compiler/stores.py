"""The open kernel stores of this process, one per cache directory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torch_pruner.cache import KernelStore

if TYPE_CHECKING:
    from torch_pruner.config import Config

_lock = threading.Lock()
_stores: dict[tuple[str, int], KernelStore] = {}


def store_for(config: Config) -> KernelStore:
    """The store of this configuration's cache directory, opened at first use."""
    key = (str(config.cache_root), config.cache_max_bytes)
    with _lock:
        if key not in _stores:
            _stores[key] = KernelStore.open(config.cache_root, max_bytes=config.cache_max_bytes)
        return _stores[key]
