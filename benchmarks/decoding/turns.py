"""The other end of ``worker``: starts contestants, tells one at a time to decode."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.job import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.decoding.decoder import Setting

    Turn = Callable[[], Sequence[float]]


class Failed(RuntimeError):
    """A contestant could not do what it was told; the message is the cell of the table."""


class Process:
    """A running ``worker``; ``close`` ends it and what it started."""

    def __init__(self, name: str, setting: Setting, limit_s: float = 600.0) -> None:
        self.name, self.limit_s = name, limit_s
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by ``close``
        given = asdict(setting) | {"folder": str(setting.folder)}
        command = json.dumps({"name": name, "setting": given})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.decoding.worker", command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(setting.threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,
        )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer; raises ``Failed`` with the reason where there is none in time."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], self.limit_s)[0]:
            raise Failed(f"no answer in {self.limit_s:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise Failed(self._how_it_ended())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        found: dict[str, Any] = answer["ok"]
        return found

    def _how_it_ended(self) -> str:
        status = self.process.wait(timeout=10)
        how = signal.Signals(-status).name if status < 0 else f"exit {status}"
        self.errors.seek(0)
        last = (self.errors.read().strip().splitlines() or ["no message"])[-1]
        return f"crash: {how}: {last[:300]}"

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def once(name: str, setting: Setting, do: str) -> str:
    """One command in a process that ends then; the reason if it could not, else nothing."""
    process = Process(name, setting, 3600.0)
    try:
        process.ask(do)
    except Failed as error:
        return str(error)
    finally:
        process.close()
    return ""


def in_turns(
    turns: Mapping[str, Turn],
    *,
    rounds: int,
    pause_s: float,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Samples by name, and reasons of those who fell out; the order rotates from round to round.

    In a pause before each turn the threads of the one before go to sleep.
    """
    samples: dict[str, list[float]] = {name: [] for name in turns}
    failed: dict[str, str] = {}
    order = list(turns)
    for _ in range(rounds):
        for name in [n for n in order if n not in failed]:
            sleep(pause_s)
            try:
                samples[name] += turns[name]()
            except Failed as error:
                failed[name] = str(error)
        order.append(order.pop(0))
    return {n: s for n, s in samples.items() if n not in failed}, failed


def load_all(
    names: Sequence[str],
    setting: Setting,
    found: dict[str, dict[str, Any]],
    at_once: int = 1,
) -> dict[str, Process]:
    """Those that are ready; ``found`` gets what they say, or the reason.

    ``at_once`` of them load beside each other: not where loading measures kernels.
    """

    def load(name: str) -> tuple[Process, dict[str, Any]]:
        process = Process(name, setting)
        try:
            return process, process.ask("load")
        except Failed as error:
            process.close()
            return process, {"reason": str(error)}

    with ThreadPoolExecutor(at_once) as pool:
        loaded = list(zip(names, pool.map(load, names), strict=True))
    for name, (_, said) in loaded:
        found[name] = said
    return {name: process for name, (process, said) in loaded if "reason" not in said}
