"""Compiling in the background: eager's results at once, programs take over between two calls."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_pruner
from tests.compile.agreement import assert_equal
from tests.compile.test_static_cache import WIDTH, Decoder
from torch_pruner.background.queue import shared_queue
from torch_pruner.dynamo.run.checked import CheckedCall
from torch_pruner.dynamo.run.runtime import RegionCall

pytestmark = pytest.mark.tvm
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 300.0  # workers give way to everything: on a busy machine that takes long


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).eval()


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert torch_pruner.wait(WAIT_S)


def background(backend, fn, **options):
    return backend.compile(fn, compile="background", **options)


def states():
    return [(g.runs, g.pending) for g in torch_pruner.last_report().graphs]


@torch.no_grad()
def test_eager_answers_first_and_a_program_then(backend, net):
    compiled, x = background(backend, net), torch.randn(8, 64)
    assert torch.equal(compiled(x), net(x))  # bit for bit: it is eager
    assert states() == [("eager", "drafted")]
    assert torch_pruner.wait(WAIT_S)
    assert states() == [("drafted", "")]
    report = torch_pruner.last_report()
    assert report.ops_compiled == report.ops_total > 0
    assert report.sources["untuned"] == len(report.tasks) > 0
    for _ in range(3):
        x = torch.randn(8, 64)
        assert_equal(compiled(x), net(x))


@torch.no_grad()
def test_tuned_kernels_take_over_from_drafted_ones(cold, net):
    compiled, x = background(cold, net, effort="quick", trials=8), torch.randn(8, 64)
    compiled(x)
    assert torch_pruner.wait(WAIT_S)
    assert states() == [("tuned", "")]
    assert torch_pruner.last_report().sources["tuned"] > 0
    assert_equal(compiled(x), net(x))


@torch.no_grad()
def test_the_first_comparison_is_not_made_in_a_call_of_the_users(cold, net, monkeypatch):
    made_in = []
    compared = CheckedCall._compared

    def noted(self, *args):
        made_in.append(threading.current_thread().name)
        return compared(self, *args)

    monkeypatch.setattr(CheckedCall, "_compared", noted)
    compiled, x = background(cold, net), torch.randn(8, 64)
    compiled(x)
    assert torch_pruner.wait(WAIT_S)
    assert_equal(compiled(x), net(x))
    assert made_in == ["torch_pruner"]


@torch.no_grad()
def test_what_differs_beside_the_users_calls_is_compared_in_one_of_them(cold, net, monkeypatch):
    """Somebody may have written to a parameter in between: only a real call decides."""
    rehearsed = CheckedCall._rehearsed

    def disturbed(self, args):
        right = self._call
        self._call = lambda given: [t + 1 for t in right(given)]
        try:
            return rehearsed(self, args)
        finally:
            self._call = right

    monkeypatch.setattr(CheckedCall, "_rehearsed", disturbed)
    compiled, x = background(cold, net), torch.randn(8, 64)
    compiled(x)
    assert torch_pruner.wait(WAIT_S)
    assert states() == [("drafted", "")]
    for _ in range(2):
        assert_equal(compiled(x), net(x))


@torch.no_grad()
def test_a_program_that_is_wrong_never_answers(cold, net, monkeypatch, caplog):
    right = RegionCall.__call__
    monkeypatch.setattr(RegionCall, "__call__", lambda self, x: [t + 1 for t in right(self, x)])
    compiled = background(cold, net, strict=False)
    with caplog.at_level(logging.WARNING, "torch_pruner"):
        for _ in range(2):
            x = torch.randn(8, 64)
            assert_equal(compiled(x), net(x))
            torch_pruner.wait(WAIT_S)
        x = torch.randn(8, 64)
        assert_equal(compiled(x), net(x))
    assert [r for r in caplog.records if "runs in eager from now on" in r.getMessage()]


@torch.no_grad()
def test_a_step_that_writes_into_its_cache(backend):
    net, twin = Decoder().eval(), Decoder().eval()
    compiled = background(backend, net)
    for start in range(8):
        if start == 4:
            assert torch_pruner.wait(WAIT_S)
            assert states() == [("drafted", "")]
        position, x = torch.tensor([start]), torch.randn(1, 1, WIDTH)
        assert_equal(compiled(x, position), twin(x, position))
        for mine, theirs in zip(net.layers, twin.layers, strict=True):
            assert_equal(mine.keys, theirs.keys)
            assert_equal(mine.values, theirs.values)


def test_training_changes_forward_and_backward_together(backend):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))
    compiled = background(backend, net)
    steps = [torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, twin)]
    for k in range(8):
        if k in (2, 4):  # a backward may be captured when its forward first runs
            assert torch_pruner.wait(WAIT_S)
        x = torch.randn(16, 32)
        for model, step in zip((compiled, twin), steps, strict=True):
            step.zero_grad()
            model(x).square().mean().backward()
            step.step()
        for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert_equal(mine.grad, theirs.grad)
            assert_equal(mine, theirs)
    assert {runs for runs, _ in states()} == {"drafted"}


@torch.no_grad()
def test_random_numbers_are_eagers_whatever_runs(backend):
    def drops(x):
        return torch.dropout(x * 2, 0.5, True) + 1

    compiled, x = background(backend, drops), torch.randn(16, 16)
    for k in range(4):
        if k == 1:
            assert torch_pruner.wait(WAIT_S)
        torch.manual_seed(k)
        want = drops(x), torch.rand(3)
        torch.manual_seed(k)
        for ours, eagers in zip((compiled(x), torch.rand(3)), want, strict=True):
            assert_equal(ours, eagers)


@torch.no_grad()
def test_weights_that_change_before_a_program_takes_over(cold, net):
    compiled, x = background(cold, net), torch.randn(8, 64)
    compiled(x)
    assert torch_pruner.wait(WAIT_S)
    for change in (lambda w: w.mul_(2), lambda w: w.data.neg_(), lambda w: w.data.add_(1)):
        change(net[0].weight)
        assert_equal(compiled(x), net(x))


@torch.no_grad()
def test_sizes_that_vary_run_in_eager_until_there_is_a_program(backend, net):
    compiled = background(backend, net, dynamic=True)
    for rows in (8, 5, 7, 8, 3, 9, 8, 5):
        x = torch.randn(rows, 64)
        assert_equal(compiled(x), net(x))
        if rows == 7:
            assert torch_pruner.wait(WAIT_S)
    assert torch_pruner.wait(WAIT_S)
    for rows in (8, 5):
        x = torch.randn(rows, 64)
        assert_equal(compiled(x), net(x))


@torch.no_grad()
def test_a_cache_that_is_not_on_disk_is_built_here(tmp_path, backend, net):
    (tmp_path / "file").write_text("no directory")
    compiled = background(backend, net, cache_dir=str(tmp_path / "file" / "below"))
    x = torch.randn(8, 64)
    compiled(x)
    assert torch_pruner.wait(WAIT_S)
    assert states() == [("drafted", "")]
    assert_equal(compiled(x), net(x))


def _kill_the_process(times):
    """Kill what compiles as often as that, as soon as it is there."""
    killed = 0
    queue, deadline = shared_queue(), time.monotonic() + WAIT_S
    while killed < times and time.monotonic() < deadline:
        process = queue._process and queue._process._process
        if process is not None and process.alive and queue._busy:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
            while process.alive or (queue._process and queue._process._process is process):
                time.sleep(0.01)
        time.sleep(0.01)
    assert killed == times


@torch.no_grad()
def test_a_process_that_is_killed_is_started_again(cold, net):
    compiled, x = background(cold, net), torch.randn(8, 64)
    compiled(x)
    _kill_the_process(1)
    assert torch_pruner.wait(WAIT_S)
    assert states() == [("drafted", "")]
    assert_equal(compiled(x), net(x))


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_where_it_is_killed_again_eager_stays(cold, net, strict, caplog):
    compiled, x = background(cold, net, strict=strict), torch.randn(8, 64)
    with caplog.at_level(logging.WARNING, "torch_pruner"):
        compiled(x)
        _kill_the_process(2)
        if strict:
            with pytest.raises(torch_pruner.exc.WorkerDied):
                torch_pruner.wait(WAIT_S)
        assert torch_pruner.wait(WAIT_S)
    assert states() == [("eager", "")]
    assert "not compiled: WorkerDied" in torch_pruner.last_report().notes[0]
    assert len([r for r in caplog.records if "stays as it is" in r.getMessage()]) == 1
    assert torch.equal(compiled(x), net(x))


@torch.no_grad()
def test_a_model_that_is_deleted_is_not_compiled(cold):
    def short_lived():
        net = nn.Sequential(nn.Linear(64, 72), nn.ReLU()).eval()
        background(cold, net)(torch.randn(4, 64))
        return weakref.ref(net)

    gone = short_lived()
    torch._dynamo.reset()
    gc.collect()
    assert torch_pruner.wait(WAIT_S)
    gc.collect()
    assert gone() is None


@torch.no_grad()
def test_dynamo_is_reset_in_the_middle(cold, net):
    compiled, x = background(cold, net), torch.randn(8, 64)
    compiled(x)
    torch._dynamo.reset()
    assert_equal(compiled(x), net(x))
    assert torch_pruner.wait(WAIT_S)
    assert_equal(compiled(x), net(x))
    assert not any(pending for _, pending in states())


BEGIN = """
import sys, torch, torch_pruner
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).eval()
options = {"effort": "none", "compile": "background", "cache_dir": sys.argv[1], "strict": True}
compiled, x = torch.compile(net, backend="pruner", options=options), torch.randn(8, 64)
torch.set_grad_enabled(False)
assert torch.equal(compiled(x), net(x))
"""
FORKS = """
import os
pid = os.fork()
if not pid:
    compiled(x)
    done = torch_pruner.wait(100)
    pending = [g.pending for g in torch_pruner.last_report().graphs if g.pending]
    torch.testing.assert_close(compiled(x), net(x))
    os._exit(0 if done and not pending else 1)
assert torch_pruner.wait(100)
torch.testing.assert_close(compiled(x), net(x))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("done")
"""
ENDS = """
import time
time.sleep(float(sys.argv[2]))
print("done")
"""


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", BEGIN + code, *map(str, arguments)], capture_output=True, text=True,
        cwd=ROOT, timeout=WAIT_S,
    )  # fmt: skip


@pytest.mark.rotated(6)
def test_a_forked_child_compiles_for_itself(tmp_path):
    done = run(FORKS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


@pytest.mark.rotated(2)
@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_an_interpreter_that_ends_in_the_middle(tmp_path, after_s):
    begin = time.monotonic()
    done = run(ENDS, tmp_path, after_s)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("done\n", "")
    assert time.monotonic() - begin < 60
