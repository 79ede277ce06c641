"""ONNX's own node tests, operator by operator, and what tracing makes of a model."""

from __future__ import annotations

import re

import pytest
import torch
from onnx import helper

from tests.suites import onnx_nodes
from tests.unit.onnx.test_load import expected, linear
from torch_pruner.onnx.bodies import body_of
from torch_pruner.onnx.function import OnnxFunction
from torch_pruner.onnx.load import load
from torch_pruner.onnx.operators import TABLE, DataDependentError


@pytest.mark.rotated(6)
@pytest.mark.filterwarnings("ignore")
def test_nine_of_ten_node_tests_pass() -> None:
    outcomes = [onnx_nodes.run(case, None) for case in onnx_nodes.cases()[::4]]
    tried = [o for o in outcomes if o.status != "left out"]
    failed = [o for o in tried if o.status == "failed"]
    assert len(tried) > 200
    assert len(failed) < 0.1 * len(tried), failed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operator", ["deform_conv", "causal_conv_with_state"])
def test_convolutions_that_torch_lacks(operator) -> None:
    cases = [case for case in onnx_nodes.cases() if operator in case.name]
    assert len(cases) >= 4
    assert [o for o in (onnx_nodes.run(c, None) for c in cases) if o.status != "passed"] == []


@pytest.mark.filterwarnings("ignore")
def test_operators_that_onnx_defines_by_others() -> None:
    assert "LinearAttention" not in TABLE
    cases = [c for c in onnx_nodes.cases() if re.match("test_linear_attention_[a-z_]*$", c.name)]
    assert len(cases) >= 8
    assert [o for o in (onnx_nodes.run(c, None) for c in cases) if o.status != "passed"] == []


def test_operators_without_a_definition_have_no_body() -> None:
    for name, domain in (("DeformConv", ""), ("Nonsense", ""), ("Relu", "com.example")):
        node = helper.make_node(name, ["x"], ["y"], domain=domain)
        assert body_of(node, 22, [(torch.float32, (2, 3))]) is None
    node = helper.make_node("Swish", ["x"], ["y"])
    assert body_of(node, 24, [(torch.float32, (2, 3))]).node


def test_a_traced_model_has_its_weights_as_parameters() -> None:
    model = linear()
    gm = OnnxFunction(load(model)).traced([torch.randn(3, 16)])
    assert len(list(gm.parameters())) == 2
    assert len(list(gm.graph.find_nodes(op="placeholder"))) == 1
    x = torch.randn(3, 16)
    torch.testing.assert_close(gm(x)[0], expected(model, x))


def test_arithmetic_on_shapes_is_not_traced() -> None:
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"], axis=0),
        helper.make_node("Unsqueeze", ["n", "axes"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["y"]),
    ]
    initial = {"zero": 0, "axes": [0], "rest": [-1]}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6])],
        [numpy_helper.from_array(np.array(v, dtype=np.int64), k) for k, v in initial.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    gm = OnnxFunction(load(model)).traced([torch.randn(5, 2, 3)])
    targets = {str(n.target) for n in gm.graph.nodes if n.op == "call_function"}
    assert targets <= {"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"}


def test_what_depends_on_numbers_is_not_traced_and_runs_all_the_same(caplog) -> None:
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [1, "n"])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    function, x = OnnxFunction(load(model)), torch.tensor([1.0, 0.0, 2.0, 0.0])
    with pytest.raises(DataDependentError):
        function.traced([x])
    with caplog.at_level("WARNING", logger="torch_pruner"):
        assert function(x).tolist() == [[0, 2]]
        assert function(x).tolist() == [[0, 2]]
    assert len([r for r in caplog.records if "operator by operator" in r.message]) == 1
