"""A handle on an IR node with arithmetic, so that operator rules read like formulas.

A ``Value`` never promotes: both operands of an operation have one dtype, and Python numbers take
the dtype of the tensor that they meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.rejection import arguments
from torch_pruner.graph.ops import FLOATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_pruner.graph.ir import GraphBuilder, Shape

Number = bool | int | float

_DIVISIONS = ("floordiv", "truncdiv", "mod", "fmod")

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Node ``id`` of ``builder``; ``fake`` is the torch tensor it stands for, if any."""

    builder: GraphBuilder
    id: int
    fake: torch.Tensor | None = None

    @property
    def shape(self) -> Shape:
        return self.builder.shape(self.id)

    @property
    def dtype(self) -> str:
        return self.builder.dtype(self.id)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def _new(self, id: int) -> Value:  # noqa: A002
        return Value(self.builder, id)

    def const(self, number: Number) -> Value:
        """``number`` as a scalar of this value's dtype."""
        return self._new(self.builder.const(number, self.dtype))

    def apply(self, op: str, *others: Value | Number, dtype: str | None = None) -> Value:
        """A pointwise operation with this value as the first operand.

        Raises ``Unsupported`` for a division that whole numbers or booleans do not have.
        """
        if (self.dtype == "bool" and op in _DIVISIONS) or (op == "div" and not self.is_float):
            raise arguments(f"{op} of {self.dtype}")
        operands = [o.id if isinstance(o, Value) else self.const(o).id for o in others]
        return self._new(self.builder.pointwise(op, self.id, *operands, dtype=dtype))

    def __add__(self, other: Value | Number) -> Value:
        return self.apply("add", other)

    def __radd__(self, other: Number) -> Value:
        return self.apply("add", other)

    def __sub__(self, other: Value | Number) -> Value:
        return self.apply("sub", other)

    def __rsub__(self, other: Number) -> Value:
        return self.const(other).apply("sub", self)

    def __mul__(self, other: Value | Number) -> Value:
        return self.apply("mul", other)

    def __rmul__(self, other: Number) -> Value:
        return self.apply("mul", other)

    def __truediv__(self, other: Value | Number) -> Value:
        return self.apply("div", other)

    def __rtruediv__(self, other: Number) -> Value:
        return self.const(other).apply("div", self)

    def __neg__(self) -> Value:
        return self.apply("neg")

    def __and__(self, other: Value) -> Value:
        return self.apply("logical_and", other)

    def __or__(self, other: Value) -> Value:
        return self.apply("logical_or", other)

    def __invert__(self) -> Value:
        return self.apply("logical_not")

    def __lt__(self, other: Value | Number) -> Value:
        return self.apply("lt", other)

    def __le__(self, other: Value | Number) -> Value:
        return self.apply("le", other)

    def __gt__(self, other: Value | Number) -> Value:
        return self.apply("gt", other)

    def __ge__(self, other: Value | Number) -> Value:
        return self.apply("ge", other)

    def equals(self, other: Value | Number) -> Value:
        return self.apply("eq", other)

    def differs(self, other: Value | Number) -> Value:
        return self.apply("ne", other)

    def isnan(self) -> Value:
        return self.apply("isnan", dtype="bool")

    def maximum(self, other: Value | Number) -> Value:
        return self.apply("maximum", other)

    def minimum(self, other: Value | Number) -> Value:
        return self.apply("minimum", other)

    def where(self, yes: Value | Number, no: Value | Number) -> Value:
        """Elementwise choice by this bool value; at least one branch is a ``Value``."""
        typed = yes if isinstance(yes, Value) else no
        assert isinstance(typed, Value)
        a = yes if isinstance(yes, Value) else typed.const(yes)
        b = no if isinstance(no, Value) else typed.const(no)
        return self._new(self.builder.pointwise("where", self.id, a.id, b.id))

    def cast(self, dtype: str) -> Value:
        return self if dtype == self.dtype else self._new(self.builder.cast(self.id, dtype))

    def widened(self) -> Value:
        """Half precision as float32, anything else as it is."""
        return self.cast("float32") if self.dtype in ("bfloat16", "float16") else self

    def reshape(self, shape: Iterable[int]) -> Value:
        return self._new(self.builder.reshape(self.id, shape))

    def permute(self, perm: Iterable[int]) -> Value:
        return self._new(self.builder.permute(self.id, perm))

    def moved(self, source: int, target: int) -> Value:
        """The value with dim ``source`` moved to position ``target``."""
        order = [i for i in range(self.ndim) if i != source]
        order.insert(target, source)
        return self.permute(order)

    def swapped(self) -> Value:
        """The last two dims exchanged."""
        order = list(range(self.ndim))
        order[-2:] = reversed(order[-2:])
        return self.permute(order)

    def broadcast(self, shape: Iterable[int]) -> Value:
        return self._new(self.builder.broadcast(self.id, shape))

    def slice(
        self, starts: Sequence[int], shape: Iterable[int], steps: Sequence[int] | None = None
    ) -> Value:
        return self._new(self.builder.slice(self.id, starts, shape, steps))

    def narrow(self, dim: int, start: int, length: int, step: int = 1) -> Value:
        """``length`` elements of ``dim`` from ``start``, ``step`` apart."""
        starts, steps, shape = [0] * self.ndim, [1] * self.ndim, list(self.shape)
        starts[dim], steps[dim], shape[dim] = start, step, length
        return self.slice(starts, shape, steps)

    def whole(self) -> Value:
        """All of it as a slice, which stands for one that takes less at other sizes."""
        none, ones = (0,) * self.ndim, (1,) * self.ndim
        at = self.builder.append(
            "slice", (self.id,), self.shape, self.dtype, starts=none, steps=ones
        )
        return self._new(at)

    def select(self, dim: int, index: int) -> Value:
        shape = self.shape[:dim] + self.shape[dim + 1 :]
        return self.narrow(dim, index, 1).reshape(shape)

    def unsqueeze(self, dim: int) -> Value:
        return self.reshape((*self.shape[:dim], 1, *self.shape[dim:]))

    def flip(self, dims: Sequence[int]) -> Value:
        if not dims:
            return self
        ids = self.builder.append("flip", (self.id,), self.shape, self.dtype, dims=tuple(dims))
        return self._new(ids)

    def reduce(
        self, op: str, axes: Iterable[int], *, keepdim: bool = False, dtype: str | None = None
    ) -> Value:
        axes = tuple(axes)
        if not axes and (dtype is None or dtype == self.dtype):
            return self
        return self._new(self.builder.reduce(op, self.id, axes, dtype=dtype, keepdim=keepdim))

    def sum(self, axes: Iterable[int], *, keepdim: bool = False) -> Value:
        return self.reduce("sum", axes, keepdim=keepdim)

    def mean(self, axes: Iterable[int], *, keepdim: bool = False) -> Value:
        axes = tuple(axes)
        count = 1
        for axis in axes:
            count *= self.shape[axis]
        return self.sum(axes, keepdim=keepdim) / float(count)

    def matmul(self, other: Value, dtype: str | None = None) -> Value:
        return self._new(self.builder.matmul(self.id, other.id, dtype))

    def take(self, dim: int, index: Value) -> Value:
        """``x[..., index, ...]`` with ``index`` of any rank in place of ``dim``."""
        shape = self.shape[:dim] + index.shape + self.shape[dim + 1 :]
        ids = self.builder.append("take", (self.id, index.id), shape, self.dtype, dim=dim)
        return self._new(ids)

    def updated(
        self, dim: int, indices: Sequence[Value], rows: Value, *, in_place: bool = False
    ) -> Value:
        """The value with ``rows`` at positions of its axes from ``dim`` on, one for each of the
        ``indices``, which have one shape."""
        operands = (self.id, rows.id, *(index.id for index in indices))
        ids = self.builder.append(
            "update", operands, self.shape, self.dtype, dim=dim, in_place=in_place
        )
        return self._new(ids)

    def accumulated(self, dim: int, indices: Sequence[Value], rows: Value) -> Value:
        """The value with ``rows`` added at positions as in ``updated``."""
        operands = (self.id, rows.id, *(index.id for index in indices))
        return self._new(
            self.builder.append("accumulate", operands, self.shape, self.dtype, dim=dim)
        )

    def pad(self, lo: Sequence[int], hi: Sequence[int], value: Number = 0) -> Value:
        if not any(lo) and not any(hi):
            return self
        shape = [a + n + b for a, n, b in zip(lo, self.shape, hi, strict=True)]
        fill = float(value) if self.is_float else int(value)
        return self._new(
            self.builder.append(
                "pad", (self.id,), shape, self.dtype, lo=tuple(lo), hi=tuple(hi), value=fill
            )
        )


def iota(builder: GraphBuilder, size: int, *, dtype: str = "int64") -> Value:
    """``0, 1, ..., size - 1``."""
    return Value(builder, builder.append("iota", (), (size,), dtype, dim=0))


def concatenate(parts: Sequence[Value], dim: int) -> Value:
    """The parts, all of one dtype, one after another along ``dim``."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    shape = list(first.shape)
    shape[dim] = sum(p.shape[dim] for p in parts)
    ids = first.builder.append("cat", [p.id for p in parts], shape, first.dtype, dim=dim)
    return Value(first.builder, ids)
