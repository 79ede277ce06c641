"""Ranks of ``torch.distributed``: nothing is tuned inline, and kernels reach every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_pruner
from torch_pruner.config import Config
from torch_pruner.dynamo.run import distributed

ROOT = Path(__file__).resolve().parents[3]

RANK = """
import sys, torch
from tests.contracts.store import kernel_entry
from torch_pruner import exc, sync_cache
from torch_pruner.cache import KernelStore
from torch_pruner.compiler.context import Context
from torch_pruner.config import Config
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.task import Candidate
import dataclasses

rank, rendezvous, cache, role = int(sys.argv[1]), *sys.argv[2:]
if role == "stranger" and rank == 1:
    other = dataclasses.replace(DeviceFingerprint.detect(), name="another CPU")
    DeviceFingerprint.detect = staticmethod(lambda probe=None: other)
torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank,
                                     world_size=2)
key = Context.make(Config.from_options(), 2).kernel_key("a" * 64)
if rank == 0 and role != "unreadable":
    store = KernelStore.open(cache)
    store.put_kernel(kernel_entry(key, candidate=Candidate("contraction", (("tm", 8),)).to_json()))
    store.close()
if rank == 0 and role == "unreadable":
    import torch_pruner.dynamo.run.distributed as module
    def fails(*_, **__):
        raise OSError("no space")
    module.save_bundle = fails
try:
    sync_cache(cache_dir=cache)
    print("synced", len(KernelStore.open(cache).ls()))
except (exc.PrunerError, OSError) as err:
    print(type(err).__name__, err)
"""


def synced(tmp_path: Path, role: str) -> list[str]:
    """What each of two ranks said."""
    command = [sys.executable, "-c", RANK]
    places = [str(tmp_path / "rendezvous")], [str(tmp_path / "a"), str(tmp_path / "b")]
    started = [
        subprocess.Popen(
            [*command, str(rank), places[0][0], places[1][rank], role],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = []
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err[-3000:]
        said.append(out.splitlines()[-1])
    return said


def test_one_ranks_kernels_reach_the_other(tmp_path: Path) -> None:
    assert synced(tmp_path, "alike") == ["synced 1", "synced 1"]


def test_a_rank_on_another_device_refuses_and_all_hear_of_it(tmp_path: Path) -> None:
    first, second = synced(tmp_path, "stranger")
    assert first.startswith("IncompatibleBundle")
    assert "1 ranks could not" in first
    assert second.startswith("IncompatibleBundle")
    assert "device" in second


def test_a_source_that_fails_leaves_nobody_waiting(tmp_path: Path) -> None:
    first, second = synced(tmp_path, "unreadable")
    assert first.startswith("OSError")
    assert second.startswith("IncompatibleBundle")


def test_without_a_process_group_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        torch_pruner.sync_cache()


@pytest.fixture
def group(tmp_path: Path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'alone'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_alone_everything_is_as_asked() -> None:
    config = Config.from_options(options={"effort": "full"})
    assert distributed.without_tuning(config) is config


@pytest.mark.usefixtures("group")
def test_a_rank_does_not_tune_and_says_so_once(caplog) -> None:
    config = Config.from_options(options={"effort": "full"})
    with caplog.at_level("WARNING", logger="torch_pruner"):
        assert distributed.without_tuning(config).on_miss == "fallback"
        distributed.without_tuning(config)
    assert len([r for r in caplog.records if "nothing is tuned" in r.message]) == 1


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("options", [{"on_miss": "error"}, {"effort": "none"}])
def test_what_does_not_tune_is_left_alone(options) -> None:
    config = Config.from_options(options=options)
    assert distributed.without_tuning(config) is config
