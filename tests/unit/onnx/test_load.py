"""Model files from anywhere: what is read, what is refused and with which words."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from torch_pruner import exc
from torch_pruner.onnx import files
from torch_pruner.onnx.function import OnnxFunction
from torch_pruner.onnx.load import load

if TYPE_CHECKING:
    from pathlib import Path


def linear(*, opset: int = 18) -> onnx.ModelProto:
    """y = relu(x w + b) with a dynamic batch."""
    rng = np.random.default_rng(0)
    w = numpy_helper.from_array(rng.standard_normal((16, 8)).astype(np.float32), "w")
    b = numpy_helper.from_array(rng.standard_normal(8).astype(np.float32), "b")
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"]),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
        [w, b],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def expected(model: onnx.ModelProto, x: torch.Tensor) -> torch.Tensor:
    w, b = (torch.from_numpy(numpy_helper.to_array(t).copy()) for t in model.graph.initializer)
    return torch.relu(x @ w + b)


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """The model with its weights in a file beside it."""
    path = tmp_path / "model.onnx"
    onnx.save_model(
        linear(), path, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    return path


def test_a_file_bytes_and_a_model_are_the_same(tmp_path: Path) -> None:
    model, x = linear(), torch.randn(3, 16)
    path = tmp_path / "model.onnx"
    onnx.save_model(model, path)
    for source in (model, path, str(path), path.read_bytes()):
        (y,) = OnnxFunction(load(source)).eager([x])
        torch.testing.assert_close(y, expected(model, x))


def test_external_data_is_found_beside_the_model(external: Path) -> None:
    x = torch.randn(3, 16)
    (y,) = OnnxFunction(load(external)).eager([x])
    torch.testing.assert_close(y, expected(linear(), x))


def moved(external: Path, **entries: str) -> onnx.ModelProto:
    """The model whose first weight is said to be elsewhere."""
    proto = onnx.load(external, load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        if entry.key in entries:
            entry.value = entries[entry.key]
    external.write_bytes(proto.SerializeToString())
    return proto


@pytest.mark.parametrize(
    "where", ["../secret", "/etc/passwd", "link", "", ".", "nothing", "a/../../b"]
)
def test_external_data_stays_in_the_folder(external: Path, where: str) -> None:
    (external.parent.parent / "secret").write_bytes(bytes(4096))
    (external.parent / "link").symlink_to(external.parent.parent / "secret")
    moved(external, location=where)
    with pytest.raises(exc.UnsupportedModel, match="folder"):
        load(external)


@pytest.mark.parametrize(
    "entries", [{"offset": "100000"}, {"length": "4"}, {"offset": "-8"}, {"length": "99999999"}]
)
def test_external_data_has_its_length(external: Path, entries: dict[str, str]) -> None:
    moved(external, **entries)
    with pytest.raises(exc.UnsupportedModel):
        load(external)


def test_external_data_of_bytes_has_no_folder(external: Path) -> None:
    with pytest.raises(exc.UnsupportedModel, match="another file"):
        load(external.read_bytes())


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08" * 100])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(exc.UnsupportedModel):
        load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(exc.UnsupportedModel, match="nothing"):
        load(tmp_path / "nothing.onnx")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(linear(), path)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10)
    with pytest.raises(exc.UnsupportedModel, match="bytes"):
        load(path)


@pytest.mark.parametrize("opset", [1, 999])
def test_unknown_opsets_are_refused(opset: int) -> None:
    with pytest.raises(exc.UnsupportedModel, match="opset"):
        load(linear(opset=opset))


def test_damaged_models_never_crash(tmp_path: Path) -> None:
    """A byte changed, or the end missing: a model, or a refusal."""
    good = linear().SerializeToString()
    rng = np.random.default_rng(0)
    for _ in range(200):
        data = bytearray(good)
        data[rng.integers(len(data))] = rng.integers(256)
        data = data[: rng.integers(1, len(data) + 1)] if rng.integers(2) else data
        with contextlib.suppress(exc.UnsupportedModel):
            load(bytes(data))


def test_unknown_operators_are_named() -> None:
    model = linear()
    model.graph.node[1].op_type = "Relu"
    model.graph.node[1].domain = "com.example"
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    with pytest.raises(exc.UnsupportedModel, match=r"com\.example::Relu"):
        OnnxFunction(load(model)).eager([torch.randn(2, 16)])


def test_wrong_inputs_are_named() -> None:
    function = OnnxFunction(load(linear()))
    with pytest.raises(TypeError, match="missing: x"):
        function()
    with pytest.raises(TypeError, match="inputs are x"):
        function(torch.randn(2, 16), z=1)


def test_a_function_of_the_model_is_called() -> None:
    """A function with an attribute of its caller's."""
    body = helper.make_node("LeakyRelu", ["a"], ["b"])
    attribute = onnx.AttributeProto(name="alpha", type=onnx.AttributeProto.FLOAT)
    attribute.ref_attr_name = "slope"
    body.attribute.append(attribute)
    function = helper.make_function(
        "own", "leaky", ["a"], ["b"], [body], [helper.make_opsetid("", 18)], ["slope"]
    )
    graph = helper.make_graph(
        [helper.make_node("leaky", ["x"], ["y"], domain="own", slope=0.5)], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
    )  # fmt: skip
    model = helper.make_model(
        graph, functions=[function],
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("own", 1)],
    )  # fmt: skip
    x = torch.tensor([-2.0, -1.0, 0.0, 3.0])
    (y,) = OnnxFunction(load(model)).eager([x])
    torch.testing.assert_close(y, torch.nn.functional.leaky_relu(x, 0.5))


def test_the_command_line_makes_up_inputs(tmp_path: Path) -> None:
    """``--batch`` stands for the dynamic axis; what is loaded computes what the model says."""
    from argparse import Namespace

    from torch_pruner.cli import model as cli

    proto, path = linear(), tmp_path / "net.onnx"
    onnx.save_model(proto, path)
    asked = {"inputs": None, "train": False, "batch": 4, "seq": None, "dtype": None}
    loaded = cli.load(Namespace(model=str(path), **asked))
    ((x,),) = loaded.inputs
    assert x.shape == (4, 16)
    torch.testing.assert_close(loaded.module(x)[0], expected(proto, x))
