"""Capture a module with AOTAutograd, partition it, and run the steps without a compiler."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils import _pytree as pytree

from torch_pruner.devices.dtypes import DEFAULT_DTYPES
from torch_pruner.dynamo.capture.decompositions import decomposition_table
from torch_pruner.dynamo.lower.partition import PartitionedGraph, Region, partition
from torch_pruner.graph.reference import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable

DECOMPOSITIONS = decomposition_table()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def from_numpy(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """A tensor with the strides of the fake tensor ``like``."""
    array = np.array(array, copy=True, order="C")
    if like.dtype == torch.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    assert tensor.dtype == like.dtype
    assert tensor.shape == like.shape
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(tensor)


def run(gm: fx.GraphModule, parts: PartitionedGraph, inputs: Any) -> Any:
    """Interpret the partitioned graph: regions by the reference, the rest by eager."""
    env: dict[fx.Node, Any] = {}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    env.update(zip(placeholders, inputs, strict=True))
    env.update({n: getattr(gm, n.target) for n in gm.graph.nodes if n.op == "get_attr"})
    for step in parts.steps:
        if isinstance(step, Region):
            results = evaluate(step.graph, [to_numpy(env[n]) for n in step.inputs])
            assert len(results) == len(step.outputs) + bool(step.flags)
            for node, array in zip(step.outputs, results, strict=False):
                env[node] = from_numpy(array, node.meta["val"])
            continue
        for node in step.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
    (output,) = [n for n in gm.graph.nodes if n.op == "output"]
    return fx.node.map_arg(output.args[0], env.__getitem__)


@dataclass
class Capture:
    """A ``torch.compile`` backend that remembers what it partitioned."""

    dtypes: frozenset[str] = DEFAULT_DTYPES
    parts: list[PartitionedGraph] = field(default_factory=list)
    graphs: list[fx.GraphModule] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., Any]:
        backend = aot_autograd(
            fw_compiler=self._compile, bw_compiler=self._compile, decompositions=DECOMPOSITIONS
        )
        return backend(gm, example)

    def _compile(self, gm: fx.GraphModule, _example: list[torch.Tensor]) -> Callable[..., Any]:
        parts = partition(gm, dtypes=self.dtypes)
        self.graphs.append(gm)
        self.parts.append(parts)

        def call(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            return run(gm, parts, given)

        call._boxed_call = True
        return call

    @property
    def rejected(self) -> list[str]:
        """Operators left to eager, without their node's name."""
        return [r.node.split(" ")[0] for p in self.parts for r in p.rejections]


def assert_equal(actual: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    left, right = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        exact = not b.is_floating_point()
        torch.testing.assert_close(
            a, b, rtol=0 if exact else rtol, atol=0 if exact else atol, equal_nan=True
        )


def check(fn: Callable[..., Any], *args: Any, tol: float = 1e-4, **kwargs: Any) -> Capture:
    """Compare the partitioned ``fn`` with eager, without gradients."""
    torch._dynamo.reset()
    capture = Capture()
    with torch.no_grad():
        torch.manual_seed(0)
        expected = fn(*pytree.tree_map(_cloned, args), **kwargs)
        torch.manual_seed(0)
        compiled = torch.compile(fn, backend=capture, dynamic=False)
        actual = compiled(*pytree.tree_map(_cloned, args), **kwargs)
    assert_equal(actual, expected, rtol=tol, atol=tol)
    return capture


def check_training(module: nn.Module, *args: Any, tol: float = 1e-4, **kwargs: Any) -> Capture:
    """Compare loss, gradients and buffers after one step of the partitioned module with eager."""
    torch._dynamo.reset()
    capture, other = Capture(), copy.deepcopy(module)
    torch.manual_seed(0)
    expected = module(*args, **kwargs)
    expected.backward()
    torch.manual_seed(0)
    actual = torch.compile(other, backend=capture, dynamic=False)(*args, **kwargs)
    actual.backward()
    assert_equal(actual, expected, rtol=tol, atol=tol)
    for a, b in zip(other.parameters(), module.parameters(), strict=True):
        assert_equal(a.grad, b.grad, rtol=tol, atol=tol)
    for a, b in zip(other.buffers(), module.buffers(), strict=True):
        assert_equal(a, b, rtol=tol, atol=tol)
    return capture


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
