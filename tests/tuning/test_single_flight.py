"""Many processes and threads meet one cold model: it is tuned once, and all answers are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tvm
ROOT = Path(__file__).resolve().parents[2]
PROCESSES, THREADS, TRIALS = 4, 4, 4

# Starts when told to. Says how many candidates it measured itself and how many answers were right.
SCRIPT = """
import json, sys, threading
import torch, torch_pruner as tp
from torch_pruner.cache import KernelStore

cache, threads, trials = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
measured, right, errors = 0, 0, []
add, lock = KernelStore.add_records, threading.Lock()

def counted(self, key, records):
    global measured
    with lock:
        measured += len(records)
    add(self, key, records)

KernelStore.add_records = counted
def fn(x, w):
    return torch.tanh(x @ w)
torch.manual_seed(0)
x, w = torch.randn(24, 40), torch.randn(40, 56)
expected = fn(x, w)
options = {"effort": "quick", "trials": trials, "time_budget_s": 300.0, "library": False,
           "cache_dir": cache, "strict": True, "threads": 1}
compiled = torch.compile(fn, backend="pruner", options=options)
barrier = threading.Barrier(threads)

def call():
    global right
    barrier.wait()
    try:
        torch.testing.assert_close(compiled(x, w), expected)
    except Exception as err:
        errors.append(repr(err))
    else:
        with lock:
            right += 1

print("ready", flush=True)
sys.stdin.readline()
started = [threading.Thread(target=call) for _ in range(threads)]
for thread in started:
    thread.start()
for thread in started:
    thread.join()
print(json.dumps({"measured": measured, "right": right, "errors": errors}))
"""


@pytest.mark.rotated(6)
def test_one_tuning_and_all_answers_right(tmp_path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cache"), str(THREADS), str(TRIALS)]
    started = [
        subprocess.Popen(
            command, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for _ in range(PROCESSES)
    ]  # fmt: skip
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        found = []
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in started:
            out, err = process.communicate(timeout=400)
            assert process.returncode == 0, err[-3000:]
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in started:
            process.kill()
    assert [f["errors"] for f in found] == [[]] * PROCESSES
    assert sum(f["right"] for f in found) == PROCESSES * THREADS
    tuners = [f["measured"] for f in found if f["measured"]]
    assert len(tuners) == 1
    assert tuners[0] <= TRIALS
