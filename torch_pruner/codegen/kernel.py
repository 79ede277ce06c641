"""From a kernel graph and decisions to a scheduled kernel: the dispatcher over the emitters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_pruner.codegen._tvm import T, buffer, indexing
from torch_pruner.graph.signature import BufferSpec, Signature, signature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.packing import PackLayout

__all__ = ["BufferSpec", "Emitted", "ScheduledKernel", "index_dtype_of", "schedule"]

_LARGE = 2**31 - 2**24  # elements from which on indices have 64 bits


@dataclass(frozen=True, slots=True)
class ScheduledKernel:
    """TIR for one kernel. Parameters are flat buffers: inputs by index, outputs, then scratch.

    ``packs[i]`` is the layout in which input ``i`` must be given, or None for the layout of the
    graph.
    """

    func: Any
    inputs: tuple[BufferSpec, ...]
    outputs: tuple[BufferSpec, ...]
    scratch: tuple[BufferSpec, ...]
    packs: tuple[PackLayout | None, ...]


def schedule(spec: Graph, sketch: str, decisions: Mapping[str, int]) -> ScheduledKernel:
    """Emit ``spec`` as the named sketch with its decisions taken.

    Raises ``KeyError`` for an unknown sketch.
    """
    # Each emitter imports this module.
    from torch_pruner.codegen import (
        abreast,
        attention,
        axpy,
        contraction,
        depthwise,
        dot,
        gradient,
        in_place,
        injective,
        reduction,
        tiles,
        winograd,
    )

    emitters = {
        "abreast": abreast.emit,
        "attention": attention.emit,
        "axpy": axpy.emit,
        "contraction": contraction.emit,
        "depthwise": depthwise.emit,
        "dot": dot.emit,
        "gradient": gradient.emit,
        "in_place": in_place.emit,
        "tiles": tiles.emit,
        "winograd": winograd.emit,
        "rows": reduction.emit_rows,
        "columns": reduction.emit_columns,
        "injective": injective.emit,
    }
    takes = signature(spec, sketch, decisions)
    with indexing(index_dtype_of(spec, takes)):
        emit = emitters[sketch](spec, decisions, takes)
    buffers = [*emit.inputs, *emit.outputs, *emit.scratch]
    func = T.PrimFunc(buffers, emit.body).with_attr(
        {"global_symbol": "kernel", "tirx.noalias": True}
    )
    return ScheduledKernel(func, takes.inputs, takes.outputs, takes.scratch, takes.packs)


def index_dtype_of(spec: Graph, takes: Signature) -> str:
    """Of the indices of a kernel: "int32" unless a value or a buffer of it has too many elements.

    Loops round extents up to whole tiles and vectors, for which there is room below the bound.
    """
    buffers = (*takes.inputs, *takes.outputs, *takes.scratch)
    most = max([n.numel for n in spec.nodes] + [math.prod(b.shape) for b in buffers])
    return "int32" if most < _LARGE else "int64"


@dataclass(slots=True)
class Emitted:
    """What an emitter returns: the body and the buffers it uses, in parameter order."""

    body: Any
    inputs: list[Any]
    outputs: list[Any]
    scratch: list[Any]


def parameters(takes: Signature) -> tuple[list[Any], list[Any], list[Any]]:
    """Flat buffers for inputs, outputs and scratch."""
    return (
        [flat(b, f"in{k}") for k, b in enumerate(takes.inputs)],
        [flat(b, f"out{k}") for k, b in enumerate(takes.outputs)],
        [flat(b, f"scratch{k}") for k, b in enumerate(takes.scratch)],
    )


def flat(spec: BufferSpec, name: str) -> Any:
    return buffer(math.prod(spec.shape), spec.dtype, name)
