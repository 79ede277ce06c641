"""Weights that change behind torch's version counter, and the option that says how to look."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.suites import weights as suite
from torch_pruner.dynamo.run import packed_inputs, page_writes, snapshot
from torch_pruner.dynamo.run.settled_watch import QUIET
from torch_pruner.dynamo.run.weight_checks import (
    Contents,
    State,
    Watch,
    facts_of,
    read_contents,
    span_of,
)
from torch_pruner.graph.weight_checksum import PHASES, Span, checksums, plan_of

pytestmark = pytest.mark.tvm


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 160), nn.ReLU(), nn.Linear(160, 64)).eval()


def agrees(compiled, network, x) -> bool:
    with torch.no_grad():
        return torch.allclose(compiled(x), network(x), rtol=1e-4, atol=1e-4)


def test_compiled_checksums_are_those_of_the_reference():
    from torch_pruner.codegen.build.lower import compile_module
    from torch_pruner.codegen.build.weight_checksum import checksum_functions
    from torch_pruner.codegen.tir.builders import tvm
    from torch_pruner.graph.memory import CHECKSUMS
    from torch_pruner.target import TargetSpec

    library = compile_module(tvm.IRModule(checksum_functions()), TargetSpec.resolve("auto"))
    random = np.random.default_rng(0)
    arrays = [random.integers(0, 255, n, np.uint8) for n in (64, 71, 4000, 3904, 3905, 1 << 21)]
    spans = [Span.of(a.ctypes.data + k % 3, a.nbytes - k % 3) for k, a in enumerate(arrays)]
    plan = plan_of(spans)
    for name in CHECKSUMS:
        watch = Watch([Contents(span, ()) for span in spans], (library[name],) * 2)
        for phase in (0, 1, 17, PHASES - 1):
            assert watch.read(phase) == checksums(plan, phase).tobytes(), (name, phase)


@pytest.mark.parametrize("kind", [0, 1], ids=["one thread", "all threads"])
def test_a_program_knows_what_python_would_be_asked_of_tensors(kind):
    from torch_pruner.codegen.build.lower import compile_module
    from torch_pruner.codegen.build.weight_checksum import checksum_functions
    from torch_pruner.codegen.tir.builders import tvm
    from torch_pruner.graph.memory import CHECKSUMS
    from torch_pruner.target import TargetSpec

    library = compile_module(tvm.IRModule(checksum_functions()), TargetSpec.resolve("auto"))
    tensors = [torch.randn(50 + k) for k in range(300)]
    tensors += [torch.randn(4000)[5:], nn.Parameter(torch.randn(70, 70)), torch.randn(3)]
    versions = [t._version if k % 3 else None for k, t in enumerate(tensors)]

    def watch() -> Watch:
        entries = (library[CHECKSUMS[kind]],) * 2
        known = read_contents([span_of(t) for t in tensors], entries)
        facts = facts_of(tensors, [t._version if v is not None else None for t, v in pairs])
        assert facts is not None
        return Watch(known, entries, facts)

    pairs = list(zip(tensors, versions, strict=True))
    same = watch()
    assert all(same.look() is State.SAME for _ in range(2 * PHASES))
    for k in (1, 160, 299, 301):
        seen = watch()
        with torch.no_grad():
            tensors[k].view(-1)[:1].copy_(tensors[k].view(-1)[:1].clone())  # the same bytes
        assert seen.look() is State.MOVED, k
        seen = watch()
        tensors[k].data.mul_(3)
        assert seen.look() is State.WRITTEN, k
        seen, kept = watch(), tensors[k].data
        tensors[k].data = kept.clone()
        assert seen.look() is State.MOVED, k
    seen = watch()
    with torch.no_grad():
        tensors[0][:1].copy_(tensors[0][:1].clone())  # whose version nobody asks for
    assert seen.look() is State.SAME


@pytest.mark.parametrize("mode", ["checked", "live"])
def test_a_write_that_raises_no_version_is_seen_at_the_next_call(backend, network, mode):
    compiled, x = backend.compile(network, weights=mode), torch.randn(32, 96)
    assert all(agrees(compiled, network, x) for _ in range(3))
    network[2].weight.data.mul_(1.5)
    assert agrees(compiled, network, x)
    torch.from_dlpack(network[0].weight.detach()).neg_()
    assert agrees(compiled, network, x)


def test_a_new_program_does_not_trust_copies_that_others_made(backend, network):
    compiled = backend.compile(network, dynamic=False, strict=True)
    assert agrees(compiled, network, torch.randn(32, 96))
    network[2].weight.data.mul_(1.5)
    assert agrees(compiled, network, torch.randn(48, 96))  # another program, packed as the first is


@pytest.mark.parametrize("told", [True, False], ids=["by a program", "by Python"])
def test_what_torch_knows_of_weights_is_asked_by_whoever_can(backend, network, monkeypatch, told):
    """Where experiments do not say how torch lays tensors out, Python is asked."""
    if not told:
        monkeypatch.setattr(snapshot, "facts_of", lambda *given: None)
    compiled, x = backend.compile(network), torch.randn(32, 96)
    assert all(agrees(compiled, network, x) for _ in range(3))
    with torch.no_grad():
        network[0].weight[3, 5] += 4.0  # less than a page: only the version tells at once
    assert agrees(compiled, network, x)
    network[2].weight.data = torch.randn(64, 160)
    assert agrees(compiled, network, x)
    network[2].weight.data.neg_()
    assert agrees(compiled, network, x)


@torch.no_grad()
def test_one_element_of_weights_that_were_long_quiet_is_seen_at_the_next_call(backend):
    """Wherever the system notes writes; elsewhere a sample of lines comes to it within a round."""
    net = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 96))
    compiled, x, weight = backend.compile(net), torch.randn(32, 1024), net[0].weight
    for _ in range(QUIET + PHASES + 3):
        compiled(x)
    assert agrees(compiled, net, x)
    own = page_writes.page_ranges([(weight.data_ptr(), weight.data_ptr() + weight.nbytes)])
    notes = page_writes.watch(own) is not None
    weight.data[131, 7] += 4.0
    assert any(agrees(compiled, net, x) for _ in range(1 if notes else PHASES))


def test_fused_optimizers_are_seen_without_looking(backend, network, monkeypatch):
    """A step of a fused optimizer moves no version: evaluation ran on the weights of the past."""
    compiled, x = backend.compile(network), torch.randn(32, 96)
    assert all(agrees(compiled, network, x) for _ in range(3))
    monkeypatch.setattr(Watch, "look", lambda self, turn=None: State.SAME)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        network(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert agrees(compiled, network, x)


def test_another_optimizers_step_renews_nothing(backend, network, monkeypatch):
    compiled, x = backend.compile(network), torch.randn(32, 96)
    assert all(agrees(compiled, network, x) for _ in range(3))
    made = []
    original = packed_inputs.PackedInputs._make
    monkeypatch.setattr(
        packed_inputs.PackedInputs, "_make", lambda *given: made.append(1) or original(*given)
    )
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    torch.optim.SGD([other], lr=0.1).step()
    assert agrees(compiled, network, x)
    assert not made


def test_live_weights_are_kept_nowhere(backend, network, monkeypatch):
    kept = []
    original = packed_inputs.PackedInputs._make

    def keep(self, *given):
        kept.append(original(self, *given))
        return kept[-1]

    monkeypatch.setattr(packed_inputs.PackedInputs, "_make", keep)
    compiled, x = backend.compile(network, weights="live"), torch.randn(32, 96)
    assert all(agrees(compiled, network, x) for _ in range(3))
    network[0].weight.data[5, 7] += 100  # less than a sample sees for sure
    assert agrees(compiled, network, x)
    assert sum(t.nbytes for snapshot in kept for t in snapshot.kept) == 0


def test_frozen_weights_are_looked_at_once(backend, network):
    """The user promises that nothing changes; another module's weights are others all the same."""
    compiled, x = backend.compile(network, weights="frozen"), torch.randn(32, 96)
    with torch.no_grad():
        before = [compiled(x) for _ in range(3)][-1]
        network[0].weight.data.mul_(1.5)
        assert torch.equal(compiled(x), before)
        network.load_state_dict(
            {k: v.clone() for k, v in network.state_dict().items()}, assign=True
        )
    assert agrees(compiled, network, x)


def test_weights_of_inference_mode_are_read_whole(backend):
    """They have no version counter, so one element counts at the next call."""
    with torch.inference_mode():
        network = nn.Linear(96, 160).eval()
        compiled, x = backend.compile(network), torch.randn(32, 96)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), network(x), rtol=1e-4, atol=1e-4)
        network.weight[3, 5] += 10
        torch.testing.assert_close(compiled(x), network(x), rtol=1e-4, atol=1e-4)


def test_ways_of_the_suite(monkeypatch, shared_cache):
    monkeypatch.setenv("TORCH_PRUNER_CACHE_DIR", str(shared_cache))
    suite.subject.cache_clear()
    for way in ("SGD(fused=True)", "p.data.neg_", "views-of-a-flat-buffer", "another-process"):
        outcome = suite.check(f"bert_tiny:{way}")
        assert outcome.status == "compiled", (way, outcome.reason)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_compiled_copies_of_rows(threads):
    """Rows of one tensor and of several, fewer than threads and more; nothing behind them."""
    from torch_pruner.codegen.build.lower import compile_module
    from torch_pruner.codegen.build.row_copies import copy_functions
    from torch_pruner.codegen.tir.builders import tvm
    from torch_pruner.dynamo.run.row_copies import RowCopier, Rows
    from torch_pruner.graph.memory import COPIES
    from torch_pruner.target import TargetSpec

    library = compile_module(tvm.IRModule(copy_functions()), TargetSpec.resolve("auto"))
    copy = RowCopier(library[COPIES], threads)
    sources = [torch.rand(n, 9, 7) for n in (1, 2, 5, 17)]
    targets = [torch.full((len(s) * 3 * 7 + 1,), 5.0) for s in sources]
    rows = [Rows(3 * 7 * 4, 9 * 7 * 4, len(s), 3 * 7 * 4) for s in sources]
    copy(list(zip(targets, sources, rows, strict=True)))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target[:-1].view(-1, 3, 7), source[:, :3])
        assert target[-1] == 5.0
    copy([])
