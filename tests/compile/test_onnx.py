"""ONNX models, compiled: a sample of ONNX's node tests, and a small network with dynamic sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import torch_pruner as tp
from tests.suites import onnx_nodes
from tests.unit.onnx.test_load import expected, linear

pytestmark = [pytest.mark.tvm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("step", [108, pytest.param(36, marks=pytest.mark.stress)])
def test_a_sample_of_node_tests(shared_cache, step: int) -> None:
    options = {"effort": "none", "cache_dir": str(shared_cache)}
    cases = onnx_nodes.cases()[::step]
    outcomes = [onnx_nodes.run(case, options) for case in cases]
    tried = [o for o in outcomes if o.status != "left out"]
    failed = [o for o in tried if o.status == "failed"]
    assert len(tried) > len(cases) // 2
    assert len(failed) < 0.1 * len(tried), failed


def test_sizes_are_compiled_as_they_come(shared_cache) -> None:
    model = linear()
    options = {"effort": "none", "cache_dir": str(shared_cache), "strict": True}
    function = tp.onnx.compile(model, options=options)
    for batch in (3, 5, 3):
        x = torch.randn(batch, 16)
        torch.testing.assert_close(function(x), expected(model, x))
        torch.testing.assert_close(function(x=x), expected(model, x))
    assert tp.last_report().graphs[0].ops_fallback == ()


def test_a_network(shared_cache) -> None:
    """Convolution, normalisation, pooling, a residual, a classifier."""
    rng = np.random.default_rng(0)

    def weight(name, *shape):
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) * 0.2, name)

    positive = numpy_helper.from_array(rng.random(8).astype(np.float32) + 0.5, "var")
    initial = [
        weight("w1", 8, 3, 3, 3), weight("b1", 8), weight("scale", 8), weight("shift", 8),
        weight("mean", 8), positive, weight("w2", 8, 8, 1, 1), weight("w3", 8, 5),
    ]  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("Conv", ["r", "w2"], ["d"]),
        helper.make_node("Add", ["d", "r"], ["a"]),
        helper.make_node("GlobalAveragePool", ["a"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "w3"], ["m"]),
        helper.make_node("Softmax", ["m"], ["y"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])], initial,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    options = {"effort": "none", "cache_dir": str(shared_cache), "strict": True}
    function = tp.onnx.compile(model, options=options)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(function(x), function.eager([x])[0], rtol=1e-4, atol=1e-5)
    assert tp.last_report().graphs[0].ops_fallback == ()


def test_an_option_that_does_not_exist_raises() -> None:
    with pytest.raises(tp.exc.OptionError):
        tp.onnx.compile(linear(), options={"efort": "none"})
