"""Constants, branches, loops and sequences: what is about the graph and not about numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from onnx import AttributeProto, helper, numpy_helper

from torch_pruner.exc import UnsupportedModel
from torch_pruner.onnx.operators.types import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from onnx import GraphProto, NodeProto

    from torch_pruner.onnx.interpreter import Interpreter, Value

    Env = dict[str, Value | None]
    Values = Sequence[Value | None]
    Control = Callable[[Interpreter, NodeProto, Values, Env, int], Values]


def _attrs(node: NodeProto) -> dict[str, AttributeProto]:
    return {a.name: a for a in node.attribute}


def _number(value: Value | None, default: int | None = None) -> int:
    if value is None:
        assert default is not None
        return default
    return int(np.asarray(value.numbers()).reshape(-1)[0])


def _constant(run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int) -> Values:
    from torch_pruner.onnx.interpreter import Value

    (a,) = node.attribute
    value = helper.get_attribute_value(a)
    if a.type == AttributeProto.TENSOR:
        return [Value.of(numpy_helper.to_array(value))]
    if a.type in (AttributeProto.INT, AttributeProto.INTS):
        return [Value.of(np.array(value, dtype=np.int64))]
    if a.type in (AttributeProto.FLOAT, AttributeProto.FLOATS):
        return [Value.of(np.array(value, dtype=np.float32))]
    raise UnsupportedModel(run.name, f"a constant given as {a.name}", "")


def _inside(
    run: Interpreter, graph: GraphProto, env: Env, given: Mapping[str, Any], depth: int
) -> Values:
    """A subgraph, which sees what is outside of it."""
    own: Env = {**env, **given}
    for tensor in graph.initializer:
        from torch_pruner.onnx.interpreter import Value

        own[tensor.name] = Value.of(numpy_helper.to_array(tensor))
    run.run(graph, own, depth + 1)
    return [own[o.name] for o in graph.output]


def _if(run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int) -> Values:
    attrs = _attrs(node)
    taken = attrs["then_branch" if _number(inputs[0]) else "else_branch"].g
    return _inside(run, taken, env, {}, depth)


def _loop(run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int) -> Values:
    from torch_pruner.onnx.interpreter import MAX_STEPS, Value

    body = _attrs(node)["body"].g
    most = MAX_STEPS if inputs[0] is None else min(_number(inputs[0]), MAX_STEPS)
    going: Value | None = inputs[1] if len(inputs) > 1 else None
    going = Value.of(np.array(True)) if going is None else going
    state = list(inputs[2:])
    scans: list[list[torch.Tensor]] = [[] for _ in range(len(body.output) - 1 - len(state))]
    names = [i.name for i in body.input]
    step = 0
    while step < most and _number(going):
        given = dict(
            zip(names, [Value.of(np.array(step, dtype=np.int64)), going, *state], strict=True)
        )
        going, *results = _inside(run, body, env, given, depth)
        state, made = results[: len(state)], results[len(state) :]
        for rows, value in zip(scans, made, strict=True):
            assert value is not None
            rows.append(value.tensor())
        step += 1
    stacked = [
        Value(device=torch.stack(rows) if rows else _nothing(o))
        for rows, o in zip(scans, body.output[1 + len(state) :], strict=True)
    ]
    return [*state, *stacked]


def _nothing(output: Any) -> torch.Tensor:
    """No rows of what would have been stacked."""
    kind = output.type.tensor_type
    shape = [d.dim_value for d in kind.shape.dim]
    return torch.zeros([0, *shape], dtype=torch_dtype(kind.elem_type))


def _scan(run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int) -> Values:
    from torch_pruner.onnx.interpreter import Value

    if run.opset < 9:
        raise UnsupportedModel(run.name, "Scan of opset 8", "")
    attrs = _attrs(node)
    body, count = attrs["body"].g, attrs["num_scan_inputs"].i
    n_state = len(inputs) - count
    state, scanned = list(inputs[:n_state]), [v.tensor() for v in inputs[n_state:] if v]
    n_out = len(body.output) - n_state

    def given(name: str, n: int) -> list[int]:
        return list(attrs[name].ints) if name in attrs else [0] * n

    in_axes, out_axes = given("scan_input_axes", count), given("scan_output_axes", n_out)
    back_in, back_out = (
        given("scan_input_directions", count),
        given("scan_output_directions", n_out),
    )
    steps = scanned[0].shape[in_axes[0]]
    rows: list[list[torch.Tensor]] = [[] for _ in range(n_out)]
    names = [i.name for i in body.input]
    for t in range(steps):
        now = [
            Value(device=x.select(axis, steps - 1 - t if back else t))
            for x, axis, back in zip(scanned, in_axes, back_in, strict=True)
        ]
        results = _inside(run, body, env, dict(zip(names, [*state, *now], strict=True)), depth)
        state = list(results[:n_state])
        for kept, value in zip(rows, results[n_state:], strict=True):
            assert value is not None
            kept.append(value.tensor())
    stacked = [
        Value(device=torch.stack(kept[::-1] if back else kept, dim=axis))
        for kept, axis, back in zip(rows, out_axes, back_out, strict=True)
    ]
    return [*state, *stacked]


def _sequence(items: list[Value | None]) -> Value:
    from torch_pruner.onnx.interpreter import Value

    return Value(items=items)


def _present(value: Value | None) -> Value:
    assert value is not None
    return value


def _items(value: Value | None) -> list[Value | None]:
    assert value is not None
    assert value.items is not None
    return value.items


def _sequence_construct(
    run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int
) -> Values:
    return [_sequence(list(inputs))]


def _sequence_empty(
    run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int
) -> Values:
    return [_sequence([])]


def _sequence_at(run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int) -> Values:
    return [_items(inputs[0])[_number(inputs[1])]]


def _sequence_length(
    run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int
) -> Values:
    from torch_pruner.onnx.interpreter import Value

    return [Value.of(np.array(len(_items(inputs[0])), dtype=np.int64))]


def _sequence_insert(
    run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int
) -> Values:
    items = list(_items(inputs[0]))
    at = _number(inputs[2], len(items)) if len(inputs) > 2 else len(items)
    items.insert(at, inputs[1])
    return [_sequence(items)]


def _sequence_erase(
    run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int
) -> Values:
    items = list(_items(inputs[0]))
    items.pop(_number(inputs[1]) if len(inputs) > 1 and inputs[1] is not None else -1)
    return [_sequence(items)]


def _concat_from_sequence(
    run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int
) -> Values:
    from torch_pruner.onnx.interpreter import Value

    attrs = _attrs(node)
    tensors = [v.tensor() for v in _items(inputs[0]) if v is not None]
    join = torch.stack if "new_axis" in attrs and attrs["new_axis"].i else torch.cat
    return [Value(device=join(tensors, dim=attrs["axis"].i))]


def _split_to_sequence(
    run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int
) -> Values:
    from torch_pruner.onnx.interpreter import Value

    attrs = _attrs(node)
    axis = attrs["axis"].i if "axis" in attrs else 0
    keep = attrs["keepdims"].i if "keepdims" in attrs else 1
    x = _present(inputs[0]).tensor()
    if len(inputs) < 2 or inputs[1] is None:
        ones = torch.split(x, 1, dim=axis)
        parts = list(ones) if keep else [p.squeeze(axis) for p in ones]
    else:
        sizes = np.asarray(_present(inputs[1]).numbers())
        parts = list(torch.split(x, int(sizes) if not sizes.ndim else sizes.tolist(), dim=axis))
    return [_sequence([Value(device=p) for p in parts])]


def _sequence_map(
    run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int
) -> Values:
    body = _attrs(node)["body"].g
    names = [i.name for i in body.input]
    made: list[list[Any]] = [[] for _ in body.output]
    for k in range(len(_items(inputs[0]))):
        now = [v if v is None or v.items is None else v.items[k] for v in inputs]
        given = dict(zip(names, now, strict=True))
        for kept, value in zip(made, _inside(run, body, env, given, depth), strict=True):
            kept.append(value)
    return [_sequence(kept) for kept in made]


def _optional(run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int) -> Values:
    return [inputs[0] if inputs else None]


def _has_element(run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int) -> Values:
    from torch_pruner.onnx.interpreter import Value

    return [Value.of(np.array(bool(inputs) and inputs[0] is not None))]


def _identity(run: Interpreter, node: NodeProto, inputs: Values, env: Env, depth: int) -> Values:
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
