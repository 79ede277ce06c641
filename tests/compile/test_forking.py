"""Processes forked after a compiled call, which hung: TVM's pool has no threads there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tvm

ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import logging, multiprocessing, sys
import torch
from torch import nn

logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s %(message)s")

def net(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64)).eval()

def compiled(model, **options):
    options = {"effort": "none", "strict": True, "threads": 2, **options}
    return torch.compile(model, backend="pruner", options=options)

model, x = net(128), torch.randn(32, 64)
ours = compiled(model)
with torch.no_grad():
    want = model(x)
    torch.testing.assert_close(ours(x), want)
fork = multiprocessing.get_context("fork")
"""
CALLS = """
def child():
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(ours(x), want)

for _ in range(2):
    process = fork.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0, process.exitcode
with torch.no_grad():
    torch.testing.assert_close(ours(x), want)

class Features(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        with torch.no_grad():
            return ours(x + i)

loader = torch.utils.data.DataLoader(
    Features(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60
)
found = torch.cat(list(loader))
with torch.no_grad():
    torch.testing.assert_close(found, torch.stack([model(x + i) for i in range(8)]))
print("done")
"""
COMPILES = """
import threading
from torch_pruner.compiler import executors
from torch_pruner.dynamo.run import graphs

executors._running[("local", 2, 0, "", "")] = parents = object()

held, forked = threading.Event(), threading.Event()

def busy():
    with graphs._compile_lock, executors._lock:  # as if another thread compiled just now
        held.set()
        forked.wait(60)

def child():
    other = net(96)
    with torch.no_grad():
        torch.testing.assert_close(compiled(other)(x), other(x))
    assert parents not in executors._running.values(), "the parent's workers"

threading.Thread(target=busy, daemon=True).start()
held.wait(60)
process = fork.Process(target=child)
process.start()
forked.set()
process.join(100)
assert process.exitcode == 0, process.exitcode
assert executors._running.popitem()[1] is parents
print("done")
"""


def run(script: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {"TORCH_PRUNER_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", BEGIN + script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.rotated(6)
def test_forked_children_and_workers_of_a_data_loader_run_compiled_calls(tmp_path) -> None:
    done = run(CALLS, tmp_path)
    assert done.stdout == "done\n", done.stderr[-3000:]
    notes = [line for line in done.stderr.splitlines() if "run on one thread here" in line]
    assert len(notes) == 4, done.stderr[-3000:]  # two children and two workers


@pytest.mark.rotated(6)
def test_a_forked_child_compiles_although_the_parent_compiled_just_then(tmp_path) -> None:
    done = run(COMPILES, tmp_path)
    assert done.stdout == "done\n", done.stderr[-3000:]
