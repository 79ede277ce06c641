"""Bundles: what was written is merged, whatever else comes is refused with the reason."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from tests.contracts.store import (
    get_library,
    graph_key,
    kernel_entry,
    kernel_key,
    put_library,
    record,
)
from torch_pruner import exc
from torch_pruner.cache import Artifact, ArtifactKind, KernelStore, archive, bundle

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = "a" * 64
CODEGEN = "tvm 1 + codegen 1"
HERE = bundle.Origin({"name": "a CPU", "isa": ["avx2"]}, DEVICE, CODEGEN)
KEY = b"sixteen bytes or more"
MATMUL = kernel_key(device=DEVICE)
SOFTMAX = kernel_key("softmax", device=DEVICE)
NET = graph_key(
    device=DEVICE, codegen=CODEGEN, kernels=(f"{MATMUL.workload}:1", f"{SOFTMAX.workload}:2")
)
LIBRARY = os.urandom(5000)


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Two kernels, a library and records of this device, and a kernel of another one."""
    store = KernelStore.open(tmp_path / "cache")
    store.put_kernel(kernel_entry(MATMUL))
    store.put_kernel(kernel_entry(SOFTMAX))
    store.put_kernel(kernel_entry(kernel_key("elsewhere")))
    put_library(store, NET, LIBRARY, {"n": 1})
    store.add_records(MATMUL, [record("one"), record("two", "timeout")])
    return store


@pytest.fixture
def path(store: KernelStore, tmp_path: Path) -> Path:
    path = tmp_path / "kernels.tpb"
    bundle.create(store, path, HERE, "a test")
    return path


@pytest.fixture
def empty(tmp_path: Path) -> KernelStore:
    return KernelStore.open(tmp_path / "empty")


def rewritten(path: Path, **members: bytes | None) -> Path:
    """A copy with members replaced, added or (None) left out; names have ``/`` as ``__``."""
    changes = {name.replace("__", "/"): data for name, data in members.items()}
    copy = path.with_name("changed.tpb")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(copy, "w") as new:
        for name in old.namelist():
            data = changes.pop(name) if name in changes else old.read(name)
            if data is not None:
                new.writestr(name, data)
        for name, data in changes.items():
            if data is not None:
                new.writestr(name, data)
    return copy


def manifest(path: Path, **changes: Any) -> bytes:
    with zipfile.ZipFile(path) as file:
        return json.dumps({**json.loads(file.read(bundle.MANIFEST)), **changes}).encode()


def test_what_is_loaded_is_what_was_written(path, empty) -> None:
    contents = bundle.read(path)
    found = contents.manifest
    assert (found.kernels, found.artifacts, found.records, found.signed) == (2, 1, 2, False)
    bundle.load(empty, contents, HERE)
    assert empty.get_kernel(MATMUL) == kernel_entry(MATMUL)
    entry, library = get_library(empty, NET)
    assert (library.read_bytes(), entry.meta) == (LIBRARY, {"n": 1})
    assert empty.records(MATMUL) == [record("one"), record("two", "timeout")]
    assert empty.stats().kernels == 2
    assert empty.verify().ok


def test_of_two_kernels_the_better_one_stays(path, empty) -> None:
    better, worse = 1e-5, 1e-1
    empty.put_kernel(kernel_entry(MATMUL, latency_s=better))
    empty.put_kernel(kernel_entry(SOFTMAX, latency_s=worse))
    bundle.load(empty, bundle.read(path), HERE)
    assert empty.get_kernel(MATMUL).latency_s == better
    assert empty.get_kernel(SOFTMAX).latency_s == kernel_entry().latency_s


def test_equal_contents_give_equal_files(store, path) -> None:
    again = path.with_name("again.tpb")
    bundle.create(store, again, HERE, "a test")
    assert again.read_bytes() == path.read_bytes()


def test_only_the_kernels_of_a_report(store, path, empty) -> None:
    assert bundle.create(store, path, HERE, "t", workloads={MATMUL.workload}).artifacts == 0
    bundle.load(empty, bundle.read(path), HERE)
    assert empty.stats().kernels == 1
    both = {MATMUL.workload, SOFTMAX.workload}
    assert bundle.create(store, path, HERE, "t", workloads=both).artifacts == 1


def test_only_a_whole_bundle_has_captured_programs(store, path, empty) -> None:
    captured = dataclasses.replace(NET, kernels=())
    store.put(Artifact(ArtifactKind.CAPTURED, captured, b"a program"))
    both = {MATMUL.workload, SOFTMAX.workload}
    assert bundle.create(store, path, HERE, "t", workloads=both).artifacts == 1
    assert bundle.create(store, path, HERE, "t").artifacts == 2
    bundle.load(empty, bundle.read(path), HERE)
    assert empty.get(ArtifactKind.CAPTURED, captured) is not None


def test_a_library_that_is_damaged_is_left_out(store, path, tmp_path) -> None:
    (blob,) = (tmp_path / "cache").rglob("*.so")
    blob.write_bytes(b"something else")
    assert bundle.create(store, path, HERE, "t").artifacts == 0
    assert bundle.read(path).artifacts == ()


def test_a_file_that_cannot_be_written_leaves_no_trace(store, path, tmp_path) -> None:
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(OSError, match="directory"):
        bundle.create(store, tmp_path / "missing" / "x.tpb", HERE, "t")
    with pytest.raises(ValueError, match="16 bytes"):
        bundle.create(store, path, HERE, "t", key=b"short")
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert bundle.read(path).manifest.kernels == 2


def test_another_device_or_version_is_refused_by_name(path, empty) -> None:
    contents = bundle.read(path)
    other = dataclasses.replace(HERE, digest="b" * 64, device={"name": "another", "isa": ["avx2"]})
    with pytest.raises(exc.IncompatibleBundle, match="name 'a CPU' and not 'another'") as caught:
        bundle.load(empty, contents, other)
    assert "isa" not in str(caught.value)
    newer = dataclasses.replace(HERE, codegen="tvm 2")
    with pytest.raises(exc.IncompatibleBundle, match=r"made by tvm 1 \+ codegen 1, and this is"):
        bundle.load(empty, contents, newer)
    assert empty.stats().kernels == 0


def test_a_cache_that_cannot_be_written_says_so(path, tmp_path) -> None:
    KernelStore.open(tmp_path / "fixed").put_kernel(kernel_entry())
    fixed = KernelStore.open(tmp_path / "fixed", read_only=True)
    with pytest.raises(exc.CacheDirectoryError, match="read-only"):
        bundle.load(fixed, bundle.read(path), HERE)


def test_every_truncation_is_refused(path) -> None:
    whole = path.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:size])
        with pytest.raises(exc.IncompatibleBundle):
            bundle.read(path)


def test_a_changed_byte_is_refused_or_changes_nothing(path) -> None:
    """Some bytes of a zip archive mean nothing (times, attributes): then all is as it was."""
    whole, rng = path.read_bytes(), random.Random(0)
    reference, reasons = bundle.read(path), []
    for at in rng.sample(range(len(whole)), 300):
        flipped = bytes([whole[at] ^ (1 << rng.randrange(8))])
        path.write_bytes(whole[:at] + flipped + whole[at + 1 :])
        try:
            found = bundle.read(path)
        except exc.IncompatibleBundle as err:
            reasons.append(str(err))
        else:
            assert found == reference
    assert len(reasons) > 200
    assert not any("\n" in reason for reason in reasons)


@pytest.mark.parametrize("name", ["../evil.so", "/etc/evil", "blobs/../../evil.so", "readme.txt"])
def test_members_with_other_names_are_refused(path, name: str) -> None:
    listed = {**json.loads(manifest(path))["files"], name: ["0" * 64, 4]}
    copy = rewritten(path, **{name: b"evil"})
    with pytest.raises(exc.IncompatibleBundle, match="not those of its manifest"):
        bundle.read(copy)
    copy = rewritten(path, **{name: b"evil", "manifest.json": manifest(path, files=listed)})
    with pytest.raises(exc.IncompatibleBundle, match="no bundle gives"):
        bundle.read(copy)


def test_a_member_that_is_missing_or_there_twice_is_refused(path) -> None:
    with pytest.raises(exc.IncompatibleBundle, match="members are not those"):
        bundle.read(rewritten(path, **{"kernels.jsonl": None}))
    with pytest.raises(exc.IncompatibleBundle, match="no manifest"):
        bundle.read(rewritten(path, **{"manifest.json": None}))
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("kernels.jsonl", "")
    with pytest.raises(exc.IncompatibleBundle, match="members are not those"):
        bundle.read(path)


def test_contents_that_the_manifest_does_not_promise_are_refused(path) -> None:
    with pytest.raises(exc.IncompatibleBundle, match="not what the manifest says"):
        bundle.read(rewritten(path, **{"records.jsonl": b""}))
    files = json.loads(manifest(path))["files"]
    blob = next(name for name in files if name.startswith("blobs/"))
    with pytest.raises(exc.IncompatibleBundle, match="not what the manifest says"):
        bundle.read(rewritten(path, **{blob: b"another library"}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 99}, "its format is 99"),
        ({"files": 3}, "manifest is damaged"),
        ({"kernels": "many"}, "not a count"),
        ({"origin": {"device": {}, "digest": "b" * 64, "codegen": CODEGEN}}, "another device"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(path, changes, says: str) -> None:
    with pytest.raises(exc.IncompatibleBundle, match=says):
        bundle.read(rewritten(path, **{"manifest.json": manifest(path, **changes)}))


def test_zeros_without_end_are_refused_at_once(tmp_path, monkeypatch) -> None:
    """A hundredth of ten gigabytes in ten megabytes, against a hundredth of the bound."""
    monkeypatch.setattr(archive, "MAX_BYTES", archive.MAX_BYTES // 100)
    path = tmp_path / "bomb.tpb"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open("manifest.json", "w", force_zip64=True) as member,
    ):
        for _ in range(100):
            member.write(bytes(1 << 20))
    begin = time.monotonic()
    with pytest.raises(exc.IncompatibleBundle, match="unpacks to more than"):
        bundle.read(path)
    assert time.monotonic() - begin < 5


def test_a_text_member_is_bounded_too(path, monkeypatch) -> None:
    monkeypatch.setattr(archive, "MAX_TEXT_BYTES", 100)
    with pytest.raises(exc.IncompatibleBundle, match="larger than"):
        bundle.read(path)


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06", b"not a zip archive" * 100])
def test_what_is_no_archive_is_refused(tmp_path, content: bytes) -> None:
    path = tmp_path / "x.tpb"
    path.write_bytes(content)
    with pytest.raises(exc.IncompatibleBundle, match="damaged or no bundle"):
        bundle.read(path)
    with pytest.raises(exc.IncompatibleBundle, match="No such file"):
        bundle.read(tmp_path / "missing.tpb")
    with pytest.raises(exc.IncompatibleBundle):
        bundle.read(tmp_path)


def test_a_signature_is_asked_for_and_checked(store, path) -> None:
    with pytest.raises(exc.IncompatibleBundle, match="not signed"):
        bundle.read(path, key=KEY)
    bundle.create(store, path, HERE, "a test", key=KEY)
    assert bundle.read(path, key=KEY).manifest.signed
    assert bundle.read(path).manifest.signed
    with pytest.raises(exc.IncompatibleBundle, match="another key"):
        bundle.read(path, key=KEY + b"!")
    other = rewritten(path, **{"manifest.json": manifest(path, made_by="somebody")})
    with pytest.raises(exc.IncompatibleBundle, match="another key, or of another manifest"):
        bundle.read(other, key=KEY)
