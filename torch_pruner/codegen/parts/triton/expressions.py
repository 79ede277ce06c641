"""TIR as text of Triton's language, in which every expression is about a tile at once.

Variables stand for scalars or for all positions along an axis of a tile: ``m`` for its rows, a
column of numbers, ``n`` for its columns, a row of numbers. What is computed of both is a tile. So
the expressions that emit one element for a thread say here what becomes of all of them.

Positions outside of a buffer are read by nobody: loads are masked by the edges of the axes that
their place depends on, and by the conditions around them.
"""

from __future__ import annotations

import itertools
import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch_pruner import exc
from torch_pruner.codegen.tir.bits import FENCE
from torch_pruner.codegen.tir.builders import (
    Buffer,
    Call,
    Expr,
    S,
    Stmt,
    T,
    TensorLoad,
    Var,
    tvm,
)
from torch_pruner.codegen.tir.intrinsics import FUSED, RARE
from torch_pruner.codegen.tir.vmath import KEEP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch_pruner.codegen.tir.reader import Reader

Axes = frozenset[str]
NONE: Axes = frozenset()
TYPES = {
    "float16": "tl.float16", "bfloat16": "tl.bfloat16", "float32": "tl.float32",
    "float64": "tl.float64", "int8": "tl.int8", "int16": "tl.int16", "int32": "tl.int32",
    "int64": "tl.int64", "uint8": "tl.uint8", "uint16": "tl.uint16", "uint32": "tl.uint32",
    "uint64": "tl.uint64", "bool": "tl.int1",
}  # fmt: skip
_BINARY = {
    "Add": "+", "Sub": "-", "Mul": "*", "EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">",
    "GE": ">=", "And": "&", "Or": "|", "BitwiseAnd": "&", "BitwiseOr": "|", "BitwiseXor": "^",
    "LShift": "<<", "RShift": ">>",
}  # fmt: skip
_FUNCTIONS = {
    "tirx.fabs": "tl.abs({})", "tirx.floor": "tl.floor({})", "prim.ceil": "tl.ceil({})",
    "tirx.ceil": "tl.ceil({})", "tirx.trunc": "libdevice.trunc({})",
    "tirx.exp": "tl.exp({})", "tirx.nearbyint": "libdevice.nearbyint({})",
    "tirx.isnan": "({0} != {0})",
    "tirx.copysign": "libdevice.copysign({}, {})", "tirx.pow": "libdevice.pow({}, {})",
    "prim.likely": "{}", KEEP: "{}", FENCE: "{}", FUSED: "tl.fma({}, {}, {})",
    RARE: "{1}",
}  # fmt: skip
_EXACT = {"float32": "tl.sqrt_rn({})"}  # as the CUDA C of other kernels rounds it
_LIBRARY = frozenset(
    (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
        "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "atan2",
        "fmod", "pow",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Value:
    """Text, and the axes along which what it computes differs."""

    text: str
    axes: Axes = NONE
    literal: bool = False  # a number of Python's, which has no type of its own


@dataclass(slots=True)
class Tile:
    """Prints what happens on a tile of the axes ``axes``: names with extents, outermost first.

    ``edges``: by axis what must hold of a position that there is. Lines are collected in ``lines``.
    """

    axes: dict[str, int]
    pointers: Mapping[str, tuple[str, str]]  # by a buffer's name: its parameter, and its dtype
    edges: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    known: dict[int, Value] = field(default_factory=dict)
    indent: str = "    "
    _analyzer: tvm.sym.Analyzer = field(default_factory=tvm.sym.Analyzer)
    _guards: list[Value] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def within(self, axes: dict[str, int], edges: dict[str, str], indent: str) -> Tile:
        """Another tile of the same kernel, whose lines follow."""
        return Tile(
            axes, self.pointers, edges, self.lines, dict(self.known), indent, self._analyzer,
            list(self._guards), self._count,
        )  # fmt: skip

    def line(self, text: str) -> None:
        self.lines.append(self.indent + text)

    def number(self, var: Var, extent: int, value: str, axis: str = "") -> None:
        """``var`` is ``value`` from here on: a position from 0 to ``extent``, along ``axis``."""
        name = self._fresh(str(var.name))
        self.line(f"{name} = {value}")
        self.known[var.id_] = Value(name, frozenset([axis]) if axis else NONE)
        self._analyzer.bind(var, tvm.ir.Range.from_min_extent(0, extent), True)

    def held(self, var: Var, name: str, axes: Iterable[str] | None = None) -> None:
        """``var`` is what is called ``name``: a whole tile, or what differs along ``axes``."""
        self.known[var.id_] = Value(name, frozenset(self.axes if axes is None else axes))

    def computed(self, reader: Reader, make: Callable[[], Expr]) -> Value:
        """What ``make`` returns, which reads by ``reader``."""
        made: list[Expr] = []

        def emit() -> list[Stmt]:
            made.append(make())
            return [S.Evaluate(made[0])]

        self.run(reader.scope(emit))
        return self(made[0])

    def shape(self, axes: Axes) -> str:
        """Of a value that differs along ``axes``, as text."""
        sizes = [f"{size if axis in axes else 1}," for axis, size in self.axes.items()]
        return f"({' '.join(sizes)})"

    def whole(self, value: Value, dtype: str = "") -> str:
        """The value at every position of the tile."""
        text = value.text
        if value.literal:
            return f"tl.full({self.shape(frozenset(self.axes))}, {text}, {TYPES[dtype]})"
        if value.axes == frozenset(self.axes):
            return text
        return f"tl.broadcast_to({text}, {self.shape(frozenset(self.axes))})"

    @contextmanager
    def guarded(self, condition: Expr) -> Iterator[Value]:
        """Inside, what is read and written is where ``condition`` holds."""
        found = self(condition)
        guard = Value(self._named(found.text, "inside"), found.axes)
        self._guards.append(guard)
        try:
            yield guard
        finally:
            self._guards.pop()

    # Statements.

    def run(self, stmt: Stmt) -> None:
        """The variables that it binds. Raises ``CompileError`` for what has no word here."""
        if isinstance(stmt, S.SeqStmt):
            for part in stmt.seq:
                self.run(part)
        elif isinstance(stmt, S.Bind):
            self._bind(stmt.var, stmt.value)
        elif not isinstance(stmt, S.Evaluate):  # of a value that nobody stores
            raise exc.CompileError("a Triton kernel", f"no word for {type(stmt).__name__}")

    def store(self, buffer: Buffer, index: Expr, value: Expr) -> None:
        """``value`` at ``index``, rounded to the buffer's dtype."""
        found, kept = self(value), self.pointers[str(buffer.name)][1]
        if kept == "bfloat16":
            found = Value(f"({self.whole(found, 'float32')}).to(tl.bfloat16)", found.axes)
        self._store(buffer, index, found, kept)

    def _bind(self, var: Var, value: Expr) -> None:
        found = self(value)
        if not found.literal:
            name = self._fresh(str(var.name))
            self.line(f"{name} = {found.text}")
            found = Value(name, found.axes)
        self.known[var.id_] = found
        if str(value.ty.dtype) == "int32":
            bound = self._analyzer.const_int_bound(value)
            low, high = bound.min_value, bound.max_value
            if -(2**30) < low <= high < 2**30:
                near = tvm.ir.Range.from_min_extent(low, high - low + 1)
                self._analyzer.bind(var, near, True)

    def _store(self, buffer: Buffer, index: Expr, value: Value, dtype: str) -> None:
        parameter, kept = self.pointers[str(buffer.name)]
        place = self(index)
        text = value.text if not value.literal else self.whole(value, dtype)
        if kept == "bool":
            text = f"({text}).to(tl.int8)"
        everywhere = frozenset(self.axes)
        if place.axes != everywhere:
            place = Value(self.whole(place, "int32"), everywhere)
        mask = self._mask(everywhere)
        self.line(f"tl.store({parameter} + {place.text}, {text}{mask})")

    # Expressions.

    def __call__(self, expr: Any) -> Value:
        """The expression's text. Raises ``CompileError`` for what has no word here."""
        kind = type(expr).__name__
        if isinstance(expr, T.Var):
            return self.known[expr.id_]
        if isinstance(expr, T.IntImm):
            return self._whole_number(int(expr.value), str(expr.ty.dtype))
        if isinstance(expr, T.FloatImm):
            return _real_number(float(expr.value), str(expr.ty.dtype))
        if kind in _BINARY:
            return self._joined(f"({{}} {_BINARY[kind]} {{}})", expr.a, expr.b)
        if kind in ("FloorDiv", "FloorMod"):
            return self._divided(kind, expr)
        if kind in ("Div", "Mod"):
            whole = "int" in str(expr.ty.dtype)
            sign = "%" if kind == "Mod" else "//" if whole else "/"  # of whole numbers, truncated
            return self._joined(f"({{}} {sign} {{}})", expr.a, expr.b)
        if kind in ("Min", "Max"):
            return self._joined(f"tl.{kind.lower()}imum({{}}, {{}})", expr.a, expr.b)
        if kind in ("Not", "BitwiseNot"):
            truth = str(expr.a.ty.dtype) == "bool"
            return self._joined("({} ^ True)" if truth else "(~{})", expr.a)
        if isinstance(expr, T.Select):
            return self._chosen(expr)
        if isinstance(expr, T.Cast):
            return self._converted(expr.value, str(expr.ty.dtype))
        if isinstance(expr, T.Let):
            self._bind(expr.var, expr.value)
            return self(expr.body)
        if isinstance(expr, TensorLoad):
            return self._loaded(expr.source, expr.indices[0])
        if isinstance(expr, Call):
            return self._called(expr)
        raise exc.CompileError("a Triton kernel", f"no word for {kind}")

    def _joined(self, form: str, *operands: Expr) -> Value:
        values = [self(o) for o in operands]
        if all(v.literal for v in values):  # Python would compute it in its own precision
            values[0] = self._typed(values[0], str(operands[0].ty.dtype))
        axes = NONE.union(*(v.axes for v in values))
        return Value(form.format(*(v.text for v in values)), axes)

    def _divided(self, kind: str, expr: Any) -> Value:
        """Triton truncates; what may be negative is taken down by one."""
        x, y = self(expr.a), self(expr.b)
        axes = x.axes | y.axes
        if x.literal:
            x = self._typed(x, str(expr.a.ty.dtype))
        form = "({} // {})" if kind == "FloorDiv" else "({} % {})"
        plain = form.format(x.text, y.text)
        positive = self._analyzer.const_int_bound(expr.b).min_value > 0
        if positive and self._analyzer.const_int_bound(expr.a).min_value >= 0:
            return Value(plain, axes)
        if not positive:
            raise exc.CompileError("a Triton kernel", "a divisor that may not be positive")
        rest = self._named(f"({x.text} % {y.text})", "rest")
        if kind == "FloorMod":
            return Value(f"tl.where({rest} < 0, {rest} + {y.text}, {rest})", axes)
        return Value(f"(({x.text} // {y.text}) - ({rest} < 0).to(tl.int32))", axes)

    def _chosen(self, expr: Any) -> Value:
        test, left, right = self(expr.condition), self(expr.true_value), self(expr.false_value)
        return self._where(test, left, right, str(expr.ty.dtype))

    def _where(self, test: Value, left: Value, right: Value, dtype: str) -> Value:
        if left.literal and right.literal:
            left = self._typed(left, dtype)
        axes = test.axes | left.axes | right.axes
        return Value(f"tl.where({test.text}, {left.text}, {right.text})", axes)

    def _converted(self, value: Expr, dtype: str) -> Value:
        found = self._bits(value)
        return Value(f"({found.text}).to({TYPES[dtype]})", found.axes)

    def _called(self, call: Any) -> Value:
        name = str(call.op.name)
        if name == "tirx.reinterpret":
            return self._reinterpreted(call)
        if name == "prim.if_then_else":
            condition, one, other = call.args
            with self.guarded(condition) as test:
                left = self(one)
            with self.guarded(T.bitwise_xor(condition, T.const(True, "bool"))):
                right = self(other)
            return self._where(test, left, right, str(one.ty.dtype))
        if name == "tirx.sqrt":
            return self._joined(_EXACT.get(str(call.ty.dtype), "tl.sqrt({})"), call.args[0])
        if name == "tirx.call_pure_extern":
            function = str(call.args[0].value)
            function = function if function in _LIBRARY else function.removesuffix("f")
            if function not in _LIBRARY:
                raise exc.CompileError("a Triton kernel", f"no word for {function}")
            operands = ", ".join(["{}"] * (len(call.args) - 1))
            return self._joined(f"libdevice.{function}({operands})", *call.args[1:])
        if name not in _FUNCTIONS:
            raise exc.CompileError("a Triton kernel", f"no word for {name}")
        if name == "tirx.isnan":
            value = self(call.args[0])
            return Value(_FUNCTIONS[name].format(self._named(value.text, "x")), value.axes)
        return self._joined(_FUNCTIONS[name], *call.args)

    def _reinterpreted(self, call: Call) -> Value:
        (value,), dtype = call.args, str(call.ty.dtype)
        if (raw := _widened(value)) is not None and dtype == "float32":
            found = self(raw)  # a bfloat16, whose pointer says what it is
            return Value(f"({found.text}).to(tl.float32)", found.axes)
        found = self._bits(value)
        return Value(f"({found.text}).to({TYPES[dtype]}, bitcast=True)", found.axes)

    def _bits(self, value: Expr) -> Value:
        """A value with the type that TIR gives it: elements of bfloat16 are whole numbers there."""
        found = self(value)
        if isinstance(value, TensorLoad) and str(value.source.dtype) == "uint16":
            return Value(f"({found.text}).to(tl.uint16, bitcast=True)", found.axes)
        return self._typed(found, str(value.ty.dtype)) if found.literal else found

    def _loaded(self, buffer: Buffer, index: Expr) -> Value:
        """Elements as their pointer says: of bfloat16, which TIR has as bits, bfloat16."""
        parameter, kept = self.pointers[str(buffer.name)]
        place = self(index)
        axes = place.axes.union(*(g.axes for g in self._guards))
        mask = self._mask(place.axes)
        if axes != place.axes:
            text = place.text
            if place.literal:
                text = f"tl.full({self.shape(axes)}, {text}, tl.int32)"
            else:
                text = f"tl.broadcast_to({text}, {self.shape(axes)})"
            place = Value(text, axes)
        other = ", other=0" if mask else ""
        text = f"tl.load({parameter} + {place.text}{mask}{other})"
        return Value(f"({text} != 0)" if kept == "bool" else text, axes)

    def _mask(self, axes: Axes) -> str:
        """What must hold where places that differ along ``axes`` are read or written."""
        conditions = [text for axis, text in self.edges.items() if axis in axes]
        conditions += [guard.text for guard in self._guards]
        return f", mask={' & '.join(conditions)}" if conditions else ""

    def _typed(self, value: Value, dtype: str) -> Value:
        return Value(f"tl.full((), {value.text}, {TYPES[dtype]})", value.axes)

    def _whole_number(self, value: int, dtype: str) -> Value:
        if dtype == "bool":
            return Value(str(bool(value)), literal=True)
        if dtype == "int32":
            return Value(str(value), literal=True)
        return Value(f"tl.full((), {value}, {TYPES[dtype]})")

    def _named(self, text: str, name: str) -> str:
        fresh = self._fresh(name)
        self.line(f"{fresh} = {text}")
        return fresh

    def _fresh(self, name: str) -> str:
        plain = "".join(c if c.isalnum() else "_" for c in name)
        return f"{plain}_{next(self._count)}"


def _real_number(value: float, dtype: str) -> Value:
    text = repr(value) if math.isfinite(value) else f'float("{value}")'
    if dtype == "float32":
        return Value(text, literal=True)
    return Value(f"tl.full((), {text}, {TYPES[dtype]})")


def _widened(value: Any) -> Expr | None:
    """What was read as bits of bfloat16 and shifted to where those of float32 are."""
    if not isinstance(value, T.LShift) or not isinstance(value.b, T.IntImm) or int(value.b) != 16:
        return None
    inner = value.a.value if isinstance(value.a, T.Cast) else None
    read = isinstance(inner, TensorLoad) and str(inner.source.dtype) == "uint16"
    return inner if read else None
