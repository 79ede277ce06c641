"""Elementwise arithmetic as TVM's own front ends write it: its operators, its intrinsics.

For MetaSchedule, whose rules and passes refuse the ``Let``s of ``scalar.apply``. Rounding and the
treatment of NaN are TVM's and not torch's, so no kernel that a user calls is made with this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.tir import scalar
from torch_pruner.codegen.tir.builders import Expr, T

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def apply(op: str, args: Sequence[Expr], dtype: str) -> Expr:
    """``op`` of ``args``, as ``dtype``; in the arithmetic of ``scalar`` where no form is known.

    Those known are of float32 and bool.
    """
    known = _ONE.get(op) if len(args) == 1 else _MORE.get(op)
    dtypes = {dtype, *(str(a.ty.dtype) for a in args)}
    if not dtypes <= {"float32", "bool"} or (known is None and op != "cast"):
        return scalar.apply(op, args, dtype)
    return T.Cast(dtype, args[0]) if known is None else known(*args)


def _zero() -> Expr:
    return T.const(0.0, "float32")


def _one() -> Expr:
    return T.const(1.0, "float32")


_ONE: dict[str, Callable[[Expr], Expr]] = {
    "neg": lambda x: _zero() - x,
    "abs": T.abs,
    "relu": lambda x: T.max(x, _zero()),
    "sqrt": T.sqrt,
    "rsqrt": lambda x: _one() / T.sqrt(x),
    "reciprocal": lambda x: _one() / x,
    "sigmoid": T.sigmoid,
    "exp": T.exp,
    "log": T.log,
    "tanh": T.tanh,
    "erf": T.erf,
    "sin": T.sin,
    "cos": T.cos,
}
_MORE: dict[str, Callable[..., Expr]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "maximum": T.max,
    "minimum": T.min,
    "pow": T.pow,
    "where": T.Select,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: T.EQ(x, y),
    "ne": lambda x, y: T.NE(x, y),
    "logical_and": lambda x, y: T.And(x, y),
    "logical_or": lambda x, y: T.Or(x, y),
}
