"""Constants, branches, loops and sequences: what is about the graph and not about numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_pruner.exc import UnsupportedModel
from torch_pruner.onnx.bounds import nbytes
from torch_pruner.onnx.operators.types import torch_dtype
from torch_pruner.onnx.values import OnnxValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_pruner.onnx.graph import OnnxNode, TensorType
    from torch_pruner.onnx.interpreter import Interpreter
    from torch_pruner.onnx.values import Env

    Values = Sequence[OnnxValue | None]
    Control = Callable[[Interpreter, OnnxNode, Values, Env, int, int], Values]


def _number(value: OnnxValue | None, default: int | None = None) -> int:
    if value is None:
        if default is None:
            raise TypeError("nothing where a number should be")
        return default
    return int(np.asarray(value.numbers()).reshape(-1)[0])


def _constant(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    ((name, value),) = node.attrs.items()
    if isinstance(value, np.ndarray):
        return [OnnxValue.of(value)]
    if name in ("value_int", "value_ints"):
        return [OnnxValue.of(np.array(value, dtype=np.int64))]
    if name in ("value_float", "value_floats"):
        return [OnnxValue.of(np.array(value, dtype=np.float32))]
    raise UnsupportedModel(run.name, f"a constant given as {name}", "")


def _if(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    taken = node.attrs["then_branch" if _number(inputs[0]) else "else_branch"]
    return run.inside(taken, env, {}, depth)


class _Rows:
    """What the steps of a loop make of one output, together no more than one tensor may be."""

    def __init__(self, run: Interpreter, kind: TensorType) -> None:
        self._run, self._kind = run, kind
        self._rows: list[torch.Tensor] = []
        self._bytes = 0

    def add(self, value: OnnxValue | None) -> None:
        row = _present(value).tensor()
        self._bytes += row.numel() * row.element_size()
        self._run.memory.afford(self._bytes)
        self._rows.append(row)

    @property
    def rank(self) -> int:
        return self._rows[0].dim() if self._rows else len(self._kind.shape)

    def stacked(self, axis: int = 0, *, backwards: bool = False) -> OnnxValue:
        if not self._rows:
            empty = [*self._kind.shape]
            empty.insert(axis, 0)
            return OnnxValue(device=torch.zeros(empty, dtype=torch_dtype(self._kind.element)))
        rows = self._rows[::-1] if backwards else self._rows
        return OnnxValue(device=torch.stack(rows, dim=axis))


def _loop(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    """Runs until its count is reached or its condition fails; how long that may be is the
    interpreter's to say."""
    body = node.attrs["body"]
    most = None if inputs[0] is None else _number(inputs[0])
    going: OnnxValue | None = inputs[1] if len(inputs) > 1 else None
    going = _true() if going is None else going
    state = list(inputs[2:])
    made = [_Rows(run, body.types[name]) for name in body.outputs[1 + len(state) :]]
    if most is not None and run.tracing:
        run.budget.foresee(most * (1 + len(body.nodes)))  # the condition may end it before, rarely
    done = 0
    while (most is None or done < most) and _number(going):
        run.budget.take()
        given = dict(zip(body.inputs, [run.counter(done), going, *state], strict=True))
        going, *results = run.repeated(body, env, given, depth)
        state, rows = results[: len(state)], results[len(state) :]
        for kept, value in zip(made, rows, strict=True):
            kept.add(value)
        done += 1
    return [*state, *(rows.stacked() for rows in made)]


def _true() -> OnnxValue:
    return OnnxValue.of(np.array(True))


def _scan(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    if opset < 9:
        raise UnsupportedModel(run.name, "Scan of opset 8", "")
    body, count = node.attrs["body"], node.attrs["num_scan_inputs"]
    n_state = len(inputs) - count
    n_out = len(body.outputs) - n_state
    if count < 1 or n_state < 0 or n_out < 0:
        raise ValueError(f"{count} of {len(inputs)} inputs are scanned")
    state = list(inputs[:n_state])
    scanned = [_present(v).tensor() for v in inputs[n_state:]]
    in_axes, back_in = (node.attrs.get(f"scan_input_{k}", [0] * count) for k in _SCANS)
    out_axes, back_out = (node.attrs.get(f"scan_output_{k}", [0] * n_out) for k in _SCANS)
    steps = scanned[0].shape[in_axes[0]]
    run.budget.foresee(steps)
    made = [_Rows(run, body.types[name]) for name in body.outputs[n_state:]]
    for t in range(steps):
        run.budget.take()
        now = [
            OnnxValue(device=x.select(axis, steps - 1 - t if back else t))
            for x, axis, back in zip(scanned, in_axes, back_in, strict=True)
        ]
        given = dict(zip(body.inputs, [*state, *now], strict=True))
        results = run.repeated(body, env, given, depth)
        state = list(results[:n_state])
        for kept, value in zip(made, results[n_state:], strict=True):
            kept.add(value)
    stacked = [
        rows.stacked(_from_front(axis, rows), backwards=bool(back))
        for rows, axis, back in zip(made, out_axes, back_out, strict=True)
    ]
    return [*state, *stacked]


_SCANS = ("axes", "directions")


def _from_front(axis: int, rows: _Rows) -> int:
    return axis + rows.rank + 1 if axis < 0 else axis


def _sequence(items: list[OnnxValue | None]) -> OnnxValue:
    return OnnxValue(items=items)


def _present(value: OnnxValue | None) -> OnnxValue:
    if value is None:
        raise TypeError("nothing where a tensor should be")
    return value


def _items(value: OnnxValue | None) -> list[OnnxValue | None]:
    if value is None or value.items is None:
        raise TypeError("a tensor where a sequence should be")
    return value.items


def _sequence_construct(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    return [_sequence(list(inputs))]


def _sequence_empty(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    return [_sequence([])]


def _sequence_at(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    return [_items(inputs[0])[_number(inputs[1])]]


def _sequence_length(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    return [OnnxValue.of(np.array(len(_items(inputs[0])), dtype=np.int64))]


def _sequence_insert(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    items = list(_items(inputs[0]))
    at = _number(inputs[2], len(items)) if len(inputs) > 2 else len(items)
    items.insert(at, inputs[1])
    return [_sequence(items)]


def _sequence_erase(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    items = list(_items(inputs[0]))
    items.pop(_number(inputs[1]) if len(inputs) > 1 and inputs[1] is not None else -1)
    return [_sequence(items)]


def _concat_from_sequence(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    tensors = [v.tensor() for v in _items(inputs[0]) if v is not None]
    run.memory.afford(nbytes(tensors))
    join = torch.stack if node.attrs.get("new_axis", 0) else torch.cat
    return [OnnxValue(device=join(tensors, dim=node.attrs["axis"]))]


def _split_to_sequence(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    axis, keep = node.attrs.get("axis", 0), node.attrs.get("keepdims", 1)
    x = _present(inputs[0]).tensor()
    if len(inputs) < 2 or inputs[1] is None:
        ones = torch.split(x, 1, dim=axis)
        parts = list(ones) if keep else [p.squeeze(axis) for p in ones]
    else:
        sizes = np.asarray(_present(inputs[1]).numbers())
        parts = list(torch.split(x, int(sizes) if not sizes.ndim else sizes.tolist(), dim=axis))
    return [_sequence([OnnxValue(device=p) for p in parts])]


def _sequence_map(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    body = node.attrs["body"]
    made: list[list[Any]] = [[] for _ in body.outputs]
    for k in range(len(_items(inputs[0]))):
        now = [v if v is None or v.items is None else v.items[k] for v in inputs]
        run.budget.take()
        given = dict(zip(body.inputs, now, strict=True))
        for kept, value in zip(made, run.repeated(body, env, given, depth), strict=True):
            kept.append(value)
    return [_sequence(kept) for kept in made]


def _optional(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    return [inputs[0] if inputs else None]


def _has_element(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    return [OnnxValue.of(np.array(bool(inputs) and inputs[0] is not None))]


def _identity(
    run: Interpreter, node: OnnxNode, inputs: Values, env: Env, opset: int, depth: int
) -> Values:
    return [inputs[0]]


TABLE: Mapping[str, Control] = {
    "Constant": _constant,
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceConstruct": _sequence_construct,
    "SequenceEmpty": _sequence_empty,
    "SequenceAt": _sequence_at,
    "SequenceLength": _sequence_length,
    "SequenceInsert": _sequence_insert,
    "SequenceErase": _sequence_erase,
    "SequenceMap": _sequence_map,
    "ConcatFromSequence": _concat_from_sequence,
    "SplitToSequence": _split_to_sequence,
    "Optional": _optional,
    "OptionalHasElement": _has_element,
    "OptionalGetElement": _identity,
    "Identity": _identity,
}
