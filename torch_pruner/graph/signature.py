"""What a scheduled kernel takes: packed inputs and scratch, from graph and decisions alone.

A warm start plans memory and packs weights from this alone; the emitters build their parameters
from it, so the two cannot disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.graph.attention import attention_of, attention_plan
from torch_pruner.graph.contraction import (
    accumulator,
    constant_operand,
    contraction_of,
    copied_shape,
    copies_first,
    dealt,
    is_widened,
)
from torch_pruner.graph.gradient import gradient_of
from torch_pruner.graph.in_place import in_place_of
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.packing import PackLayout, strided_layout
from torch_pruner.graph.pairs import COLUMNS, STEPS, pair_form
from torch_pruner.graph.rows import row_domain
from torch_pruner.graph.winograd import winograd_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.ir import Graph, Shape


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Shape and dtype of one kernel parameter."""

    shape: Shape
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters in order: inputs by index, outputs, scratch.

    ``packs[i]`` is None for an input taken as it is.
    """

    inputs: tuple[BufferSpec, ...]
    outputs: tuple[BufferSpec, ...]
    scratch: tuple[BufferSpec, ...]
    packs: tuple[PackLayout | None, ...]


def signature(spec: Graph, sketch: str, decisions: Mapping[str, int]) -> Signature:
    """The parameters of ``spec`` scheduled by ``sketch`` with ``decisions``."""
    packs: list[PackLayout | None] = [None] * len(spec.inputs)
    scratch: tuple[BufferSpec, ...] = ()
    if sketch == "contraction":
        scratch = _contraction(spec, decisions, packs)
    elif sketch == "in_place":
        scratch = _in_place(spec)
    elif sketch == "gradient":
        scratch = _gradient(spec, decisions)
    elif sketch == "depthwise":
        _depthwise(spec, decisions, packs)
    elif sketch == "winograd":
        scratch = _winograd(spec, decisions, packs)
    elif sketch == "attention":
        scratch = _attention(spec, decisions)
    elif sketch in STEPS:
        scratch = _pairs(spec, sketch, decisions, packs)
    elif sketch == "rows":
        scratch = _rows(spec, decisions)
    elif sketch == "gpu_product":
        scratch = _gpu_product(spec, decisions, packs)
    elif sketch == "stock":
        _stock(spec, decisions, packs)
    nodes = spec.nodes
    inputs = tuple(
        BufferSpec(p.shape if p else nodes[i].shape, nodes[i].dtype)
        for i, p in zip(spec.inputs, packs, strict=True)
    )
    outputs = tuple(BufferSpec(nodes[o].shape, nodes[o].dtype) for o in spec.outputs)
    return Signature(inputs, outputs, scratch, tuple(packs))


def _contraction(
    spec: Graph, decisions: Mapping[str, int], packs: list[PackLayout | None]
) -> tuple[BufferSpec, ...]:
    """Scratch in order: a panel packed at run time, the input copied, sums between blocks."""
    con = contraction_of(spec)
    static = constant_operand(spec, con)
    widened = bool(is_widened(spec, con, static is not None, decisions))
    block = decisions["vl"] * decisions["nv"]
    shape = (con.groups, -(-con.n // block), con.depth, block)
    scratch: list[BufferSpec] = []
    if static is not None:
        index, view = static
        form = "matmul" if con.form == "conv_phases" else con.form  # the view has split phases
        packs[index] = PackLayout(view, form, con.groups, block, shape)
    elif decisions["pack"] or con.n % block:  # unpacked panels must not reach past a row's end
        scratch.append(BufferSpec(shape, con.acc_dtype if widened else spec.nodes[con.b].dtype))
    if copies_first(spec, con, widened):
        dtype = con.acc_dtype if widened else spec.nodes[con.a].dtype
        scratch.append(BufferSpec(copied_shape(spec, con), dtype))
    if decisions["kb"] > 1:
        chunks, tiles = con.chunked(decisions["tm"], decisions["mc"])
        tasks = con.groups * shape[1] * chunks
        scratch.append(BufferSpec((tasks, tiles, decisions["tm"], block), con.acc_dtype))
    return tuple(scratch)


def _in_place(spec: Graph) -> tuple[BufferSpec, ...]:
    """Scratch: the first operand, where it is copied."""
    found = in_place_of(spec)
    if found is None:
        raise ValueError("no product of few rows with a second operand along the reduction")
    shape = copied_shape(spec, found.con)
    return (BufferSpec(shape, found.con.acc_dtype),) if found.copied else ()


def _gradient(spec: Graph, decisions: Mapping[str, int]) -> tuple[BufferSpec, ...]:
    """Scratch: sums of the tiles of every task, between blocks of lines."""
    found = gradient_of(spec)
    if found is None:
        raise ValueError("no gradient of a convolution's weights with channels last")
    if decisions["lb"] == found.lines:
        return ()
    tm, block = decisions["tm"], decisions["vl"] * decisions["nv"]
    chunks, tiles = dealt(found.tiles(tm), decisions["mc"])
    tasks = chunks * -(-found.con.n // block)
    return (BufferSpec((tasks, tiles, tm, block), found.con.acc_dtype),)


def _gpu_product(
    spec: Graph, decisions: Mapping[str, int], packs: list[PackLayout | None]
) -> tuple[BufferSpec, ...]:
    """Panels as wide as a block's columns; operands that change are read where they lie.

    Scratch: what each part of a split reduction sums up.
    """
    con = contraction_of(spec)
    if (constant := constant_operand(spec, con)) is not None:
        (index, view), block = constant, decisions["bn"]
        form = "matmul" if con.form == "conv_phases" else con.form
        shape = (con.groups, -(-con.n // block), con.depth, block)
        packs[index] = PackLayout(view, form, con.groups, block, shape)
    parts = decisions.get("split", 1)
    sums = BufferSpec((parts, con.groups, con.rows, con.n), con.acc_dtype)
    return (sums,) if parts > 1 else ()


def _stock(spec: Graph, decisions: Mapping[str, int], packs: list[PackLayout | None]) -> None:
    """Inputs whose layout MetaSchedule chose: axis by axis, an extent and a stride."""
    for k, position in enumerate(spec.inputs):
        axes: list[tuple[int, int]] = []
        while (extent := decisions.get(f"in{k}_extent{len(axes)}")) is not None:
            axes.append((extent, decisions[f"in{k}_stride{len(axes)}"]))
        if axes:
            packs[k] = strided_layout(spec.nodes[position], axes)


def _depthwise(spec: Graph, decisions: Mapping[str, int], packs: list[PackLayout | None]) -> None:
    """Panels of one vector, so that any number of vectors can be a tile."""
    con = contraction_of(spec)
    constant = constant_operand(spec, con)
    if constant is None:
        raise ValueError("the weights of a depthwise kernel are constant")
    (index, view), lanes = constant, decisions["vl"]
    shape = (1, -(-con.n // lanes), con.depth, lanes)
    packs[index] = PackLayout(view, con.form, 1, lanes, shape)


def _winograd(
    spec: Graph, decisions: Mapping[str, int], packs: list[PackLayout | None]
) -> tuple[BufferSpec, ...]:
    """Scratch in order, for each task: transformed inputs of a block, and a panel's products."""
    plan = winograd_of(spec)
    constant = None if plan is None else constant_operand(spec, plan.con)
    if plan is None or constant is None:
        raise ValueError("no convolution of three neighbouring taps and constant weights")
    (index, view), block = constant, decisions["vl"] * decisions["nv"]
    shape = (1, -(-plan.con.n // block), plan.positions * plan.channels, block)
    packs[index] = PackLayout(view, "winograd", 1, block, shape)
    rows = decisions["tm"] * decisions["tb"]
    tasks = plan.blocked(rows, decisions["mc"])[0] * decisions["nc"]
    return tuple(
        BufferSpec((tasks, plan.positions, rows, width), plan.con.acc_dtype)
        for width in (plan.channels, block)
    )


def _pairs(
    spec: Graph, sketch: str, decisions: Mapping[str, int], packs: list[PackLayout | None]
) -> tuple[BufferSpec, ...]:
    """Scratch in order: an operand packed at run time, as words; rows copied; sums of tiles."""
    form, block = pair_form(spec, sketch), decisions["nv"] * COLUMNS
    shape, scratch = form.panel(block), []
    if form.constant is not None:
        index, view = form.constant
        packs[index] = PackLayout(view, form.con.form, form.con.groups, block, shape, 2)
    else:
        scratch.append(BufferSpec((*shape[:-1], block), "int32"))
    if form.place is None:
        scratch.append(BufferSpec(form.copy, "bfloat16"))
    if sketch == "tiles":  # a line of the cache for every row: stacks are not aligned so well
        scratch.append(BufferSpec(form.sums(decisions), "float32"))
    return tuple(scratch)


def row_tasks(spec: Graph, decisions: Mapping[str, int]) -> tuple[int, int]:
    """(rows of one parallel task, number of tasks) of a row kernel."""
    rows = row_domain(spec).rows
    chunk = max(1, min(decisions["chunk"], rows)) if decisions["par"] else rows
    return chunk, -(-rows // chunk)


def _rows(spec: Graph, decisions: Mapping[str, int]) -> tuple[BufferSpec, ...]:
    """One row of scratch per parallel task for every value kept between passes."""
    domain = row_domain(spec)
    tasks = row_tasks(spec, decisions)[1]
    return tuple(BufferSpec((tasks, domain.width), spec.nodes[k].dtype) for k in domain.kept_values)


def _attention(spec: Graph, decisions: Mapping[str, int]) -> tuple[BufferSpec, ...]:
    """Per parallel task: a tile's scores, queries and sums; copies of values, keys, masks."""
    att = attention_of(spec)
    assert att is not None
    plan, dtype = attention_plan(spec, att, decisions), accumulator(spec.nodes[att.out].dtype)
    copies = (
        BufferSpec((plan.tasks, att.keys, plan.slots * plan.column), dtype),
        BufferSpec((plan.tasks, att.keys, att.depth), dtype),
    )
    return (
        BufferSpec((plan.tasks, att.keys, plan.lanes), dtype),
        BufferSpec((plan.tasks, att.depth, plan.lanes), dtype),
        BufferSpec((plan.tasks, plan.lanes, plan.slots * plan.column), dtype),
        *copies[: decisions["pack"]],
        *(BufferSpec((plan.tasks, att.keys, plan.lanes), spec.nodes[m].dtype) for m in plan.masks),
    )
