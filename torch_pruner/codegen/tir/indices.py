"""Arithmetic of indices: of views, of rows in memory, and of positions that data gives."""

from __future__ import annotations

import math
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import Expr, T, imm, index_dtype
from torch_pruner.codegen.tir.vmath import unseen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_pruner.graph.ir import Shape

Index = tuple[Expr, ...]

_joined: ContextVar[dict[int, tuple[Expr, Index, Shape]] | None] = ContextVar(
    "joined", default=None
)


@contextmanager
def remembering() -> Iterator[None]:
    """Inside, an index that a view joined of several is taken apart again without divisions.

    An index of a dimension is always within it, but that ``(h * 64 + d) // 64`` is ``h`` cannot be
    seen from the expression where ``d`` is made of loops' variables.
    """
    token = _joined.set({})
    try:
        yield
    finally:
        _joined.reset(token)


def linear(index: Sequence[Expr], shape: Shape) -> Expr:
    """Row-major offset of ``index`` in ``shape``."""
    offset: Expr = imm(0)
    for i, extent in zip(index, shape, strict=True):
        offset = offset * extent + i if extent != 1 else offset
    return offset


def unlinear(offset: Expr, shape: Shape) -> Index:
    """Inverse of ``linear``."""
    result: list[Expr] = [imm(0)] * len(shape)
    _split(offset, shape, result, 0)
    return tuple(result)


def reshape_index(index: Sequence[Expr], target: Shape, source: Shape) -> Index:
    """Map an index of ``target`` to ``source``, which has as many elements.

    Divides only where dimensions really mix.
    """
    index, target = _apart(index, target)
    result: list[Expr] = [imm(0)] * len(source)
    i = j = 0
    while i < len(target) or j < len(source):
        i0, j0, a, b = i, j, 1, 1
        while True:
            if a == b and (i > i0 or j > j0):
                break
            if (a <= b and i < len(target)) or j >= len(source):
                a, i = a * target[i], i + 1
            else:
                b, j = b * source[j], j + 1
        _split(join(index[i0:i], target[i0:i]), source[j0:j], result, j0)
    return tuple(result)


def safe_position(position: Expr, extent: int) -> Expr:
    """A position that data gave: negative counts from the end, none is outside."""
    wide = position.astype("int64")
    wrapped = T.Select(wide < T.const(0, "int64"), wide + T.const(extent, "int64"), wide)
    low = T.max(wrapped, T.const(0, "int64"))
    return T.min(low, T.const(extent - 1, "int64")).astype(index_dtype())


def _apart(index: Sequence[Expr], shape: Shape) -> tuple[Index, Shape]:
    """The index, and the dimensions it is of, with what was joined taken apart."""
    known = _joined.get() or {}
    parts: list[Expr] = []
    dims: list[int] = []
    for i, extent in zip(index, shape, strict=True):
        _, digits, extents = known.get(id(i), (i, (i,), (extent,)))
        if math.prod(extents) != extent:  # of a dimension that was cut or padded since
            digits, extents = (i,), (extent,)
        parts += digits
        dims += extents
    return tuple(parts), tuple(dims)


def join(index: Index, shape: Shape) -> Expr:
    """``linear``, of which ``_apart`` knows the parts."""
    offset = linear(index, shape)
    if (known := _joined.get()) is not None and sum(d != 1 for d in shape) > 1:
        known[id(offset)] = offset, index, shape  # kept alive: its identity is the key
    return offset


def _split(offset: Expr, source: Shape, result: list[Expr], at: int) -> None:
    """Write the row-major digits of ``offset`` in ``source`` to ``result[at:]``."""
    real = [k for k, d in enumerate(source) if d != 1]
    if len(real) > 1 and _falls(offset):
        offset = unseen(offset)
    for pos, k in enumerate(real):
        inner = math.prod(source[m] for m in real[pos + 1 :])
        digit = T.floordiv(offset, inner) if inner != 1 else offset
        result[at + k] = T.floormod(digit, source[k]) if pos else digit


def _falls(offset: Expr) -> bool:
    """Whether something is subtracted that is no constant, as where a dimension is flipped.

    TVM 0.27 takes ``(4 - i) % 9`` for ``-(i % -9)`` when it flattens a buffer's index.
    """
    if isinstance(offset, T.Sub):
        return not isinstance(offset.b, T.IntImm) or _falls(offset.a)
    if isinstance(offset, (T.Add, T.Mul)):
        return _falls(offset.a) or _falls(offset.b)
    return isinstance(offset, T.Cast) and _falls(offset.value)


def view_index(op: str, attrs: Mapping[str, object], index: Index, source: Shape) -> Index:
    """Index of a view's operand for an index of the view (all views but reshape)."""
    if op == "permute":
        perm: Sequence[int] = attrs["perm"]  # type: ignore[assignment]
        out: list[Expr] = [imm(0)] * len(perm)
        for k, p in enumerate(perm):
            out[p] = index[k]
        return tuple(out)
    if op == "broadcast":
        tail = index[len(index) - len(source) :]
        return tuple(imm(0) if extent == 1 else e for e, extent in zip(tail, source, strict=True))
    if op == "slice":
        starts: Sequence[int] = attrs["starts"]  # type: ignore[assignment]
        steps: Sequence[int] = attrs["steps"]  # type: ignore[assignment]
        return tuple(
            e * h + s if h != 1 or s else e for e, s, h in zip(index, starts, steps, strict=True)
        )
    if op == "flip":
        dims: Sequence[int] = attrs["dims"]  # type: ignore[assignment]
        return tuple(source[k] - 1 - e if k in dims else e for k, e in enumerate(index))
    raise AssertionError(op)
