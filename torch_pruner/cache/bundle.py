"""Bundles: the kernels of one device in one file, to be shipped to a fleet.

In: a store, or a file from anywhere. Out: a file, or what it holds, all of it checked: a bundle is
a zip archive whose manifest names every other member with its size and sha256, so nothing is used
that is not listed, and nothing is unpacked to a path that the archive names. What it unpacks to is
bounded before it is read. A signature, where there is one, is an HMAC of the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import tempfile
import zipfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pruner import exc
from torch_pruner.cache import archive as archives
from torch_pruner.cache.archive import refuse
from torch_pruner.cache.entry import GraphEntry, KernelEntry
from torch_pruner.cache.key import canonical_json, is_digest, parse_object
from torch_pruner.cache.records import TuningRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch_pruner.cache.store import KernelStore

FORMAT = 1
MANIFEST, SIGNATURE = "manifest.json", "signature.json"
KERNELS, GRAPHS, RECORDS = "kernels.jsonl", "graphs.jsonl", "records.jsonl"
BLOBS, SUFFIX = "blobs/", ".so"
MIN_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Origin:
    """What a bundle was made on: the device's fingerprint as JSON, its digest, and versions."""

    device: Mapping[str, Any]
    digest: str
    codegen: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle says about itself. ``files``: (sha256, bytes) of every other member."""

    origin: Origin
    made_by: str
    kernels: int = 0
    graphs: int = 0
    records: int = 0
    files: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    signed: bool = False

    def to_text(self) -> str:
        data = {"format": FORMAT, **asdict(self)}
        del data["signed"]
        return canonical_json(data)

    @staticmethod
    def from_text(text: str, *, signed: bool) -> Manifest:
        """Inverse of ``to_text``. Raises ``ValueError`` for anything else."""
        data = parse_object(text)
        if data.get("format") != FORMAT:
            raise ValueError(
                f"its format is {data.get('format')!r}, and this version reads {FORMAT}"
            )
        try:
            origin = data["origin"]
            files = {
                str(name): (_digest(entry[0]), _count(entry[1]))
                for name, entry in data["files"].items()
            }
            return Manifest(
                Origin(dict(origin["device"]), _digest(origin["digest"]), str(origin["codegen"])),
                str(data["made_by"]),
                _count(data["kernels"]),
                _count(data["graphs"]),
                _count(data["records"]),
                files,
                signed,
            )
        except (KeyError, TypeError, AttributeError, IndexError) as err:
            raise ValueError(f"its manifest is damaged: {err}") from err


@dataclass(frozen=True, slots=True)
class Contents:
    """A bundle whose every byte was checked."""

    path: Path
    manifest: Manifest
    kernels: tuple[KernelEntry, ...]
    graphs: tuple[GraphEntry, ...]
    records: Mapping[str, tuple[TuningRecord, ...]] = field(default_factory=dict)  # by key digest

    def library(self, blob: str) -> bytes:
        """The bytes of a library, checked again. Raises ``IncompatibleBundle`` if they changed."""
        name = f"{BLOBS}{blob}{SUFFIX}"
        with archives.opened(self.path) as archive:
            expected = self.manifest.files[name]
            return archives.member_of(self.path, archive, name, expected, parsed=False)


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
    temp: str | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".bundle-", delete=False) as raw:
            temp = raw.name
            with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
                manifest = _fill(archive, store, Manifest(origin, made_by), workloads)
                text = manifest.to_text().encode()
                archives.write(archive, MANIFEST, text)
                if key is not None:
                    archives.write(archive, SIGNATURE, _signature(text, key))
            raw.flush()
            os.fsync(raw.fileno())
        os.chmod(temp, 0o644)
        os.replace(temp, target)
    except BaseException:
        if temp is not None:
            with contextlib.suppress(OSError):
                os.unlink(temp)
        raise
    return replace(manifest, signed=key is not None)


def read(path: str | os.PathLike[str], *, key: bytes | None = None) -> Contents:
    """Everything in a bundle, every digest checked; with ``key``, its signature first.

    Raises ``IncompatibleBundle`` for a file that is damaged, too large, no bundle, or not signed
    with ``key``.
    """
    where = Path(path)
    with archives.opened(where) as archive:
        manifest = _manifest(where, archive, key)
        _check_names(where, archive, manifest)
        for name, expected in manifest.files.items():
            if name.startswith(BLOBS):
                archives.hash_member(where, archive, name, expected)
        text = {
            name: archives.member_of(where, archive, name, manifest.files[name], parsed=True)
            for name in (KERNELS, GRAPHS, RECORDS)
        }
    try:
        kernels = tuple(map(KernelEntry.from_text, _split(text[KERNELS])))
        graphs = tuple(map(GraphEntry.from_text, _split(text[GRAPHS])))
        records: dict[str, list[TuningRecord]] = {k.key.digest(): [] for k in kernels}
        for line in _split(text[RECORDS]):
            data = parse_object(line)
            records[data["kernel"]].append(TuningRecord.from_json(data["record"]))
        _check_entries(manifest, kernels, graphs)
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        refuse(where, f"an entry is damaged: {err}")
    return Contents(where, manifest, kernels, graphs, {k: tuple(r) for k, r in records.items()})


def load(store: KernelStore, contents: Contents, here: Origin) -> None:
    """Merge a bundle into a store; of two kernels the better one stays.

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
    for graph in contents.graphs:
        store.put_graph(graph.key, contents.library(graph.blob), graph.meta)
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

    graphs: list[GraphEntry] = []
    for entry in listed:
        found = store.get_graph(entry.key)
        if found is None:
            continue  # damaged or gone since it was listed, which the store has said
        graphs.append(found[0])
        if (name := f"{BLOBS}{found[0].blob}{SUFFIX}") not in files:
            add(name, found[1].read_bytes())
    records = [
        canonical_json({"kernel": kernel.key.digest(), "record": record.to_json()})
        for kernel in kernels
        for record in store.records(kernel.key)
    ]
    add(KERNELS, _lines([k.to_text() for k in kernels]))
    add(GRAPHS, _lines([g.to_text() for g in graphs]))
    add(RECORDS, _lines(records))
    return replace(
        manifest, kernels=len(kernels), graphs=len(graphs), records=len(records), files=files
    )


def _selected(
    store: KernelStore, origin: Origin, workloads: Collection[str] | None
) -> tuple[list[KernelEntry], list[GraphEntry]]:
    """Kernels and graphs of one device and version, in an order that does not depend on use."""
    entries = [i.entry for i in store.ls()]
    mine = [e for e in entries if (e.key.device, e.key.codegen) == (origin.digest, origin.codegen)]
    kernels = [e for e in mine if isinstance(e, KernelEntry)]
    graphs = [e for e in mine if isinstance(e, GraphEntry)]
    if workloads is not None:
        wanted = set(workloads)
        kernels = [e for e in kernels if e.key.workload in wanted]
        graphs = [e for e in graphs if {k.partition(":")[0] for k in e.key.kernels} <= wanted]
    return (
        sorted(kernels, key=lambda e: e.key.digest()),
        sorted(graphs, key=lambda e: e.key.digest()),
    )


def _lines(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _split(data: bytes) -> list[str]:
    return data.decode().split("\n")[:-1]


def _signature(manifest: bytes, key: bytes) -> bytes:
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"a signing key has at least {MIN_KEY_BYTES} bytes")
    mac = hmac.new(key, manifest, hashlib.sha256).hexdigest()
    return canonical_json({"algorithm": "hmac-sha256", "mac": mac}).encode()


def _manifest(path: Path, archive: zipfile.ZipFile, key: bytes | None) -> Manifest:
    """The manifest; with ``key``, after its signature."""
    names = [m.filename for m in archive.infolist()]
    if MANIFEST not in names:
        refuse(path, "it has no manifest")
    text = archives.bounded(path, archive, MANIFEST)
    signed = SIGNATURE in names
    if key is not None:
        if not signed:
            refuse(path, "it is not signed", "sign with `torch-pruner bundle create --sign KEY`")
        if not hmac.compare_digest(
            archives.bounded(path, archive, SIGNATURE), _signature(text, key)
        ):
            refuse(path, "its signature is of another key, or of another manifest")
    try:
        return Manifest.from_text(text.decode(errors="replace"), signed=signed)
    except ValueError as err:
        refuse(path, str(err))


def _check_names(path: Path, archive: zipfile.ZipFile, manifest: Manifest) -> None:
    """Exactly the members that the manifest lists, with names that a bundle gives."""
    names = [m.filename for m in archive.infolist()]
    listed = {MANIFEST, *manifest.files} | ({SIGNATURE} if manifest.signed else set())
    if len(names) != len(set(names)) or set(names) != listed:
        odd = sorted(set(names) ^ listed) or sorted({n for n in names if names.count(n) > 1})
        refuse(path, f"its members are not those of its manifest: {odd[0]!r}")
    for name in manifest.files:
        blob = name.removeprefix(BLOBS).removesuffix(SUFFIX)
        named = name == f"{BLOBS}{blob}{SUFFIX}" and is_digest(blob)
        if name not in (KERNELS, GRAPHS, RECORDS) and not named:
            refuse(path, f"a member has a name that no bundle gives: {name!r}")
        if named and manifest.files[name][0] != blob:
            refuse(path, f"a library is not what it is named after: {name!r}")
    for name in (KERNELS, GRAPHS, RECORDS):
        if name not in manifest.files:
            refuse(path, f"it has no {name}")


def _check_entries(
    manifest: Manifest, kernels: tuple[KernelEntry, ...], graphs: tuple[GraphEntry, ...]
) -> None:
    origin = manifest.origin
    made_by = [(k.key.device, k.key.codegen) for k in kernels]
    made_by += [(g.key.device, g.key.codegen) for g in graphs]
    if any(found != (origin.digest, origin.codegen) for found in made_by):
        raise ValueError("one is of another device or version than the manifest says")
    for graph in graphs:
        if f"{BLOBS}{graph.blob}{SUFFIX}" not in manifest.files:
            raise ValueError(f"library {graph.blob} is missing")


def _digest(value: object) -> str:
    if not is_digest(value):
        raise ValueError(f"not a sha256: {value!r}")
    return str(value)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"not a count: {value!r}")
    return value


__all__ = ["Contents", "Manifest", "Origin", "create", "load", "read"]
