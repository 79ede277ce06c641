"""Updates of an input that may write into it, and those whose old value or alias is needed."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from torch_pruner.dynamo.capture.aot_metadata import mutated_inputs
from torch_pruner.dynamo.lower.inplace import IN_PLACE, updates_in_place
from torch_pruner.dynamo.lower.program import describe, eager_step

aten = torch.ops.aten


def found(fn) -> int:
    """How many updates of ``fn(cache, position, value)`` may write into the cache."""
    counts = []

    def look(gm, _example):
        counts.append(len(updates_in_place(gm, mutated_inputs())))

        def call(args):
            values = list(args)
            args.clear()
            return gm(*values)

        call._boxed_call = True
        return call

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=look, bw_compiler=look)
    cache, position, value = torch.zeros(2, 8, 4), torch.tensor([3]), torch.ones(2, 1, 4)
    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=False)(cache, position, value)
    return counts[0]


def copied(cache, position, value):
    cache.index_copy_(1, position, value)
    return (cache * 2).sum()


def assigned(cache, position, value):
    cache[:, position] = value
    return cache.sum()


def twice_removed(cache, position, value):
    cache.index_copy_(1, position, value)
    return cache.reshape(2, 2, 16).transpose(1, 2) @ torch.ones(2, 2, 4)


def slice_assigned(cache, position, value):
    cache[:, 2:3] = value
    return cache.sum() + position


def place_assigned(cache, position, value):
    cache[:, 5] = value[:, 0]
    return cache.sum() + position


@pytest.mark.parametrize("fn", [copied, assigned, twice_removed, slice_assigned, place_assigned])
def test_an_update_that_nobody_looks_behind_writes_in_place(fn):
    assert found(fn) == 1


def old_value(cache, position, value):
    before = cache + 1
    cache.index_copy_(1, position, value)
    return before.sum() + cache.sum()


def second_update(cache, position, value):
    cache.index_copy_(1, position, value)
    cache.index_copy_(1, position + 1, value * 2)
    return cache.sum()


def adds(cache, position, value):
    cache.index_put_((torch.tensor([0, 1]), position), value[:, 0], accumulate=True)
    return cache.sum()


def slice_added(cache, position, value):
    cache[:, 2:3] += value
    return cache.sum() + position


def result_leaves(cache, position, value):
    new = cache.index_copy(1, position, value)
    cache.copy_(new)
    return new


def view_leaves(cache, position, value):
    new = cache.index_copy(1, position, value)
    cache.copy_(new)
    return new[0]


def reads_itself(cache, position, value):
    cache.index_copy_(1, position, value + cache[:, :1])
    return cache.sum()


def no_input(cache, position, value):
    return (cache + 1).index_copy_(1, position, value)


@pytest.mark.parametrize(
    "fn",
    [
        old_value,
        second_update,
        adds,
        slice_added,
        result_leaves,
        view_leaves,
        reads_itself,
        no_input,
    ],
)
def test_other_updates_do_not(fn):
    assert found(fn) == 0


def test_an_eager_step_writes_into_its_operand():
    graph = torch.fx.Graph()
    reads = [graph.placeholder(n) for n in ("cache", "position", "value")]
    op = next(iter(IN_PLACE))
    node = graph.call_function(op, (reads[0], 0, reads[1], reads[2]))
    cache = torch.zeros(4, 2)
    value = cache, torch.tensor([1]), torch.ones(1, 2)
    (copy,) = eager_step([node], reads, [node])(*value)
    assert copy is not cache
    assert not cache.any()
    (same,) = eager_step([node], reads, [node], {node})(*value)
    assert same is cache
    assert torch.equal(cache, copy)


def test_what_is_kept_for_a_backward_is_said_to_lie_as_it_does_where_copies_are_left_out():
    """Whoever captured the graph asks it, and not the copy of it that is divided."""

    def forward(x, weight, seen):
        y = aten.convolution(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return aten.copy(seen, y.mean(0)), aten.relu(y)

    x, weight, seen = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), torch.zeros(4, 6, 6)
    gm = make_fx(forward, tracing_mode="fake")(x, weight, seen)
    program = describe(gm, static=frozenset(), mutated=(2,), loose=frozenset({1}))
    kept = gm.graph.output_node().args[0][1].meta["val"]
    assert kept.is_contiguous(memory_format=torch.channels_last)
    (region,) = program.regions
    assert any(spec.strides == kept.stride() for spec in region.outputs)
