"""``torch-pruner bundle``: create, inspect, load, and every refusal in one line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.contracts.store import kernel_entry
from torch_pruner.cache import KernelStore
from torch_pruner.compiler.context import Context
from torch_pruner.config import Config
from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., tuple[int, str, str]]

WORKLOAD = "a" * 64


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "kernels.tpb")


@pytest.fixture
def tuned() -> KernelStore:
    """The user's cache with a kernel in it."""
    store = KernelStore.open(Config.from_options().cache_root)
    key = Context.make(Config.from_options(), 2).kernel_key(WORKLOAD)
    store.put_kernel(kernel_entry(key, candidate=Candidate("rows").to_json()))
    return store


def test_create_inspect_and_load(run: Run, tuned: Any, file: str, tmp_path: Path) -> None:
    status, out, _ = run("bundle", "create", file)
    assert status == 0
    assert "1 kernels, 0 artifacts of graphs, 0 records" in out
    status, out, _ = run("bundle", "inspect", file)
    assert status == 0
    assert "the same device and version" in out
    status, _, _ = run("bundle", "load", file, "--cache-dir", str(tmp_path / "fleet"))
    assert status == 0
    assert KernelStore.open(tmp_path / "fleet").stats().kernels == 1
    assert run("bundle", "load", file, "--as-seed", "--cache-dir", str(tmp_path / "seed"))[0] == 0
    assert KernelStore.open(tmp_path / "seed").stats().records == 1


def test_json_is_one_document(run: Run, tuned: Any, file: str) -> None:
    for command in ("create", "inspect", "load"):
        status, out, _ = run("bundle", command, file, "--json")
        assert status == 0
        assert json.loads(out)["kernels"] == 1


def test_an_empty_cache_is_status_1(run: Run, file: str) -> None:
    status, out, _ = run("bundle", "create", file)
    assert status == 1
    assert "run `torch-pruner tune MODEL`" in out


def test_only_the_kernels_of_a_report(run: Run, tuned: Any, file: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    for workload, status in ((WORKLOAD, 0), ("b" * 64, 1)):
        report.write_text(json.dumps({"tasks": [{"workload": workload}]}))
        assert run("bundle", "create", file, "--report", str(report))[0] == status
    report.write_text("[]")
    status, _, err = run("bundle", "create", file, "--report", str(report))
    assert status == 2
    assert "is not a report" in err


def test_signatures(run: Run, tuned: Any, file: str, tmp_path: Path) -> None:
    good, bad, short = (tmp_path / name for name in ("good", "bad", "short"))
    good.write_bytes(b"0123456789abcdef\n")
    bad.write_bytes(b"fedcba9876543210\n")
    short.write_bytes(b"short\n")
    assert run("bundle", "create", file, "--sign", str(good))[0] == 0
    assert "signed" in run("bundle", "inspect", file)[1]
    assert run("bundle", "load", file, "--require-signature", str(good))[0] == 0
    for secret in (bad, short, tmp_path / "missing"):
        status, _, err = run("bundle", "load", file, "--require-signature", str(secret))
        assert status == 2
        assert len(err.splitlines()) == 1


def test_what_cannot_be_read_or_written_is_status_2(run: Run, tuned: Any, tmp_path: Path) -> None:
    status, _, err = run("bundle", "create", str(tmp_path / "missing" / "x.tpb"))
    assert (status, len(err.splitlines())) == (2, 1)
    junk = tmp_path / "junk.tpb"
    junk.write_bytes(b"junk")
    for command in ("inspect", "load"):
        status, _, err = run("bundle", command, str(junk))
        assert (status, len(err.splitlines())) == (2, 1)
        assert "cannot load bundle" in err


def test_a_named_directory_without_a_cache_is_said_and_not_made(run: Run, tmp_path: Path) -> None:
    missing, file = tmp_path / "missing", tmp_path / "kernels.tpb"
    status, out, err = run("bundle", "create", str(file), "--cache-dir", str(missing))
    assert (status, out) == (2, "")
    assert f"{missing}: there is nothing there" in err
    assert not missing.exists()
    assert not file.exists()
