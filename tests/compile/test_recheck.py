"""``cache verify --run``: kernels of the store are built and compared again."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from torch_pruner.cache import KernelEntry, KernelStore
from torch_pruner.cli.main import main
from torch_pruner.compiler.recheck import recheck
from torch_pruner.config import Config

pytestmark = pytest.mark.tvm


def fn(x, w):
    return torch.softmax(x @ w, -1)


@pytest.fixture
def tuned(cold):
    options = {"effort": "quick", "trials": 4, "library": False, "threads": 1}
    cold.compile(fn, **options)(torch.randn(24, 40), torch.randn(40, 56))
    return cold.cache_dir


def entries(store: KernelStore) -> list[KernelEntry]:
    return [i.entry for i in store.ls() if isinstance(i.entry, KernelEntry)]


def verified(cache, capsys) -> tuple[int, dict]:
    status = main(["cache", "verify", "--run", "--json", "--cache-dir", str(cache)])
    return status, json.loads(capsys.readouterr().out)


def test_sound_kernels_pass(tuned, capsys) -> None:
    status, found = verified(tuned, capsys)
    assert status == 0
    assert found["ok"]
    assert found["run"]["checked"] == len(entries(KernelStore.open(tuned))) > 0


def test_a_schedule_that_does_not_build_is_named(tuned, capsys) -> None:
    store = KernelStore.open(tuned)
    (old, *_) = entries(store)
    broken = {**old.candidate, "decisions": {"tm": 1}}
    store.put_kernel(dataclasses.replace(old, candidate=broken, latency_s=old.latency_s / 2))
    store.close()
    status, found = verified(tuned, capsys)
    assert status == 1
    (problem,) = found["run"]["problems"]
    assert old.task in problem


def test_a_graph_that_is_not_the_keys_is_named(tuned) -> None:
    store = KernelStore.open(tuned)
    (old, *_) = entries(store)
    graph = json.loads(old.workload_text)
    graph[1] = []
    text = json.dumps(graph)
    store.drop_kernel(old.key)
    store.put_kernel(dataclasses.replace(old, workload_text=text))
    found = recheck(store, Config.from_options())
    assert len(found.problems) == 1


def test_kernels_of_other_devices_are_left_out(tuned) -> None:
    store = KernelStore.open(tuned)
    (old, *_) = entries(store)
    elsewhere = dataclasses.replace(old.key, device="f" * len(old.key.device))
    store.put_kernel(dataclasses.replace(old, key=elsewhere))
    found = recheck(store, Config.from_options())
    assert found.skipped == 1
    assert found.ok
