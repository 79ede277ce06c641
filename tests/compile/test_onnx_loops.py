"""ONNX models with loops: bodies are compiled once, and whatever shapes do is right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import helper

from tests.unit.onnx.hostile import info, loop, model, number
from torch_pruner.onnx.function import OnnxFunction
from torch_pruner.onnx.load import load

pytestmark = [pytest.mark.tvm, pytest.mark.filterwarnings("ignore")]
X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture
def modules(monkeypatch) -> list[torch.nn.Module]:
    """Modules that were compiled, in order."""
    seen = []
    compiled = OnnxFunction._compile

    def _compile(self, module):
        seen.append(module)
        return compiled(self, module)

    monkeypatch.setattr(OnnxFunction, "_compile", _compile)
    torch._dynamo.reset()
    return seen


@pytest.fixture
def made(shared_cache):
    options = {"effort": "none", "cache_dir": str(shared_cache), "strict": True}
    return lambda proto: OnnxFunction(load(proto), None, options)


def agree(function: OnnxFunction, *inputs: torch.Tensor) -> None:
    got, expected = function(*inputs), function.eager(list(inputs))
    torch.testing.assert_close(got, tuple(expected) if len(expected) > 1 else expected[0])


def test_a_loop_of_2000_steps_is_compiled_once(made, modules) -> None:
    """It was unrolled into one graph, which took hours to compile."""
    function = made(loop(2000))
    agree(function, X)
    agree(function, X + 1)
    assert len(modules) == 3  # before it, its body, behind it
    assert sum(str(n.target) == "aten.mm.default" for n in modules[1].graph.nodes) == 1


def test_a_short_loop_is_part_of_one_graph(made, modules) -> None:
    agree(made(loop(3)), X)
    assert len(modules) == 1


def test_a_loop_whose_shapes_change_runs_operator_by_operator(made, modules) -> None:
    nodes = [
        helper.make_node("Concat", ["s", "r"], ["s2"], axis=0),
        helper.make_node("ReduceMean", ["s2"], ["row"], keepdims=0),
    ]
    function = made(loop(2000, nodes))
    agree(function, X[:1])
    assert len(modules) == 2  # before and behind it


def test_a_loop_that_cuts_by_its_counter(made) -> None:
    nodes = [
        helper.make_node("Mod", ["i", "four"], ["at"]),
        helper.make_node("Add", ["at", "one"], ["end"]),
        helper.make_node("Reshape", ["at", "ones"], ["from"]),
        helper.make_node("Reshape", ["end", "ones"], ["to"]),
        helper.make_node("Slice", ["r", "from", "to"], ["part"]),
        helper.make_node("Add", ["s", "part"], ["s2"]),
        helper.make_node("ReduceSum", ["part"], ["row"], keepdims=0),
    ]
    proto = loop(1500, nodes)
    proto.graph.initializer.extend([number("four", 4), number("one", 1), number("ones", [1])])
    agree(made(proto), X)


def test_a_long_recurrence_between_compiled_pieces(made, modules) -> None:
    rng = np.random.default_rng(0)
    initial = [number(n, rng.standard_normal((1, 16, 4)) / 4, np.float32) for n in "wr"]
    nodes = [
        helper.make_node("Tanh", ["x"], ["h"]),
        helper.make_node("LSTM", ["h", "w", "r"], ["s"], hidden_size=4),
        helper.make_node("Sigmoid", ["s"], ["y"]),
    ]
    function = made(model(nodes, initial, [info("x", "n", 1, 4)]))
    agree(function, torch.randn(700, 1, 4))
    assert len(modules) == 2
