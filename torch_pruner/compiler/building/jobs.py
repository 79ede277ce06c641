"""What is to be built, as messages: for a process that builds, or for this one.

Answers have ``ok``, and ``parts`` (of a kernel) or ``error`` and ``log``.
"""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pruner import exc
from torch_pruner.codegen.build.kernel_object import Division, divisions
from torch_pruner.graph.ir import Graph
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.graph.phases import Turn
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, Scheduled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.tuner.measure.protocol import Message

MAX_LOG = 20000  # characters of an answer's


def kernel_job(name: str, kernel: Scheduled, target: TargetSpec, path: Path) -> Message:
    """Write the object file of a kernel."""
    return {
        "cmd": "kernel", "name": name, "spec": kernel.spec.to_json(),
        "candidate": kernel.candidate.to_json(), "past_caches": kernel.past_caches,
        "target": target.to_json(), "path": str(path),
    }  # fmt: skip


def own_job(target: TargetSpec, path: Path) -> Message:
    """Write the object file of the entries that look at weights."""
    return {"cmd": "own", "target": target.to_json(), "path": str(path)}


def masks_job(target: TargetSpec, path: Path) -> Message:
    """Write the object file of the entry that draws masks of dropout."""
    return {"cmd": "masks", "target": target.to_json(), "path": str(path)}


def launch_job(target: TargetSpec, path: Path) -> Message:
    """Write the object file of the entry that says on which threads kernels run."""
    return {"cmd": "launch", "target": target.to_json(), "path": str(path)}


def entries_job(
    kernels: Mapping[str, Sequence[Division]],
    programs: Mapping[str, Sequence[KernelCall]],
    slots: int,
    threads: int,
    lines: Place | None,
    target: TargetSpec,
    path: Path,
) -> Message:
    """Write the object file of the entries of a graph."""
    calls = {
        entry: [
            [call.kernel, [list(astuple(p)) for p in call.args],
             None if call.turn is None else list(astuple(call.turn))]
            for call in sequence
        ]
        for entry, sequence in programs.items()
    }  # fmt: skip
    parts = {name: [part.to_json() for part in of] for name, of in kernels.items()}
    return {
        "cmd": "entries", "kernels": parts, "programs": calls, "slots": slots, "threads": threads,
        "lines": None if lines is None else list(astuple(lines)),
        "target": target.to_json(), "path": str(path),
    }  # fmt: skip


def answer(message: Message) -> Message:
    """Do a job in this process, which imports TVM. No exception leaves it."""
    try:
        return {"ok": True, "parts": _built(message)}
    except exc.CompileError as err:
        return {"ok": False, "what": err.what, "error": err.reason, "log": err.log[-MAX_LOG:]}
    except Exception as err:
        return {"ok": False, "what": "kernels", "error": f"{type(err).__name__}: {err}", "log": ""}


def parts_of(reply: Message) -> tuple[Division, ...]:
    """What an answer says about the parts of a kernel. Raises the ``CompileError`` that it is."""
    if not reply["ok"]:
        raise exc.CompileError(reply["what"], reply["error"], log=reply["log"])
    return divisions(reply["parts"])


def _built(message: Message) -> list[list[int | bool | None]]:
    from torch_pruner.codegen.build.launch import write_launch
    from torch_pruner.codegen.build.objects import (
        write_entries,
        write_kernel,
        write_masks,
        write_own,
    )

    target, path = TargetSpec.from_json(message["target"]), Path(message["path"])
    shared = {"own": write_own, "masks": write_masks, "launch": write_launch}
    if (write := shared.get(message["cmd"])) is not None:
        write(target, path)
        return []
    if message["cmd"] == "entries":
        kernels = {name: divisions(parts) for name, parts in message["kernels"].items()}
        programs = {name: _calls(calls) for name, calls in message["programs"].items()}
        slots, threads = message["slots"], message["threads"]
        lines = None if message["lines"] is None else Place(*message["lines"])
        write_entries(kernels, programs, slots, threads, lines, target, path)
        return []
    spec, candidate = Graph.from_json(message["spec"]), Candidate.from_json(message["candidate"])
    kernel = Scheduled(spec, candidate, message["past_caches"])
    parts = write_kernel(message["name"], kernel, target, path)
    return [part.to_json() for part in parts]


def _calls(listed: list[list[Any]]) -> list[KernelCall]:
    return [
        KernelCall(kernel, tuple(Place(*p) for p in places), None if turn is None else Turn(*turn))
        for kernel, places, turn in listed
    ]
