"""Row kernels: threads for each row, every reduction over the row shared out among them.

A row has the threads of a block, or one warp of a block that has several rows. Threads take
neighbouring elements, several at once where the row can be cut so. What each has found is exchanged
within its warp; what warps have found goes through shared memory, half of which each reduction
takes in turn: so one barrier is enough, after which every thread has the result.

Where neighbours in memory are of different rows, as in a sum over tokens, a block's rows lie
abreast: a warp has one thread of each, and what threads have found all goes through shared memory.

Where there are few rows, several blocks share each (``split``): a launch for each pass leaves what
they gave in memory, and the next one's threads begin with it.

A value that several passes read is computed again, unless it costs much and its rows fit the
block's memory.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.grid import WARP, Grid, Unshared, in_blocks, spread
from torch_pruner.codegen.parts.gpu.lanes import DISTANCES, exchanged
from torch_pruner.codegen.parts.gpu.sweeps import together
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.row_passes import forward, newly_kept, row_index
from torch_pruner.codegen.tir.builders import (
    SERIAL,
    UNROLLED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, held, imm, linear
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.families.gpu_rows.form import held_dtypes, kept_in_memory
from torch_pruner.families.gpu_rows.found import Found, found_of
from torch_pruner.families.gpu_rows.state import Rows
from torch_pruner.graph.rows import full_node, meet_others, passes, row_domain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.families.gpu_rows.form import GpuRowsDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

    Phase = Callable[[Expr], Stmt]


def emit(
    spec: Graph,
    decisions: GpuRowsDecisions[int],
    signature: Signature,
    *,
    host: bool = False,
) -> Emitted:
    """See the module, and ``GpuRowsDecisions``."""
    inputs, outputs, scratch = parameters(signature)
    own = iter(scratch)
    left = {}
    if decisions.split > 1:
        left = {r: [next(own) for _ in held_dtypes(spec, r)] for r in row_domain(spec).reductions}

    def launched(phases: Callable[[Rows], list[Phase]]) -> Stmt:
        state = _state(spec, decisions, inputs, outputs, left, host=host)

        def body(b: Expr) -> Stmt:
            split = decisions.split
            state.block = T.floordiv(b, split) if split > 1 else b
            state.part = T.floormod(b, split) if split > 1 else imm(0)
            return state.grid.phases(*(_in_rows(state, phase) for phase in phases(state)))

        return state.grid.launch(body)

    launches = [_phases]
    if decisions.split > 1:
        groups = passes(spec)
        launches = [partial(_part, done=groups[:n], group=g) for n, g in enumerate(groups)]
        launches.append(partial(_finish_parts, done=groups))
    return Emitted(seq([launched(phases) for phases in launches]), inputs, outputs, scratch)


def _state(
    spec: Graph,
    decisions: GpuRowsDecisions[int],
    inputs: Sequence[Buffer],
    outputs: Sequence[Buffer],
    left: dict[int, list[Buffer]],
    *,
    host: bool,
) -> Rows:
    domain, rows = row_domain(spec), decisions.rows
    blocks = in_blocks(domain.rows, rows) * decisions.split
    grid = Grid(blocks, rows * decisions.threads, host)
    kept = {
        k: grid.shared(rows * domain.width, value_dtype(spec.nodes[k].dtype), f"kept{k}")
        for k in (kept_in_memory(spec, domain, rows) if decisions.split == 1 else ())
    }
    flags = any(str(buf.dtype) == "bool" for buf in kept.values())
    return Rows(
        spec,
        domain,
        decisions,
        Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        grid,
        dict(zip(spec.outputs, outputs, strict=True)),
        {r: found_of(spec, r, grid) for r in domain.reductions},
        kept,
        UNROLLED if flags else together(spec),
        left,
    )


def _in_rows(state: Rows, phase: Phase) -> Phase:
    """The phase, where the last block has a row for the thread."""
    rows = state.domain.rows
    if rows % state.decisions.rows == 0:
        return phase
    inside = Unshared(lambda tid: when(state.row(tid) < rows, phase(tid), None))
    return inside if isinstance(phase, Unshared) else inside.do


def _phases(state: Rows) -> list[Phase]:
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


def _part(state: Rows, *, done: Sequence[Sequence[int]], group: Sequence[int]) -> list[Phase]:
    """A part of each row for the reductions of a pass, which need those of the passes ``done``."""
    sweep, *joined = _reduced(state, group)

    def leave(tid: Expr) -> Stmt:
        at = state.left_at(tid, state.part)
        stores = [
            store(buf, at, value)
            for r in group
            for buf, value in zip(state.scratch[r], state.found[r].held(tid), strict=True)
        ]
        return when(T.EQ(state.lane(tid), imm(0)), seq(stores), None)

    return [*_whole(state, done), Unshared(sweep), *joined, Unshared(leave)]


def _finish_parts(state: Rows, *, done: Sequence[Sequence[int]]) -> list[Phase]:
    """The outputs of a part of each row, when all parts of all reductions are there."""
    return [*_whole(state, done), *map(Unshared, _finish(state))]


def _whole(state: Rows, done: Sequence[Sequence[int]]) -> list[Phase]:
    """Every thread adds up what all parts of its row gave for the reductions of some passes."""
    reductions = [r for group in done for r in group]

    def phase(tid: Expr) -> Stmt:
        def one(part: Expr) -> Stmt:
            at = state.left_at(tid, part)
            return seq([state.found[r].take_from(tid, state.scratch[r], at) for r in reductions])

        begun = [state.found[r].begin(tid) for r in reductions]
        return seq([*begun, loop(state.decisions.split, one, SERIAL, "part")])

    return [Unshared(phase)] if reductions else []


def _scope(state: Rows, tid: Expr, emitted: Callable[[], Sequence[Stmt]]) -> Stmt:
    """Statements that may read what earlier passes have found, each thread its own copy."""
    reader = state.reader
    for r, found in state.found.items():
        registers, dtype = found.result, state.spec.nodes[r].dtype
        reader.overrides[r] = held(registers.buffer, registers.at(tid, 0), dtype)
    return reader.scope(emitted)


def _pass(
    state: Rows,
    roots: Sequence[int],
    element: Callable[[Expr, Index], Sequence[Stmt]],
    around: Callable[[Expr, Expr, Stmt], Stmt] | None = None,
) -> Phase:
    """A pass over the row. ``element(v, index)``: what is done with number ``v`` of neighbours;
    ``around(tid, first, all_of_them)`` adds to what is done with the neighbours from ``first``."""
    fresh = newly_kept(state.spec, state.domain, state.kept, state.ready, roots)
    known, width, span = dict(state.reader.overrides), state.domain.width, state.span
    vl = state.decisions.vl

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
        begin, parts = state.part * span, state.decisions.split

        def some(at: Expr) -> Stmt:
            body = neighbours(tid, begin + at)
            return when(begin + at < width, body, None) if span * parts != width else body

        return spread(state.decisions.threads, state.lane(tid), span, some, width=vl)

    earlier = sorted(state.ready)
    state.ready.update(fresh)
    return swept


def _from_row(state: Rows, node: int, tid: Expr) -> Callable[[Index], Expr]:
    """Reads a value that is kept for whole rows."""
    domain, buf = state.domain, state.kept[node]
    shape = tuple(domain.shape[a] for a in domain.axes)
    return lambda index: buf[
        state.kept_at(tid, linear(tuple(index[a] for a in domain.axes), shape))
    ]


def _reduced(state: Rows, group: Sequence[int]) -> list[Phase]:
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


def _joined(state: Rows, founds: Sequence[Found]) -> list[Phase]:
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
        for distance in DISTANCES:
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
            pairs = zip(founds, buffers, strict=True)
            return seq([found.take_from(tid, own, at(tid, unit)) for found, own in pairs])

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


def _finish(state: Rows) -> list[Phase]:
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
        first = [T.EQ(state.lane(tid), imm(0))]
        first += [T.EQ(state.part, imm(0))] if state.decisions.split > 1 else []
        return when(T.all(*first), stores, None)

    def element(_: Expr, index: Index) -> list[Stmt]:
        return [value_at(o, forward(spec, o, index)) for o in wide]

    phases: list[Phase] = [lone] if narrow else []
    return [*phases, _pass(state, wide, element)] if wide else phases
