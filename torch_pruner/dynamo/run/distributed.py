"""Several processes of ``torch.distributed``: none tunes inline, one's kernels reach the others.

A rank that tunes for a minute lets the others wait in a collective until they time out. So nothing
is measured once a process group exists; who wants tuned kernels tunes before, or on one rank, and
shares them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torch_pruner import exc, log
from torch_pruner.compiler.bundles import load_bundle, save_bundle

if TYPE_CHECKING:
    import os

    from torch.distributed import ProcessGroup

    from torch_pruner.config import Config

MAX_BYTES = 4 << 30  # of a bundle that is taken from another rank

_log = log.logger(__name__)


def initialised() -> bool:
    """Whether this process is a rank of a process group."""
    distributed = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized())


def without_tuning(config: Config) -> Config:
    """``config``, with missing kernels drafted instead of tuned where there are ranks."""
    if config.on_miss != "tune" or config.effort == "none" or not initialised():
        return config
    log.warn_once(
        _log,
        "ranks",
        "torch.distributed is initialised, so nothing is tuned now: kernels that the cache lacks "
        "run as drafted. Tune before (torch-pruner tune) and call torch_pruner.sync_cache()",
    )
    return config.replace(on_miss="fallback")


def sync_cache(
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    src: int = 0,
    group: ProcessGroup | None = None,
) -> None:
    """Give every rank the kernels that rank ``src`` has in its cache. A collective: all call it.

    Of two kernels the better one stays. What arrives is checked like any bundle, except that it is
    trusted as much as the process group is. Ranks on one machine that share a cache need it not.

    Raises:
        RuntimeError: There is no process group.
        IncompatibleBundle: A rank's device or version differs from that of ``src``; every rank
            hears of it, and no rank waits for another.
        CacheDirectoryError: A cache cannot be written.

    Example:
        if torch.distributed.get_rank() == 0:
            torch_pruner.tune(model, (x,))
        torch_pruner.sync_cache()
    """
    if not initialised():
        raise RuntimeError("sync_cache needs torch.distributed.init_process_group")
    distributed = torch.distributed
    mine = distributed.get_rank() == src
    with tempfile.TemporaryDirectory(prefix="torch_pruner-") as folder:
        path = Path(folder) / "kernels.tpb"
        problem: Exception | None = None
        content = torch.empty(0, dtype=torch.uint8)
        if mine:
            try:
                save_bundle(path, cache_dir=cache_dir)
                content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            except (OSError, exc.PrunerError) as err:
                problem = err
        size = torch.tensor([-1 if problem else content.numel()])
        distributed.broadcast(size, src, group=group)
        count = int(size.item())
        if problem is not None:
            raise problem
        if not 0 <= count <= MAX_BYTES:
            raise exc.IncompatibleBundle(str(path), f"rank {src} could not make one")
        if not mine:
            content = torch.empty(count, dtype=torch.uint8)
        distributed.broadcast(content, src, group=group)
        if not mine:
            path.write_bytes(content.numpy().tobytes())
            problem = _loaded(path, cache_dir)
        _agree(problem, group)


def _loaded(path: Path, cache_dir: str | os.PathLike[str] | None) -> Exception | None:
    try:
        load_bundle(path, cache_dir=cache_dir)
    except (OSError, exc.PrunerError) as err:
        return err
    return None


def _agree(problem: Exception | None, group: ProcessGroup | None) -> None:
    """Raise on every rank if loading failed on one."""
    failed = torch.tensor([int(problem is not None)])
    torch.distributed.all_reduce(failed, group=group)
    if problem is not None:
        raise problem
    if failed.item():
        raise exc.IncompatibleBundle("kernels.tpb", f"{int(failed.item())} ranks could not load it")
