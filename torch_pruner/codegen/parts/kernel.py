"""What an emitter returns, the buffers it takes, and the scheduled kernel made of both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import Buffer, PrimFunc, Stmt, T, buffer, indexing, streaming
from torch_pruner.codegen.tir.indices import remembering

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.packing import PackLayout
    from torch_pruner.graph.signature import BufferSpec, Signature

_LARGE = 2**31 - 2**24  # elements from which on indices have 64 bits


@dataclass(frozen=True, slots=True)
class ScheduledKernel:
    """TIR for one kernel. Parameters are flat buffers: inputs by index, outputs, then scratch.

    ``packs[i]`` is the layout in which input ``i`` must be given, or None for the layout of the
    graph.
    """

    func: PrimFunc
    inputs: tuple[BufferSpec, ...]
    outputs: tuple[BufferSpec, ...]
    scratch: tuple[BufferSpec, ...]
    packs: tuple[PackLayout | None, ...]


@dataclass(slots=True)
class Emitted:
    """What an emitter returns: the body and the buffers it uses, in parameter order."""

    body: Stmt
    inputs: list[Buffer]
    outputs: list[Buffer]
    scratch: list[Buffer]


def parameters(signature: Signature) -> tuple[list[Buffer], list[Buffer], list[Buffer]]:
    """Flat buffers for inputs, outputs and scratch."""
    return (
        [flat(b, f"in{k}") for k, b in enumerate(signature.inputs)],
        [flat(b, f"out{k}") for k, b in enumerate(signature.outputs)],
        [flat(b, f"scratch{k}") for k, b in enumerate(signature.scratch)],
    )


def flat(spec: BufferSpec, name: str) -> Buffer:
    return buffer(math.prod(spec.shape), spec.dtype, name)


def as_kernel(
    spec: Graph, signature: Signature, emit: Callable[[], Emitted], *, past_caches: bool = False
) -> ScheduledKernel:
    """What ``emit`` returns as a function, its indices as wide as ``spec`` needs them."""
    width = index_dtype_of(spec, signature)
    with indexing(width), streaming(past_caches=past_caches), remembering():
        emitted = emit()
    buffers = [*emitted.inputs, *emitted.outputs, *emitted.scratch]
    func = T.PrimFunc(buffers, emitted.body).with_attr(
        {"global_symbol": "kernel", "tirx.noalias": True}
    )
    return ScheduledKernel(
        func, signature.inputs, signature.outputs, signature.scratch, signature.packs
    )


def index_dtype_of(spec: Graph, signature: Signature) -> str:
    """The dtype of a kernel's indices: "int32" unless a value or a buffer has too many elements.

    Loops round extents up to whole tiles and vectors, for which there is room below the bound.
    """
    buffers = (*signature.inputs, *signature.outputs, *signature.scratch)
    most = max([n.numel for n in spec.nodes] + [math.prod(b.shape) for b in buffers])
    return "int32" if most < _LARGE else "int64"
