"""Parameters whose memory no program reads: they move to a file, and come back page by page.

A compiled graph that reads copies of its weights, packed or narrow, leaves the weights themselves
without a reader. Whoever accesses them still finds them: each page is read from the file when it is
touched, by whatever touches it, and pages that are written are memory again.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from typing import TYPE_CHECKING, cast

import torch

from torch_pruner.config import Config
from torch_pruner.dynamo.run.copies import moved
from torch_pruner.dynamo.run.packed_inputs import in_use
from torch_pruner.log import logger

if TYPE_CHECKING:
    from pathlib import Path

log = logger(__name__)

SWAPS = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether this version of torch changes the memory of a storage for all tensors that share it."""
LEAST_BYTES = 64 << 10
"""Of a parameter that is worth a file."""


def free_originals(model: torch.nn.Module, folder: str | Path | None = None) -> int:
    """Free the memory of a model's parameters that compiled graphs read as copies only.

    For models compiled with ``weights="frozen"``, after a call for each size that comes; no call
    may run meanwhile. The parameters stay what they are for everybody: their bytes lie in a file
    that has no name any more, in ``folder`` (default: the cache directory), which should not be in
    memory itself, and the system reads them from there when they are accessed, by ``state_dict``,
    a call in eager, a copy, or whatever it is. Addresses of them that others hold, as arrays of
    numpy do, must be given up before. Parameters stay in memory that a graph reads where they lie,
    whose graphs are not all ``frozen``, that share their storage, or that are smaller than 64 KiB.

    Returns the bytes freed. Raises ``OSError`` if the files cannot be written; parameters are then
    freed or as they were.

    Example:
        compiled = torch.compile(model, backend="pruner", options={"weights": "frozen"})
        with torch.no_grad():
            compiled(tokens)
            print(tp.free_originals(model) // 2**20, "MiB freed")
    """
    if not SWAPS:
        log.warning("nothing is freed: torch %s cannot move what tensors share", torch.__version__)
        return 0
    place = Config.from_options().cache_root if folder is None else folder
    os.makedirs(place, exist_ok=True)
    freed = 0
    for parameter in model.parameters():
        if not _is_plain(parameter) or parameter.nbytes < LEAST_BYTES or in_use(parameter):
            continue
        storage = parameter.untyped_storage()
        storage._swap_data_ptr_(_on_disk(storage, place))  # type: ignore[attr-defined]
        moved(parameter)
        freed += parameter.nbytes
    if freed:
        _give_back()
    log.info("%d MiB of parameters are freed", freed >> 20)
    return freed


def _is_plain(parameter: torch.nn.Parameter) -> bool:
    """Whether it is all that its storage holds, in memory of this process alone."""
    if type(parameter) is not torch.nn.Parameter or parameter.layout is not torch.strided:
        return False
    storage = parameter.untyped_storage()
    whole = parameter.storage_offset() == 0 and storage.nbytes() == parameter.nbytes
    return whole and parameter.device.type == "cpu" and not storage.is_shared()


def _on_disk(storage: torch.UntypedStorage, folder: str | Path) -> torch.UntypedStorage:
    """A storage that holds the same bytes in a file without a name."""
    held = torch.empty(0, dtype=torch.uint8).set_(storage)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="originals-") as file:
        held.numpy().tofile(file.name)
        if sys.platform == "linux":  # what was written leaves memory only once it is on the disk
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = torch.UntypedStorage.from_file(file.name, False, storage.nbytes())
    return cast("torch.UntypedStorage", mapped)


def _give_back() -> None:
    """What the C library keeps for later, between other pieces of its heap, goes to the system."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # not glibc's
        log.debug("this C library returns memory when it likes")
