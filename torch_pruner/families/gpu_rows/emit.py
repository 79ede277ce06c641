"""Row kernels: a block of threads per row, every reduction over the row shared out among them.

A value that several passes read is computed again, unless it costs much and a row of it fits the
block's memory. Threads take neighbouring elements; what each has summed is combined in two steps
through shared memory, after which every thread has the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.grid import WARP, Grid, Registers, Unshared, spread
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.reductions import combine, identity, merge, sum_dtype
from torch_pruner.codegen.parts.row_passes import forward, newly_kept, row_index
from torch_pruner.codegen.tir.builders import (
    SERIAL,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    stack,
)
from torch_pruner.codegen.tir.reader import Index, Reader, held, imm, linear, unlinear
from torch_pruner.codegen.tir.scalar import apply
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.graph.ops import FLOATS, ITEMSIZE
from torch_pruner.graph.rows import RowDomain, full_node, row_domain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.families.gpu_rows.form import GpuRowsDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

KEPT_BYTES = 32 << 10  # of shared memory for values that several passes read


@dataclass(slots=True)
class _Row:
    spec: Graph
    domain: RowDomain
    reader: Reader
    grid: Grid
    outputs: dict[int, Buffer]
    kept: dict[int, Buffer]  # a row of each value worth keeping
    results: dict[int, Registers]
    partial: dict[str, Buffer] = field(default_factory=dict)  # shared, by what is combined
    ready: set[int] = field(default_factory=set)

    @property
    def width_shape(self) -> tuple[int, ...]:
        return tuple(self.domain.shape[a] for a in self.domain.axes)

    def index(self, row: Index, position: Expr) -> Index:
        """The full index of the row's element at a position along it."""
        along = unlinear(position, self.width_shape)
        return merge(row, along, self.domain.axes, len(self.domain.shape))


def emit(
    spec: Graph,
    decisions: GpuRowsDecisions[int],
    signature: Signature,
    *,
    host: bool = False,
) -> Emitted:
    """Decisions: ``threads`` per row."""
    inputs, outputs, scratch = parameters(signature)
    domain, threads = row_domain(spec), decisions.threads
    grid = Grid(domain.rows, threads, host)
    kept: dict[int, Buffer] = {}
    room = KEPT_BYTES
    for k in domain.kept_values:
        dtype = value_dtype(spec.nodes[k].dtype)
        if domain.width * ITEMSIZE[dtype] <= room:
            room -= domain.width * ITEMSIZE[dtype]
            kept[k] = grid.shared(domain.width, dtype, f"kept{k}")
    state = _Row(
        spec,
        domain,
        Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        grid,
        dict(zip(spec.outputs, outputs, strict=True)),
        kept,
        {r: grid.registers(1, sum_dtype(spec.nodes[r]), f"r{r}") for r in domain.reductions},
    )
    for r in domain.reductions:
        for name, dtype in _combined(spec, r).items():
            key = f"{name}:{dtype}"
            if key not in state.partial:
                state.partial[key] = grid.shared(2 * threads, dtype, f"partial_{name}_{dtype}")

    def row(b: Expr) -> Stmt:
        kept_shape = tuple(domain.shape[a] for a in domain.kept)
        return _emit(state, unlinear(b, kept_shape))

    return Emitted(grid.launch(row), inputs, outputs, scratch)


def _combined(spec: Graph, r: int) -> dict[str, str]:
    """What of a reduction travels between threads: name and dtype."""
    node = spec.nodes[r]
    if node.op in ("argmax", "argmin"):
        return {"best": value_dtype(spec.nodes[node.inputs[0]].dtype), "place": "int64"}
    return {"sum": sum_dtype(node)}


def _emit(state: _Row, row: Index) -> Stmt:
    phases: list[Callable[[Expr], Stmt]] = []
    before = False  # whether the reduction before looked for a place
    for r in state.domain.reductions:
        arg = state.spec.nodes[r].op in ("argmax", "argmin")
        sweep, *rest = _arg_reduce(state, r, row) if arg else _reduce(state, r, row)
        # What threads combine they write in a sweep, and other threads read it in the phases that
        # follow: after a sum, in the last of them, the second half, which no sweep writes. What a
        # sweep keeps of the row is read after those phases.
        phases += [sweep if before and arg else Unshared(sweep), *rest]
        before = arg
    phases += [Unshared(phase) for phase in _finish(state, row)]  # shares nothing
    return state.grid.phases(*phases)


def _scope(state: _Row, tid: Expr, emit: Callable[[], Sequence[Stmt]]) -> Stmt:
    """Statements that may read what earlier passes have found, each thread its own copy."""
    reader = state.reader
    for r, registers in state.results.items():
        dtype = state.spec.nodes[r].dtype
        reader.overrides[r] = held(registers.buffer, registers.at(tid, 0), dtype)
    return reader.scope(emit)


def _pass(
    state: _Row,
    row: Index,
    roots: Sequence[int],
    before: Callable[[Expr], Stmt | None],
    body: Callable[[Expr, Expr, Index], Sequence[Stmt]],
    after: Callable[[Expr], Stmt | None],
) -> list[Callable[[Expr], Stmt]]:
    """One phase over the row: ``body(tid, position, index)`` for each of a thread's elements."""
    fresh, known = (
        newly_kept(state.spec, state.domain, state.kept, state.ready, roots),
        dict(state.reader.overrides),
    )

    def element(tid: Expr, position: Expr) -> Stmt:
        index = state.index(row, position)

        def emit() -> list[Stmt]:
            saved = [
                S.BufferStore(state.kept[k], state.reader.at(k, index), [position]) for k in fresh
            ]
            return [*saved, *body(tid, position, index)]

        return _scope(state, tid, emit)

    def each(tid: Expr) -> Stmt:
        state.reader.overrides = dict(known)
        sweep = spread(state.grid, tid, state.domain.width, lambda at: element(tid, at))
        return seq([before(tid), sweep, after(tid)])

    for k in fresh:
        state.ready.add(k)
        state.reader.overrides[k] = _from_row(state, state.kept[k])
    return [each]


def _from_row(state: _Row, buf: Buffer) -> Callable[[Index], Expr]:
    """Reads a value that is kept for a whole row."""
    axes, shape = state.domain.axes, state.width_shape
    return lambda index: buf[linear(tuple(index[a] for a in axes), shape)]


def _reduce(state: _Row, r: int, row: Index) -> list[Callable[[Expr], Stmt]]:
    node, dtype = state.spec.nodes[r], sum_dtype(state.spec.nodes[r])
    result, partial = state.results[r], state.partial[f"sum:{dtype}"]
    source = node.inputs[0]

    def body(tid: Expr, _: Expr, index: Index) -> list[Stmt]:
        at = result.at(tid, 0)
        value = state.reader.at(source, index).astype(dtype)
        return [store(result.buffer, at, combine(node, result.buffer[at], value, dtype))]

    def begin(tid: Expr) -> Stmt:
        return store(result.buffer, result.at(tid, 0), identity(node, dtype))

    def end(tid: Expr) -> Stmt:
        return store(partial, tid, result.buffer[result.at(tid, 0)])

    def joined(into: Buffer, at: Expr | int, first: Expr, stride: int, count: int) -> Stmt:
        def add(i: Expr) -> Stmt:
            return store(into, at, combine(node, into[at], partial[first + i * stride], dtype))

        return seq([store(into, at, identity(node, dtype)), loop(count, add, name="i")])

    phases = _pass(state, row, [source], begin, body, end)
    return [*phases, *_tree(state.grid, partial, result, joined)]


def _tree(
    grid: Grid,
    partial: Buffer,
    result: Registers,
    joined: Callable[[Buffer, Expr | int, Expr, int, int], Stmt],
) -> list[Callable[[Expr], Stmt]]:
    """From a value per thread in the first half of ``partial`` to one that every thread has.

    Some threads each combine as many values as a warp has threads, into the second half; then all
    threads read these. Neighbouring threads read neighbouring values.
    """
    threads = grid.threads
    each = min(WARP, threads)
    few = threads // each

    def some(tid: Expr) -> Stmt:
        into = joined(partial, imm(threads) + tid, tid, few, each)
        return S.IfThenElse(tid < few, into, None) if few < threads else into

    def all_of_them(tid: Expr) -> Stmt:
        return joined(result.buffer, result.at(tid, 0), imm(threads), 1, few)

    return [some, all_of_them]


def _arg_reduce(state: _Row, r: int, row: Index) -> list[Callable[[Expr], Stmt]]:
    """Position of the first extreme element along the one axis; NaN is the most extreme."""
    node = state.spec.nodes[r]
    source = state.spec.nodes[node.inputs[0]]
    names = _combined(state.spec, r)
    kind = names["best"]
    values = state.partial[f"best:{kind}"]
    places, result, grid = state.partial["place:int64"], state.results[r], state.grid
    best = grid.registers(1, kind, f"best{r}")
    none = T.const(-1, "int64")

    def wins(value: Expr, place: Expr, tid: Expr) -> Expr:
        """Whether a value at a place comes before what the thread has."""
        held, at = best.buffer[best.at(tid, 0)], result.buffer[result.at(tid, 0)]
        better = apply("gt" if node.op == "argmax" else "lt", (value, held), "bool")
        same = apply("eq", (value, held), "bool")
        if source.dtype in FLOATS:
            nan, held_nan = (apply("isnan", (v,), "bool") for v in (value, held))
            better = T.any(T.all(better, T.Not(held_nan)), T.all(nan, T.Not(held_nan)))
            same = T.any(same, T.all(nan, held_nan))
        return T.any(at < T.const(0, "int64"), better, T.all(same, place < at))

    def take(value: Expr, place: Expr, tid: Expr) -> Stmt:
        v = buffer(1, kind, "candidate", scope="local")
        both = seq(
            [
                store(best.buffer, best.at(tid, 0), v[imm(0)]),
                store(result.buffer, result.at(tid, 0), place),
            ]
        )
        known = T.all(place >= T.const(0, "int64"), wins(v[imm(0)], place, tid))
        return seq([stack(v), store(v, imm(0), value), S.IfThenElse(known, both, None)])

    def begin(tid: Expr) -> Stmt:
        return seq(
            [
                store(best.buffer, best.at(tid, 0), T.const(0, kind)),
                store(result.buffer, result.at(tid, 0), none),
            ]
        )

    def body(tid: Expr, position: Expr, index: Index) -> list[Stmt]:
        return [take(state.reader.at(node.inputs[0], index), position.astype("int64"), tid)]

    def end(tid: Expr) -> Stmt:
        return seq(
            [
                store(values, tid, best.buffer[best.at(tid, 0)]),
                store(places, tid, result.buffer[result.at(tid, 0)]),
            ]
        )

    def every(tid: Expr) -> Stmt:
        compare = loop(grid.threads, lambda i: take(values[i], places[i], tid), SERIAL, "i")
        return seq([begin(tid), compare])

    return [*_pass(state, row, [node.inputs[0]], begin, body, end), every]


def _finish(state: _Row, row: Index) -> list[Callable[[Expr], Stmt]]:
    """Per-row outputs by one thread; one more pass for the outputs that have the row's width."""
    spec, domain = state.spec, state.domain
    wide = [o for o in spec.outputs if full_node(spec, o, domain.shape) is not None]
    narrow = [o for o in spec.outputs if o not in wide]

    def value_at(o: int, index: Index) -> Stmt:
        at = linear(index, spec.nodes[o].shape)
        return store(state.outputs[o], at, state.reader.at(o, index))

    def lone(tid: Expr) -> Stmt:
        stores = _scope(
            state, tid, lambda: [value_at(o, row_index(spec, o, domain, row)) for o in narrow]
        )
        return S.IfThenElse(T.EQ(tid, imm(0)), stores, None)

    def body(_: Expr, __: Expr, index: Index) -> list[Stmt]:
        return [value_at(o, forward(spec, o, index)) for o in wide]

    def nothing(_: Expr) -> None:
        return None

    phases: list[Callable[[Expr], Stmt]] = [lone] if narrow else []
    if wide:
        phases += _pass(state, row, wide, nothing, body, nothing)
    return phases
