"""Bundles that somebody forged: refused with one error, within bounds, before anything is kept."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import struct
import subprocess
import sys
import threading
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from tests.contracts.store import graph_key, kernel_entry, kernel_key, put_library, record
from torch_pruner import exc
from torch_pruner.cache import KernelStore, archive, bundle
from torch_pruner.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

DEVICE, CODEGEN = "a" * 64, "tvm 1 + codegen 1"
HERE = bundle.Origin({"name": "a CPU"}, DEVICE, CODEGEN)
MATMUL = kernel_key(device=DEVICE)
NET = graph_key(device=DEVICE, codegen=CODEGEN)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store = KernelStore.open(tmp_path / "cache")
    store.put_kernel(kernel_entry(MATMUL))
    put_library(store, NET, b"library" * 100, {"n": 1})
    store.add_records(MATMUL, [record("one"), record("two", "timeout")])
    bundle.create(store, tmp_path / "kernels.tpb", HERE, "a test")
    store.close()
    return tmp_path / "kernels.tpb"


def forged(path: Path, member: str = "", old: str = "", new: str = "", **manifest: Any) -> Path:
    """A copy in which a member has ``new`` for ``old``, with a manifest to match."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    given = json.loads(members.pop(bundle.MANIFEST))
    if member:
        changed = members[member].replace(old.encode(), new.encode())
        assert changed != members[member]
        members[member] = changed
    files = {n: [hashlib.sha256(d).hexdigest(), len(d)] for n, d in members.items()}
    members[bundle.MANIFEST] = json.dumps({**given, "files": files, **manifest}).encode()
    copy = path.with_name("forged.tpb")
    with zipfile.ZipFile(copy, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return copy


def refused(path: Path, match: str) -> None:
    with pytest.raises(exc.IncompatibleBundle, match=match):
        bundle.read(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.tpb"
    os.mkfifo(pipe)
    found: list[BaseException] = []

    def read() -> None:
        try:
            bundle.read(pipe)
        except BaseException as err:
            found.append(err)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(10)
    assert not reader.is_alive(), "it waits for somebody who writes"
    assert isinstance(found[0], exc.IncompatibleBundle)
    assert "not a regular file" in str(found[0])


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev", "/proc/self/mem", "a\0b"])
def test_what_is_no_regular_file_is_refused(device: str) -> None:
    """A device was read until memory ended."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, limits[1]))
    try:
        with pytest.raises(exc.IncompatibleBundle):
            bundle.read(device)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("flag", ["--require-signature", "--report"])
def test_secrets_and_reports_are_regular_files_too(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "create" if flag == "--report" else "load"
    assert main(["bundle", command, str(tmp_path / "x.tpb"), flag, "/dev/zero"]) == 2
    assert "not a regular file" in capsys.readouterr().err


_LOADS = """
import resource, sys
from torch_pruner import exc
from torch_pruner.cache import bundle
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    bundle.read(sys.argv[1])
except exc.IncompatibleBundle as err:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, err)
"""


def refused_within(path: Path, mebibytes: int) -> str:
    """What is said, by a process of its own, and that it took no more memory than this."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _LOADS, str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    kibibytes, _, said = done.stdout.partition(" ")
    assert int(kibibytes) < mebibytes << 10
    return said


@pytest.mark.parametrize("text", ["\n", "[],", "{}\n"])
def test_a_member_of_nothing_takes_no_memory(path: Path, text: str) -> None:
    """Newlines took 1.2 GB: there were as many lines, and their list was made."""
    big = text * ((100 << 20) // len(text))
    with zipfile.ZipFile(path) as file:
        line = file.read(bundle.RECORDS).decode()
    said = refused_within(forged(path, bundle.RECORDS, line, big, records=big.count("\n")), 400)
    assert "values" in said


def test_lines_are_counted_before_they_are_parsed(path: Path) -> None:
    refused(forged(path, records=3), "not as many as the manifest says")
    refused(forged(path, bundle.ARTIFACTS, "}\n", "}"), "not as many as the manifest says")


def many_members(path: Path, count: int) -> None:
    """As zipfile writes them, but without its time for each."""
    body = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 33, 0, 0, 0, 1, 0) + b"x"
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, *[0] * 3, 33, *[0] * 3, 1, *[0] * 6)
    entry += b"x"
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, count * len(entry), len(body), 0)
    path.write_bytes(body + entry * count + end)


def test_too_many_members_are_refused_before_they_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the archive may say any number; 300 000 were parsed."""
    path = tmp_path / "many.tpb"
    monkeypatch.setattr(zipfile, "ZipFile", lambda *args: pytest.fail("it is parsed"))
    for count in (300_000, archive.MAX_MEMBERS + 1):
        many_members(path, count)
        refused(path, "20000 members")


NUMBERS = ["1" + "0" * 400, "1e400", "NaN", "Infinity", str(1 << 64), '"\\ud800"', "[" * 500]


@pytest.mark.parametrize("number", NUMBERS, ids=[n[:8] for n in NUMBERS])
@pytest.mark.parametrize(
    ("member", "old"),
    [
        (bundle.KERNELS, '"latency_s":0.001'),
        (bundle.KERNELS, '"trials":8'),
        (bundle.KERNELS, '"i":4'),
        (bundle.ARTIFACTS, '"n":1'),
        (bundle.ARTIFACTS, '"threads":2'),
        (bundle.RECORDS, '"run_secs":[0.001'),
        (bundle.RECORDS, '"time":0.0'),
        (bundle.RECORDS, '"i":1'),
    ],
)
def test_forged_values_are_refused_before_anything_is_kept(
    path: Path, tmp_path: Path, member: str, old: str, number: str
) -> None:
    """They failed in the middle, after libraries had been stored."""
    name = old.rpartition(":")[0]
    new = f"{name}:[{number}" if "[" in old else f"{name}:{number}"
    if number.startswith("["):
        new += "1" + "]" * 500
    copy = forged(path, member, old, new)
    empty = KernelStore.open(tmp_path / "empty")
    with pytest.raises(exc.IncompatibleBundle):
        bundle.load(empty, bundle.read(copy), HERE)
    assert empty.ls() == []
    assert not list((tmp_path / "empty").rglob("*.so"))


@pytest.mark.parametrize(
    "changes",
    [
        {"made_by": "\x1b]0;me\x07"},
        {"origin": {"device": {"name": "\x1b[2J"}, "digest": DEVICE, "codegen": CODEGEN}},
        {"kernels": 10**400},
        {"files": {"x": ["a" * 64, -1]}},
        {"files": [1]},
        {"origin": None},
    ],
)
def test_a_forged_manifest_is_refused(path: Path, changes: dict[str, Any]) -> None:
    refused(forged(path, **changes), "cannot load bundle")


@pytest.mark.parametrize("how", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_ways_of_packing_are_refused(path: Path, how: int) -> None:
    """Their windows may be as large as they say."""
    copy = path.with_name("packed.tpb")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(copy, "w", how) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    refused(copy, "packed as no bundle is")


def test_a_file_that_changes_after_it_was_checked_is_refused(path: Path, tmp_path: Path) -> None:
    contents = bundle.read(path)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data + b"")
    os.utime(path, ns=(0, 0))
    empty = KernelStore.open(tmp_path / "empty")
    with pytest.raises(exc.IncompatibleBundle, match="changed"):
        bundle.load(empty, contents, HERE)
    assert empty.ls() == []


def test_only_as_many_records_are_written_as_are_read(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = KernelStore.open(tmp_path / "cache")
    store.add_records(MATMUL, [record(f"more {n}") for n in range(100)])
    monkeypatch.setattr(archive, "MAX_VALUES", 1000)
    found = bundle.create(store, path, HERE, "a test")
    assert 10 < found.records < 100
    assert f"only {found.records}" in caplog.text
    assert len(bundle.read(path).records[MATMUL.digest()]) == found.records
