"""Updates of inputs as parts of a program: what writes where, and what is looked at before."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_pruner.dynamo.lower import serialization
from torch_pruner.dynamo.lower.inplace import written_by_eager
from torch_pruner.dynamo.lower.program import RegionStep, describe
from torch_pruner.graph.updates import written_inputs

aten = torch.ops.aten
CPU = torch.device("cpu")


def program(fn, *args, device=CPU):
    """``fn`` replaces its first argument by its first result."""
    gm = make_fx(fn, tracing_mode="fake")(*args)
    return describe(gm, static=frozenset(), mutated=(0,), device=device)


def cache(**kwargs):
    return torch.zeros(2, 8, 4, **kwargs)


def rows(**kwargs):
    return torch.ones(2, 1, 4, **kwargs)


def written(step) -> dict[int, int]:
    assert isinstance(step.does, RegionStep)
    return written_inputs(step.does.graph)


def test_an_update_and_its_readers_are_one_region():
    def fn(c, x, i):
        new = aten.index_copy.default(c, 1, i, x.exp())
        return new, new.sum(-1)

    (step,) = program(fn, cache(), rows(), torch.tensor([3])).steps
    assert written(step) == {0: step.does.inputs.index(step.does.outputs[0])}
    assert [c.range.kind for c in step.does.checks] == ["index_copy"]
    assert not step.does.flags


def test_what_no_input_shows_is_tested_before_anything_is_written():
    def fn(c, x, i, table):
        picked = aten.embedding.default(table, i * 3)
        new = aten.index_copy.default(c, 1, i, x)
        return new, picked

    found = program(fn, cache(), rows(), torch.tensor([3]), torch.rand(20, 4))
    test, step = found.steps
    assert [flag.kind for flag in test.does.flags] == ["embedding"]
    assert (test.writes, test.dead) == ((), ())
    assert test.reads == (2,)
    assert written(step)
    assert step.does.flags == ()
    again = serialization.loads(serialization.dumps(found, ""))
    assert [written(s) for s in again.steps] == [{}, written(step)]


def test_nothing_is_written_that_a_later_step_may_refuse():
    """Eager sorts between the update and what it may raise for."""

    def fn(c, x, i, table):
        picked = aten.embedding.default(table, aten.sort.default(i)[1] + i * 2)
        new = aten.index_copy.default(c, 1, i, x)
        return new, picked

    found = program(fn, cache(), rows(), torch.tensor([3]), torch.rand(20, 4))
    assert [written(s) for s in found.steps if isinstance(s.does, RegionStep)] != []
    for step in found.steps:
        if isinstance(step.does, RegionStep) and written(step):
            rest = found.steps[found.steps.index(step) + 1 :]
            assert not any(s.does.flags for s in rest if isinstance(s.does, RegionStep))


def test_gaps_in_memory_are_eagers():
    def fn(c, x, i):
        return (aten.index_copy.default(c, 1, i, x),)

    found = program(fn, torch.zeros(2, 8, 8)[..., ::2], rows(), torch.tensor([3]))
    (step,) = found.steps
    assert isinstance(step.does, fx.GraphModule) or not written(step)


def test_devices_write_rows_and_leave_sums_to_eager():
    meta = torch.device("meta")
    at = torch.zeros(1, dtype=torch.int64, device=meta)

    def copied(c, x, i):
        return (aten.index_copy.default(c, 1, i, x),)

    def added(c, x, i):
        return (aten.index_add.default(c, 1, i, x),)

    def assigned(c, x):
        return (aten.slice_scatter.default(c, x, 1, 2, 3),)

    (step,) = program(copied, cache(device=meta), rows(device=meta), at, device=meta).steps
    assert written(step) == {0: 0}
    (step,) = program(added, cache(device=meta), rows(device=meta), at, device=meta).steps
    assert isinstance(step.does, fx.GraphModule)
    (step,) = program(assigned, cache(device=meta), rows(device=meta), device=meta).steps
    assert written(step) == {0: 0}


def test_what_a_program_writes_into_is_known():
    def fn(c, x, i):
        new = aten.index_copy.default(c, 1, i, x)
        return (new, new.sum())

    at = torch.tensor([3])
    assert program(fn, cache(), rows(), at).written == {0}
    left = make_fx(lambda c, x: (c.exp() + x,), tracing_mode="fake")(cache(), rows())
    assert describe(left, static=frozenset()).written == set()
    written = make_fx(lambda x, c, i: aten.index_copy_.default(c, 1, i, x), tracing_mode="fake")
    assert written_by_eager(written(rows(), cache(), at)) == {1}


def test_numbers_beside_tensors_are_no_refusals():
    graph = fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    twice = graph.call_function(aten.mul.Tensor, (x, 2))
    more = graph.call_function(operator.add, (n, 1))
    graph.output((twice, more))
    x.meta["val"] = twice.meta["val"] = torch.empty(3, device="meta")
    n.meta["val"] = more.meta["val"] = 4
    gm = fx.GraphModule(torch.nn.Module(), graph)
    found = describe(gm, static=frozenset(), device=torch.device("meta"))
    assert found.refused == ()
    assert (found.ops_total, found.ops_compiled) == (1, 1)
    again = serialization.loads(serialization.dumps(found, ""))
    (eager,) = (s for s in again.steps if isinstance(s.does, fx.GraphModule))
    assert eager.does(4) == (5,)


def test_a_literal_is_no_input():
    def fn(c, x):
        at = torch.tensor([-1])
        new = aten.index_put.default(aten.roll.default(c, [-1], [1]), [None, at], x)
        return (aten.copy.default(c, new),)

    gm = make_fx(fn, tracing_mode="fake")(cache(), rows())
    found = describe(gm, static=frozenset(), mutated=(0,))
    (step,) = found.steps
    assert found.constants == {}
    assert step.does.checks == ()
    assert "update" not in [n.op for n in step.does.graph.nodes]  # a window that moves on


def test_a_copy_of_what_lies_in_the_input_stays_a_copy():
    """Else torch would copy a view of the cache over the cache."""

    def fn(c):
        return (aten.copy.default(c, aten.transpose.int(c, 0, 1)),)

    (step,) = program(fn, torch.zeros(4, 4)).steps
    assert isinstance(step.does, fx.GraphModule)
    assert aten.copy.default in [n.target for n in step.does.graph.nodes]
