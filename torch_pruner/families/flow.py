"""The data flow of a schedule along its tiling, one step per move or use of a buffer.

Memory → panel in cache → register tile → compute → epilogue → write-back: each step is a
``FlowStep``, whose numbers hold one value per point. So thousands of points are described at once,
and nothing is built. ``flow_of`` derives it from the symbols and the kernel graph, which any sketch
has; one that knows its loops better has a ``flow`` of its own. Any number of operands, any number
of steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_pruner.graph.ops import EXPENSIVE, ITEMSIZE, OpKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.families.space import Decisions, Sketch
    from torch_pruner.task import Task

Values = npt.NDArray[np.float64] | float
LINE_BYTES = 64.0


class Role(IntEnum):
    """Which step of the way a token describes. The numbers are part of trained weights."""

    ACTIVATION = 0  # an operand read from memory
    CONSTANT = 1  # an operand that never changes, read from memory
    PANEL = 2  # what a core keeps re-reading in its caches
    TILE = 3  # what moves between cache and registers
    COMPUTE = 4
    EPILOGUE = 5
    WRITE = 6  # an output written to memory
    COPY = 7  # a copy made before the loops: packed, padded


class Reuse(IntEnum):
    """Why a byte is touched again."""

    NONE = 0
    LOOP = 1  # a loop that its index does not depend on
    SERIAL = 2  # written, then read


@dataclass(frozen=True, slots=True)
class FlowStep:
    """One buffer at one level, each number for all points (n,) or the same for all.

    ``moved`` bytes in all, ``unique`` bytes among them, ``span`` bytes touched before a byte comes
    again, ``alloc`` bytes held at once, ``stride`` bytes between neighbouring elements, ``run``
    bytes that lie next to each other, ``ops`` operations done in the step.
    """

    role: Role
    itemsize: float
    moved: Values = 0.0
    unique: Values = 0.0
    span: Values = 0.0
    alloc: Values = 0.0
    stride: Values = 0.0
    run: Values = LINE_BYTES
    ops: Values = 0.0
    reuse: Reuse = Reuse.NONE


def flow_of(task: Task, sketch: Sketch, decisions: Decisions) -> Sequence[FlowStep]:
    """The steps of all points, in the order in which data takes them; at least one."""
    own = sketch.flow(decisions)
    if own is not None:
        return own
    return steps_from_symbols(task, symbol_columns(sketch, decisions))


def symbol_columns(sketch: Sketch, decisions: Decisions) -> Mapping[str, npt.NDArray[np.float64]]:
    """The symbols that hold a value per point, by name."""
    symbols: Any = sketch.symbols(decisions)
    found = {}
    for field in dataclasses.fields(symbols):
        value = np.asarray(getattr(symbols, field.name), dtype=np.float64)
        if value.shape == (len(decisions),):
            found[field.name] = np.nan_to_num(value, nan=0.0, posinf=1e30, neginf=-1e30)
    return found


def steps_from_symbols(
    task: Task, symbols: Mapping[str, npt.NDArray[np.float64]]
) -> Sequence[FlowStep]:
    """The flow that the symbols imply: traffic is shared out among operands by their size."""
    spec, vector = task.spec, float(task.target.vector_bytes)
    outputs = [spec.nodes[o] for o in spec.outputs]
    written = float(sum(n.nbytes for n in outputs))
    inputs = [spec.nodes[i] for i in spec.inputs]
    size = float(sum(n.nbytes for n in inputs)) or 1.0
    item = float(max((ITEMSIZE[n.dtype] for n in (*inputs, *outputs)), default=4))

    traffic = np.maximum(symbols.get("s5_traffic_bytes", size + written), written)
    rounds = symbols.get("s6_rounds", 1.0)
    held, registers = symbols.get("s3_cache_bytes", 0.0), symbols.get("s1_registers", 1.0)
    ops = symbols.get("s8_ops", float(sum(n.numel for n in outputs)))
    tile_ops = np.maximum(symbols.get("s2_tile_ops", 1.0), 1.0)
    run = symbols.get("s7_contiguous_bytes", vector)

    steps = []
    for node in inputs:
        share = np.maximum((traffic - written) * (node.nbytes / size), node.nbytes)
        constant = bool(node.attr("static"))
        steps.append(
            FlowStep(
                Role.CONSTANT if constant else Role.ACTIVATION,
                float(ITEMSIZE[node.dtype]),
                moved=share,
                unique=float(node.nbytes),
                span=held,
                stride=float(ITEMSIZE[node.dtype]),
                run=run,
                reuse=Reuse.LOOP,
            )
        )
    steps.append(FlowStep(Role.PANEL, item, traffic, held, held, held, item, run, 0.0, Reuse.LOOP))
    tile = registers * vector
    loads = np.maximum(ops / tile_ops, 1.0) * item
    steps.append(
        FlowStep(Role.TILE, item, loads, tile, tile, tile, item, vector, 0.0, Reuse.SERIAL)
    )
    steps.append(FlowStep(Role.COMPUTE, item, 0.0, tile, rounds, tile, item, vector, ops))
    steps.append(
        FlowStep(Role.EPILOGUE, item, written, written, tile, tile, item, vector, after(task))
    )
    steps += [
        FlowStep(Role.WRITE, float(ITEMSIZE[n.dtype]), float(n.nbytes), float(n.nbytes), run=vector)
        for n in outputs
    ]
    return steps


def after(task: Task) -> float:
    """Vector operations of all elementwise nodes; costly functions count for twelve."""
    total = 0.0
    for node in task.spec.nodes:
        if node.kind is OpKind.POINTWISE:
            total += node.numel * (12.0 if node.op in EXPENSIVE else 1.0)
        elif node.kind is OpKind.INJECTIVE:
            total += 4.0 * node.numel
    return total
