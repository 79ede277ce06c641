"""Bundles of this machine's kernels: written from a cache, loaded into one.

In: a cache directory and a file. Out: the file, or the cache with more in it. Knows what this
device and this version are; ``cache.bundle`` knows the file. Imports neither torch nor TVM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch_pruner import __version__, exc, families
from torch_pruner.cache import KernelEntry, KernelStore, bundle, location
from torch_pruner.compiler.context import Context, codegen_version
from torch_pruner.compiler.remembered import history
from torch_pruner.config import Config
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.log import logger
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureStatus

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch_pruner.cache.bundle import BundleContents, Origin
    from torch_pruner.cache.bundle import Manifest as Manifest
    from torch_pruner.report import Report

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class BundleDevice:
    """The device that a bundle is of, or for, at hand or not."""

    fingerprint: DeviceFingerprint
    target: TargetSpec

    @staticmethod
    def cpu() -> BundleDevice:
        """The CPU of this machine."""
        return BundleDevice(DeviceFingerprint.detect(), TargetSpec.detect())

    def context(self, threads: int, numerics: str) -> Context:
        """What kernels of this device have in their keys."""
        return Context(self.target.with_threads(threads), self.fingerprint, threads, numerics)


def save_bundle(
    path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    report: Report | None = None,
    sign: bytes | None = None,
    device: BundleDevice | None = None,
) -> Manifest:
    """Write everything the cache has for a device, or only the kernels of ``report``, to a file.

    ``sign`` is a secret of at least 16 bytes that whoever loads the bundle can ask for; the device
    is ``device``, by default this CPU. Raises ``OSError`` where the file cannot be written.
    """
    workloads = None if report is None else {t.workload for t in report.tasks}
    return create(path, cache_dir=cache_dir, workloads=workloads, sign=sign, device=device)


def load_bundle(
    path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    as_seed: bool = False,
    require_signature: bytes | None = None,
    device: BundleDevice | None = None,
) -> Manifest:
    """Check a whole bundle, then merge it into the cache; of two kernels the better one stays.

    With ``as_seed`` its schedules are where tuning starts on this device, whatever it was made on,
    and nothing of it runs untimed. Raises ``IncompatibleBundle`` for another device or version, a
    damaged file, or a signature other than ``require_signature`` gives, and ``CacheDirectoryError``
    where the cache cannot be written. The device is ``device``, by default this CPU.
    """
    device = device or BundleDevice.cpu()
    contents = bundle.read(path, key=require_signature)
    _check(contents)
    store = store_at(cache_dir)
    try:
        if as_seed:
            _seed(store, contents, device)
        else:
            bundle.load(store, contents, origin(device))
    finally:
        store.close()
    return contents.manifest


def create(
    path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None,
    workloads: set[str] | None,
    sign: bytes | None,
    device: BundleDevice | None = None,
) -> Manifest:
    """``save_bundle`` of some ``workloads``, or of all."""
    store = store_at(cache_dir, reads=True)
    made_by = f"torch-pruner {__version__}"
    try:
        here = origin(device)
        made = bundle.create(store, path, here, made_by, workloads=workloads, key=sign)
        return replace(made, left_out=_untuned(store, here, workloads))
    finally:
        store.close()


def _untuned(store: KernelStore, here: Origin, workloads: set[str] | None) -> tuple[str, ...]:
    """Names of the kernels that a bundle is made without, since nobody tuned them yet."""
    kernels = [e for e in (i.entry for i in store.ls()) if isinstance(e, KernelEntry)]
    mine = [e for e in kernels if (e.key.device, e.key.codegen) == (here.digest, here.codegen)]
    asked = [e for e in mine if workloads is None or e.key.workload in workloads]
    names = tuple(sorted(e.task for e in asked if not e.shippable))
    if names:
        text = "%d kernels are not tuned and left out of the bundle: %s; tune them with: %s"
        log.warning(text, len(names), ", ".join(names[:5]), "torch-pruner tune --seen")
    return names


def origin(device: BundleDevice | None = None) -> Origin:
    """A device (this CPU) and this version."""
    fingerprint = (device or BundleDevice.cpu()).fingerprint
    return bundle.Origin(
        fingerprint.to_json(), fingerprint.digest(), codegen_version(fingerprint.kind)
    )


def store_at(cache_dir: str | os.PathLike[str] | None, *, reads: bool = False) -> KernelStore:
    """A store of its own: closing it closes nobody else's.

    Raises ``CacheDirectoryError`` where it cannot be used, and with ``reads`` where it was named
    and is not there: none is made.
    """
    options = {} if cache_dir is None else {"cache_dir": cache_dir}
    config = Config.from_options(options=options)
    root = config.cache_root
    if reads and cache_dir is not None:
        location.expect(root)
    location.usable(root)
    return KernelStore.open(root, max_bytes=config.cache_max_bytes)


def _check(contents: BundleContents) -> None:
    """Whether the schedules are schedules, before anything of them is kept."""
    try:
        for entry in contents.kernels:
            _candidate(entry.candidate)
        for record in (r for own in contents.records.values() for r in own):
            _candidate(record.candidate)
            if record.status != history.SEED:
                MeasureStatus(record.status)
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise exc.IncompatibleBundle(contents.path, f"an entry is damaged: {err!r}") from err


def _candidate(data: Mapping[str, Any]) -> None:
    if not all(isinstance(n, int) for n in data["decisions"].values()):
        raise ValueError("a decision is no integer")
    Candidate.from_json(data)


def _seed(store: KernelStore, contents: BundleContents, device: BundleDevice) -> None:
    """Note the bundle's schedules under the keys that a device gives their workloads."""
    if store.read_only or store.degraded:
        reason = store.degraded or "it is read-only"
        raise exc.CacheDirectoryError(str(store.root or "in memory"), reason)
    for entry in contents.kernels:
        candidate = Candidate.from_json(entry.candidate)
        if not (families.knows(candidate.sketch) and families.named(candidate.sketch).generated):
            continue
        context = device.context(entry.key.threads, entry.key.numerics)
        store.add_records(context.kernel_key(entry.key.workload), history.seeds_of([candidate]))
