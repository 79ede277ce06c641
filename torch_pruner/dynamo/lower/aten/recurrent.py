"""Rules of recurrent layers: one product for the inputs of all steps, and a recurrence."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch_pruner.dynamo.lower import recurrent_ops
from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments
from torch_pruner.dynamo.lower.aten.value import Value, concatenate

if TYPE_CHECKING:
    from collections.abc import Sequence

_LSTM_RESULTS = 3


class _Direction(NamedTuple):
    """Weights of one direction of a layer, as torch has them: (gates H, inputs), (gates H, H)."""

    inputs: Value
    states: Value
    input_bias: Value | None = None
    state_bias: Value | None = None


class _Stack(NamedTuple):
    """What all layers of one call have in common."""

    call: OpCall
    op: str
    directions: int
    batch_first: bool


def _rule_of(op: str) -> None:
    @rule(recurrent_ops.overload(op))
    def layers(
        call: OpCall,
        x: Value,
        hx: Value | Sequence[Value],
        params: Sequence[Value],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Value | None, ...]:
        del dropout, train
        stack = _Stack(call, op, 2 if bidirectional else 1, batch_first)
        states = [hx] if isinstance(hx, Value) else hx
        return _layers(stack, x, states, params, num_layers, has_biases=has_biases)


for _op in recurrent_ops.NAMES:
    _rule_of(_op)


def _layers(
    stack: _Stack,
    x: Value,
    hx: Sequence[Value],
    params: Sequence[Value],
    layers: int,
    *,
    has_biases: bool,
) -> tuple[Value | None, ...]:
    """The last layer's states, and those of all layers after the last step."""
    each = 4 if has_biases else 2
    if len(params) != each * layers * stack.directions:
        raise arguments("states that are projected")
    if any(v.dtype != "float32" for v in (x, *hx, *params)):
        raise arguments("recurrent layers of other numbers than float32")
    if any(s.shape[2] != params[1].shape[1] or s.shape[1] != x.shape[not stack.batch_first]
           for s in hx):  # fmt: skip
        raise arguments("states of another shape")
    out, ends = x, [list[Value]() for _ in hx]
    for layer in range(layers):
        first = layer * stack.directions
        own = [
            _Direction(*params[each * k : each * (k + 1)])
            for k in range(first, first + stack.directions)
        ]
        states = [s.narrow(0, first, stack.directions) for s in hx]
        order = (1, 0, 2) if stack.batch_first and layer else (0, 1, 2)
        made = _layer(
            stack, out.permute(order), states, own, turned=stack.batch_first and not layer
        )
        for found, kept in zip(made[1:], ends, strict=False):
            kept.append(found)
        out = made[0].permute((1, 0, 2)) if stack.batch_first else made[0]
    return (out, *(concatenate(kept, 0) if kept else None for kept in ends))


def _layer(
    stack: _Stack,
    x: Value,
    states: Sequence[Value],
    own: Sequence[_Direction],
    *,
    turned: bool,
) -> list[Value]:
    """The states (T, N, directions H) of a layer, its last ones, and its last cells if wanted.

    ``x`` is (T, N, inputs), or (N, T, inputs) where ``turned``.
    """
    builder, units = x.builder, own[0].states.shape[1]
    gates = own[0].states.shape[0] // units
    first, second, width = x.shape
    product = x.reshape((first * second, width)).matmul(
        concatenate([d.inputs for d in own], 0).swapped()
    )
    if own[0].input_bias is not None:
        bias = concatenate([_bias(stack.op, d, units) for d in own], 0)
        product = product + bias.broadcast(product.shape)
    given = product.reshape((first, second, len(own), gates, units))
    given = given.permute((1, 0, 2, 3, 4)) if turned else given
    steps, rows = given.shape[:2]
    weights = (
        concatenate([d.states for d in own], 0).reshape((len(own), gates * units, units)).swapped()
    )
    operands, more = [given, weights, states[0]], {}
    if stack.op == "lstm":
        operands.append(states[1])
        more["cells"] = int(_LSTM_RESULTS - 1 in stack.call.used)
    elif stack.op == "gru":
        operands.append(_share_of_new(own, units))
    extent = steps + more.get("cells", 0)
    backwards = tuple(range(len(own)))
    made = Value(
        builder,
        builder.append(
            stack.op,
            [o.id for o in operands],
            (extent, rows, len(own), units),
            x.dtype,
            reverse=backwards,
            **more,
        ),
    )
    out = made.narrow(0, 0, steps)
    ends = [
        out.narrow(2, k, 1).select(0, 0 if k else steps - 1).moved(1, 0) for k in range(len(own))
    ]
    results = [out.reshape((steps, rows, len(own) * units)), concatenate(ends, 0)]
    return results + ([made.select(0, steps).moved(1, 0)] if more.get("cells") else [])


def _bias(op: str, own: _Direction, units: int) -> Value:
    """What is added to the inputs' share: both biases, save what a GRU's reset gate multiplies."""
    assert own.input_bias is not None
    assert own.state_bias is not None
    if op != "gru":
        return own.input_bias + own.state_bias
    both = 2 * units
    sums = own.input_bias.narrow(0, 0, both) + own.state_bias.narrow(0, 0, both)
    return concatenate([sums, own.input_bias.narrow(0, both, units)], 0)


def _share_of_new(own: Sequence[_Direction], units: int) -> Value:
    """(directions, H): what is added to the state's share of a GRU's new gate."""
    biases = [d.state_bias for d in own]
    if biases[0] is None:
        return own[0].states.const(0).broadcast((len(own), units))
    parts = [b.narrow(0, 2 * units, units).unsqueeze(0) for b in biases if b is not None]
    return concatenate(parts, 0)
