"""What a graph writes into its inputs: as results of the graph, and back where it belongs."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from torch_pruner.dynamo.lower.inplace import writes_as_results
from torch_pruner.dynamo.run.graphs import boxed
from torch_pruner.dynamo.run.written_back import written_back


def through(fn):
    """``fn`` as AOTAutograd captures it, run by eager between both; and what was moved."""
    moved = []

    def lower(gm, _example):
        functional, written = writes_as_results(gm)
        moved.append((functional, written))
        return written_back(boxed(functional), written)

    backend = aot_autograd(fw_compiler=lower, keep_inference_input_mutations=True)
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, dynamic=False), moved


def counts(x, y):
    x.add_(1)
    y.mul_(2)
    return x * y


def swaps(x, y):
    held = x.clone()
    x.copy_(y)
    y.copy_(held)
    return x - y


def returns_what_it_wrote(x, y):
    x.add_(y)
    return x, x.view(-1)[:2], y + 1


def writes_a_view(x, y):
    x[1:].copy_(y[1:] * 3)
    return y.sum()


def only_writes(x, y):
    x.sub_(y)


@pytest.mark.parametrize("fn", [counts, swaps, returns_what_it_wrote, writes_a_view, only_writes])
def test_inputs_and_results_are_eagers(fn):
    call, moved = through(fn)
    mine, theirs = ([torch.arange(6.0) + k, torch.ones(6) * 5] for k in (0, 0))
    with torch.no_grad():
        for _ in range(3):
            got, expected = call(*mine), fn(*theirs)
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    functional, written = moved[0]
    assert written
    assert torch.ops.aten.copy_.default not in {n.target for n in functional.graph.nodes}


def test_a_graph_without_writes_is_left_alone():
    call, moved = through(lambda x, y: x + y)
    with torch.no_grad():
        call(torch.ones(3), torch.ones(3))
    assert moved[0][1] == ()


def test_what_lies_there_already_is_not_copied():
    given = [torch.zeros(2), torch.zeros(2), torch.ones(2)]
    versions = [t._version for t in given]

    def run(args):
        a, b, c = args
        args.clear()
        return [c, a, b + c]  # new values of the last and of the first

    results = written_back(run, (2, 0))(list(given))
    assert [t._version for t in given] == versions
    torch.testing.assert_close(results, [torch.ones(2)])


def test_numbers_are_copied_whatever_they_are_and_lie_in():
    def run(args):
        a, b, c, d = args
        args.clear()
        return [a + 1, b * 2, c + 1, d.clone() + 1]

    call = written_back(run, (0, 1, 2, 3))
    for count in (1, 3, 1):
        given = [torch.tensor(3), torch.full((1, 1), 1.5), torch.zeros(5)[::2][:count]]
        given.append(torch.tensor([True]).expand(2)[:1].int())
        expected = [t.clone() for t in given]
        assert call(list(given)) == []
        torch.testing.assert_close(given, run(expected))


def test_a_parameter_is_written_whatever_autograd_thinks_of_it():
    weight = torch.nn.Parameter(torch.zeros(2))
    call = written_back(lambda args: [args[0].detach() + 1], (0,))
    assert call([weight]) == []
    assert weight.tolist() == [1, 1]
    assert weight.grad_fn is None
