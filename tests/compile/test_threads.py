"""Calls from several threads, cold and warm, and from forked processes."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import torch_pruner as tp
from tests.compile.agreement import assert_equal

pytestmark = pytest.mark.tvm
THREADS = 4


def together(work) -> list:
    """``work(k)`` on four threads that start at once; the first exception is raised here."""
    barrier = threading.Barrier(THREADS)

    def run(k):
        barrier.wait()
        return work(k)

    with ThreadPoolExecutor(THREADS) as pool:
        return [f.result(timeout=120) for f in [pool.submit(run, k) for k in range(THREADS)]]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 8)).eval()


def test_cold_function(cold):
    net = model()
    compiled = cold.compile(net)

    def work(k):
        generator = torch.Generator().manual_seed(k)
        with torch.no_grad():
            for _ in range(5):
                x = torch.randn(6, 24, generator=generator)
                assert_equal(compiled(x), net(x))

    together(work)
    assert tp.last_report().ops_compiled > 0


def test_warm_function_with_workspace_of_its_own_per_thread(backend):
    net = model()
    compiled = backend.compile(net)
    with torch.no_grad():
        compiled(torch.randn(6, 24))

    def work(k):
        x = torch.full((6, 24), float(k)).add_(torch.arange(24.0))
        with torch.no_grad():
            expected = net(x)
            for _ in range(200):
                torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)

    together(work)


def test_cold_training_step(cold):
    nets = [model().train() for _ in range(THREADS)]
    compiled = [cold.compile(n) for n in nets]

    def work(k):
        for _ in range(3):
            compiled[k](torch.ones(6, 24)).square().sum().backward()
        return [p.grad.clone() for p in nets[k].parameters()]

    twin = model().train()
    for _ in range(3):
        twin(torch.ones(6, 24)).square().sum().backward()
    for gradients in together(work):
        for got, p in zip(gradients, twin.parameters(), strict=True):
            torch.testing.assert_close(got, p.grad, rtol=1e-3, atol=1e-3)


def test_two_functions_at_once(cold):
    fns = [
        lambda x: x.relu() + 1,
        lambda x: x.exp().sum(0),
        lambda x: x @ x.t(),
        lambda x: x.softmax(1),
    ]
    compiled = [cold.compile(f) for f in fns]
    x = torch.randn(6, 24)

    def work(k):
        for _ in range(3):
            assert_equal(compiled[k](x), fns[k](x))

    together(work)


def test_weights_changed_between_two_threads_calls(backend):
    """Each thread keeps an address table; a change of the weights must reach all of them."""
    net = model()
    compiled = backend.compile(net)
    x = torch.randn(6, 24)
    turns = [threading.Event() for _ in range(9)]
    results: dict[int, torch.Tensor] = {}

    def work(which):
        for turn in range(which, 8, 2):
            assert turns[turn].wait(60)
            with torch.no_grad():
                results[turn] = compiled(x)
                net[0].weight.add_(0.25)
                net[3].weight.data = net[3].weight.data * 1.5
            turns[turn + 1].set()

    twin = model()
    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    turns[0].set()
    for thread in threads:
        thread.join(120)
    for turn in range(8):
        with torch.no_grad():
            assert_equal(results[turn], twin(x), tolerance=1e-3)
            twin[0].weight.add_(0.25)
            twin[3].weight.mul_(1.5)


def test_inference_while_another_thread_compiles(cold):
    net = model()
    compiled = cold.compile(net, dynamic=False)
    x = torch.randn(6, 24)
    with torch.no_grad():
        expected = net(x)
        compiled(x)

    def work(k):
        with torch.no_grad():
            if k == 0:
                for rows in (2, 3, 4):
                    y = torch.randn(rows, 24)
                    assert_equal(compiled(y), net(y))
                return
            for _ in range(50):
                torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)

    together(work)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_calls_what_its_parent_compiled(backend, threads):
    """TVM's worker threads do not survive a fork; a child that waited for them would never end."""
    net = model()
    compiled = backend.compile(net, threads=threads)
    x = torch.randn(64, 24)
    with torch.no_grad():
        expected = compiled(x).clone()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:  # no pytest in the child: it reports by its pipe and leaves
            try:
                torch.set_num_threads(1)
                same = torch.allclose(compiled(x), expected, atol=1e-5)
                os.write(write, b"same" if same else b"other")
            finally:
                os._exit(0)
    os.close(write)
    watchdog = threading.Timer(60, os.kill, (pid, 9))
    watchdog.start()
    answer = os.read(read, 10)
    os.waitpid(pid, 0)
    watchdog.cancel()
    os.close(read)
    assert answer == b"same"


def test_the_first_call_leaves_the_generator_to_other_threads(cold):
    """The check replays eager's random numbers, and only where there are any."""
    compiled = cold.compile(lambda x: x.relu() + 1)
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    calls = []
    original = torch.set_rng_state
    try:
        torch.set_rng_state = lambda state: calls.append(state) or original(state)
        compiled(torch.ones(3, 4))
    finally:
        torch.set_rng_state = original
    assert not calls
    assert torch.equal(torch.rand(4), expected)
