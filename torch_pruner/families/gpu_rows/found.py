"""What a thread has found of its row for a reduction, and how others' findings are taken in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.reductions import combine, identity
from torch_pruner.codegen.tir.builders import Buffer, Expr, S, Stmt, T, seq
from torch_pruner.codegen.tir.scalar import apply
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.gpu_rows.form import held_dtypes
from torch_pruner.graph.ops import FLOATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.codegen.parts.gpu.grid import Grid, Registers
    from torch_pruner.graph.ir import Graph


class Found(ABC):
    """A reduction as each thread has it, in registers."""

    def __init__(self, registers: Sequence[Registers]) -> None:
        self.registers = registers

    @property
    def dtypes(self) -> list[str]:
        """Of what travels between threads, value by value."""
        return [str(r.buffer.dtype) for r in self.registers]

    @property
    @abstractmethod
    def result(self) -> Registers:
        """What the reduction gives, once everything was taken in."""

    def held(self, tid: Expr) -> list[Expr]:
        """What thread ``tid`` has."""
        return [r.buffer[r.at(tid, 0)] for r in self.registers]

    def set(self, tid: Expr, values: Sequence[Expr]) -> Stmt:
        """``values`` in place of what thread ``tid`` has."""
        stores = [
            store(r.buffer, r.at(tid, 0), v) for r, v in zip(self.registers, values, strict=True)
        ]
        return seq(stores)

    @abstractmethod
    def begin(self, tid: Expr) -> Stmt:
        """Nothing was found yet."""

    @abstractmethod
    def take(self, tid: Expr, values: Sequence[Expr]) -> Stmt:
        """Take in what another has found. ``values`` are cheap: they are read several times."""

    def take_from(self, tid: Expr, buffers: Sequence[Buffer], at: Expr) -> Stmt:
        """Take in what another has left at a place of ``buffers``, one for each value."""
        values = [T.Var("candidate", dtype) for dtype in self.dtypes]
        binds = [S.Bind(v, buf[at]) for v, buf in zip(values, buffers, strict=True)]
        return seq([*binds, self.take(tid, values)])

    def as_held(self, value: Expr) -> Expr:
        """An element of the row, in the dtype of the first of what is held."""
        return value.astype(self.dtypes[0])

    def take_element(self, tid: Expr, value: Expr, position: Expr) -> Stmt:
        """Take in an element of the row, which is cheap to read."""
        return self.take(tid, [value])


class Sum(Found):
    """Of a sum, a product, an extreme value, ``any`` or ``all``."""

    def __init__(self, spec: Graph, reduction: int, grid: Grid) -> None:
        self._node = spec.nodes[reduction]
        (dtype,) = held_dtypes(spec, reduction)
        self._kind = "bool" if self._node.dtype == "bool" else dtype  # what is computed in
        super().__init__([grid.registers(1, dtype, f"r{reduction}")])

    @property
    def result(self) -> Registers:
        return self.registers[0]

    def begin(self, tid: Expr) -> Stmt:
        return self.set(tid, [identity(self._node, self._kind).astype(self.dtypes[0])])

    def take(self, tid: Expr, values: Sequence[Expr]) -> Stmt:
        (held,), (value,) = self.held(tid), values
        kind = self._kind
        found = combine(self._node, held.astype(kind), value.astype(kind), kind)
        return self.set(tid, [found.astype(self.dtypes[0])])

    def as_held(self, value: Expr) -> Expr:
        return value.astype(self._kind).astype(self.dtypes[0])


class Place(Found):
    """The position of the first extreme element along the one axis; NaN is the most extreme."""

    def __init__(self, spec: Graph, reduction: int, grid: Grid) -> None:
        self._node = spec.nodes[reduction]
        source = spec.nodes[self._node.inputs[0]].dtype
        self._floats = source in FLOATS
        names = f"best{reduction}", f"r{reduction}"
        dtypes = held_dtypes(spec, reduction)
        super().__init__([grid.registers(1, d, n) for d, n in zip(dtypes, names, strict=True)])

    @property
    def result(self) -> Registers:
        return self.registers[1]

    def begin(self, tid: Expr) -> Stmt:
        return self.set(tid, [T.const(0, self.dtypes[0]), T.const(-1, "int64")])

    def take(self, tid: Expr, values: Sequence[Expr]) -> Stmt:
        (value, place), (held, at) = values, self.held(tid)
        better = apply("gt" if self._node.op == "argmax" else "lt", (value, held), "bool")
        same = apply("eq", (value, held), "bool")
        if self._floats:
            nan, held_nan = (apply("isnan", (v,), "bool") for v in (value, held))
            better = T.any(T.all(better, T.Not(held_nan)), T.all(nan, T.Not(held_nan)))
            same = T.any(same, T.all(nan, held_nan))
        none = T.const(0, "int64")
        wins = T.any(at < none, better, T.all(same, place < at))
        return S.IfThenElse(T.all(place >= none, wins), self.set(tid, values), None)

    def take_element(self, tid: Expr, value: Expr, position: Expr) -> Stmt:
        return self.take(tid, [value, position.astype("int64")])


def found_of(spec: Graph, reduction: int, grid: Grid) -> Found:
    """How threads of ``grid`` hold a reduction of ``spec``."""
    where = spec.nodes[reduction].op in ("argmax", "argmin")
    return (Place if where else Sum)(spec, reduction, grid)
