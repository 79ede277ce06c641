"""What conditions are made of that vectors keep: bitwise operators, and NaN by comparison."""

from __future__ import annotations

from torch_pruner.codegen.tir.builders import Expr, T


def negated(x: Expr) -> Expr:
    """Not ``x``: as ``not (x < y)`` TVM would make ``y <= x`` of it, which NaN tells apart."""
    return T.bitwise_xor(x, T.const(True, "bool"))


def opaque(x: Expr, dtype: str) -> Expr:
    """The same value, which the simplifier does not know to be the same."""
    if isinstance(x, T.FloatImm):
        return x
    return T.reinterpret(dtype, T.reinterpret("int64" if dtype == "float64" else "int32", x))


def is_nan(x: Expr, dtype: str) -> Expr:
    """By comparing ``x`` with itself: TVM takes a vector's ``isnan`` apart, and what is computed of
    it, lane by lane."""
    return T.isnan(x) if isinstance(x, T.FloatImm) else negated(T.EQ(x, opaque(x, dtype)))
