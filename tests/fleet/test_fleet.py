"""Candidates timed by a fleet on loopback: right, all at once, and whatever happens to devices."""

from __future__ import annotations

import json
import signal
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torch_pruner as tp
from tests.compile.agreement import assert_equal
from tests.contracts.measure_executor import MeasureExecutorContract
from tests.families import kernels as K
from tests.fleet import fleet as fleets
from torch_pruner.exc import MeasureError
from torch_pruner.families import sketches_for
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureInput, MeasureStatus, Task
from torch_pruner.tuner.measure import rpc
from torch_pruner.tuner.measure.rpc import RpcExecutor, registered

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.tvm, pytest.mark.rpc]


@pytest.fixture(scope="module")
def pair() -> Iterator[fleets.Fleet]:
    with fleets.fleet(2) as found:
        yield found


def a_task() -> Task:
    return Task("linear", K.linear(48, 64, 96), TargetSpec.detect(1), 1)


def candidates(count: int) -> list[Candidate]:
    (sketch,) = sketches_for(a_task())[-1:]
    points = K.points(sketch, count - 1)
    return [Candidate(sketch.name, tuple(sorted(p.items()))) for p in points]


class TestRpcExecutor(MeasureExecutorContract):
    @pytest.fixture
    def executor(self, pair: fleets.Fleet) -> Iterator[RpcExecutor]:
        with RpcExecutor(pair.tracker, 1) as found:
            yield found

    @pytest.fixture
    def task(self) -> Task:
        return a_task()

    @pytest.fixture
    def good(self) -> list[Candidate]:
        return candidates(3)

    @pytest.fixture
    def bad(self) -> list[tuple[Candidate, MeasureStatus]]:
        unknown = Candidate("nothing", candidates(1)[0].decisions)
        return [(unknown, MeasureStatus.BUILD_ERROR)]

    def test_it_is_about_the_devices(self, executor: RpcExecutor) -> None:
        executor.wait_ready()
        assert executor.device == DeviceFingerprint.detect()
        assert executor.target == TargetSpec.detect()

    def test_both_devices_are_used(self, executor: RpcExecutor, task: Task) -> None:
        for _ in range(3):  # a server may still be ending the session of the test before
            results = executor.measure([MeasureInput(task, c) for c in candidates(8)])
            assert all(r.status is MeasureStatus.OK for r in results), [r.error for r in results]
            if len(executor._workers) == 2:
                return
        pytest.fail(f"{len(executor._workers)} of 2 devices")


@pytest.mark.rotated(6)
def test_a_device_that_is_killed_costs_a_second_try() -> None:
    """In the middle of timing; its candidates are timed by the other one."""
    with fleets.fleet(2) as found, RpcExecutor(found.tracker, 1) as executor:
        task = a_task()
        executor.measure([MeasureInput(task, c) for c in candidates(2)])
        threading.Timer(0.6, found.signal, (0, signal.SIGKILL)).start()
        for _ in range(4):
            results = executor.measure([MeasureInput(task, c) for c in candidates(8)])
            assert all(r.status is MeasureStatus.OK for r in results), [r.error for r in results]
        deadline = time.monotonic() + 30
        while found.count() > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert found.count() == 1
        executor.measure([MeasureInput(task, c) for c in candidates(2)])
        assert len(executor._workers) == 1


@pytest.mark.stress
def test_a_device_that_hangs_is_left_alone() -> None:
    with fleets.fleet(2) as found, RpcExecutor(found.tracker, 1) as executor:
        task = a_task()
        executor.measure([MeasureInput(task, c) for c in candidates(2)])
        executor.limits = rpc.Limits(start_s=4.0, task_s=4.0, build_s=20.0, run_s=1.0)
        found.signal(0, signal.SIGSTOP)
        statuses = set()
        for _ in range(3):
            results = executor.measure([MeasureInput(task, c) for c in candidates(4)])
            statuses = {r.status for r in results}
        assert statuses == {MeasureStatus.OK}, "the other one goes on alone"
        found.signal(0, signal.SIGCONT)


def test_unlike_devices_of_one_key_are_refused(pair: fleets.Fleet) -> None:
    with RpcExecutor(pair.tracker, 1) as executor:
        executor.wait_ready()
        other = {**DeviceFingerprint.detect().to_json(), "name": "another CPU"}
        hello = {"hello": 1, "device": other, "target": TargetSpec.detect().to_json()}
        with pytest.raises(MeasureError, match=r"not alike.*key of its own"):
            executor._on_hello(hello)
        with pytest.raises(MeasureError, match="no sense"):
            executor._on_hello({"hello": 1, "device": {"name": 3}})


@torch.no_grad()
def test_a_network_is_tuned_by_the_fleet(cold: Any, pair: fleets.Fleet) -> None:
    net, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU()).eval(), torch.randn(20, 64)
    options = {"executor": "rpc", "tracker": pair.tracker, "threads": 1}
    compiled = cold.compile(net, effort="quick", trials=6, time_budget_s=60.0, **options)
    assert_equal(compiled(x), net(x))
    report = tp.last_report()
    assert report is not None
    assert {t.source for t in report.tasks} == {"tuned"}
    torch._dynamo.reset()
    local = cold.compile(net, effort="quick", threads=1, on_miss="error")
    assert_equal(local(x), net(x))


class Answers:
    """A tracker's side of one connection."""

    def __init__(self, *parts: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.tracker = f"127.0.0.1:{self._listener.getsockname()[1]}/key"
        self._parts = parts
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._listener:
            link, _ = self._listener.accept()
        with link:
            for part in self._parts:
                link.recv(1 << 16)
                link.sendall(part)


def packed(answer: Any) -> bytes:
    text = json.dumps(answer).encode()
    return struct.pack("<i", len(text)) + text


HELLO = struct.pack("<i", rpc.MAGIC)


def test_what_a_tracker_knows() -> None:
    servers = [{"key": "server:key"}, {"key": "server:other"}, {"key": "server:key"}]
    assert registered(Answers(HELLO, packed([0, {"server_info": servers}])).tracker) == 2


@pytest.mark.parametrize(
    "parts",
    [
        (struct.pack("<i", 7),),
        (HELLO, struct.pack("<i", 1 << 30)),
        (HELLO, packed({"nothing": 1})),
        (HELLO, packed([0, {"server_info": 5}])),
        (HELLO, struct.pack("<i", 4) + b"{{{{"),
        (HELLO, struct.pack("<i", 100) + b"short"),
        (),
    ],
    ids=["magic", "huge", "object", "number", "text", "short", "closed"],
)
def test_what_is_no_tracker_is_an_error(parts: tuple[bytes, ...]) -> None:
    with pytest.raises(MeasureError, match=r"tracker|answers"):
        registered(Answers(*parts).tracker)


def test_nobody_there() -> None:
    with pytest.raises(MeasureError, match="rpc_tracker"):
        registered("127.0.0.1:9/key")
    with fleets.fleet(0) as found, RpcExecutor(found.tracker, 1) as executor:
        while True:
            try:
                registered(found.tracker)
                break
            except MeasureError:
                time.sleep(0.1)
        with pytest.raises(MeasureError, match="rpc_server"):
            executor.wait_ready()
