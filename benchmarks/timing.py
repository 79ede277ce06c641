"""Timing several candidates side by side, and saying on what machine that was.

In: functions without arguments. Out: medians and spread, in seconds per call. Candidates take turns
in one process, so that a machine that slows down slows all of them down.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import os
import platform
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import tables

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent

MIN_SAMPLE_S = 1e-3
"""Calls shorter than this are timed in groups, so that the clock does not count."""

MAX_ROUNDS = 10_000

_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call over ``n`` samples."""

    name: str
    n: int
    median_s: float
    q1_s: float
    q3_s: float
    min_s: float

    @classmethod
    def of(cls, name: str, samples: Sequence[float]) -> Timing:
        quarters = (
            statistics.quantiles(samples, n=4, method="inclusive")
            if len(samples) > 1
            else [samples[0]] * 3
        )
        return cls(name, len(samples), quarters[1], quarters[0], quarters[2], min(samples))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# A turn among competitors whose threads spin for up to 200 ms after a call (benchmarks/README.md).
PAUSE_S, WAKE, PER_TURN = 0.3, 3, 5


def in_turns(
    callables: Mapping[str, Callable[[], object]], *, rounds: int, min_seconds: float
) -> dict[str, Timing]:
    """``interleave`` so that no candidate pays for the threads of the one before."""
    return interleave(
        callables,
        rounds=rounds,
        min_seconds=min_seconds,
        pause_s=PAUSE_S,
        wake=WAKE,
        per_turn=PER_TURN,
    )


def interleave(
    callables: Mapping[str, Callable[[], object]],
    *,
    warmup: int = 3,
    rounds: int = 20,
    min_seconds: float = 0.0,
    pause_s: float = 0.0,
    wake: int = 1,
    per_turn: int = 1,
    beside: Collection[str] = (),
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, Timing]:
    """Times candidates round-robin: at least ``rounds`` samples and ``min_seconds`` for each.

    Those ``beside`` take their turns like all others, but nobody waits until they have had
    ``min_seconds``.

    The order rotates from round to round. A turn starts with a pause of ``pause_s``, in which the
    threads that the candidate before left spinning go to sleep, and with ``wake`` untimed calls,
    after which the candidate finds its own threads awake and its data in the caches; ``per_turn``
    samples follow.
    """
    groups = {}
    for name, function in callables.items():
        for _ in range(warmup):
            function()
        groups[name] = _group_size(function, clock)
    samples: dict[str, list[float]] = {name: [] for name in callables}
    spent = dict.fromkeys(callables, 0.0)
    order = list(callables)
    while order and len(samples[order[0]]) < MAX_ROUNDS:
        for name in order:
            function, calls = callables[name], groups[name]
            if pause_s:
                sleep(pause_s)
            for _ in range(wake):
                function()
            for _ in range(per_turn):
                start = clock()
                for _ in range(calls):
                    function()
                elapsed = clock() - start
                samples[name].append(elapsed / calls)
                spent[name] += elapsed
        order.append(order.pop(0))
        least = min((s for name, s in spent.items() if name not in beside), default=min_seconds)
        if len(samples[order[0]]) >= rounds and least >= min_seconds:
            break
    return {name: Timing.of(name, values) for name, values in samples.items()}


def _group_size(function: Callable[[], object], clock: Callable[[], float]) -> int:
    start = clock()
    function()
    once = clock() - start
    return max(1, math.ceil(MIN_SAMPLE_S / max(once, 1e-7)))


def ratios(timings: Mapping[str, Timing], baseline: str) -> dict[str, float]:
    """How many times faster than the baseline each candidate is, by medians."""
    return {name: timings[baseline].median_s / t.median_s for name, t in timings.items()}


def format_timings(timings: Mapping[str, Timing], baseline: str) -> str:
    """A plain-text table, one line per candidate."""
    faster = ratios(timings, baseline)
    rows = [
        [name, duration(t.median_s), spread(t), duration(t.min_s), f"{faster[name]:.2f}x", str(t.n)]
        for name, t in timings.items()
    ]
    return tables.plain(["", "median", "quartiles", "min", f"vs {baseline}", "n"], rows)


def spread(timing: Timing) -> str:
    return f"{duration(timing.q1_s)} .. {duration(timing.q3_s)}"


def duration(seconds: float) -> str:
    """Three digits with a unit that suits: ``31.4 ms``."""
    unit, size = next(((unit, size) for unit, size in _UNITS if seconds >= size), ("ns", 1e-9))
    value = seconds / size
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def machine() -> dict[str, Any]:
    """What a reader needs in order to judge or repeat a measurement."""
    versions = {
        name: _version(name) for name in ("torch", "apache-tvm", "transformers", "torch-pruner")
    }
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def machine_line(of: Mapping[str, Any]) -> str:
    """The same on one line."""
    versions = ", ".join(f"{name} {v}" for name, v in of["versions"].items() if v)
    return (
        f"{of['gpu'] or of['cpu']}, {of['cores']} cores, threads: {of['threads']}; {versions}; "
        f"commit {of['commit']}; {of['date']}"
    )


def code_identity(parts: Sequence[str] = ("torch_pruner",), commit: str = "") -> str:
    """Names the source of these parts as it is now, committed or not, or as it was at a commit.

    Where there is no card, what only cards run does not count: nothing that is timed there differs.
    """
    entries = (_git("ls-tree", "-r", commit or "HEAD", "--", *parts) or "unknown").splitlines()
    now = "" if commit else _git("diff", "--name-only", "HEAD", "--", *parts)
    changed = (now or "").splitlines()
    if not torch.cuda.is_available():
        entries, changed = ([e for e in of if not _of_cards(e)] for of in (entries, changed))
    tree = hashlib.sha256("\n".join(entries).encode()).hexdigest()[:12]
    return f"{tree}+changes" if changed else tree


def _of_cards(entry: str) -> bool:
    """Whether a line of git's that ends with a path is of code for GPUs: its names say so."""
    return any(part.startswith("gpu") for part in PurePosixPath(entry.split("\t")[-1]).parts)


def _cpu_model() -> str:
    """Its name with family and model: hosts give virtual machines names that tell less."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
        says = {name.strip(): value.strip() for name, _, value in reversed(lines)}
        if "model name" in says and "cpu family" in says:
            return f"{says['model name']} (family {says['cpu family']}, model {says['model']})"
        if "model name" in says:
            return says["model name"]
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
