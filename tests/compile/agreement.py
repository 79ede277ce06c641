"""What one call of a function does, as far as its caller can see.

Compiled and eager calls must do the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

import torch_pruner as tp

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
MakeArgs = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Observation:
    """Outputs, arguments as the call left them, who shares memory, and the generator's state."""

    structure: Any
    outputs: list[Any]
    inputs: list[Any]
    aliases: list[tuple[int, int]]
    same: list[tuple[int, int]]
    random: torch.Tensor


def observe(fn: Callable[..., Any], make_args: MakeArgs, seed: int = 7) -> Observation:
    """Call ``fn`` on fresh arguments.

    With ``requires_grad`` outputs, gradients of leaves come with the inputs.
    """
    torch.manual_seed(seed)
    args = make_args()
    result = fn(*args)
    outputs, structure = tree_flatten(result)
    tensors = [t for t in [*tree_flatten(args)[0], *outputs] if isinstance(t, torch.Tensor)]
    pairs = list(itertools.combinations(range(len(tensors)), 2))
    aliases = [(i, j) for i, j in pairs if shares_storage(tensors[i], tensors[j])]
    same = [(i, j) for i, j in pairs if tensors[i] is tensors[j]]
    differentiable = [
        t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad and not t.is_leaf
    ]
    if differentiable:
        sum(
            ((t.abs() if t.is_complex() else t).double() * (k + 1)).sum()
            for k, t in enumerate(differentiable)
        ).backward()
    inputs: list[Any] = []
    for value in tree_flatten(args)[0]:
        inputs.append(value)
        if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
            inputs.append(value.grad)
    return Observation(structure, outputs, inputs, aliases, same, torch.get_rng_state())


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two strided tensors lie in one piece of memory."""
    if a.layout is not torch.strided or b.layout is not torch.strided or a.is_meta or b.is_meta:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def assert_same(got: Observation, expected: Observation, tolerance: float | None = None) -> None:
    """Everything a caller can see is equal; floating-point numbers within a tolerance."""
    assert got.structure == expected.structure
    assert len(got.outputs) == len(expected.outputs)
    for where, mine, theirs in (
        ("output", got.outputs, expected.outputs),
        ("argument", got.inputs, expected.inputs),
    ):
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_equal(a, b, f"{where} {k}", tolerance)
    assert got.aliases == expected.aliases
    assert got.same == expected.same
    assert torch.equal(got.random, expected.random), "another number of random draws than in eager"


def assert_equal(a: Any, b: Any, where: str = "value", tolerance: float | None = None) -> None:
    """One value against eager's: type, dtype, shape, strides, ``requires_grad`` and elements."""
    assert type(a) is type(b), f"{where}: {type(a)}, eager {type(b)}"
    if isinstance(b, float):  # of a tensor that may have had half of its digits
        limit = TOLERANCE[torch.float32] if tolerance is None else tolerance
        near = math.isclose(a, b, rel_tol=limit, abs_tol=limit)
        assert near or (a != a and b != b), f"{where}: {a}, eager {b}"
        return
    if not isinstance(b, torch.Tensor):
        assert a == b, f"{where}: {a}, eager {b}"
        return
    for name in ("dtype", "shape", "layout", "device", "requires_grad"):
        assert getattr(a, name) == getattr(b, name), (
            f"{where}: {name} {getattr(a, name)}, eager {getattr(b, name)}"
        )
    if b.is_meta:
        return
    if b.layout is torch.strided and not b.is_quantized:
        # Of one element, kernels of torch's and its own meta functions give different strides.
        same = strides_that_count(a) == strides_that_count(b)
        assert same, f"{where}: strides {a.stride()}, eager {b.stride()}"
        assert a.storage_offset() == b.storage_offset(), where
    a, b = (t.detach().to_dense() if t.layout is not torch.strided else t.detach() for t in (a, b))
    a, b = (t.dequantize() if t.is_quantized else t for t in (a, b))
    limit = TOLERANCE.get(b.dtype, 0.0) if tolerance is None else tolerance
    torch.testing.assert_close(
        a, b, rtol=limit, atol=limit, equal_nan=True, msg=lambda m: f"{where}: {m}"
    )


def strides_that_count(tensor: torch.Tensor) -> list[int]:
    """Those of dimensions with more than one element."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, extent in pairs if extent != 1]


def check(
    compiled: Callable[..., Any], eager: Callable[..., Any], make_args: MakeArgs, *, calls: int = 2,
    tolerance: float | None = None, covers: bool = True,
) -> None:  # fmt: skip
    """Several calls with fresh arguments equal eager's.

    The first is compared inside the backend too, later ones are not. With ``covers``, something
    must have been compiled: eager agreeing with eager shows nothing.
    """
    for seed in range(calls):
        expected = observe(eager, make_args, seed)
        got = observe(compiled, make_args, seed)
        assert_same(got, expected, tolerance)
    if covers:
        report = tp.last_report()
        assert report is not None
        assert report.ops_compiled > 0, report.ops_fallback
