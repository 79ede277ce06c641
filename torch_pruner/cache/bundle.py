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

from torch_pruner import exc, log
from torch_pruner.cache import archive as archives
from torch_pruner.cache.archive import refuse
from torch_pruner.cache.entry import CHECKED, GraphEntry, KernelEntry
from torch_pruner.cache.key import canonical_json, is_digest, parse_object
from torch_pruner.cache.records import TuningRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch_pruner.cache.store import KernelStore

FORMAT = 1
MANIFEST, SIGNATURE = "manifest.json", "signature.json"
KERNELS, GRAPHS, RECORDS = "kernels.jsonl", "graphs.jsonl", "records.jsonl"
BLOBS, SUFFIX = "blobs/", ".so"
MIN_KEY_BYTES = 16

Stamp = tuple[int, ...]

_log = log.logger(__name__)


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
    left_out: tuple[str, ...] = ()  # kernels that are not tuned, when it was made

    def to_text(self) -> str:
        data = {"format": FORMAT, **asdict(self)}
        del data["signed"], data["left_out"]
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
                Origin(
                    _device(origin["device"]),
                    _digest(origin["digest"]),
                    _plain(str(origin["codegen"])),
                ),
                _plain(str(data["made_by"])),
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
    """A bundle whose every byte was checked. ``vouched``: by a signature that was asked for."""

    path: Path
    manifest: Manifest
    kernels: tuple[KernelEntry, ...]
    graphs: tuple[GraphEntry, ...]
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
    if key is not None:
        _check_key(key)
    with archives.opened(where) as archive:
        stamp = _stamp(archive)
        manifest = _manifest(where, archive, key)
        _check_names(where, archive, manifest)
        for name, expected in manifest.files.items():
            if name.startswith(BLOBS):
                archives.hash_member(where, archive, name, expected)
        text = {
            name: archives.member_of(where, archive, name, manifest.files[name], parsed=True)
            for name in (KERNELS, GRAPHS, RECORDS)
        }
    if sum(map(archives.values_in, text.values())) > archives.MAX_VALUES:
        refuse(where, f"its entries hold more than {archives.MAX_VALUES} values")
    try:
        kernels = tuple(KernelEntry.from_text(t) for t in _split(text[KERNELS], manifest.kernels))
        graphs = tuple(GraphEntry.from_text(t) for t in _split(text[GRAPHS], manifest.graphs))
        records: dict[str, list[TuningRecord]] = {k.key.digest(): [] for k in kernels}
        for line in _split(text[RECORDS], manifest.records):
            data = parse_object(line)
            records[data["kernel"]].append(TuningRecord.from_json(data["record"]))
        _check_entries(manifest, kernels, graphs)
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        refuse(where, f"an entry is damaged: {err}")
    kept = {name: tuple(found) for name, found in records.items()}
    return Contents(where, manifest, kernels, graphs, kept, key is not None, stamp)


def load(store: KernelStore, contents: Contents, here: Origin) -> None:
    """Merge a bundle into a store; of two kernels the better one stays.

    What others say was compared with eager is not taken over unless the bundle is ``vouched`` for.
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
        for graph in contents.graphs:
            if CHECKED in graph.meta and not contents.vouched:
                continue
            name = f"{BLOBS}{graph.blob}{SUFFIX}"
            expected = contents.manifest.files[name]
            data = archives.member_of(contents.path, archive, name, expected, parsed=False)
            store.put_graph(graph.key, data, graph.meta)
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
    own = _lines([k.to_text() for k in kernels])
    built = _lines([g.to_text() for g in graphs])
    records = _records(store, kernels, archives.values_in(own) + archives.values_in(built))
    add(KERNELS, own)
    add(GRAPHS, built)
    add(RECORDS, _lines(records))
    return replace(
        manifest, kernels=len(kernels), graphs=len(graphs), records=len(records), files=files
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
) -> tuple[list[KernelEntry], list[GraphEntry]]:
    """Kernels and graphs of one device and version, in an order that does not depend on use."""
    entries = [i.entry for i in store.ls()]
    mine = [e for e in entries if (e.key.device, e.key.codegen) == (origin.digest, origin.codegen)]
    found = [e for e in mine if isinstance(e, KernelEntry)]
    kernels = [e for e in found if e.shippable]
    absent = {e.key.workload for e in found if not e.shippable}
    graphs = [e for e in mine if isinstance(e, GraphEntry)]
    graphs = [e for e in graphs if absent.isdisjoint(k.partition(":")[0] for k in e.key.kernels)]
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
    """What tells one state of one file from others."""
    assert archive.fp is not None
    found = os.fstat(archive.fp.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _check_key(key: bytes) -> None:
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"a signing key has at least {MIN_KEY_BYTES} bytes")


def _signature(manifest: bytes, key: bytes) -> bytes:
    _check_key(key)
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


def _device(value: Mapping[str, Any]) -> dict[str, Any]:
    for name, fact in value.items():
        _plain(f"{name} {fact}")
    return dict(value)


def _plain(text: str) -> str:
    """What is shown on terminals. Raises ValueError for characters that would command one."""
    if not text.isprintable():
        raise ValueError(f"its manifest is damaged: {text[:40]!r}")
    return text


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"not a count: {value!r}")
    return value


__all__ = ["Contents", "Manifest", "Origin", "create", "load", "read"]
