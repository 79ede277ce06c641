"""Models made to hang, to take all memory, or to read what is not theirs: one typed error each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.unit.onnx.hostile import BOOL, OPSET, chain, info, loop, model, number, outside
from tests.unit.onnx.test_load import expected, linear
from torch_pruner import exc
from torch_pruner.onnx import function as functions
from torch_pruner.onnx.function import OnnxFunction
from torch_pruner.onnx.load import load
from torch_pruner.onnx.operators import DataDependentError

if TYPE_CHECKING:
    from pathlib import Path

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def run(proto: onnx.ModelProto, *inputs: torch.Tensor) -> list[Any]:
    return OnnxFunction(load(proto)).eager(list(inputs or (X,)))


# Steps


@pytest.mark.parametrize("count", [None, 1 << 40])
def test_a_loop_beyond_the_bound_raises_and_is_not_cut(count, monkeypatch) -> None:
    monkeypatch.setattr(functions, "MAX_STEPS", 500)
    with pytest.raises(exc.UnsupportedModel, match="more than 500 nodes"):
        run(loop(count))


def test_a_long_loop_is_whole() -> None:
    y, rows = run(loop(300))
    assert len(rows) == 300
    w = torch.from_numpy(numpy_helper.to_array(loop(1).graph.initializer[0]).copy())
    state = torch.relu(X)
    for _ in range(300):
        state = torch.tanh(state @ w)
    torch.testing.assert_close(y, state.exp())


def test_all_loops_share_one_budget(monkeypatch) -> None:
    monkeypatch.setattr(functions, "MAX_STEPS", 2000)
    inner = loop(300).graph.node[1]
    inner.input[0], inner.input[2] = "many", "s"
    inner.output[:] = ["s2", "rows1"]
    sums = helper.make_node("ReduceSum", ["s2"], ["row"], keepdims=0)
    proto = loop(3, [inner, sums])
    proto.graph.initializer.append(number("many", 100))
    assert len(run(proto)[1]) == 3
    proto.graph.initializer[-1].CopyFrom(number("many", 300))
    with pytest.raises(exc.UnsupportedModel, match="more than 2000 nodes"):
        run(proto)


def test_chains_of_functions_are_counted_before_anything_runs() -> None:
    assert torch.equal(run(chain(10))[0], X)
    with pytest.raises(exc.UnsupportedModel, match="nodes run at each call"):
        load(chain(24))
    with pytest.raises(exc.UnsupportedModel, match="deep"):
        load(chain(200, calls=1))


def test_functions_in_a_circle_are_refused() -> None:
    proto = chain(3)
    proto.functions[0].node[0].op_type = "f2"
    proto.functions[0].node[0].domain = "own"
    with pytest.raises(exc.UnsupportedModel, match="calls itself"):
        load(proto)


def test_subgraphs_are_not_deep_in_each_other() -> None:
    inner = helper.make_graph([helper.make_node("Neg", ["x"], ["z"])], "g", [], [info("z")])
    for _ in range(40):
        outer = helper.make_graph([helper.make_node("If", ["b"], ["z"])], "g", [], [info("z")])
        branch = outer.node[0].attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH)
        branch.g.CopyFrom(inner)
        inner = outer
    proto = model([], [number("b", True, bool)])
    proto.graph.node.add().CopyFrom(inner.node[0])
    with pytest.raises(exc.UnsupportedModel, match="deep"):
        load(proto)


def test_a_long_recurrence_is_not_unrolled() -> None:
    rng = np.random.default_rng(0)
    initial = [number(n, rng.standard_normal((1, 16, 4)) / 4, np.float32) for n in "wr"]
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=4)
    proto = model([node], initial, [info("x", "n", 1, 4)])
    function = OnnxFunction(load(proto))
    assert function.traced([torch.randn(5, 1, 4)]) is not None
    with pytest.raises(DataDependentError, match="unrolled"):
        function.traced([torch.randn(2000, 1, 4)])
    assert function.eager([torch.randn(2000, 1, 4)])[0].shape == (2000, 1, 1, 4)


# Memory

BILLION = 1_000_000_000
SHAPE = number("k", [BILLION, 1000])
FORGED = {
    "Expand": ([helper.make_node("Expand", ["v", "k"], ["y"])], [SHAPE, number("v", [1], float)]),
    "Tile": ([helper.make_node("Tile", ["x", "k"], ["y"])], [SHAPE]),
    "ConstantOfShape": ([helper.make_node("ConstantOfShape", ["k"], ["y"])], [SHAPE]),
    "Range": (
        [helper.make_node("Range", ["a", "b", "c"], ["y"])],
        [number("a", 0), number("b", BILLION * 1000), number("c", 1)],
    ),
    "Pad": (
        [helper.make_node("Pad", ["x", "k"], ["y"])], [number("k", [0, 0, BILLION, BILLION])],
    ),
    "Pad, reflected": (
        [helper.make_node("Pad", ["x", "k"], ["y"], mode="wrap")], [number("k", [0, 0, 0, BILLION])]
    ),
    "Resize": (
        [helper.make_node("Resize", ["x", "", "", "k"], ["y"])], [number("k", [BILLION, BILLION])],
    ),
    "Resize, linear": (
        [helper.make_node("Resize", ["x", "", "", "k"], ["y"], mode="linear")],
        [number("k", [4, BILLION])],
    ),
    "OneHot": (
        [helper.make_node("OneHot", ["a", "b", "c"], ["y"])],
        [number("a", [1, 2]), number("b", BILLION * 1000), number("c", [0, 1])],
    ),
    "RandomNormal": ([helper.make_node("RandomNormal", [], ["y"], shape=[BILLION, 1000])], []),
    "HannWindow": ([helper.make_node("HannWindow", ["k"], ["y"])], [number("k", BILLION * 1000)]),
    "Where": (
        [
            helper.make_node("ConstantOfShape", [s], [o])
            for s, o in (("ka", "a"), ("kb", "b"), ("kc", "c"))
        ]
        + [
            helper.make_node("Cast", ["a"], ["a1"], to=BOOL),
            helper.make_node("Where", ["a1", "b", "c"], ["y"]),
        ],
        [number("ka", [4000, 1, 1]), number("kb", [1, 4000, 1]), number("kc", [1, 1, 4000])],
    ),
    "without elements": (
        [
            helper.make_node("ConstantOfShape", ["k"], ["z"]),
            helper.make_node("ReduceSum", ["z", "a"], ["y"]),
        ],
        [number("k", [0, BILLION * 1000]), number("a", [0])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED)
def test_forged_sizes_are_refused_before_they_are_allocated(what) -> None:
    nodes, initial = FORGED[what]
    function = OnnxFunction(load(model(nodes, initial)))
    for way in (function.eager, function.traced):
        with pytest.raises(exc.UnsupportedModel, match=r"bytes, more than|makes no sense"):
            way([X])


def test_a_state_that_doubles_ends() -> None:
    nodes = [
        helper.make_node("Concat", ["s", "s"], ["s2"], axis=0),
        helper.make_node("ReduceSum", ["s2"], ["row"], keepdims=0),
    ]
    with pytest.raises(exc.UnsupportedModel, match="bytes, more than"):
        run(loop(1000, nodes))


# Files


def saved(folder: Path, proto: onnx.ModelProto) -> Path:
    """The model in a file; a well-named file with 4 KiB of ones lies beside it."""
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    (folder / "data").write_bytes(np.ones(1024, dtype=np.float32).tobytes())
    return folder / "model.onnx"


def weight(location: str = "data", **entries: int) -> onnx.TensorProto:
    return outside(number("v", np.zeros((4, 8)), np.float32), location, **entries)


def with_weight(tensor: onnx.TensorProto) -> onnx.ModelProto:
    return model([helper.make_node("Add", ["x", "v"], ["y"])], [tensor])


def with_constant(tensor: onnx.TensorProto) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Constant", [], ["v"], value=tensor),
        helper.make_node("Add", ["x", "v"], ["y"]),
    ]
    return model(nodes)


def with_branch(tensor: onnx.TensorProto) -> onnx.ModelProto:
    add = helper.make_node("Add", ["x", "v"], ["z"])
    branch = helper.make_graph([add], "g", [], [info("z", 4, 8)], [tensor])
    node = helper.make_node("If", ["b"], ["y"], then_branch=branch, else_branch=branch)
    return model([node], [number("b", True, bool)])


def with_function(tensor: onnx.TensorProto) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Constant", [], ["v"], value=tensor),
        helper.make_node("Add", ["a", "v"], ["b"]),
    ]
    own = helper.make_function("own", "f", ["a"], ["b"], nodes, [OPSET])
    return model([helper.make_node("f", ["x"], ["y"], domain="own")], functions=[own])


PLACES = [with_weight, with_constant, with_branch, with_function]


@pytest.mark.parametrize("place", PLACES)
def test_data_of_any_tensor_lies_beside_the_model(place, tmp_path, monkeypatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data").write_bytes(bytes(4096))
    monkeypatch.chdir(elsewhere)
    path = saved(tmp_path / "own", place(weight()))
    (y,) = OnnxFunction(load(path)).eager([X])
    torch.testing.assert_close(y, X + 1)
    with pytest.raises(exc.UnsupportedModel, match="another file"):
        load(place(weight()))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "location",
    ["../secret", "/etc/passwd", "link", "hard", "pipe", "sub", "", ".", "a\0b", "a" * 5000],
)
def test_data_of_no_tensor_lies_elsewhere(place, location, tmp_path) -> None:
    (tmp_path / "secret").write_bytes(bytes(4096))
    path = saved(tmp_path / "own", place(weight(location)))
    (path.parent / "link").symlink_to(tmp_path / "secret")
    (path.parent / "hard").hardlink_to(tmp_path / "secret")
    (path.parent / "sub").mkdir()
    os.mkfifo(path.parent / "pipe")
    with pytest.raises(exc.UnsupportedModel):
        load(path)


def test_a_folder_that_is_a_link_is_not_entered(tmp_path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data").write_bytes(bytes(4096))
    path = saved(tmp_path / "own", with_weight(weight("sub/data")))
    (path.parent / "sub").symlink_to(tmp_path / "other")
    with pytest.raises(exc.UnsupportedModel, match="folder"):
        load(path)
    (path.parent / "sub").unlink()
    (tmp_path / "other").rename(path.parent / "sub")
    torch.testing.assert_close(OnnxFunction(load(path)).eager([X])[0], X)


def test_a_store_of_links_is_read(tmp_path) -> None:
    """A folder of links into one folder with the model and its data, as Hugging Face keeps it."""
    path = saved(tmp_path / "blobs", with_weight(weight()))
    path.rename(path.parent / "1234")
    (path.parent / "data").rename(path.parent / "5678")
    (tmp_path / "secret").write_bytes(bytes(4096))
    shown = tmp_path / "snapshots" / "main"
    shown.mkdir(parents=True)
    (shown / "model.onnx").symlink_to("../../blobs/1234")
    (shown / "data").symlink_to("../../blobs/5678")
    torch.testing.assert_close(OnnxFunction(load(shown / "model.onnx")).eager([X])[0], X + 1)
    (shown / "data").unlink()
    (shown / "data").symlink_to("../../secret")
    with pytest.raises(exc.UnsupportedModel, match="folder"):
        load(shown / "model.onnx")


def test_a_small_file_is_no_large_weights(tmp_path) -> None:
    tensors = [
        outside(number(f"v{k}", np.zeros(900), np.float32), "data", offset=4 * k) for k in range(50)
    ]
    proto = model([helper.make_node("Neg", ["x"], ["y"])], tensors)
    with pytest.raises(exc.UnsupportedModel, match="overlap"):
        load(saved(tmp_path, proto))


@pytest.mark.parametrize("place", PLACES[:1])
def test_external_data_does_not_switch_the_checker_off(place, tmp_path) -> None:
    proto = place(weight())
    proto.graph.node[-1].input.append("x")  # Add has two inputs
    with pytest.raises(exc.UnsupportedModel, match="checker"):
        load(saved(tmp_path, proto))


@pytest.mark.parametrize("name", ["a\0b.onnx", "x" * 5000, "/dev/zero", "pipe", "."])
def test_what_is_no_file_is_not_opened(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(exc.UnsupportedModel):
        load(name)


# Tensors and names


def damaged(**changes: Any) -> onnx.TensorProto:
    tensor = number("v", np.zeros((4, 8)), np.float32)
    for key, value in changes.items():
        if key == "dims":
            tensor.dims[:] = value
        else:
            setattr(tensor, key, value)
    return tensor


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "changes",
    [
        {"dims": [2**62, 2**62]}, {"dims": [0, 2**62, 2**62]}, {"dims": [2**32, 2**32]},
        {"dims": [-1]}, {"dims": [1] * 100}, {"dims": [7]}, {"data_type": 99}, {"data_type": -1},
        {"data_type": 0}, {"data_type": 8}, {"raw_data": b"abc"}, {"raw_data": b""},
    ],
    ids=str,
)  # fmt: skip
def test_tensors_that_make_no_sense(place, changes) -> None:
    with pytest.raises(exc.UnsupportedModel):
        load(place(damaged(**changes)))


@pytest.mark.parametrize("entries", [{"offset": 2**70}, {"length": 2**70}, {"offset": -1}])
def test_places_in_files_that_make_no_sense(entries, tmp_path) -> None:
    with pytest.raises(exc.UnsupportedModel):
        load(saved(tmp_path, with_weight(weight(**entries))))


def test_names_are_used_once(tmp_path) -> None:
    one = number("v", np.zeros((4, 8)), np.float32)
    with pytest.raises(exc.UnsupportedModel):
        load(model([helper.make_node("Add", ["x", "v"], ["y"])], [one, one]))
    with pytest.raises(exc.UnsupportedModel):
        load(model([helper.make_node("Neg", ["x"], ["y"])], [], [info("x", 4, 8)] * 2))
    twice = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])]
    with pytest.raises(exc.UnsupportedModel):
        load(model(twice))


def test_nodes_in_a_circle_are_refused() -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Neg", ["a"], ["b"])]
    with pytest.raises(exc.UnsupportedModel):
        load(model([*nodes, helper.make_node("Neg", ["b"], ["y"])]))


def test_what_a_node_raises_names_it() -> None:
    proto = model([helper.make_node("Add", ["x", "v"], ["y"], name="sum")])
    proto.graph.input.append(info("v", 4, 8))
    with pytest.raises(exc.UnsupportedModel, match=r"'sum' \(Add\)"):
        run(proto, X, torch.zeros(3, 3))


def test_inputs_of_forged_sizes_are_not_made_up() -> None:
    for shape in ([BILLION, 1000], [2**62, 2**62]):
        proto = model([helper.make_node("Neg", ["x"], ["y"])], [], [info("x", *shape)])
        with pytest.raises(exc.UnsupportedModel):
            OnnxFunction(load(proto)).examples(1, 128)
    proto = model([helper.make_node("Cast", ["x"], ["y"], to=1)], [], [info("x", 2, kind=99)])
    with pytest.raises(exc.UnsupportedModel):
        OnnxFunction(load(proto)).examples(1, 128)


def test_types_that_torch_lacks_are_typed_errors() -> None:
    for node in (
        helper.make_node("Cast", ["x"], ["y"], to=TensorProto.STRING),
        helper.make_node("Constant", [], ["y"], value_string="text"),
    ):
        with pytest.raises(exc.UnsupportedModel):
            run(model([node]))


def test_a_model_s_own_numbers_stay(tmp_path) -> None:
    """The checker is shown another model where data lies outside; the one given is not changed."""
    proto = linear()
    before = proto.SerializeToString(deterministic=True)
    torch.testing.assert_close(run(proto, torch.ones(2, 16))[0], expected(proto, torch.ones(2, 16)))
    assert proto.SerializeToString(deterministic=True) == before
