"""Pointwise operators of the reference interpreter: one numpy expression each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


def _by_element(fn: Callable[[float], float]) -> Callable[[np.ndarray], np.ndarray]:
    def apply_all(x: np.ndarray) -> np.ndarray:
        flat = np.fromiter(map(fn, x.ravel().tolist()), np.float64, x.size)
        return flat.reshape(x.shape).astype(x.dtype)

    return apply_all


def _truncdiv(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if np.result_type(a, b).kind == "f":
        return np.asarray(np.trunc(a / b))
    quotient = np.floor_divide(a, b)
    inexact = (np.mod(a, b) != 0) & ((a < 0) != (b < 0))
    return np.asarray(quotient + inexact.astype(quotient.dtype))


def _pow(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if np.result_type(a, b).kind == "f":
        return np.asarray(np.power(a, b))
    powered = np.power(a, np.maximum(b, 0))
    odd = np.where(b % 2 == 0, 1, -1)
    inverse = np.where(a == 1, 1, np.where(a == -1, odd, 0))
    return np.where(b < 0, inverse, powered)


def _maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The second of equals, zeros of both signs among them, as vectors of x86 have it."""
    return np.where(np.isnan(a) | (a > b), a, b)


def _minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(a) | (a < b), a, b)


def _sign(x: np.ndarray) -> np.ndarray:
    return (x > 0).astype(np.int8) - (x < 0).astype(np.int8)


def _identity_on_integers(fn: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda x: fn(x) if x.dtype.kind == "f" else x


_TABLE: dict[str, Callable[..., np.ndarray]] = {
    "neg": np.negative,
    "abs": np.abs,
    "sign": _sign,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "erf": _by_element(math.erf),
    "erfc": _by_element(math.erfc),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "relu": lambda x: np.where(x < 0, x.dtype.type(0), x),
    "floor": _identity_on_integers(np.floor),
    "ceil": _identity_on_integers(np.ceil),
    "trunc": _identity_on_integers(np.trunc),
    "round": _identity_on_integers(np.rint),
    "isnan": np.isnan,
    "isinf": np.isinf,
    "logical_not": np.logical_not,
    "bitwise_not": np.invert,
    "cast": lambda x: x,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floordiv": np.floor_divide,
    "mod": np.mod,
    "truncdiv": _truncdiv,
    "fmod": np.fmod,
    "pow": _pow,
    "atan2": np.arctan2,
    "maximum": _maximum,
    "minimum": _minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
    "where": np.where,
}


def apply(op: str, args: list[np.ndarray]) -> np.ndarray:
    """``op`` of widened operands, not yet rounded to the node's dtype."""
    return np.asarray(_TABLE[op](*args))


def convert(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``x`` in ``dtype``; any -> bool is ``!= 0``, float -> int truncates."""
    return np.asarray(x).astype(dtype, copy=False)
