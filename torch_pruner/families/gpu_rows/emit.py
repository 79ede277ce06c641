"""Row kernels: threads for each row, every reduction over the row shared out among them.

A row has the threads of a block, or one warp of a block that has several rows. Threads take
neighbouring elements, several at once where the row can be cut so. What each has found is exchanged
within its warp; what warps have found goes through shared memory, half of which each reduction
takes in turn: so one barrier is enough, after which every thread has the result.

Where neighbours in memory are of different rows, as in a sum over tokens, a block's rows lie
abreast: a warp has one thread of each, and what threads have found all goes through shared memory.

A value that several passes read is computed again, unless it costs much and its rows fit the
block's memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.grid import WARP, Grid, Unshared, in_blocks, spread
from torch_pruner.codegen.parts.gpu.lanes import exchanged
from torch_pruner.codegen.parts.gpu.sweeps import together
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.reductions import merge
from torch_pruner.codegen.parts.row_passes import forward, newly_kept, row_index
from torch_pruner.codegen.tir.builders import (
    SERIAL,
    UNROLLED,
    Buffer,
    Expr,
    ForKind,
    S,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, held, imm, linear, unlinear
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.families.gpu_rows.form import kept_in_memory
from torch_pruner.families.gpu_rows.found import Found, bound, found_of
from torch_pruner.graph.rows import RowDomain, full_node, meet_others, passes, row_domain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.families.gpu_rows.form import GpuRowsDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

    Phase = Callable[[Expr], Stmt]


@dataclass(slots=True)
class _Rows:
    """What is known of a kernel while it is emitted; ``tid`` is a thread of the block."""

    spec: Graph
    domain: RowDomain
    decisions: GpuRowsDecisions[int]
    reader: Reader
    grid: Grid
    outputs: dict[int, Buffer]
    found: dict[int, Found]
    kept: dict[int, Buffer]  # the block's rows of each value worth keeping
    neighbours: ForKind
    block: Expr = field(default_factory=lambda: imm(0))
    shared: dict[str, Buffer] = field(default_factory=dict)  # by what meets in it
    ready: set[int] = field(default_factory=set)
    met: int = 0  # how many times warps have met

    @property
    def apart(self) -> bool:
        """Whether threads of a row exchange nothing in registers."""
        return bool(self.grid.host or self.decisions.abreast)

    @property
    def units(self) -> int:
        """Of a row: threads, or warps, which have exchanged what they found."""
        threads = self.decisions.threads
        return threads if self.apart else threads // WARP

    def lane(self, tid: Expr) -> Expr:
        """Among the threads of a row."""
        threads, rows, abreast = self.decisions.threads, self.decisions.rows, self.decisions.abreast
        if rows == 1:
            return tid
        return T.floordiv(tid, rows) if abreast else T.floormod(tid, threads)

    def which(self, tid: Expr) -> Expr:
        """Among the rows of the block."""
        threads, rows, abreast = self.decisions.threads, self.decisions.rows, self.decisions.abreast
        if rows == 1:
            return imm(0)
        return T.floormod(tid, rows) if abreast else T.floordiv(tid, threads)

    def kept_at(self, tid: Expr, position: Expr) -> Expr:
        """Where values are kept that lie at a position of the thread's row."""
        which = self.which(tid)
        if self.decisions.abreast:
            return position * self.decisions.rows + which
        return which * self.domain.width + position

    def row(self, tid: Expr) -> Expr:
        """Among all."""
        return self.block * self.decisions.rows + self.which(tid)

    def row_at(self, tid: Expr) -> Index:
        return unlinear(self.row(tid), tuple(self.domain.shape[a] for a in self.domain.kept))

    def index(self, tid: Expr, position: Expr) -> Index:
        """The full index of the element of the thread's row at a position along it."""
        domain = self.domain
        along = unlinear(position, tuple(domain.shape[a] for a in domain.axes))
        return merge(self.row_at(tid), along, domain.axes, len(domain.shape))

    def meeting(self, name: str, dtype: str) -> Buffer:
        """Shared memory for one value of every unit, twice."""
        key = f"{name}_{dtype}"
        if key not in self.shared:
            count = 2 * self.decisions.rows * self.units
            self.shared[key] = self.grid.shared(count, dtype, f"partial{key}")
        return self.shared[key]


def emit(
    spec: Graph,
    decisions: GpuRowsDecisions[int],
    signature: Signature,
    *,
    host: bool = False,
) -> Emitted:
    """See the module, and ``GpuRowsDecisions``."""
    inputs, outputs, scratch = parameters(signature)
    domain, rows = row_domain(spec), decisions.rows
    grid = Grid(in_blocks(domain.rows, rows), rows * decisions.threads, host)
    kept = {
        k: grid.shared(rows * domain.width, value_dtype(spec.nodes[k].dtype), f"kept{k}")
        for k in kept_in_memory(spec, domain, rows)
    }
    flags = any(str(buf.dtype) == "bool" for buf in kept.values())
    state = _Rows(
        spec,
        domain,
        decisions,
        Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        grid,
        dict(zip(spec.outputs, outputs, strict=True)),
        {r: found_of(spec, r, grid) for r in domain.reductions},
        kept,
        UNROLLED if flags else together(spec),
    )

    def body(b: Expr) -> Stmt:
        state.block = b
        return grid.phases(*(_in_rows(state, phase) for phase in _phases(state)))

    return Emitted(grid.launch(body), inputs, outputs, scratch)


def _in_rows(state: _Rows, phase: Phase) -> Phase:
    """The phase, where the last block has a row for the thread."""
    rows = state.domain.rows
    if rows % state.decisions.rows == 0:
        return phase
    inside = Unshared(lambda tid: when(state.row(tid) < rows, phase(tid), None))
    return inside if isinstance(phase, Unshared) else inside.do


def _phases(state: _Rows) -> list[Phase]:
    phases: list[Phase] = []
    waits = False
    # In a warp alone nobody waits for others, unless they read what a pass has kept.
    crossing = state.units == 1 and not state.apart and meet_others(state.spec, state.domain)
    for group in passes(state.spec):
        kept = len(state.ready)
        sweep, *joined = _reduced(state, group)
        phases += [sweep if waits else Unshared(sweep), *joined]
        waits = crossing and len(state.ready) > kept
    first, *rest = _finish(state)
    return [*phases, first if waits else Unshared(first), *map(Unshared, rest)]


def _scope(state: _Rows, tid: Expr, emitted: Callable[[], Sequence[Stmt]]) -> Stmt:
    """Statements that may read what earlier passes have found, each thread its own copy."""
    reader = state.reader
    for r, found in state.found.items():
        registers, dtype = found.result, state.spec.nodes[r].dtype
        reader.overrides[r] = held(registers.buffer, registers.at(tid, 0), dtype)
    return reader.scope(emitted)


def _pass(
    state: _Rows,
    roots: Sequence[int],
    element: Callable[[Expr, Index], Sequence[Stmt]],
    around: Callable[[Expr, Expr, Stmt], Stmt] | None = None,
) -> Phase:
    """A pass over the row. ``element(v, index)``: what is done with number ``v`` of neighbours;
    ``around(tid, first, all_of_them)`` adds to what is done with the neighbours from ``first``."""
    fresh = newly_kept(state.spec, state.domain, state.kept, state.ready, roots)
    known, width, vl = dict(state.reader.overrides), state.domain.width, state.decisions.vl

    def each(tid: Expr, position: Expr, v: Expr) -> Stmt:
        index, place = state.index(tid, position), state.kept_at(tid, position)

        def emitted() -> list[Stmt]:
            saved = [
                S.BufferStore(state.kept[k], state.reader.at(k, index), [place]) for k in fresh
            ]
            return [*saved, *element(v, index)]

        return _scope(state, tid, emitted)

    def neighbours(tid: Expr, first: Expr) -> Stmt:
        body = loop(vl, lambda v: each(tid, first + v, v), state.neighbours, "v")
        return around(tid, first, body) if around else body

    def swept(tid: Expr) -> Stmt:
        state.reader.overrides = {**known, **{k: _from_row(state, k, tid) for k in earlier}}
        lane, threads = state.lane(tid), state.decisions.threads
        return spread(threads, lane, width, lambda at: neighbours(tid, at), width=vl)

    earlier = sorted(state.ready)
    state.ready.update(fresh)
    return swept


def _from_row(state: _Rows, node: int, tid: Expr) -> Callable[[Index], Expr]:
    """Reads a value that is kept for whole rows."""
    domain, buf = state.domain, state.kept[node]
    shape = tuple(domain.shape[a] for a in domain.axes)
    return lambda index: buf[
        state.kept_at(tid, linear(tuple(index[a] for a in domain.axes), shape))
    ]


def _reduced(state: _Rows, group: Sequence[int]) -> list[Phase]:
    """Reductions that need one pass: it, and what threads do to have all of it."""
    founds = [state.found[r] for r in group]
    sources = [state.spec.nodes[r].inputs[0] for r in group]
    vl = state.decisions.vl
    taken = [buffer(vl, f.dtypes[0], "taken", scope="local") for f in founds]

    def element(v: Expr, index: Index) -> list[Stmt]:
        return [
            store(buf, v, found.as_held(state.reader.at(source, index)))
            for found, source, buf in zip(founds, sources, taken, strict=True)
        ]

    def around(tid: Expr, first: Expr, gathered: Stmt) -> Stmt:
        def into(v: Expr) -> Stmt:
            pairs = zip(founds, taken, strict=True)
            return seq([f.take_element(tid, buf[v], first + v) for f, buf in pairs])

        return seq([*map(stack, taken), gathered, loop(vl, into, UNROLLED, "v")])

    swept = _pass(state, sources, element, around)
    together_at_last, *rest = _joined(state, founds)

    def whole(tid: Expr) -> Stmt:
        begun = [f.begin(tid) for f in founds]
        return seq([*begun, swept(tid), together_at_last(tid)])

    return [whole, *rest]


def _joined(state: _Rows, founds: Sequence[Found]) -> list[Phase]:
    """From what each thread has found to what all threads of a row have: the end of one phase, and
    those that follow."""
    units, rows = state.units, state.decisions.rows
    half, alone = state.met % 2 * rows * units, units == 1
    buffers = [
        [] if alone else [state.meeting(f"{n}_{k}", d) for k, d in enumerate(found.dtypes)]
        for n, found in enumerate(founds)
    ]
    state.met += not alone

    def at(tid: Expr, unit: Expr) -> Expr:
        return imm(half) + unit * rows + state.which(tid)

    def exchange(tid: Expr) -> Stmt:
        if state.apart:
            return handed_over(tid, state.lane(tid))
        stmts: list[Stmt] = []
        for distance in (16, 8, 4, 2, 1):
            stmts += [_from_lane(found, tid, distance) for found in founds]
        if not alone:
            first = T.EQ(T.floormod(tid, WARP), imm(0))
            stmts.append(when(first, handed_over(tid, T.floordiv(state.lane(tid), WARP)), None))
        return seq(stmts)

    def handed_over(tid: Expr, unit: Expr) -> Stmt:
        return seq(
            [
                store(buf, at(tid, unit), value)
                for found, own in zip(founds, buffers, strict=True)
                for buf, value in zip(own, found.held(tid), strict=True)
            ]
        )

    def all_of_them(tid: Expr) -> Stmt:
        def one(unit: Expr) -> Stmt:
            stmts: list[Stmt] = []
            for found, own in zip(founds, buffers, strict=True):
                binds, values = bound([buf[at(tid, unit)] for buf in own], found.dtypes)
                stmts += [*binds, found.take(tid, values)]
            return seq(stmts)

        return seq([*(f.begin(tid) for f in founds), loop(units, one, SERIAL, "unit")])

    return [exchange] if alone else [exchange, all_of_them]


def _from_lane(found: Found, tid: Expr, distance: int) -> Stmt:
    """Take in what the thread at a distance in the warp has found, while it takes in this one's."""
    stmts: list[Stmt] = []
    others: list[Expr] = []
    for value, dtype in zip(found.held(tid), found.dtypes, strict=True):
        binds, _, other = exchanged(value, dtype, distance)
        stmts += binds
        others.append(other)
    return seq([*stmts, found.take(tid, others)])


def _finish(state: _Rows) -> list[Phase]:
    """Per-row outputs by one thread; one more pass for the outputs that have the row's width."""
    spec, domain = state.spec, state.domain
    wide = [o for o in spec.outputs if full_node(spec, o, domain.shape) is not None]
    narrow = [o for o in spec.outputs if o not in wide]

    def value_at(o: int, index: Index) -> Stmt:
        at = linear(index, spec.nodes[o].shape)
        return store(state.outputs[o], at, state.reader.at(o, index))

    def lone(tid: Expr) -> Stmt:
        row = state.row_at(tid)
        stores = _scope(
            state, tid, lambda: [value_at(o, row_index(spec, o, domain, row)) for o in narrow]
        )
        return S.IfThenElse(T.EQ(state.lane(tid), imm(0)), stores, None)

    def element(_: Expr, index: Index) -> list[Stmt]:
        return [value_at(o, forward(spec, o, index)) for o in wide]

    phases: list[Phase] = [lone] if narrow else []
    return [*phases, _pass(state, wide, element)] if wide else phases
