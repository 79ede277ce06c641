"""The data flow of a register-tiled contraction: operands, copies, panel, rows, tile, epilogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_pruner.families.contraction.form import PACKED_NEAR
from torch_pruner.families.flow import FlowStep, Reuse, Role, after
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.contraction.form import ContractionDecisions
    from torch_pruner.families.contraction.space import ContractionSketch
    from torch_pruner.families.space import Array, Decisions

_LOOP, _SERIAL = Reuse.LOOP, Reuse.SERIAL


def contraction_flow(sketch: ContractionSketch, decisions: Decisions) -> Sequence[FlowStep]:
    """One step per operand and level; the operands of the epilogue follow the tile they meet."""
    return [*_operands(sketch, decisions), *_tiling(sketch, decisions), *_rest(sketch, decisions)]


def _operands(sketch: ContractionSketch, decisions: Decisions) -> list[FlowStep]:
    """Both operands on their way from memory, and the copy that packs the second one."""
    c, con, size = sketch.columns(decisions), sketch.con, float(sketch.itemsize)
    second = _second(sketch)
    columns, panel = c.nv * c.vl, con.depth * c.nv * c.vl * second
    blocks, groups, chunks = np.ceil(con.n / columns), float(con.groups), c.mc
    kernel = max(1.0, float(np.prod(con.k[:-1]))) if con.conv is not None else 1.0
    a_bytes = groups * con.rows * con.depth * size / kernel
    b_bytes = groups * con.n * con.depth * second
    by_panels = c.order == 0  # all rows pass by one panel, then the next
    steps = [
        FlowStep(
            Role.ACTIVATION,
            size,
            moved=np.where(by_panels, blocks, 1.0) * a_bytes,
            unique=a_bytes,
            span=panel + a_bytes / groups / chunks,
            stride=size,
            run=con.k[-1] * size,
            reuse=Reuse.LOOP,
        ),
        FlowStep(
            Role.CONSTANT if sketch.constant else Role.ACTIVATION,
            second,
            moved=groups * blocks * np.where(by_panels, 1.0, chunks) * panel,
            unique=b_bytes,
            span=np.where(by_panels, c.tm * con.depth * size, b_bytes / groups),
            stride=second,
            run=_runs(sketch, c),
            reuse=Reuse.LOOP,
        ),
    ]
    if not sketch.constant:
        copied = np.where(c.pack == 1, b_bytes, 0.0)
        # Tasks that pack for themselves copy what they share once each.
        times = np.where(by_panels | (c.pack == 1), 1.0, chunks)
        copied = np.where(c.pack == PACKED_NEAR, b_bytes, copied)
        steps.append(FlowStep(Role.COPY, second, 2 * copied * times, copied, b_bytes, copied))
    return steps


def _tiling(sketch: ContractionSketch, decisions: Decisions) -> list[FlowStep]:
    """What stays in cache, what moves to registers, and the multiply-adds."""
    c, con, size = sketch.columns(decisions), sketch.con, float(sketch.itemsize)
    second, width = _second(sketch), c.vl * size
    columns = c.nv * c.vl
    n_tiles = con.groups * con.row_tiles(c.tm) * np.ceil(con.n / columns)
    panel, rows, tile = con.depth * columns * second, c.tm * con.depth * size, _tile(sketch, c)
    registers = (c.tm * c.nv + c.nv + 1) * width
    run, inner = _runs(sketch, c), con.k[-1] * size
    block = panel / c.kb
    held = block * (1 + c.ahead)  # and the next one, where it is fetched early
    loads = c.tm * size + columns * second  # for one step of the reduction
    ops = 2.0 * n_tiles * c.tm * columns * con.depth
    span = con.depth / c.ku
    return [
        FlowStep(Role.PANEL, second, n_tiles * panel, panel, block + rows, held, second, run,
             reuse=_LOOP),
        FlowStep(Role.PANEL, size, n_tiles * rows, rows, rows, rows, inner, inner, 0.0, _LOOP),
        FlowStep(Role.TILE, size, n_tiles * tile, tile, tile, registers, size, width, 0.0, _SERIAL),
        FlowStep(Role.COMPUTE, size, n_tiles * con.depth * loads, loads, span, tile, size,
             c.nv * width, ops, _SERIAL),
    ]  # fmt: skip


def _rest(sketch: ContractionSketch, decisions: Decisions) -> list[FlowStep]:
    """The epilogue with the operands that only it reads, and the outputs."""
    c, con, size = sketch.columns(decisions), sketch.con, float(sketch.itemsize)
    spec, columns, tile = sketch.task.spec, c.nv * c.vl, _tile(sketch, c)
    n_tiles = con.groups * con.row_tiles(c.tm) * np.ceil(con.n / columns)
    run, ops = columns * size, after(sketch.task)
    steps = [FlowStep(Role.EPILOGUE, size, n_tiles * tile, tile, tile, tile, size, run, ops)]
    for i in spec.inputs:
        if not _feeds(sketch, i):
            node = spec.nodes[i]
            item, moved = float(ITEMSIZE[node.dtype]), float(node.nbytes)
            role = Role.CONSTANT if node.attr("static") else Role.ACTIVATION
            steps.append(FlowStep(role, item, moved, moved, tile, 0.0, item, columns * item))
    for o in spec.outputs:
        item, moved = float(ITEMSIZE[spec.nodes[o].dtype]), float(spec.nodes[o].nbytes)
        steps.append(FlowStep(Role.WRITE, item, moved, moved, 0.0, 0.0, item, columns * item))
    return steps


def _second(sketch: ContractionSketch) -> float:
    """Bytes of an element of the second operand."""
    return sketch.stored


def _tile(sketch: ContractionSketch, c: ContractionDecisions[Array]) -> Any:
    """Bytes of a register tile."""
    return c.tm * c.nv * c.vl * float(sketch.itemsize)


def _runs(sketch: ContractionSketch, c: ContractionDecisions[Array]) -> Any:
    """Bytes of the second operand that lie next to each other."""
    return np.where(c.pack > 0, c.nv, 1) * c.vl * _second(sketch)


def _feeds(sketch: ContractionSketch, i: int) -> bool:
    """Whether an input reaches the contraction and not only its epilogue."""
    nodes, con = sketch.task.spec.nodes, sketch.con
    pending, seen = [con.a, con.b], set()
    while pending:
        at = pending.pop()
        if at == i:
            return True
        if at not in seen:
            seen.add(at)
            pending.extend(nodes[at].inputs)
    return False
