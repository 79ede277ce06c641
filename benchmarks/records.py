"""Measured records as JSON lines: what `collect` writes and `train` reads.

A line is either a task (its kernel graph, target and threads) or a result of one (a sketch, its
decisions, how measuring went). Features are not kept: they follow from these, so a better reading
of the same decisions needs no new measurement. ``python -m benchmarks.records FILE.jsonl ...``
writes each file once more as FILE.jsonl.xz, which is much smaller and read like the file itself.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pruner import cpus
from torch_pruner.graph.ir import Graph
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureResult, MeasureStatus, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch_pruner.fingerprint import DeviceFingerprint


MAX_BYTES = 1 << 30  # of a file, unpacked
_DIGITS = 10  # of seconds: clocks tell nanoseconds


@dataclass(slots=True)
class Measured:
    """A task and its results, in the order they were measured; ``device`` is a digest.

    ``earlier`` holds the first result of candidates that were measured more than once.
    """

    task: Task
    device: str
    results: list[MeasureResult] = field(default_factory=list)
    earlier: dict[Candidate, MeasureResult] = field(default_factory=dict)
    device_name: str = ""

    @property
    def key(self) -> str:
        """Equal keys: results may be compared with each other."""
        return f"{self.task.workload}/{self.task.threads}/{self.task.target.mcpu}/{self.device}"


def task_line(task: Task, device: DeviceFingerprint) -> dict[str, Any]:
    return {
        "kind": "task",
        "workload": task.workload,
        "name": task.name,
        "spec": task.spec.to_json(),
        "target": task.target.to_json(),
        "threads": task.threads,
        "device": device.digest(),
        "device_name": device.name,
    }


def result_line(task: Task, device: DeviceFingerprint, result: MeasureResult) -> dict[str, Any]:
    return {
        "kind": "result",
        "workload": task.workload,
        "threads": task.threads,
        "mcpu": task.target.mcpu,
        "device": device.digest(),
        "candidate": result.candidate.to_json(),
        "status": str(result.status),
        "run_secs": [round(s, _DIGITS) for s in result.run_secs],
        "error": result.error[:200],
    }


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Adds whole lines; what a killed run left behind of a line is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.writelines((json.dumps(line, sort_keys=True) + "\n").encode() for line in lines)


def read(paths: Iterable[Path]) -> tuple[list[Measured], int]:
    """Everything in ``paths`` (missing files are empty), and how many lines were damaged.

    A candidate counts once: its last result. Raises ValueError for a file of more than
    ``MAX_BYTES``.
    """
    found: dict[str, Measured] = {}
    damaged = 0
    for path in paths:
        for line in _lines(path):
            try:
                _take(json.loads(line), found)
            except (ValueError, KeyError, TypeError, AttributeError):
                damaged += 1
    for measured in found.values():
        last = {r.candidate: r for r in measured.results}
        first = {r.candidate: r for r in reversed(measured.results)}
        measured.results = list(last.values())
        measured.earlier = {c: r for c, r in first.items() if r is not last[c]}
    return list(found.values()), damaged


def _lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_BYTES >> 20} MiB")
    yield from content.splitlines()


def pack(path: Path) -> Path:
    """The same file, compressed, beside it."""
    packed = path.with_name(path.name + ".xz")
    with lzma.open(packed, "wb", preset=9) as file:
        file.write(path.read_bytes())
    return packed


def _take(line: dict[str, Any], found: dict[str, Measured]) -> None:
    if line["kind"] == "task":
        spec, target = Graph.from_json(line["spec"]), TargetSpec.from_json(line["target"])
        task = Task(str(line["name"]), spec, _as_known(target), int(line["threads"]))
        if task.workload != line["workload"]:
            raise ValueError("the kernel graph is not the one that was measured")
        measured = Measured(task, str(line["device"]), device_name=str(line["device_name"]))
        found.setdefault(measured.key, measured)
        return
    run_secs = tuple(float(s) for s in line["run_secs"])
    if not all(0 < s < math.inf for s in run_secs):
        raise ValueError("not seconds")
    key = f"{line['workload']}/{line['threads']}/{line['mcpu']}/{line['device']}"
    candidate, status = Candidate.from_json(line["candidate"]), MeasureStatus(line["status"])
    found[key].results.append(MeasureResult(candidate, status, run_secs, str(line["error"])))


def _as_known(target: TargetSpec) -> TargetSpec:
    """With what was learned of its processor after the record was made."""
    model = cpus.BY_NAME.get(target.mcpu)
    return target if model is None else replace(target, reads_ahead=model.reads_ahead)


def split(measured: Sequence[Measured], folds: int, fold: int) -> tuple[list[Any], list[Any]]:
    """(train, held out): whole workloads go to one side, whatever device or threads they ran on.

    The side follows from the workload alone, so data that is added later moves nothing across.
    """
    held = [m for m in measured if in_fold(m.task.workload, folds, fold)]
    return [m for m in measured if not any(m is h for h in held)], held


def in_fold(workload: str, folds: int, fold: int) -> bool:
    """Whether a workload belongs to part ``fold`` of ``folds``."""
    return zlib.crc32(workload.encode()) % folds == fold


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.records", description="Packs files of records."
    )
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines, kept as they are")
    for file in parser.parse_args().files:
        print(pack(file))
