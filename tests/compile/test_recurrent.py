"""Recurrent modules end to end: compiled without gradients, eager's with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import torch_pruner
from tests.compile.agreement import assert_equal, check
from tests.compile.functions import randn

pytestmark = pytest.mark.tvm


class Tagger(nn.Module):
    """A recurrent layer between others."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.recurrent = nn.LSTM(6, 9, batch_first=True, bidirectional=True)
        self.leave = nn.Linear(18, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.recurrent(self.enter(x).relu())[0])


def given(module: nn.RNNBase, *states: int) -> tuple[Any, ...]:
    x = randn(3, 4, 5) if module.batch_first else randn(4, 3, 5)
    if not states:
        return (x,)
    h = randn(*states)
    return (x, (h, randn(*states)) if isinstance(module, nn.LSTM) else h)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "options", "states"),
    [
        (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}, ()),
        (nn.LSTM, {"bias": False}, (1, 3, 9)),
        (nn.GRU, {"num_layers": 2, "dropout": 0.5}, (2, 3, 9)),
        (nn.GRU, {"bidirectional": True, "batch_first": True}, ()),
        (nn.RNN, {"nonlinearity": "relu"}, ()),
        (nn.RNN, {"num_layers": 2, "bidirectional": True}, (4, 3, 9)),
    ],
)
def test_modules(backend, kind, options, states) -> None:
    module = kind(5, 9, **options).eval()
    with torch.no_grad():
        backend.check_module(module, lambda: given(module, *states))
    (graph,) = torch_pruner.last_report().graphs
    assert graph.ops_compiled == graph.ops_total


def test_sequences_without_a_batch_and_weights_that_change(backend) -> None:
    module = nn.LSTM(5, 9).eval()
    compiled = backend.compile(module)
    with torch.no_grad():
        check(compiled, module, lambda: (randn(4, 5),), calls=1)
        module.load_state_dict({k: randn(*v.shape) for k, v in module.state_dict().items()})
        check(compiled, module, lambda: (randn(4, 5),), calls=2)
        module.weight_hh_l0 = nn.Parameter(randn(36, 9))
        check(compiled, module, lambda: (randn(4, 5),), calls=1)


def test_gradients_are_recorded_as_in_eager(backend) -> None:
    """Before and after calls without gradients, which are one graph."""
    module = Tagger()
    compiled = backend.compile(module)
    x = randn(3, 4, 5)
    for _ in range(2):
        for fn in (compiled, module):
            module.zero_grad()
            fn(x).sum().backward()
            if fn is compiled:
                found = [p.grad.clone() for p in module.parameters()]
        for got, parameter in zip(found, module.parameters(), strict=True):
            assert_equal(got, parameter.grad)
        counters.clear()
        with torch.no_grad():
            assert_equal(compiled(x), module(x))
        assert not counters["graph_break"]


def test_packed_sequences_and_other_backends_are_eagers(backend) -> None:
    module = nn.GRU(5, 9).eval()
    packed = nn.utils.rnn.pack_padded_sequence(randn(4, 3, 5), torch.tensor([4, 2, 1]))
    graphs = []

    def other(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        assert_equal(backend.compile(module)(packed)[0].data, module(packed)[0].data)
        torch._dynamo.reset()
        torch.compile(lambda x: module(x)[0], backend=other)(randn(4, 3, 5))
    assert not graphs
    assert not torch._dynamo.config.allow_rnn
