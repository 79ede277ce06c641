"""An ONNX file, compiled: written here, read back, checked against ONNX's own reference.

python examples/onnx_model.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import torch_pruner

BATCH = 4


def make_model() -> onnx.ModelProto:
    """Convolution, normalisation, a residual, pooling and a classifier."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        values = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        return numpy_helper.from_array(values.astype(np.float32), name)

    ones = numpy_helper.from_array(np.ones(32, np.float32), "ones")
    zeros = numpy_helper.from_array(np.zeros(32, np.float32), "zeros")
    weights = [weight("w1", 32, 3, 3, 3), weight("w2", 32, 32, 3, 3), weight("w3", 32, 10)]
    same = {"pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], strides=[2, 2], **same),
        helper.make_node("BatchNormalization", ["c1", "ones", "zeros", "zeros", "ones"], ["n1"]),
        helper.make_node("Relu", ["n1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], **same),
        helper.make_node("Add", ["c2", "r1"], ["sum"]),
        helper.make_node("GlobalAveragePool", ["sum"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w3"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["y"], axis=-1),
    ]
    ends = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 64, 64]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10]),
    ]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], [*weights, ones, zeros])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="onnx-") as folder:
        path = Path(folder) / "net.onnx"
        onnx.save(make_model(), path)
        run = torch_pruner.onnx.compile(path)
        x = torch.randn(BATCH, 3, 64, 64)
        start = time.perf_counter()
        y = run(x)
        print(f"first call, with tuning: {time.perf_counter() - start:.1f} s")
        start = time.perf_counter()
        run(x)
        print(f"second call: {1e3 * (time.perf_counter() - start):.2f} ms")
        (expected,) = ReferenceEvaluator(str(path)).run(None, {"x": x.numpy()})
    difference = np.abs(y.numpy() - expected).max() / np.abs(expected).max()
    print(f"largest difference from ONNX's reference, relative: {difference:.1e}")
    if difference > 1e-4:
        raise SystemExit("the results differ")
    print(torch_pruner.last_report())


if __name__ == "__main__":
    main()
