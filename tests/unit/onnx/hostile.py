"""Small models that ask for too much, or for what is not theirs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = helper.make_opsetid("", 18)
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def info(name: str, *shape: int | str | None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def number(name: str, value: Any, dtype: Any = np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, dtype=dtype), name)


def model(
    nodes: list[onnx.NodeProto],
    initial: list[onnx.TensorProto] | None = None,
    inputs: list[onnx.ValueInfoProto] | None = None,
    outputs: list[onnx.ValueInfoProto] | None = None,
    **more: Any,
) -> onnx.ModelProto:
    """A model of opset 18 from x (4, 8) to y, unless said otherwise."""
    inputs = [info("x", 4, 8)] if inputs is None else inputs
    outputs = [info("y", None, None)] if outputs is None else outputs
    graph = helper.make_graph(nodes, "net", inputs, outputs, initial or [])
    domains = [helper.make_opsetid("own", 1)] if "functions" in more else []
    return helper.make_model(graph, opset_imports=[OPSET, *domains], **more)


def chain(length: int, *, calls: int = 2) -> onnx.ModelProto:
    """``length`` functions, each of which calls the one before it ``calls`` times."""
    functions = []
    for k in range(length):
        names = ["a", *(f"t{i}" for i in range(calls - 1)), "b"]
        domain, op = ("own", f"f{k - 1}") if k else ("", "Neg")
        nodes = [
            helper.make_node(op, [i], [o], domain=domain) for i, o in itertools.pairwise(names)
        ]
        imports = [OPSET, helper.make_opsetid("own", 1)]
        functions.append(helper.make_function("own", f"f{k}", ["a"], ["b"], nodes, imports))
    call = helper.make_node(f"f{length - 1}", ["x"], ["y"], domain="own")
    return model([call], functions=functions)


def loop(count: int | None, body: list[onnx.NodeProto] | None = None) -> onnx.ModelProto:
    """x (4, 8) → tanh(s w), ``count`` times or without end; also the sum of every step's state.

    ``body`` makes ``s2`` and ``row`` of ``i``, ``s`` and what is outside.
    """
    nodes = body or [
        helper.make_node("MatMul", ["s", "w"], ["m"]),
        helper.make_node("Tanh", ["m"], ["s2"]),
        helper.make_node("ReduceSum", ["s2"], ["row"], keepdims=0),
    ]
    inner = helper.make_graph(
        [*nodes, helper.make_node("Identity", ["c"], ["c2"])], "body",
        [info("i", kind=INT64), info("c", kind=BOOL), info("s", None, None)],
        [info("c2", kind=BOOL), info("s2", None, None), info("row")],
    )  # fmt: skip
    rng = np.random.default_rng(0)
    initial = [number("w", rng.standard_normal((8, 8)) / 2, np.float32), number("t", True, bool)]
    initial += [] if count is None else [number("n", count)]
    given = ["" if count is None else "n", "t", "r"]
    outer = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Loop", given, ["last", "rows"], body=inner),
        helper.make_node("Exp", ["last"], ["y"]),
    ]
    return model(outer, initial, outputs=[info("y", None, None), info("rows", None)])


def outside(tensor: onnx.TensorProto, location: str, **entries: int) -> onnx.TensorProto:
    """The tensor with its data said to be in a file."""
    tensor.ClearField("raw_data")
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor
