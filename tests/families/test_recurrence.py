"""Recurrent layers: emitted steps against the reference, the reference against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.families import kernels as K
from tests.unit.tuner import graphs_by_kind as G
from torch_pruner.families.recurrence.space import RecurrenceSketch
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task
from torch_pruner.tuner.measure.check import random_inputs

pytestmark = pytest.mark.tvm

CASES: list[tuple[str, dict[str, Any]]] = [
    ("lstm", {}),
    ("lstm", {"units": 33, "rows": 3, "directions": 1}),
    ("gru", {"units": 16, "rows": 1}),
    ("gru", {"units": 5, "rows": 6, "static": False}),
    ("rnn_tanh", {"units": 37, "rows": 1, "directions": 1, "steps": 1}),
    ("rnn_relu", {"rows": 5}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("op", "sizes"), CASES)
def test_kernels(op: str, sizes: dict[str, Any]) -> None:
    spec = G.recurrence(op, **sizes)
    sketch = RecurrenceSketch(Task("recurrence", spec, TargetSpec.detect(2), 2))
    for decisions in K.points(sketch, 3):
        outputs, expected, _ = K.run(spec, "recurrence", decisions)
        assert K.error(outputs, expected) < 1e-5, decisions


@pytest.mark.parametrize("op", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_the_reference_is_torch(op: str) -> None:
    units, rows, steps = 6, 2, 4
    spec = G.recurrence(op, units, rows=rows, steps=steps)
    given, weights, state, *other = random_inputs(spec, 0)
    gates = given.shape[3]
    mode = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(op, torch.nn.RNN)
    more = {"nonlinearity": op[4:]} if op.startswith("rnn") else {}
    layer = mode(2 * gates * units, units, bidirectional=True, **more)
    with torch.no_grad():
        for d, end in enumerate(("", "_reverse")):
            picked = torch.zeros(gates * units, 2 * gates * units)  # a direction's share of inputs
            picked[:, d * gates * units :][:, : gates * units] = torch.eye(gates * units)
            getattr(layer, f"weight_ih_l0{end}").copy_(picked)
            getattr(layer, f"weight_hh_l0{end}").copy_(torch.tensor(weights[d].T))
            for name in ("ih", "hh"):
                getattr(layer, f"bias_{name}_l0{end}").zero_()
            if op == "gru":
                getattr(layer, f"bias_hh_l0{end}")[2 * units :] = torch.tensor(other[0][d])
        x, h = torch.tensor(given).reshape(steps, rows, -1), torch.tensor(state)
        out, last = layer(x, (h, torch.tensor(other[0])) if op == "lstm" else h)
    (found,) = evaluate(spec, [given, weights, state, *other])
    states = out.reshape(steps, rows, 2, units)
    np.testing.assert_allclose(found[:steps], states, rtol=1e-5, atol=1e-5)
    if op == "lstm":
        np.testing.assert_allclose(found[steps].swapaxes(0, 1), last[1], rtol=1e-5, atol=1e-5)
