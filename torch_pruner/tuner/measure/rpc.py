"""Measure on a fleet: candidates are built here and timed on every device of one key at once.

Devices run ``rpc_server.py`` and are listed by TVM's RPC tracker. Each has a relay here, a worker
process that builds, sends and asks (``rpc_relay.py``). A device that dies or hangs costs the
candidates on it a second try elsewhere; devices of one key must be alike.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from torch_pruner.exc import MeasureError, WorkerDied
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.log import logger
from torch_pruner.target import TargetSpec
from torch_pruner.task import MeasureStatus
from torch_pruner.tuner.measure.jobs import Limits, MeasureBatch, WorkerState, groups
from torch_pruner.tuner.measure.local import LocalExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.tuner.measure.protocol import Message

RELAY: Final = "torch_pruner.tuner.measure.rpc_relay:RpcRelay"
LOST: Final = 71  # exit status of a relay whose server went away
MAX_DEVICES: Final = 64
MAX_FAILED: Final = 2  # starts of a relay, before a device counts as broken
FORGIVEN_S: Final = 600.0
TRACKER_S: Final = 10.0  # for the tracker to answer
MAGIC, SUMMARY = 0x2F271, 6  # of TVM's tracker: the greeting, and the question who is there
MAX_SUMMARY: Final = 16 << 20  # bytes

log = logger(__name__)


class RpcExecutor(LocalExecutor):
    """Contract of ``MeasureExecutor`` on the devices of one key of a tracker.

    ``device`` and ``target`` are those of the fleet, known once ``wait_ready`` came back.
    """

    def __init__(self, tracker: str, threads: int, *, seed: int = 0) -> None:
        """``tracker``: "HOST:PORT/KEY"."""
        limits = Limits(start_s=30.0, build_s=60.0, run_s=20.0)
        super().__init__(threads, n_workers=1, limits=limits, seed=seed)
        self.tracker = tracker
        self.target: TargetSpec | None = None
        self._hello: DeviceFingerprint | None = None
        self._known = self._failed = 0  # devices, and starts of relays that failed
        self._since = 0.0  # the first of those

    def wait_ready(self) -> None:
        """Until the first device has said what it is. Raises ``MeasureError`` if none does."""
        with self._lock:
            batch = MeasureBatch((), [])
            while self._hello is None:
                self._respawn()
                self._hear(self._workers, batch, MeasureStatus.RUN_ERROR)

    def _arguments(self) -> list[str]:
        return ["--relay", RELAY, "--argument", self.tracker]

    def _respawn(self) -> None:
        """A relay for each device that the tracker knows, but for those that do not answer."""
        found = registered(self.tracker)
        # Somebody started one, perhaps in the place of a broken one; or that is long ago.
        if found > self._known or time.monotonic() - self._since > FORGIVEN_S:
            self._failed = 0
        self._known = found
        count = found - self._failed // MAX_FAILED
        if count < 1 and not self._workers:
            raise MeasureError(
                f"no device of {self.tracker} is there or answers; start one with"
                " `python -m torch_pruner.tuner.measure.rpc_server`"
            )
        self._n_workers = min(max(count, len(self._workers)), MAX_DEVICES)
        super()._respawn()

    def _did_not_start(self, words: str) -> None:
        """One device less, as long as others answer."""
        self._since = self._since if self._failed else time.monotonic()
        self._failed += 1
        log.warning("a device of %s does not answer: %s", self.tracker, words or "nothing")

    def _blames(self, err: WorkerDied) -> bool:
        return err.exitcode != LOST and super()._blames(err)

    def _limit_s(self, worker: WorkerState, job_s: float) -> float:
        """A device answers for all candidates of a group at once."""
        return super()._limit_s(worker, job_s * max(1, len(worker.owes)))

    def _on_hello(self, message: Message) -> None:
        try:
            device = DeviceFingerprint.from_json(message["device"])
            target = TargetSpec.from_json(message["target"])
        except (KeyError, ValueError) as err:
            raise MeasureError(f"a device of {self.tracker} says no sense: {err}") from err
        if self._hello is None:
            self._hello = self.device = device
            self.target = target
        elif device != self._hello:
            raise MeasureError(
                f"the devices of {self.tracker} are not alike: {device.name}"
                f" and {self._hello.name}; give each kind a key of its own"
            )

    def _time(self, batch: MeasureBatch) -> None:
        """All devices at once, each its groups one after another."""
        waiting: dict[int, deque[list[int]]] = {}
        for worker in list(self._workers):
            jobs = [j for j in worker.built if j not in batch.results]
            waiting[id(worker)] = deque(groups(batch, jobs, self.evaluator.flush_bytes))
        while True:
            for worker in list(self._workers):
                left = waiting.get(id(worker))
                if worker.owes or not left:
                    continue
                if worker.process.alive:
                    self._start_group(worker, batch, left.popleft())
                else:
                    why = "the relay died"
                    self._lose(worker, batch, MeasureStatus.RUN_ERROR, why, blame=False)
            busy = [w for w in self._workers if w.owes]
            if not busy:
                break
            self._hear(busy, batch, MeasureStatus.RUN_ERROR)
            self._note_best(batch, batch.results)
        for worker in self._workers:
            if worker.built:
                self._drop(worker)

    def _hear(
        self, busy: Sequence[WorkerState], batch: MeasureBatch, status: MeasureStatus
    ) -> None:
        """Wait for some of ``busy`` and take in what they say."""
        for worker in self._wait(busy, batch, self.limits.run_s):
            try:
                for message in self._receive(worker):
                    if "hello" in message:
                        self._on_built(worker, batch, message)
                    else:
                        self._on_timed(worker, batch, message)
            except WorkerDied as err:
                self._died(worker, batch, status, err)


def registered(tracker: str) -> int:
    """How many devices of its key a tracker knows. Raises ``MeasureError`` where it is not there.

    TVM's protocol: a magic number, then JSON after its length.
    """
    address, _, key = tracker.rpartition("/")
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=TRACKER_S) as link:
            link.settimeout(TRACKER_S)
            link.sendall(struct.pack("<i", MAGIC))
            if struct.unpack("<i", _exactly(link, 4))[0] != MAGIC:
                raise MeasureError(f"{address} is not a TVM RPC tracker")
            question = json.dumps([SUMMARY]).encode()
            link.sendall(struct.pack("<i", len(question)) + question)
            (length,) = struct.unpack("<i", _exactly(link, 4))
            if not 0 <= length <= MAX_SUMMARY:
                raise MeasureError(f"{address} answers with {length} bytes")
            answer: Any = json.loads(_exactly(link, length))
        servers = answer[1]["server_info"]
        return sum(server["key"] == f"server:{key}" for server in servers)
    except (OSError, ValueError, KeyError, IndexError, TypeError, struct.error) as err:
        raise MeasureError(
            f"the tracker at {address} does not answer ({err}); start one with"
            " `python -m tvm.exec.rpc_tracker`"
        ) from err


def _exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = link.recv(min(count - len(data), 1 << 16))
        if not more:
            raise OSError("it closed the connection")
        data += more
    return data
