"""Where the outputs of a region come from: kernels, inputs, what is prepared, other outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import torch_pruner as tp
from torch_pruner.config import Config
from torch_pruner.devices import device_for
from torch_pruner.dynamo.lower.program import RegionStep
from torch_pruner.dynamo.lower.tensors import spec_of
from torch_pruner.dynamo.run.build import built_region, region_calls
from torch_pruner.graph.ir import GraphBuilder

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.tvm

CPU = torch.device("cpu")
SHAPE = (6, 10)

# From a varying input x and a parameter w, both float32, to a node; and the same by torch.
SOURCES: dict[str, tuple[Callable[..., int], Callable[..., torch.Tensor]]] = {
    "input": (lambda b, x, w: x, lambda x, w: x.clone()),
    "parameter": (lambda b, x, w: w, lambda x, w: w.clone()),
    "input permuted": (lambda b, x, w: b.permute(x, (1, 0)), lambda x, w: x.t()),
    "input reshaped": (lambda b, x, w: b.reshape(x, (60,)), lambda x, w: x.reshape(60)),
    "parameter permuted": (lambda b, x, w: b.permute(w, (1, 0)), lambda x, w: w.t()),
    "parameter reshaped": (lambda b, x, w: b.reshape(w, (4, 15)), lambda x, w: w.reshape(4, 15)),
    "prepared": (lambda b, x, w: b.pointwise("exp", w), lambda x, w: w.exp()),
    "prepared permuted": (
        lambda b, x, w: b.permute(b.pointwise("exp", w), (1, 0)),
        lambda x, w: w.exp().t(),
    ),
    "prepared reshaped": (
        lambda b, x, w: b.reshape(b.pointwise("exp", w), (4, 15)),
        lambda x, w: w.exp().reshape(4, 15),
    ),
    "computed": (lambda b, x, w: b.pointwise("neg", x), lambda x, w: -x),
    "computed permuted": (
        lambda b, x, w: b.permute(b.pointwise("neg", x), (1, 0)),
        lambda x, w: -x.t(),
    ),
    "of both": (
        lambda b, x, w: b.pointwise("mul", x, b.pointwise("exp", w)),
        lambda x, w: x * w.exp(),
    ),
    "constant": (
        lambda b, x, w: b.broadcast(b.const(2.5, "float32"), SHAPE),
        lambda x, w: torch.full(SHAPE, 2.5),
    ),
    "neutral": (
        lambda b, x, w: b.pointwise("mul", x, b.const(1.0, "float32")),
        lambda x, w: x.clone(),
    ),
}


def region(names: list[str], x: torch.Tensor, w: torch.Tensor, orders: dict[int, tuple[int, ...]]):
    """A region whose outputs are ``names``; those in ``orders`` lie in another order."""
    b = GraphBuilder()
    ends = b.input(0, x.shape, "float32"), b.input(1, w.shape, "float32", static=True)
    graph = b.finish([SOURCES[name][0](b, *ends) for name in names])
    expected = [SOURCES[name][1](x, w).contiguous() for name in names]
    for k, order in orders.items():
        inverse = [order.index(d) for d in range(len(order))]
        expected[k] = expected[k].permute(order).contiguous().permute(inverse)
    return RegionStep(graph, (spec_of(x), spec_of(w)), tuple(map(spec_of, expected))), expected


def run(backend, step: RegionStep, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    config = Config.from_options(None, backend.options())
    device = device_for(CPU, config)
    built = built_region(step, device.compiler(config), device, "ends")
    call, _ = region_calls(built, step, device)
    call([x, w])  # a second call finds the table filled
    return list(call([x, w]))


def same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)
    assert len({t.data_ptr() for t in mine}) == len(mine)  # each is a tensor of its own


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_kind_of_source(backend, name, transposed) -> None:
    """A prepared value as an output was looked up among the inputs (``IndexError``)."""
    x, w = torch.randn(SHAPE), torch.randn(SHAPE)
    if transposed:
        x, w = (t.t().contiguous().t() for t in (x, w))
    step, expected = region([name], x, w, {})
    same(run(backend, step, x, w), expected)


@pytest.mark.parametrize("name", ["input", "parameter", "prepared", "computed", "constant"])
def test_one_value_as_several_outputs_of_different_orders(backend, name) -> None:
    """The order of the last output was taken for the first one's, and for the input's."""
    x, w = torch.randn(SHAPE), torch.randn(SHAPE)
    step, expected = region([name, name, "of both", name], x, w, {3: (1, 0)})
    same(run(backend, step, x, w), expected)


def test_all_at_once(backend) -> None:
    x, w = torch.randn(SHAPE), torch.randn(12, 10)[::2]
    step, expected = region(list(SOURCES), x, w, {0: (1, 0)})
    same(run(backend, step, x, w), expected)


class Quantised(torch.nn.Module):
    """Weights of int8 on both sides of an operator that eager runs: what is computed from the
    second is ready before it, and an output of the first region."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        for name, shape in (("up", (32, 16)), ("down", (8, 32))):
            weight = torch.randint(-127, 128, shape, dtype=torch.int8, generator=random)
            self.register_buffer(name, weight)
            self.register_buffer(f"{name}_scale", torch.rand(shape[0], generator=random) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.up.t().to(x.dtype) * self.up_scale
        y = torch.sort(y)[0]
        return y @ self.down.t().to(x.dtype) * self.down_scale


@pytest.mark.parametrize("check", ["first-call", "off"])
def test_int8_weights_behind_an_operator_of_eager(backend, check) -> None:
    torch._dynamo.reset()
    model, x = Quantised(), torch.randn(4, 16)
    compiled = backend.compile(model, check=check)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-3)
        model.down.neg_()
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-3)
    report = tp.last_report()
    assert report is not None
    assert report.ops_compiled > 0
