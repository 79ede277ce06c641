"""Tune on a fleet: a tracker and servers on this machine, first one device, then two.

A real fleet has a machine for each server (docs/fleet.md); here they share one, so times disturb
each other, and what two save is the waiting, not the arithmetic. Needs the extra ``rpc``.

    python examples/fleet.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "here"
SERVER = "torch_pruner.tuner.measure.rpc_server"


@contextlib.contextmanager
def started(module: str, *arguments: str) -> Iterator[None]:
    """A Python module as a process of its own, with all that it starts."""
    command = [sys.executable, "-m", module, *arguments]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def wait_for(tracker: str, devices: int) -> None:
    """Until the tracker knows so many devices."""
    from torch_pruner.exc import MeasureError
    from torch_pruner.tuner.measure.rpc import registered

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(MeasureError):
            if registered(tracker) == devices:
                return
        time.sleep(0.1)
    raise SystemExit("the fleet did not start")


def tune(tracker: str, trials: int, cache: str) -> float:
    """Seconds of tuning one linear layer with so many candidates, from nothing."""
    import torch_pruner

    model = nn.Sequential(nn.Linear(256, 512), nn.GELU()).eval()
    options = {"executor": "rpc", "tracker": tracker, "threads": 1, "cache_dir": cache}
    options |= {"trials": trials, "time_budget_s": 120.0}
    start = time.perf_counter()
    report = torch_pruner.tune(model, (torch.randn(64, 256),), options=options)
    seconds = time.perf_counter() - start
    measured = sum(task.trials for task in report.tasks)
    best = min((t.latency_after_s or 0.0) * 1e6 for t in report.tasks)
    print(f"  {measured} candidates in {seconds:.1f} s; the best takes {best:.1f} us")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=48)
    trials = parser.parse_args().trials
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, tracker = f"127.0.0.1:{port}", f"127.0.0.1:{port}/{KEY}"
    listen = ("--host", "127.0.0.1", "--port", str(port), "--port-end", "65535", "--silent")
    with contextlib.ExitStack() as running:
        running.enter_context(started("tvm.exec.rpc_tracker", *listen))
        seconds = []
        for devices in (1, 2):
            first = str(9300 + 200 * devices)
            server = (SERVER, "--tracker", address, "--key", KEY, "--port", first)
            running.enter_context(started(*server))
            wait_for(tracker, devices)
            if devices == 1:
                print("imports, and a first try:")
                with tempfile.TemporaryDirectory(prefix="fleet-") as cache:
                    tune(tracker, 1, cache)
            print(f"{devices} device{'s' * (devices > 1)}:")
            with tempfile.TemporaryDirectory(prefix="fleet-") as cache:
                seconds.append(tune(tracker, trials, cache))
        print(f"two devices take {seconds[1] / seconds[0]:.2f} of the time of one")


if __name__ == "__main__":
    main()
