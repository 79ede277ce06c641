"""Graphs of symbolic sizes, written down for the sizes that come."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from torch_pruner.dynamo.sizes import sized_call, symbolic


def captured(fn, *args, dynamic=True):
    """Every graph that AOTAutograd captures, with its example inputs."""
    found = []

    def keep(gm, example_inputs):
        found.append((gm, list(example_inputs)))

        def call(values):
            given = list(values)
            values.clear()
            return gm(*given)

        call._boxed_call = True
        return call

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, inference_compiler=keep)
    out = torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.sum().backward()
    return found


def captured_one(fn, *args, dynamic=True):
    with torch.no_grad():
        ((gm, inputs),) = captured(fn, *args, dynamic=dynamic)
    return gm, inputs


def arguments(gm, inputs, *tensors):
    """What AOTAutograd would call ``gm`` with: sizes first, wherever it has put them."""
    given = iter(tensors)
    names = {}
    values = [next(given) if isinstance(v, torch.Tensor) else v for v in inputs]
    for given_as, tensor in zip(inputs, values, strict=True):
        if isinstance(given_as, torch.Tensor):
            for s, d in zip(given_as.shape, tensor.shape, strict=True):
                names[str(s)] = d
    return [v if isinstance(v, torch.Tensor) else names[str(v)] for v in values]


def symbols_in(gm):
    return [
        node
        for node in gm.graph.nodes
        for leaf in torch.utils._pytree.tree_leaves(node.meta.get("val"))
        if isinstance(leaf, (torch.SymInt, torch.SymFloat))
        or (isinstance(leaf, torch.Tensor) and any(isinstance(d, torch.SymInt) for d in leaf.shape))
    ]


def attend(x):
    """Views, sizes computed from sizes, and a size among the results."""
    n, width = x.shape
    heads = x.view(n, 2, width // 2).transpose(0, 1)
    scores = torch.softmax(heads @ heads.transpose(1, 2) / n, -1)
    padded = F.pad(scores @ heads, (0, 0, 0, n % 3))
    return padded.reshape(2, -1), n * 2


def test_numbers_take_the_place_of_symbols():
    gm, inputs = captured_one(attend, torch.rand(5, 8))
    assert symbols_in(gm)
    for n in (3, 5, 16):
        x = torch.rand(n, 8)
        args = arguments(gm, inputs, x)
        small = symbolic.with_sizes(gm, args)
        assert not symbols_in(small)
        assert len(small.graph.find_nodes(op="placeholder")) == len(inputs)
        for got, expected in zip(small(*args), gm(*args), strict=True):
            torch.testing.assert_close(got, expected)
    assert symbols_in(gm)  # the graph itself is as it was


def test_a_graph_for_the_sizes_of_its_capture():
    gm, inputs = captured_one(attend, torch.rand(5, 8))
    hints = symbolic.hinted(inputs)
    assert hints is not None
    assert (5, 8) in [h.shape for h in hints if isinstance(h, symbolic.Given)]
    assert {h for h in hints if not isinstance(h, symbolic.Given)} == {5, 8}
    small = symbolic.with_sizes(gm, hints)
    x = torch.rand(5, 8)
    torch.testing.assert_close(small(*arguments(gm, inputs, x))[0], attend(x)[0])


def test_forward_and_backward():
    layer = nn.Linear(4, 3)
    graphs = captured(lambda x: layer(x).relu(), torch.rand(6, 4, requires_grad=True))
    assert len(graphs) == 2
    for gm, inputs in graphs:
        assert symbolic.depends_on_sizes(gm)
        assert not symbols_in(symbolic.with_sizes(gm, symbolic.hinted(inputs)))


def test_autocast_and_random_numbers_are_left_alone():
    gm, inputs = captured_one(lambda x: F.dropout(x @ x.t(), 0.5), torch.rand(5, 8))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        small = symbolic.with_sizes(gm, symbolic.hinted(inputs))
    assert torch.equal(torch.get_rng_state(), before)
    values = torch.utils._pytree.tree_leaves([n.meta.get("val") for n in small.graph.nodes])
    found = {v.dtype for v in values if isinstance(v, torch.Tensor)}
    assert torch.float32 in found
    assert torch.bfloat16 not in found


def test_constants_of_the_graph_are_taken_along():
    table = torch.rand(8)
    gm, inputs = captured_one(lambda x: x + table * torch.tensor([2.0]), torch.rand(5, 8))
    args = arguments(gm, inputs, *(torch.rand(7, 8) if len(i.shape) == 2 else table for i in inputs
                                   if isinstance(i, torch.Tensor)))  # fmt: skip
    torch.testing.assert_close(symbolic.with_sizes(gm, args)(*args), gm(*args))


@pytest.mark.parametrize(
    ("fn", "args", "dynamic"),
    [
        (lambda x: x + 1, (torch.rand(3),), False),
        (lambda x: x.nonzero() * 2, (torch.rand(3) > 0.5,), True),
        (lambda x, n: x * n, (torch.rand(3), 7), None),
    ],
    ids=["no symbols", "sizes that depend on values", "a number that is no size"],
)
def test_what_sizes_do_not_say(fn, args, dynamic):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        graphs = captured(fn, *args, dynamic=dynamic)
        if dynamic is None:  # the number becomes a symbol when it is another
            graphs = []
            backend = aot_autograd(fw_compiler=lambda gm, inputs: graphs.append(gm) or gm)
            compiled = torch.compile(fn, backend=backend)
            for n in (7, 8):
                compiled(args[0], n)
            graphs = [(gm, None) for gm in graphs[-1:]]
    assert graphs
    assert not any(symbolic.depends_on_sizes(gm) for gm, _ in graphs)


class Builds:
    """Builds nothing: notes for what it was asked, and has eager run the graph for those sizes."""

    def __init__(self, gm):
        self.gm, self.names = gm, []

    def __call__(self, args, text):
        self.names.append(text)
        gm = symbolic.with_sizes(self.gm, args)

        def call(args):
            values = list(args)
            args.clear()
            return gm(*values)

        return call

    def general(self):
        self.names.append("all")

        def call(args):
            values = list(args)
            args.clear()
            return self.gm(*values)

        return call


def sized(fn, example, *, limit=32):
    """A call, a function that calls it, what it built, and the graph's inputs."""
    gm, inputs = captured_one(fn, example)
    builds, other = Builds(gm), Builds(gm)
    call = sized_call.SizedCall(gm, builds, other.general, limit=limit, name="graph")

    def run(x):
        args = arguments(gm, inputs, x)
        out = call(args)
        assert args == []
        torch.testing.assert_close(out[0], attend(x)[0])

    builds.other = other
    return call, run, builds, inputs


def test_every_size_is_built_once():
    _, run, builds, _ = sized(attend, torch.rand(5, 8))
    for n in (3, 7, 3, 5, 7, 3):
        run(torch.rand(n, 8))
    assert builds.names == ["3,8", "7,8", "5,8"]
    assert builds.other.names == []


def test_the_sizes_of_the_capture_are_prepared_with_another_build():
    call, run, builds, inputs = sized(attend, torch.rand(5, 8))
    first = Builds(builds.gm)
    call.prepare(symbolic.hinted(inputs), first)
    for n in (5, 3):
        run(torch.rand(n, 8))
    assert (first.names, builds.names) == (["5,8"], ["3,8"])


def test_after_the_first_few_a_size_is_built_when_it_comes_again(monkeypatch):
    monkeypatch.setattr(sized_call, "AT_ONCE", 2)
    _, run, builds, _ = sized(attend, torch.rand(5, 8))
    for n in (3, 5, 7, 9, 7, 7, 3):
        run(torch.rand(n, 8))
    assert builds.names == ["3,8", "5,8", "7,8"]
    assert builds.other.names == ["all"]


def test_what_grows_by_one_is_built_when_it_comes_again():
    """A cache that takes one token more at every call."""
    call, run, builds, inputs = sized(attend, torch.rand(5, 8))
    call.prepare(symbolic.hinted(inputs), builds)
    for n in (6, 7, 8, 9, 20, 7):
        run(torch.rand(n, 8))
    assert builds.names == ["5,8", "20,8", "7,8"]
    assert builds.other.names == ["all"]


def test_sizes_beyond_the_limit_run_in_the_general_graph(caplog):
    _, run, builds, _ = sized(attend, torch.rand(5, 8), limit=2)
    with caplog.at_level(logging.WARNING, "torch_pruner"):
        for n in (3, 7, 9, 10, 3):
            run(torch.rand(n, 8))
        assert not any("max_sizes" in r.message for r in caplog.records)
        for _ in range(2):
            run(torch.rand(9, 8))
    assert builds.names == ["3,8", "7,8"]
    assert builds.other.names == ["all"]
    assert sum("max_sizes" in r.message for r in caplog.records) == 1


def test_what_is_noted_is_bounded(monkeypatch):
    monkeypatch.setattr(sized_call, "AT_ONCE", 1)
    monkeypatch.setattr(sized_call, "MOST_NOTED", 3)
    call, run, builds, _ = sized(attend, torch.rand(5, 8))
    for n in (3, 5, 7, 9, 11, 5):  # 5 is forgotten when it comes again
        run(torch.rand(n, 8))
    assert builds.names == ["3,8"]
    assert len(call._times) == 3


def test_threads_that_meet_at_a_new_size_build_it_once():
    _, run, builds, _ = sized(attend, torch.rand(5, 8))
    x, right = torch.rand(6, 8), []

    def work():
        run(x)
        right.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(right) == 8
    assert builds.names == ["6,8"]


def test_a_failing_build_is_tried_again():
    gm, inputs = captured_one(attend, torch.rand(5, 8))
    builds, failures = Builds(gm), [RuntimeError("out of luck")]

    def build(args, text):
        if failures:
            raise failures.pop()
        return builds(args, text)

    call = sized_call.SizedCall(gm, build, builds.general, limit=4, name="graph")
    x = torch.rand(4, 8)
    with pytest.raises(RuntimeError, match="out of luck"):
        call(arguments(gm, inputs, x))
    torch.testing.assert_close(call(arguments(gm, inputs, x))[0], attend(x)[0])


def test_a_size_that_does_not_fit_is_no_error_of_torchs_log(caplog):
    gm, inputs = captured_one(lambda x: x + torch.arange(16)[: x.shape[0]], torch.ones(9))
    symbols = symbolic.symbols_of(gm, symbolic.hinted(inputs))
    larger = symbolic.with_symbols(gm, symbolic.hinted(inputs), dict.fromkeys(symbols, 33))
    with pytest.raises(RuntimeError, match="33"):
        symbolic.with_sizes(gm, larger)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
