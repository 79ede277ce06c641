"""Signed entries: what others put into a cache of this user is a miss, whatever became of its
permissions; what was shipped here works, and nobody's word is taken for it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.contracts.store import (
    best_of,
    get_library,
    graph_key,
    kernel_entry,
    kernel_key,
    library_digest,
    put_library,
    record,
)
from torch_pruner.cache import Artifact, ArtifactEntry, ArtifactKind, KernelStore, bundle
from torch_pruner.cache.blobs import sha256
from torch_pruner.cache.row_checksum import checksum_of
from torch_pruner.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data directory of a user who has no key yet."""
    path = tmp_path / "data"
    monkeypatch.setenv("XDG_DATA_HOME", str(path))
    return path / "torch_pruner"


def fill(root: Path) -> KernelStore:
    store = KernelStore.open(root)
    store.put_kernel(kernel_entry())
    put_library(store, graph_key(), b"library", {"n": 1})
    put_library(store, graph_key("other"), b"another library", {"n": 1})
    store.put(Artifact(ArtifactKind.VERDICT, graph_key("verdict")))
    store.add_records(kernel_key(), [record("a"), record("b")])
    store.close()
    return store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fill(tmp_path / "cache")
    return tmp_path / "cache"


def signed_by_nobody(root: Path) -> None:
    """Give every row the checksum that everybody can compute, as if he had written it."""
    conn = sqlite3.connect(root / "v2" / "index.sqlite")
    with conn:
        for table, name in (("kernels", "digest"), ("artifacts", "digest"), ("tasks", "digest"),
                            ("records", "task")):  # fmt: skip
            rows = conn.execute(f"SELECT rowid, {name}, entry FROM {table}").fetchall()
            for row, key, text in rows:
                values = (checksum_of(key, text), row)
                conn.execute(f"UPDATE {table} SET checksum = ? WHERE rowid = ?", values)
    conn.close()


def planted(root: Path) -> None:
    """Point a library's row at code of an attacker, who needs no key for it."""
    digest = library_digest()
    evil = b"code of an attacker"
    text = ArtifactEntry(ArtifactKind.LIBRARY, graph_key(), sha256(evil), {"n": 1}).to_text()
    path = root / "v2" / "blobs" / sha256(evil)[:2] / f"{sha256(evil)}.so"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(evil)
    path.chmod(0o600)
    conn = sqlite3.connect(root / "v2" / "index.sqlite")
    with conn:
        values = (sha256(evil), text, checksum_of(digest, text), digest)
        conn.execute(
            "UPDATE artifacts SET blob = ?, entry = ?, checksum = ? WHERE digest = ?", values
        )
    conn.close()


def swapped(root: Path) -> None:
    """Let two rows name each other's library: sqlite and the checksum are all that it takes."""
    conn = sqlite3.connect(root / "v2" / "index.sqlite")
    with conn:
        keys = (library_digest(), library_digest("other"))
        query = "SELECT blob, entry FROM artifacts WHERE digest = ?"
        (one, first), (two, second) = (conn.execute(query, (key,)).fetchone() for key in keys)
        for key, old, new, text in ((keys[0], one, two, first), (keys[1], two, one, second)):
            forged = text.replace(old, new)
            values = (new, forged, checksum_of(key, forged), key)
            conn.execute(
                "UPDATE artifacts SET blob = ?, entry = ?, checksum = ? WHERE digest = ?", values
            )
    conn.close()


@pytest.mark.parametrize("attack", [planted, swapped, signed_by_nobody])
@pytest.mark.parametrize("read_only", [False, True])
def test_what_others_put_in_is_a_miss_when_it_was_closed_again(
    root: Path, attack: object, read_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It was open to others for a while; permissions say nothing of that."""
    attack(root)  # type: ignore[operator]
    store = KernelStore.open(root, read_only=read_only)
    assert store.degraded is None
    assert get_library(store, graph_key()) is None
    assert caplog.text.count("have no signature of this user") == 1
    assert "cache adopt" in caplog.text
    assert not store.verify().ok
    if not read_only:
        put_library(store, graph_key(), b"library", {"n": 1})
        found = get_library(store, graph_key())
        assert found is not None
        assert found[1].read_bytes() == b"library"


def test_rows_of_every_table_are_signed(root: Path) -> None:
    signed_by_nobody(root)
    store = KernelStore.open(root)
    assert store.get_kernel(kernel_key()) is None
    assert store.get(ArtifactKind.VERDICT, graph_key("verdict")) is None
    assert store.records(kernel_key()) == []
    assert store.nearest(kernel_key(threads=9)) is None
    assert store.ls() == []
    assert list(store.export_records()) == []
    assert len(store.verify().problems) == 7
    worse = kernel_entry(latency_s=1.0)
    assert best_of(store, worse) == worse, "what others wrote is not merged"


def test_what_is_adopted_counts_but_for_verdicts(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signed_by_nobody(root)
    assert main(["cache", "adopt", "--cache-dir", str(root)]) == 0
    assert "signed 6 entries" in capsys.readouterr().out
    store = KernelStore.open(root)
    assert store.get_kernel(kernel_key()) == kernel_entry()
    assert get_library(store, graph_key(), mine=True) is not None
    assert store.records(kernel_key()) == [record("a"), record("b")]
    assert store.get(ArtifactKind.VERDICT, graph_key("verdict")) is None
    assert store.verify().ok
    assert store.adopt() == 0


@pytest.mark.parametrize("read_only", [False, True])
def test_a_directory_that_was_shipped_works(
    root: Path, tmp_path: Path, read_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 1 to 3 of the README, on two machines."""
    shipped = tmp_path / "there" / "kernels"
    shutil.copytree(root, shipped)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another"))
    for _ in range(2):
        store = KernelStore.open(shipped, read_only=read_only)
        assert store.get_kernel(kernel_key()) == kernel_entry()
        assert get_library(store, graph_key()) is not None
        assert get_library(store, graph_key(), mine=True) is None
        assert store.get(ArtifactKind.VERDICT, graph_key("verdict"), mine=True) is None, (
            "nobody's word is taken"
        )
        assert store.records(kernel_key()) == [record("a"), record("b")]
        store.close()
    assert (tmp_path / "another" / "torch_pruner" / "signing.key").exists() is not read_only
    if not read_only:
        store = KernelStore.open(shipped)
        put_library(store, graph_key("new"), b"new", {})
        assert get_library(store, graph_key("new"), mine=True) is not None


def test_a_directory_moved_on_one_machine_keeps_its_verdicts(root: Path, tmp_path: Path) -> None:
    root.rename(tmp_path / "moved")
    store = KernelStore.open(tmp_path / "moved", read_only=True)
    assert store.get(ArtifactKind.VERDICT, graph_key("verdict"), mine=True) is not None


def test_a_directory_that_took_the_place_of_one_s_own_works(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another"))
    fill(tmp_path / "elsewhere")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    root.rename(tmp_path / "old")
    (tmp_path / "elsewhere").rename(root)
    assert KernelStore.open(root).get_kernel(kernel_key()) == kernel_entry()


def test_the_key_is_private_and_no_part_of_the_cache(root: Path, home: Path) -> None:
    key = home / "signing.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    secret = key.read_bytes().split()[0]
    assert len(secret) == 64
    for path in root.rglob("*"):
        assert path.is_dir() or secret not in path.read_bytes()
    fill(root.parent / "other")
    assert key.read_bytes().split()[0] == secret
    assert not list(home.glob(".tmp-*"))


_FILLS = """
import sys
from pathlib import Path
from tests.cache.test_row_checksum import fill
fill(Path(sys.argv[1]))
"""


def test_processes_that_start_at_once_have_one_key(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _FILLS]
    started = [
        subprocess.Popen([*command, str(tmp_path / f"cache {n}")], env=env) for n in range(3)
    ]
    assert [process.wait() for process in started] == [0] * 3
    for n in range(3):
        store = KernelStore.open(tmp_path / f"cache {n}", read_only=True)
        assert store.get(ArtifactKind.VERDICT, graph_key("verdict"), mine=True) is not None


def test_a_flipped_bit_of_the_key_costs_nothing(root: Path, home: Path) -> None:
    sound = (home / "signing.key").read_bytes()
    for at in range(0, len(sound), 3):
        (home / "signing.key").write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        found = get_library(KernelStore.open(root, read_only=True), graph_key(), mine=True)
        assert found is not None, at


@pytest.mark.parametrize("harm", ["read", "damage", "link", "pipe"])
def test_a_key_that_is_none_is_replaced(root: Path, home: Path, harm: str) -> None:
    """What it signed is not known as this user's any more, so in his own cache it is a miss."""
    key = home / "signing.key"
    secret = key.read_bytes()
    if harm == "read":
        key.chmod(0o644)
    elif harm == "damage":
        key.write_bytes(b"rubbish")
    else:
        key.rename(home / "elsewhere")
        key.symlink_to(home / "elsewhere") if harm == "link" else os.mkfifo(key)
    store = KernelStore.open(root)
    assert store.degraded is None
    if harm in ("read", "damage"):
        assert get_library(store, graph_key()) is None
        assert key.read_bytes() != secret
    assert get_library(store, graph_key(), mine=True) is None
    store.put_kernel(kernel_entry(kernel_key("new")))
    assert store.get_kernel(kernel_key("new")) is not None
    assert store.adopt() == 6 if harm in ("read", "damage") else True
    assert get_library(store, graph_key()) is not None


@pytest.mark.parametrize("data_home", ["/proc/nothing", "/dev/null/x", "{root}/v2"])
def test_a_user_without_a_place_for_a_key_has_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_home: str
) -> None:
    """No home, a home that cannot be written, or one inside of the cache: entries count as others'
    do, and verdicts are not believed."""
    root = tmp_path / "cache"
    monkeypatch.setenv("XDG_DATA_HOME", data_home.format(root=root))
    monkeypatch.setenv("HOME", "")
    fill(root)
    store = KernelStore.open(root)
    assert store.degraded is None
    assert store.get_kernel(kernel_key()) == kernel_entry()
    assert get_library(store, graph_key()) is not None
    assert store.get(ArtifactKind.VERDICT, graph_key("verdict"), mine=True) is None
    assert store.verify().ok
    assert not list(tmp_path.rglob("signing.key"))


def test_what_was_kept_in_memory_is_this_process_s_own() -> None:
    store = KernelStore.open("/proc/nothing-here")
    store.put(Artifact(ArtifactKind.VERDICT, graph_key("verdict")))
    assert store.get(ArtifactKind.VERDICT, graph_key("verdict"), mine=True) is not None


def test_verdicts_of_a_bundle_count_if_its_signature_was_asked_for(tmp_path: Path) -> None:
    codegen, key = "tvm 1 + codegen 1", b"sixteen bytes or more"
    verdict = graph_key("verdict", device="a" * 64, codegen=codegen)
    store = KernelStore.open(tmp_path / "cache")
    store.put(Artifact(ArtifactKind.VERDICT, verdict))
    put_library(store, graph_key(device="a" * 64, codegen=codegen), b"library", {})
    here = bundle.Origin({}, "a" * 64, codegen)
    path = tmp_path / "kernels.tpb"
    bundle.create(store, path, here, "a test", key=key)
    for secret in (None, key):
        loaded = KernelStore.open(tmp_path / str(secret))
        bundle.load(loaded, bundle.read(path, key=secret), here)
        assert loaded.stats().libraries == 1
        assert loaded.stats().verdicts == (0 if secret is None else 1)
        assert (loaded.get(ArtifactKind.VERDICT, verdict, mine=True) is not None) is (
            secret is not None
        )


def test_notes_of_one_s_own_caches_name_them(root: Path, home: Path) -> None:
    (note,) = (home / "caches").iterdir()
    assert json.loads(note.read_text())["path"] == str(root / "v2")
    note.write_text("[")
    assert KernelStore.open(root).get_kernel(kernel_key()) == kernel_entry()
