"""The child process of ``RpcExecutor``: builds here, has a device of the fleet check and time.

It speaks the protocol of ``worker.py`` with its parent and stands for one server. When that one
goes away, so does this process: the parent asks the tracker for another.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm import rpc

from torch_pruner import families
from torch_pruner.codegen.build.lower import (
    compile_module,
    export_library,
    program_module,
)
from torch_pruner.exc import CompileError, PrunerError
from torch_pruner.graph.ir import Graph
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureStatus
from torch_pruner.tuner.measure.rpc import LOST
from torch_pruner.tuner.measure.rpc_server import COMMAND, HELLO, library_name
from torch_pruner.tuner.measure.worker import failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.tuner.measure.protocol import Message

MAX_REPLY = 16 << 20  # characters


class RpcRelay:
    """Executes the commands of one parent on one server. ``argument``: "HOST:PORT/KEY"."""

    def __init__(self, argument: str) -> None:
        address, _, key = argument.rpartition("/")
        host, _, port = address.rpartition(":")
        self._sources: dict[str, tuple[Graph, TargetSpec]] = {}
        self._files: dict[int, str] = {}
        self._session = rpc.connect_tracker(host, int(port)).request(key, max_retry=5)
        self._command = self._session.get_function(COMMAND)
        self.hello: Message = json.loads(str(self._session.get_function(HELLO)()))

    def handle(self, message: Message, reply: Callable[[Message], None]) -> None:
        """Execute one command and send its replies. Ends the process if the server is gone."""
        try:
            if message["cmd"] == "build":
                for job in message["jobs"]:
                    reply({"job": job["job"], **self._build(message["task"], job)})
                return
            if message["cmd"] == "task":
                source = Graph.from_json(message["spec"]), TargetSpec.from_json(message["target"])
                self._sources[message["task"]] = source
            for answer in self._remote(message):
                reply(answer)
            if message["cmd"] == "drop":
                for job in message["jobs"]:
                    name = self._files.pop(job, None)
                    if name is not None and name not in self._files.values():
                        self._session.remove(name)
        except PrunerError:
            raise
        except Exception as err:  # whatever TVM raises of a connection
            sys.stderr.write(f"the server is lost: {type(err).__name__}: {err}\n"[-2000:])
            sys.stderr.flush()
            os._exit(LOST)

    def _build(self, task: str, job: Message) -> Message:
        candidate = Candidate.from_json(job["candidate"])
        spec, target = self._sources[task]
        name = library_name(spec, candidate)
        if name not in self._files.values():  # a file in use must not be written again
            try:
                data = _built(spec, target, candidate)
            except Exception as err:
                return failure(MeasureStatus.BUILD_ERROR, err)
            self._session.upload(bytearray(data), name)
        self._files[job["job"]] = name
        (answer,) = self._remote({"cmd": "build", "task": task, "jobs": [job]})
        return {k: v for k, v in answer.items() if k != "job"}

    def _remote(self, message: Message) -> list[Message]:
        text = str(self._command(json.dumps(message)))
        if len(text) > MAX_REPLY:
            raise ValueError(f"a reply of {len(text)} characters")
        answers: Any = json.loads(text)
        if not isinstance(answers, list) or not all(isinstance(a, dict) for a in answers):
            raise ValueError("a reply that is no list of messages")
        return answers


def _built(spec: Graph, target: TargetSpec, candidate: Candidate) -> bytes:
    """A candidate as a shared library for a device of the fleet."""
    if candidate.trace:
        raise CompileError(candidate.sketch, "MetaSchedule's candidates are not timed by a fleet")
    kernel = families.named(candidate.sketch).schedule(spec, candidate, target)
    count = len(kernel.inputs) + len(kernel.outputs) + len(kernel.scratch)
    call = KernelCall("kernel", tuple(Place(k) for k in range(count)))
    library = compile_module(program_module({"kernel": kernel}, {"main": [call]}, count), target)
    with tempfile.TemporaryDirectory(prefix="torch_pruner-") as folder:
        path = Path(folder) / "kernel.so"
        export_library(library, path)
        return path.read_bytes()
