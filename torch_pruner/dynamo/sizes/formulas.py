"""The numbers of a graph as functions of its symbols.

A graph that was captured for all sizes names its extents by expressions. Written down for the sizes
of a call (``sizes/symbolic.py``) it has numbers, and so has all that is made of it. Which
expression a number came from is found again by its values at several sizes; then it is known at
every size, without writing the graph down once more.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, cast

import sympy
import torch
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.functions import FloorDiv

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch import fx

    from torch_pruner.dynamo.sizes.varying import Varying

    Values = tuple[int, ...]

__all__ = ["Formulas", "UnknownNumberError", "expressions_of", "grains_of"]


class UnknownNumberError(ValueError):
    """A number that no expression of the graph explains, or more than one does."""


def expressions_of(gm: fx.GraphModule) -> set[sympy.Expr] | None:
    """The expressions of all extents and numbers of a graph; None if some are no whole numbers."""
    found: set[sympy.Expr] = set()
    for node in gm.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, (torch.SymFloat, torch.SymBool)):
                return None
            numbers: tuple[object, ...] = (value,)
            if isinstance(value, torch.Tensor):
                numbers = (*value.shape, *value.stride())
            found |= {n.node.expr for n in numbers if isinstance(n, torch.SymInt)}
    return found


def grains_of(expressions: set[sympy.Expr], varying: Varying) -> dict[Hashable, int]:
    """For the first symbol of each group by how much it differs at least where every extent does:
    one for polynomials; for quotients (an image that a layer halves) a multiple of their divisors.

    Polynomials and such quotients make a graph do the same at every size at which its extents are
    at least one. A minimum or a condition may make it another graph at some. Raises
    ``UnknownNumberError`` for these.
    """
    found: dict[Hashable, int] = {group[0][0]: 1 for group in varying.groups}
    same = _replaced(varying)
    for given in expressions:
        expression = given.xreplace(same)
        grain = _grain(expression)
        for symbol in expression.free_symbols:
            found[symbol] = math.lcm(found.get(symbol, 1), grain)
    return found


def _grain(expression: sympy.Expr) -> int:
    if not expression.free_symbols:
        return 1
    if isinstance(expression, FloorDiv):
        whole, divisor = expression.args
        if not divisor.is_Integer or not divisor > 0:
            raise UnknownNumberError(f"{expression} divides by what varies")
        if not any(isinstance(a, FloorDiv) for a in sympy.preorder_traversal(whole)):
            linear = whole.is_polynomial() and sympy.total_degree(whole) == 1
            if not linear:
                raise UnknownNumberError(f"{expression} is a part of a product")
        return _grain(whole) * int(divisor)
    if expression.is_Symbol:
        return 1
    power = isinstance(expression, sympy.Pow) and expression.exp.is_Integer and expression.exp > 0
    if not power and not isinstance(expression, (sympy.Add, sympy.Mul)):
        raise UnknownNumberError(f"{expression} is no polynomial")
    return math.lcm(*map(_grain, expression.args))


def _replaced(varying: Varying) -> dict[Any, Any]:
    """What stands for symbols that do not vary by themselves."""
    same: dict[Any, Any] = {}
    for (first, _), *others in varying.groups:
        same |= {s: cast("Any", first) + d for s, d in others}
    return same | {s: sympy.Integer(n) for s, n in varying.fixed}


class Formulas:
    """Expressions by their values at ``samples``, which give every symbol a number.

    Symbols that keep a distance from another are taken for that one and the distance.
    """

    def __init__(
        self,
        expressions: set[sympy.Expr],
        samples: Sequence[Mapping[Hashable, int]],
        varying: Varying,
    ) -> None:
        self._symbols = tuple(samples[0])
        self._known: dict[Values, sympy.Expr] = {}
        same = _replaced(varying)
        for given in expressions:
            expression = given.xreplace(same)
            values = tuple(int(cast("int", expression.xreplace(dict(s)))) for s in samples)
            other = self._known.setdefault(values, expression)
            if sympy.expand(other - expression) != 0:
                self._known[values] = sympy.nan  # one of them, but which
        self._wanted: dict[sympy.Expr, int] = {}

    def number(self, values: Sequence[int]) -> int:
        """The place in what ``compiled`` gives of a number that has these values at the samples.

        Raises ``UnknownNumberError``.
        """
        key = tuple(int(v) for v in values)
        constant = sympy.Integer(key[0]) if len(set(key)) == 1 else None
        expression = self._known.get(key, constant)
        if expression is None or expression is sympy.nan:
            raise UnknownNumberError(f"{key} are values of no expression, or of several")
        return self._wanted.setdefault(expression, len(self._wanted))

    def compiled(self) -> Callable[[Mapping[Hashable, int]], Values]:
        """A function of the symbols' numbers that gives all numbers that were asked for."""
        modules = [{"FloorDiv": operator.floordiv}, "math"]
        function = sympy.lambdify(self._symbols, list(self._wanted), modules=modules, cse=True)

        def values(known: Mapping[Hashable, int]) -> Values:
            return tuple(function(*(known[s] for s in self._symbols)))

        return values
