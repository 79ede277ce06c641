"""The manifest of a bundle: read, and checked against the archive.

In: an archive. Out: its manifest, which names every other member with its size and sha256. Checks
the manifest's form, its signature (an HMAC of its bytes) where one is asked for, and the names of
the members; their contents are ``bundle``'s to check.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch_pruner.cache import archive as archives
from torch_pruner.cache.archive import refuse
from torch_pruner.cache.key import canonical_json, is_digest, parse_object

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Mapping
    from pathlib import Path

FORMAT = 2
MANIFEST, SIGNATURE = "manifest.json", "signature.json"
KERNELS, ARTIFACTS, RECORDS = "kernels.jsonl", "artifacts.jsonl", "records.jsonl"
BLOBS, SUFFIX = "blobs/", ".so"
MIN_KEY_BYTES = 16
MEMBERS = (KERNELS, ARTIFACTS, RECORDS)


@dataclass(frozen=True, slots=True)
class Origin:
    """The device that a bundle was made on, its digest, and the versions that made it.

    ``device``: the fingerprint as JSON.
    """

    device: Mapping[str, Any]
    digest: str
    codegen: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a bundle in numbers. ``files``: (sha256, bytes) of every other member."""

    origin: Origin
    made_by: str
    kernels: int = 0
    artifacts: int = 0
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
                _count(data["artifacts"]),
                _count(data["records"]),
                files,
                signed,
            )
        except (KeyError, TypeError, AttributeError, IndexError) as err:
            raise ValueError(f"its manifest is damaged: {err}") from err


def check_key(key: bytes) -> None:
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"a signing key has at least {MIN_KEY_BYTES} bytes")


def signature(manifest: bytes, key: bytes) -> bytes:
    check_key(key)
    mac = hmac.new(key, manifest, hashlib.sha256).hexdigest()
    return canonical_json({"algorithm": "hmac-sha256", "mac": mac}).encode()


def read(path: Path, archive: zipfile.ZipFile, key: bytes | None) -> Manifest:
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
            archives.bounded(path, archive, SIGNATURE), signature(text, key)
        ):
            refuse(path, "its signature is of another key, or of another manifest")
    try:
        return Manifest.from_text(text.decode(errors="replace"), signed=signed)
    except ValueError as err:
        refuse(path, str(err))


def check_names(path: Path, archive: zipfile.ZipFile, manifest: Manifest) -> None:
    """Exactly the members that the manifest lists, with names that a bundle gives."""
    names = [m.filename for m in archive.infolist()]
    listed = {MANIFEST, *manifest.files} | ({SIGNATURE} if manifest.signed else set())
    if len(names) != len(set(names)) or set(names) != listed:
        odd = sorted(set(names) ^ listed) or sorted({n for n in names if names.count(n) > 1})
        refuse(path, f"its members are not those of its manifest: {odd[0]!r}")
    for name in manifest.files:
        blob = name.removeprefix(BLOBS).removesuffix(SUFFIX)
        named = name == f"{BLOBS}{blob}{SUFFIX}" and is_digest(blob)
        if name not in MEMBERS and not named:
            refuse(path, f"a member has a name that no bundle gives: {name!r}")
        if named and manifest.files[name][0] != blob:
            refuse(path, f"a blob is not what it is named after: {name!r}")
    for name in MEMBERS:
        if name not in manifest.files:
            refuse(path, f"it has no {name}")


def _digest(value: object) -> str:
    if not is_digest(value):
        raise ValueError(f"not a sha256: {value!r}")
    return str(value)


def _device(value: Mapping[str, Any]) -> dict[str, Any]:
    for name, fact in value.items():
        _plain(f"{name} {fact}")
    return dict(value)


def _plain(text: str) -> str:
    """``text``, to be shown on terminals. Raises ValueError for characters that command one."""
    if not text.isprintable():
        raise ValueError(f"its manifest is damaged: {text[:40]!r}")
    return text


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"not a count: {value!r}")
    return value
