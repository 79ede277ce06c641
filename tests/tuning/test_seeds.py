"""A bundle's schedules as starting points: tuning begins with them, nothing runs untimed."""

from __future__ import annotations

import pytest
import torch

import torch_pruner as tp
from torch_pruner.cache import KernelEntry, KernelStore

pytestmark = pytest.mark.tvm


def fn(x, w):
    return torch.tanh(x @ w)


def tuned(backend, cache, trials: int) -> KernelEntry:
    options = {"effort": "quick", "trials": trials, "library": False, "threads": 1}
    torch._dynamo.reset()
    backend.compile(fn, cache_dir=str(cache), **options)(torch.randn(24, 40), torch.randn(40, 56))
    store = KernelStore.open(cache)
    try:
        (entry,) = [i.entry for i in store.ls() if isinstance(i.entry, KernelEntry)]
        return entry
    finally:
        store.close()


@pytest.mark.rotated(6)
def test_tuning_starts_from_a_bundles_schedules(cold, tmp_path) -> None:
    here, there = cold.cache_dir, tmp_path / "there"
    shipped = tuned(cold, here, 8)
    tp.save_bundle(tmp_path / "kernels.tpb", cache_dir=here)
    tp.load_bundle(tmp_path / "kernels.tpb", cache_dir=there, as_seed=True)
    store = KernelStore.open(there)
    assert not [i for i in store.ls() if isinstance(i.entry, KernelEntry)]
    store.close()
    tuned(cold, there, 2)
    store = KernelStore.open(there)
    measured = [r for r in store.records(shipped.key) if r.status == "ok"]
    store.close()
    assert shipped.candidate in [dict(r.candidate) for r in measured]
    assert len(measured) <= 3
