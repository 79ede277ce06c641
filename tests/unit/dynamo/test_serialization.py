"""Programs as bytes: what comes back does the same, and what is no program is refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.unit.dynamo.running import to_numpy
from torch_pruner.dynamo.lower import serialization
from torch_pruner.dynamo.lower.program import Program, RegionStep, describe
from torch_pruner.graph.reference import evaluate

aten = torch.ops.aten


def traced(fn, *args) -> fx.GraphModule:
    return make_fx(lambda *a: list(fn(*a)), tracing_mode="fake")(*args)


def program(fn, *args) -> Program:
    return describe(traced(fn, *args), static=frozenset())


def mixed(x, table, index):
    """Regions around operators that eager runs, a checked index, all kinds of arguments."""
    row = aten.embedding.default(table, index)
    order = (x * 2 + row).cumprod(1)
    values, where = aten.sort.stable(order, stable=True, dim=1, descending=True)
    like = aten.full_like.default(values, float("inf"), dtype=torch.float64, pin_memory=False)
    return (values + 1).exp(), where, like.cumsum(0), None, 3


@pytest.fixture
def example():
    return program(mixed, torch.rand(3, 4), torch.rand(7, 4), torch.tensor([1, 6, 0]))


def test_bytes_give_the_same_program(example) -> None:
    data = serialization.dumps(example, "source")
    again = serialization.loads(data)
    assert serialization.dumps(again, "source") == data
    kinds = [[isinstance(s.does, RegionStep) for s in p.steps] for p in (again, example)]
    assert kinds[0] == kinds[1]
    for mine, theirs in zip(again.regions, example.regions, strict=True):
        assert mine.graph.digest() == theirs.graph.digest()
        assert mine.inputs == theirs.inputs
        assert mine.outputs == theirs.outputs
        assert mine.checks == theirs.checks
    assert again.outputs == example.outputs
    assert again.refused == example.refused
    assert any(r.checks for r in again.regions)


def interpreted(of: Program, *values: torch.Tensor) -> list:
    """The outputs, regions by the reference interpreter."""
    env: list = [*values, *(None,) * (of.n_values - len(values))]
    for step in of.steps:
        given = [env[k] for k in step.reads]
        if isinstance(step.does, RegionStep):
            results = evaluate(step.does.graph, [to_numpy(v) for v in given])
            made = [torch.from_numpy(r.copy()) for r in results]
        else:
            made = step.does(*given)
        for k, value in zip(step.writes, made, strict=True):
            env[k] = value
    return [env[k] if k >= 0 else constant for k, constant in of.outputs]


def test_what_comes_back_computes_the_same(example) -> None:
    values = torch.rand(3, 4), torch.rand(7, 4), torch.tensor([1, 6, 0])
    again = serialization.loads(serialization.dumps(example, ""))
    mine, theirs, eager = (
        interpreted(again, *values), interpreted(example, *values), mixed(*values)
    )  # fmt: skip
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert mine[3:] == [None, 3]
    torch.testing.assert_close(mine[:3], list(eager[:3]), equal_nan=True)


def test_another_source_gives_other_bytes(example) -> None:
    assert serialization.dumps(example, "a") != serialization.dumps(example, "b")


def test_a_constant_tensor_is_not_saved() -> None:
    constant = torch.rand(3)
    gm = make_fx(lambda x: [x + constant])(torch.rand(3))
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = constant
    with pytest.raises(serialization.UnsavableError, match="constant"):
        serialization.dumps(describe(gm, static=frozenset()), "")


@pytest.mark.parametrize("value", [torch.tensor(1.0), object(), 1j, torch.Generator()])
def test_arguments_without_a_text_are_not_saved(value) -> None:
    with pytest.raises(serialization.UnsavableError):
        serialization._encoded([value], {})


def test_every_truncation_is_a_value_error(example) -> None:
    data = serialization.dumps(example, "")
    for end in range(0, len(data), 7):
        with pytest.raises(ValueError):  # noqa: PT011  json's or ours
            serialization.loads(data[:end])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), serialization.FORMAT + 1),
        (("steps",), None),
        (("steps", 0, 0), {}),
        (("steps", 0, 0, "inputs", 0, 2), "nn"),
        (("steps", 0, 0, "checks"), [[0, None, [0, 0], 0, 1, "eval", 0, 1]]),
        (("steps", 0, 0, "checks"), [[0, None, 0, 0, 1, "gather", 0, 1]]),
        (("counts",), [1]),
        (("outputs",), [[0, {"layout": "float32"}]]),
        (("outputs",), [[0, {"node": 5}]]),
    ],
)
def test_what_is_no_program_is_a_value_error(example, path, value) -> None:
    data = json.loads(serialization.dumps(example, ""))
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ValueError):  # noqa: PT011  whoever finds it first
        serialization.loads(json.dumps(data).encode())


@pytest.mark.parametrize(
    "name", ["os.system", "aten.add", "aten.add.nothing", "builtins.eval.x", "aten.__class__.x"]
)
def test_only_operators_of_torch_are_called(name: str) -> None:
    given = {"eager": ["x", [name, [{"node": 0}], {"dict": {}}]], "results": [{"node": 1}]}
    with pytest.raises((ValueError, AttributeError)):
        serialization._read_step(given)


def test_the_version_is_the_same_each_time_and_short() -> None:
    assert serialization.version() == serialization.version()
    assert len(serialization.version()) == 16
