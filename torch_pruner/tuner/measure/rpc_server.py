"""What a device of a fleet runs: TVM's RPC server, with our worker behind it.

    python -m torch_pruner.tuner.measure.rpc_server --tracker HOST:PORT --key KEY

A session gets built libraries and the commands of ``protocol.py``, and answers as a local worker
would: inputs are made here, results are checked here, candidates take turns here; the network
carries code and numbers. Each session is a process of its own, so a kernel that crashes takes the
session with it and not the server.

TVM's server lets anyone who can reach it run code: keep it on networks that you trust.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pruner import families
from torch_pruner.codegen.build.load import bound, load_entries
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.log import logger
from torch_pruner.target import TargetSpec
from torch_pruner.tuner.measure._tvm import TvmBuilder
from torch_pruner.tuner.measure.builder import BuiltKernel
from torch_pruner.tuner.measure.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.graph.ir import Graph
    from torch_pruner.task import Candidate

log = logger(__name__)
HELLO, COMMAND = "torch_pruner.hello", "torch_pruner.command"  # what a session can call


class LibraryBuilder(TvmBuilder):
    """Candidates that were built elsewhere: each is a library in ``folder``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def build(
        self, spec: Graph, target: TargetSpec, threads: int, candidate: Candidate
    ) -> BuiltKernel:
        """Raises ``CorruptEntry`` for a library that cannot be loaded."""
        takes = families.signature_of(spec, candidate)
        (entry,) = load_entries(self._folder / library_name(spec, candidate), ["main"])
        return BuiltKernel(
            bind=lambda arrays: bound(entry, arrays),
            packs=takes.packs,
            outputs=[(b.shape, b.dtype) for b in takes.outputs],
            scratch=[(b.shape, b.dtype) for b in takes.scratch],
        )


def library_name(spec: Graph, candidate: Candidate) -> str:
    return f"{spec.digest()[:24]}-{candidate.digest[:24]}.so"


def hello() -> str:
    """Which device this is and what code is for it, as JSON."""
    device, target = DeviceFingerprint.detect(), TargetSpec.detect()
    return json.dumps({"device": device.to_json(), "target": target.to_json()})


def register() -> None:
    """Give sessions of this server process what they call."""
    import tvm_ffi

    workers: list[Worker] = []  # of the session, which is a process

    def command(text: str) -> str:
        if not workers:
            folder = tvm_ffi.get_global_func("tvm.rpc.server.workpath")(".")
            workers.append(Worker(LibraryBuilder(Path(str(folder)))))
        replies: list[dict[str, Any]] = []
        workers[0].handle(json.loads(str(text)), replies.append)
        return json.dumps(replies)

    tvm_ffi.register_global_func(HELLO, hello, override=True)
    tvm_ffi.register_global_func(COMMAND, command, override=True)
    _outlive_sessions()


def _outlive_sessions() -> None:
    """TVM's server stops listening, without a word, when a session ends badly: a kernel crashed, or
    its client was killed."""
    from tvm.rpc import server

    serve = server._serving

    def serving(sock: Any, *session: Any) -> None:
        folder = os.getcwd()
        try:
            serve(sock, *session)
        except RuntimeError as err:
            os.chdir(folder)
            sock.close()
            log.info("a session ended badly: %s", err)

    server._serving = serving


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tracker", required=True, metavar="HOST:PORT")
    parser.add_argument("--key", required=True, help="the name of this kind of device")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=9100, help="the first port to try")
    options = parser.parse_args(argv)
    host, _, port = options.tracker.rpartition(":")
    if not host or not port.isdecimal():
        parser.error(f"--tracker is HOST:PORT, not {options.tracker!r}")
    from tvm import rpc

    server = rpc.Server(
        options.host,
        options.port,
        options.port + 100,
        tracker_addr=(host, int(port)),
        key=options.key,
        silent=True,
        custom_addr=options.host,
        server_init_callback=register,
    )
    sys.stdout.write(f"serving {options.key!r} at {options.host}:{server.port}\n")
    sys.stdout.flush()
    server.proc.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
