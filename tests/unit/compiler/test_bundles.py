"""``save_bundle`` and ``load_bundle``: this device's kernels, and schedules as seeds."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from typing import TYPE_CHECKING

import pytest

import torch_pruner
from tests.contracts.store import kernel_entry, record
from torch_pruner import exc
from torch_pruner.cache import KernelStore, bundle
from torch_pruner.compiler import bundles
from torch_pruner.compiler.context import Context
from torch_pruner.compiler.remembered import history
from torch_pruner.config import Config
from torch_pruner.families.library import FAMILY as LIBRARY
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.report import GraphReport, Report, TaskReport
from torch_pruner.task import Candidate, MeasureStatus

if TYPE_CHECKING:
    from pathlib import Path

    from torch_pruner.cache import KernelKey

CANDIDATE = Candidate("contraction", (("nv", 3), ("tm", 8)))


@pytest.fixture
def context() -> Context:
    return Context.make(Config.from_options(), 2)


@pytest.fixture
def key(context: Context) -> KernelKey:
    return context.kernel_key("a" * 64)


@pytest.fixture
def cache(tmp_path: Path, context: Context, key: KernelKey) -> Path:
    """A kernel with a record, another kernel that the vendor's library runs."""
    store = KernelStore.open(tmp_path / "cache")
    store.put_kernel(kernel_entry(key, candidate=CANDIDATE.to_json()))
    vendor = Candidate(LIBRARY.name).to_json()
    store.put_kernel(kernel_entry(context.kernel_key("b" * 64), candidate=vendor, source="library"))
    store.add_records(key, [record(CANDIDATE.digest, candidate=CANDIDATE.to_json())])
    return tmp_path / "cache"


def elsewhere(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this is another machine."""
    other = dataclasses.replace(DeviceFingerprint.detect(), name="another CPU", l3_bytes=1)
    monkeypatch.setattr(DeviceFingerprint, "detect", staticmethod(lambda probe=None: other))


def test_what_is_shipped_is_there(cache, key, tmp_path) -> None:
    path = tmp_path / "kernels.tpb"
    assert torch_pruner.save_bundle(path, cache_dir=cache).kernels == 2
    found = torch_pruner.load_bundle(path, cache_dir=tmp_path / "fleet")
    assert (found.kernels, found.records) == (2, 1)
    store = KernelStore.open(tmp_path / "fleet")
    assert store.get_kernel(key).candidate == CANDIDATE.to_json()
    results, seeds = history.of(store, key, lambda candidate: True)
    assert [(r.candidate, r.status) for r in results] == [(CANDIDATE, MeasureStatus.OK)]
    assert seeds == []


def test_only_what_a_report_names(cache, key, tmp_path) -> None:
    task = TaskReport("matmul", key.workload, 1, 1.0, "tuned", None, 1e-3, 8, "d")
    report = Report((GraphReport("graph0", 1, 1, 1, 1, 1, tasks=(task,)),))
    path = tmp_path / "kernels.tpb"
    assert torch_pruner.save_bundle(path, cache_dir=cache, report=report).kernels == 1


def test_another_machine_refuses_kernels_and_takes_seeds(
    cache, key, tmp_path, monkeypatch, context
) -> None:
    path, fleet = tmp_path / "kernels.tpb", tmp_path / "fleet"
    torch_pruner.save_bundle(path, cache_dir=cache)
    elsewhere(path, monkeypatch)
    with pytest.raises(exc.IncompatibleBundle, match="'another CPU'") as caught:
        torch_pruner.load_bundle(path, cache_dir=fleet)
    assert "--as-seed" in str(caught.value)
    torch_pruner.load_bundle(path, cache_dir=fleet, as_seed=True)
    store = KernelStore.open(fleet)
    assert store.stats().kernels == 0
    local = Context.make(Config.from_options(), 2).kernel_key(key.workload)
    assert local != key
    assert history.of(store, local, lambda candidate: True) == ([], [CANDIDATE])
    assert history.of(store, local, lambda candidate: False) == ([], [])
    # Once measured here, it is a seed no more.
    store.add_records(local, [record(CANDIDATE.digest, candidate=CANDIDATE.to_json())])
    results, seeds = history.of(store, local, lambda candidate: True)
    assert (len(results), seeds) == (1, [])


def test_schedules_that_are_none_are_refused_before_anything_is_kept(cache, key, tmp_path) -> None:
    store = KernelStore.open(cache)
    store.put_kernel(kernel_entry(key, candidate={"sketch": "x"}, latency_s=1e-9))
    path = tmp_path / "kernels.tpb"
    torch_pruner.save_bundle(path, cache_dir=cache)
    for as_seed in (False, True):
        with pytest.raises(exc.IncompatibleBundle, match="an entry is damaged"):
            torch_pruner.load_bundle(path, cache_dir=tmp_path / "fleet", as_seed=as_seed)
    assert not (tmp_path / "fleet").exists()


def test_a_signature_is_optional_and_checked_on_demand(cache, tmp_path) -> None:
    path, secret = tmp_path / "kernels.tpb", b"0123456789abcdef"
    torch_pruner.save_bundle(path, cache_dir=cache, sign=secret)
    torch_pruner.load_bundle(path, cache_dir=tmp_path / "a")
    torch_pruner.load_bundle(path, cache_dir=tmp_path / "b", require_signature=secret)
    with pytest.raises(exc.IncompatibleBundle, match="another key"):
        torch_pruner.load_bundle(path, cache_dir=tmp_path / "c", require_signature=secret[::-1])


def test_a_manifest_names_device_and_versions(cache, tmp_path) -> None:
    path = tmp_path / "kernels.tpb"
    torch_pruner.save_bundle(path, cache_dir=cache)
    with zipfile.ZipFile(path) as file:
        data = json.loads(file.read(bundle.MANIFEST))
    assert data["origin"]["codegen"] == bundles.origin().codegen
    assert data["origin"]["device"]["name"] == DeviceFingerprint.detect().name
    assert data["made_by"] == f"torch-pruner {torch_pruner.__version__}"
