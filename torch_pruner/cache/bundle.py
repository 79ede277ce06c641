"""Bundles: the kernels of one device in one file, to be shipped to a fleet.

In: a store, or a file from anywhere. Out: a file, or what it holds, all of it checked: a bundle is
a zip archive whose manifest names every other member with its size and sha256, so nothing is used
that is not listed, and nothing is unpacked to a path that the archive names. What it unpacks to is
bounded before it is read. A signature, where there is one, is an HMAC of the manifest.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch_pruner import exc, log
from torch_pruner.cache import archive as archives
from torch_pruner.cache import manifest as manifests
from torch_pruner.cache.archive import refuse
from torch_pruner.cache.entry import Artifact, ArtifactEntry, ArtifactKind, KernelEntry
from torch_pruner.cache.files import written_whole
from torch_pruner.cache.key import canonical_json, parse_object
from torch_pruner.cache.manifest import (
    ARTIFACTS,
    BLOBS,
    KERNELS,
    MANIFEST,
    MEMBERS,
    RECORDS,
    SIGNATURE,
    SUFFIX,
    Manifest,
    Origin,
)
from torch_pruner.cache.records import TuningRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch_pruner.cache.store import KernelStore

Stamp = tuple[int, ...]

_log = log.logger(__name__)


@dataclass(frozen=True, slots=True)
class BundleContents:
    """A bundle whose every byte was checked. ``vouched``: by a signature that was asked for."""

    path: Path
    manifest: Manifest
    kernels: tuple[KernelEntry, ...]
    artifacts: tuple[ArtifactEntry, ...]
    records: Mapping[str, tuple[TuningRecord, ...]] = field(default_factory=dict)  # by key digest

    vouched: bool = field(default=False, compare=False)
    file: Stamp = field(default=(), compare=False)  # which one was read


def create(
    store: KernelStore,
    path: str | os.PathLike[str],
    origin: Origin,
    made_by: str,
    *,
    workloads: Collection[str] | None = None,
    key: bytes | None = None,
) -> Manifest:
    """Write what ``store`` has for a device and version, only of some ``workloads`` if given.

    A file at ``path`` is replaced when the new one is whole. ``key`` signs it. Raises ``OSError``
    where it cannot be written.
    """
    target = Path(path)
    with (
        written_whole(target, mode=0o644) as raw,
        zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        manifest = _fill(archive, store, Manifest(origin, made_by), workloads)
        text = manifest.to_text().encode()
        archives.write(archive, MANIFEST, text)
        if key is not None:
            archives.write(archive, SIGNATURE, manifests.signature(text, key))
    return replace(manifest, signed=key is not None)


def read(path: str | os.PathLike[str], *, key: bytes | None = None) -> BundleContents:
    """Everything in a bundle, every digest checked; with ``key``, its signature first.

    Raises ``IncompatibleBundle`` for a file that is damaged, too large, no bundle, or not signed
    with ``key``.
    """
    where = Path(path)
    if key is not None:
        manifests.check_key(key)
    with archives.opened(where) as archive:
        stamp = _stamp(archive)
        manifest = manifests.read(where, archive, key)
        manifests.check_names(where, archive, manifest)
        for name, expected in manifest.files.items():
            if name.startswith(BLOBS):
                archives.hash_member(where, archive, name, expected)
        text = {
            name: archives.member_of(where, archive, name, manifest.files[name], parsed=True)
            for name in MEMBERS
        }
    if sum(map(archives.values_in, text.values())) > archives.MAX_VALUES:
        refuse(where, f"its entries hold more than {archives.MAX_VALUES} values")
    try:
        kernels = tuple(KernelEntry.from_text(t) for t in _split(text[KERNELS], manifest.kernels))
        artifacts = tuple(
            ArtifactEntry.from_text(t) for t in _split(text[ARTIFACTS], manifest.artifacts)
        )
        records: dict[str, list[TuningRecord]] = {k.key.digest(): [] for k in kernels}
        for line in _split(text[RECORDS], manifest.records):
            data = parse_object(line)
            records[data["kernel"]].append(TuningRecord.from_json(data["record"]))
        _check_entries(manifest, kernels, artifacts)
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        refuse(where, f"an entry is damaged: {err}")
    kept = {name: tuple(found) for name, found in records.items()}
    return BundleContents(where, manifest, kernels, artifacts, kept, key is not None, stamp)


def load(store: KernelStore, contents: BundleContents, here: Origin) -> None:
    """Merge a bundle into a store; of two kernels the better one stays.

    Verdicts of others are not taken over unless the bundle is ``vouched`` for.
    Raises ``IncompatibleBundle`` where it was made for another device or version than ``here``, and
    ``CacheDirectoryError`` where the store cannot be written.
    """
    origin = contents.manifest.origin
    seed = "`--as-seed` takes its schedules as starting points for tuning"
    if origin.digest != here.digest:
        differs = [
            f"{name} {origin.device.get(name)!r} and not {value!r}"
            for name, value in here.device.items()
            if origin.device.get(name) != value
        ]
        refuse(contents.path, f"made on another device: {'; '.join(differs)}", seed)
    if origin.codegen != here.codegen:
        refuse(contents.path, f"made by {origin.codegen}, and this is {here.codegen}", seed)
    if store.read_only or store.degraded:
        reason = store.degraded or "it is read-only"
        raise exc.CacheDirectoryError(str(store.root or "in memory"), reason)
    with archives.opened(contents.path) as archive:
        if _stamp(archive) != contents.file:
            refuse(contents.path, "it changed while it was read", "try again")
        for entry in contents.artifacts:
            if entry.kind is ArtifactKind.VERDICT and not contents.vouched:
                continue
            name = f"{BLOBS}{entry.blob}{SUFFIX}"
            expected = contents.manifest.files[name]
            data = archives.member_of(contents.path, archive, name, expected, parsed=False)
            store.put(Artifact(entry.kind, entry.key, data, entry.meta))
    for kernel in contents.kernels:
        store.put_kernel(kernel)
        if records := contents.records.get(kernel.key.digest()):
            store.add_records(kernel.key, records)


def _fill(
    archive: zipfile.ZipFile,
    store: KernelStore,
    manifest: Manifest,
    workloads: Collection[str] | None,
) -> Manifest:
    """Write every member but the manifest; the manifest, with what they hold."""
    kernels, listed = _selected(store, manifest.origin, workloads)
    files: dict[str, tuple[str, int]] = {}

    def add(name: str, data: bytes) -> None:
        archives.write(archive, name, data)
        files[name] = (hashlib.sha256(data).hexdigest(), len(data))

    artifacts: list[ArtifactEntry] = []
    for entry in listed:
        found = store.get(entry.kind, entry.key)
        if found is None:
            continue  # damaged or gone since it was listed, which the store has said
        artifacts.append(found[0])
        if (name := f"{BLOBS}{found[0].blob}{SUFFIX}") not in files:
            add(name, found[1].read_bytes())
    own = _lines([k.to_text() for k in kernels])
    kept = _lines([a.to_text() for a in artifacts])
    records = _records(store, kernels, archives.values_in(own) + archives.values_in(kept))
    add(KERNELS, own)
    add(ARTIFACTS, kept)
    add(RECORDS, _lines(records))
    return replace(
        manifest,
        kernels=len(kernels),
        artifacts=len(artifacts),
        records=len(records),
        files=files,
    )


def _records(store: KernelStore, kernels: list[KernelEntry], values: int) -> list[str]:
    """Records of ``kernels``, as many as a bundle may hold beside so many ``values``."""
    found: list[str] = []
    size = 0
    for kernel in kernels:
        name = kernel.key.digest()
        for record in store.records(kernel.key):
            line = canonical_json({"kernel": name, "record": record.to_json()})
            size, values = size + len(line) + 1, values + archives.values_in(line.encode()) + 1
            if size > archives.MAX_TEXT_BYTES or values > archives.MAX_VALUES:
                _log.warning("only %d of the tuning records fit into the bundle", len(found))
                return found
            found.append(line)
    return found


def _selected(
    store: KernelStore, origin: Origin, workloads: Collection[str] | None
) -> tuple[list[KernelEntry], list[ArtifactEntry]]:
    """Kernels and artifacts of one device and version, in an order that does not depend on use.

    Of some ``workloads``, only what was made of them and nothing else: captured programs know
    nothing of kernels, so they are left out.
    """
    entries = [i.entry for i in store.ls()]
    mine = [e for e in entries if (e.key.device, e.key.codegen) == (origin.digest, origin.codegen)]
    found = [e for e in mine if isinstance(e, KernelEntry)]
    kernels = [e for e in found if e.shippable]
    absent = {e.key.workload for e in found if not e.shippable}
    # What kernels' machine code is good for, new graphs, can be built; libraries have it linked.
    artifacts = [
        e for e in mine if isinstance(e, ArtifactEntry) and e.kind is not ArtifactKind.KERNEL
    ]
    artifacts = [e for e in artifacts if absent.isdisjoint(_workloads(e))]
    if workloads is not None:
        wanted = set(workloads)
        kernels = [e for e in kernels if e.key.workload in wanted]
        artifacts = [e for e in artifacts if e.kind is not ArtifactKind.CAPTURED]
        artifacts = [e for e in artifacts if _workloads(e) <= wanted]
    return (
        sorted(kernels, key=lambda e: e.key.digest()),
        sorted(artifacts, key=ArtifactEntry.digest),
    )


def _workloads(entry: ArtifactEntry) -> set[str]:
    """Digests of the graphs of the kernels that an artifact was made with."""
    return {kernel.partition(":")[0] for kernel in entry.key.kernels}


def _lines(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _split(data: bytes, count: int) -> Iterator[str]:
    """The lines, one at a time. Raises ValueError unless there are ``count``, each with its end."""
    if data.count(b"\n") != count or data[-1:] not in (b"", b"\n"):
        raise ValueError("its lines are not as many as the manifest says")
    start = 0
    while start < len(data):
        end = data.index(b"\n", start)
        yield data[start:end].decode()
        start = end + 1


def _stamp(archive: zipfile.ZipFile) -> Stamp:
    """Device, inode, size and time of a file, by which one state of it is told from others."""
    assert archive.fp is not None
    found = os.fstat(archive.fp.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _check_entries(
    manifest: Manifest, kernels: tuple[KernelEntry, ...], artifacts: tuple[ArtifactEntry, ...]
) -> None:
    origin = manifest.origin
    made_by = [(k.key.device, k.key.codegen) for k in kernels]
    made_by += [(g.key.device, g.key.codegen) for g in artifacts]
    if any(found != (origin.digest, origin.codegen) for found in made_by):
        raise ValueError("one is of another device or version than the manifest says")
    for entry in artifacts:
        if f"{BLOBS}{entry.blob}{SUFFIX}" not in manifest.files:
            raise ValueError(f"blob {entry.blob} is missing")


__all__ = ["BundleContents", "Manifest", "Origin", "create", "load", "read"]
