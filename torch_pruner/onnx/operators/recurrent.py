"""RNN, GRU and LSTM, one step after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_pruner.onnx.operators.registry import OperatorCall, Result, Tensor, op

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[[Tensor], Tensor]
    CellStep = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

_NODES_PER_STEP = 10
_ACTIVATIONS = {
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "Relu": torch.relu,
    "Softsign": torch.nn.functional.softsign,
    "Softplus": torch.nn.functional.softplus,
}


def _activations(n: OperatorCall, defaults: list[str]) -> list[Callable[[Tensor], Tensor]]:
    names = n.attr("activations") or defaults * (2 if n.attr("direction") == "bidirectional" else 1)
    return [_ACTIVATIONS[name] for name in names]


def _clipped(n: OperatorCall, x: Tensor) -> Tensor:
    limit = n.attr("clip")
    return x if not limit else x.clamp(-limit, limit)


@op("RNN", "GRU", "LSTM")
def _recurrent(
    n: OperatorCall,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    peepholes: Tensor | None = None,
) -> Result:
    layout = n.attr("layout", 0)
    if layout:
        x = x.transpose(0, 1)
        h0, c0 = (None if t is None else t.transpose(0, 1) for t in (h0, c0))
    directions, size = w.shape[0], r.shape[-1]
    defaults = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
    functions = _activations(n, defaults[n.op])
    each = len(functions) // directions
    n.spend(_NODES_PER_STEP * directions * x.shape[0])
    n.afford(x.element_size() * x.shape[0] * x.shape[1] * directions * r.shape[-2])
    outputs, hidden, cells = [], [], []
    for d in range(directions):
        backwards = n.attr("direction") == "reverse" or d == 1
        zero = torch.zeros(x.shape[1], size, dtype=x.dtype)
        step = _STEPS[n.op](
            n, functions[d * each : (d + 1) * each], w[d], r[d],
            None if b is None else b[d], None if peepholes is None else peepholes[d],
        )  # fmt: skip
        made, h, c = _unrolled(
            x, step, zero if h0 is None else h0[d], zero if c0 is None else c0[d],
            lengths, backwards=backwards,
        )  # fmt: skip
        outputs.append(made)
        hidden.append(h)
        cells.append(c)
    y, last, cell = torch.stack(outputs, dim=1), torch.stack(hidden), torch.stack(cells)
    if layout:
        y, last, cell = y.permute(2, 0, 1, 3), last.transpose(0, 1), cell.transpose(0, 1)
    return (y, last, cell) if n.op == "LSTM" else (y, last)


def _unrolled(
    x: Tensor,
    step: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    h: Tensor,
    c: Tensor,
    lengths: Tensor | None,
    *,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """All hidden states (time, batch, size), and the last ones. Beyond its length a row waits."""
    times = range(x.shape[0])
    made: list[Tensor] = [h] * len(times)
    for t in reversed(times) if backwards else times:
        new_h, new_c = step(x[t], h, c)
        if lengths is not None:
            running = (lengths.to(torch.int64) > t)[:, None]
            made[t] = torch.where(running, new_h, torch.zeros_like(new_h))
            h, c = torch.where(running, new_h, h), torch.where(running, new_c, c)
        else:
            made[t], h, c = new_h, new_h, new_c
    return torch.stack(made), h, c


def _rnn(
    n: OperatorCall,
    functions: list[Function],
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    _: Tensor | None,
) -> CellStep:
    size = r.shape[-1]
    bias = 0 if b is None else b[:size] + b[size:]

    def step(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return functions[0](_clipped(n, x @ w.T + h @ r.T + bias)), c

    return step


def _gru(
    n: OperatorCall,
    functions: list[Function],
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    _: Tensor | None,
) -> CellStep:
    size = r.shape[-1]
    zero = torch.zeros(6 * size, dtype=w.dtype)
    bias = (zero if b is None else b).split(size)
    wz, wr, wh = w.split(size)
    rz, rr, rh = r.split(size)
    first, second = functions

    def step(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        z = first(_clipped(n, x @ wz.T + h @ rz.T + bias[0] + bias[3]))
        reset = first(_clipped(n, x @ wr.T + h @ rr.T + bias[1] + bias[4]))
        if n.attr("linear_before_reset", 0):
            new = x @ wh.T + reset * (h @ rh.T + bias[5]) + bias[2]
        else:
            new = x @ wh.T + (reset * h) @ rh.T + bias[5] + bias[2]
        return (1 - z) * second(_clipped(n, new)) + z * h, c

    return step


def _lstm(
    n: OperatorCall,
    functions: list[Function],
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    peepholes: Tensor | None,
) -> CellStep:
    size = r.shape[-1]
    bias = 0 if b is None else b[: 4 * size] + b[4 * size :]
    pi, po, pf = (0, 0, 0) if peepholes is None else peepholes.split(size)
    gate, cell, hide = functions

    def step(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, o, f, g = (x @ w.T + h @ r.T + bias).split(size, dim=-1)
        i = gate(_clipped(n, i + pi * c))
        f = 1 - i if n.attr("input_forget", 0) else gate(_clipped(n, f + pf * c))
        c = f * c + i * cell(_clipped(n, g))
        return gate(_clipped(n, o + po * c)) * hide(c), c

    return step


_STEPS = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}
