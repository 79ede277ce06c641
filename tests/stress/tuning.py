"""Tunes in forked children and kills each at a random moment; what was committed must stay.

``tuning CACHE KILLS SEED``: prints a JSON object of what happened, or ends with an assertion.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

# Everything that a child needs is imported once, before the first fork; nothing has run yet, so
# there is no thread that a fork could lose.
import torch
import torch._dynamo
import tvm  # noqa: F401

import torch_pruner as tp
import torch_pruner.compiler.driver
import torch_pruner.dynamo.backend
import torch_pruner.tuner
from torch_pruner.cache import KernelStore

TRIALS = 6
PATIENCE_S = 60.0
MARK = "TUNING_OF"


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ w, -1)


def tune(cache: Path, n: int) -> list[str]:
    """Compile and check a function of the ``n``-th shape; where its kernels came from."""
    torch.manual_seed(n)
    x, w = torch.randn(8 + n, 24), torch.randn(24, 16 * (1 + n % 3))
    options = {
        "effort": "quick", "trials": TRIALS, "library": False, "cache_dir": str(cache),
        "strict": True, "threads": 1, "time_budget_s": 100.0,  # trials end it, however busy it is
    }  # fmt: skip
    torch._dynamo.reset()  # else another shape is taken for a dynamic one
    compiled = torch.compile(function, backend="pruner", dynamic=False, options=options)
    torch.testing.assert_close(compiled(x, w), function(x, w))
    report = tp.last_report()
    assert report is not None
    return sorted(task.source for graph in report.graphs for task in graph.tasks)


def child(cache: Path, n: int) -> int:
    """The process id of a child that tunes."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    os.environ[MARK] = str(os.getpid())  # its workers inherit it and can be found
    status = 1
    try:
        tune(cache, n)
        status = 0
    finally:
        os._exit(status)


def committed(cache: Path) -> tuple[set[str], set[str]]:
    """Digests of the records and of the kernels that are in the index."""
    index = cache / "v2" / "index.sqlite"
    if not index.exists():
        return set(), set()
    connection = sqlite3.connect(f"file:{index}?mode=ro", uri=True, timeout=30)
    try:
        names = {r[0] for r in connection.execute("SELECT name FROM sqlite_master")}
        if not {"records", "kernels"} <= names:
            return set(), set()
        return tuple(  # type: ignore[return-value]
            {repr(r) for r in connection.execute(f"SELECT {columns} FROM {table}")}
            for table, columns in (("records", "task, candidate"), ("kernels", "digest"))
        )
    finally:
        connection.close()


def workers_end(pid: int) -> bool:
    """Whether every worker of a killed child ends by itself soon."""
    mark = f"{MARK}={pid}\0".encode()
    until = time.monotonic() + PATIENCE_S
    while any(mark in environment(path) for path in Path("/proc").glob("[0-9]*/environ")):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def environment(path: Path) -> bytes:
    """A process's environment, empty if it has ended (zombies have)."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def main() -> None:
    cache, kills, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    begin = time.monotonic()
    _, status = os.waitpid(child(cache, 0), 0)
    assert status == 0, "tuning that nobody disturbs fails"
    whole_s = time.monotonic() - begin
    shape, killed, finished = 1, 0, 0
    while killed < kills:
        before = committed(cache)
        pid = child(cache, shape)
        time.sleep(whole_s * rng.random())
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        else:
            assert status == 0, f"tuning fails after {killed} kills"
            finished += 1
            shape += 1
        assert workers_end(pid), "a worker outlives its tuner"
        after = committed(cache)
        assert before[0] <= after[0], "records are gone"
        assert before[1] <= after[1], "kernels are gone"
        store = KernelStore.open(cache)
        assert store.degraded is None, store.degraded
        report = store.verify()
        assert report.ok, report.problems
        store.close()
    report_of: dict[str, Any] = {"killed": killed, "finished": finished, "whole_s": whole_s}
    for n in range(shape):
        assert set(tune(cache, n)) == {"cache"}, f"shape {n} was tuned and is not in the cache"
    report_of["last"] = tune(cache, shape)
    report_of["records"] = len(committed(cache)[0])
    sys.stdout.write(json.dumps(report_of) + "\n")


if __name__ == "__main__":
    main()
