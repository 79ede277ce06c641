"""A cache that others could have written to is not used: refused, or begun afresh beside it."""

from __future__ import annotations

import os
import shutil
import stat
from typing import TYPE_CHECKING

import pytest

from tests.contracts.store import (
    best_of,
    get_library,
    graph_key,
    kernel_entry,
    kernel_key,
    put_library,
    record,
)
from torch_pruner import exc
from torch_pruner.cache import KernelStore, learned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PARTS = ["", "v2", "v2/blobs", "v2/blobs/??", "v2/locks", "v2/models", "v2/index.sqlite"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache with one of everything."""
    root = tmp_path / "cache"
    store = KernelStore.open(root)
    store.put_kernel(kernel_entry())
    put_library(store, graph_key(), b"library", {"n": 1})
    store.add_records(kernel_key(), [record("a")])
    with store.claim(kernel_key().digest()):
        pass
    learned.write(learned.path_of(root, "moa-llvm"), b"weights")
    store.close()
    return root


def part_of(root: Path, part: str) -> Path:
    (path,) = root.glob(part) if "?" in part else [root / part]
    return path


def aside(root: Path) -> list[Path]:
    return list(root.glob("v2.untrusted-*"))


def is_begun_anew(root: Path) -> bool:
    """The cache holds nothing of the old one, works, and is closed."""
    store = KernelStore.open(root)
    assert store.degraded is None
    assert store.ls() == []
    assert get_library(store, graph_key()) is None
    assert store.records(kernel_key()) == []
    assert best_of(store, kernel_entry()) == kernel_entry()
    put_library(store, graph_key(), b"library", {"n": 1})
    assert get_library(store, graph_key()) is not None
    store.close()
    again = KernelStore.open(root)
    assert again.get_kernel(kernel_key()) == kernel_entry(), "only once"
    modes = [p.lstat().st_mode for p in [root, root / "v2", *(root / "v2").rglob("*")]]
    return not any(mode & 0o022 for mode in modes)


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("part", PARTS)
def test_what_others_may_write_is_begun_anew(
    root: Path, part: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It was closed with chmod, and trusted with whatever had been put in."""
    path = part_of(root, part)
    path.chmod(stat.S_IMODE(path.stat().st_mode) | mode)
    with pytest.raises(exc.CacheDirectoryError, match="can write to it"):
        KernelStore.open(root, read_only=True)
    assert is_begun_anew(root)
    (kept,) = aside(root)
    assert (kept / "index.sqlite").exists()
    assert caplog.text.count("others could have written to the cache") == 1
    assert str(path) in caplog.text
    KernelStore.open(root).clear()
    assert not aside(root)


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_journals_that_others_may_write_are_not_replayed(root: Path, suffix: str) -> None:
    journal = root / "v2" / f"index.sqlite{suffix}"
    journal.touch()
    journal.chmod(0o666)
    assert is_begun_anew(root)


@pytest.mark.parametrize("part", PARTS[1:])
def test_no_link_is_followed(root: Path, tmp_path: Path, part: str) -> None:
    path = part_of(root, part)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    before = _tree(elsewhere)
    with pytest.raises(exc.CacheDirectoryError, match="symbolic link"):
        KernelStore.open(root, read_only=True)
    assert is_begun_anew(root)
    assert _tree(elsewhere) == before


def test_a_root_that_is_a_link_is_refused(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    for read_only in (False, True):
        with pytest.raises(exc.CacheDirectoryError, match="symbolic link"):
            KernelStore.open(link, read_only=read_only)
    above = tmp_path / "above"
    above.symlink_to(tmp_path)
    assert KernelStore.open(above / "cache").get_kernel(kernel_key()) is not None


@pytest.mark.parametrize("part", PARTS)
def test_what_belongs_to_somebody_else_is_not_used(root: Path, part: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    path = part_of(root, part)
    os.chown(path, 12345, 12345)
    with pytest.raises(exc.CacheDirectoryError, match="belongs to user 12345"):
        KernelStore.open(root, read_only=True)
    if part:
        assert is_begun_anew(root)
    else:
        with pytest.raises(exc.CacheDirectoryError, match="belongs to user 12345"):
            KernelStore.open(root)


def test_a_folder_for_other_things_is_refused_and_left_as_it_is(root: Path) -> None:
    (root / "letter.txt").write_text("not ours")
    root.chmod(0o777)
    with pytest.raises(exc.CacheDirectoryError, match="chmod -R go-w"):
        KernelStore.open(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o777
    root.chmod(0o755)
    assert KernelStore.open(root).get_kernel(kernel_key()) is not None


def test_an_empty_folder_of_a_group_is_closed_and_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``mkdir kernels`` where the umask is 002."""
    root = tmp_path / "kernels"
    root.mkdir()
    root.chmod(0o775)
    assert is_begun_anew(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    assert not aside(root)
    assert "others" not in caplog.text


def _link(path: Path, victim: Path) -> None:
    victim.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(victim)


def _open(path: Path, victim: Path) -> None:
    path.chmod(0o666)


def _pipe(path: Path, victim: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [_link, _open, _pipe])
def test_a_library_that_others_can_change_is_a_miss(
    root: Path, tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    """Its digest is right until it is loaded."""
    (blob,) = root.rglob("*.so")
    change(blob, tmp_path / "victim")
    store = KernelStore.open(root)
    assert len(store.verify().problems) == 1
    assert get_library(store, graph_key()) is None
    assert put_library(store, graph_key(), b"library", {"n": 1}) == blob
    assert stat.S_ISREG(blob.lstat().st_mode)
    assert stat.S_IMODE(blob.lstat().st_mode) == 0o600
    assert get_library(store, graph_key()) is not None
    assert store.degraded is None


def test_a_lock_that_is_a_link_leaves_its_target_alone(root: Path, tmp_path: Path) -> None:
    """Lock files are emptied when they are opened."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (f"{kernel_key().digest()}.lock", "index.lock"):
        (root / "v2" / "locks" / name).unlink(missing_ok=True)
        (root / "v2" / "locks" / name).symlink_to(victim)
    store = KernelStore.open(root)
    with store.claim(kernel_key().digest()) as mine:
        assert mine
    (root / "v2" / "index.sqlite").write_bytes(b"rubbish" * 1000)
    assert KernelStore.open(root).get_kernel(kernel_key()) is None
    assert victim.read_text() == "precious"


def test_what_a_cost_model_learned_is_read_from_a_regular_file(root: Path, tmp_path: Path) -> None:
    path = learned.path_of(root, "moa-llvm")
    assert learned.read(path) == b"weights"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        learned.read(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        learned.read(path)


def test_two_processes_begin_anew_once(root: Path) -> None:
    first = KernelStore.open(root)
    assert first.get_kernel(kernel_key()) is not None
    (root / "v2" / "blobs").chmod(0o777)
    second = KernelStore.open(root)
    second.put_kernel(kernel_entry(latency_s=5.0))
    found = first.get_kernel(kernel_key())
    assert found is not None
    assert found.latency_s == 5.0, "who had it open goes over to the new one"
    assert len(aside(root)) == 1
    shutil.rmtree(aside(root)[0])
    assert KernelStore.open(root).get_kernel(kernel_key()) is not None


def _tree(path: Path) -> list[tuple[str, bytes]]:
    files = sorted(p for p in [path, *path.rglob("*")] if p.is_file())
    return [(str(p), p.read_bytes()) for p in files]
