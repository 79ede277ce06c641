"""What a scheduled kernel takes: inputs, outputs and scratch, packed or as they lie.

A warm start plans memory and packs weights from this alone; emitters build their parameters from
it, so the two cannot disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.ir import Graph, Shape
    from torch_pruner.graph.packing import PackLayout


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


def signature_of(
    spec: Graph, packs: Mapping[int, PackLayout], scratch: tuple[BufferSpec, ...]
) -> Signature:
    """The parameters of a kernel of ``spec``; ``packs`` by position among its inputs."""
    nodes = spec.nodes
    layouts = tuple(packs.get(k) for k in range(len(spec.inputs)))
    inputs = tuple(
        BufferSpec(p.shape, p.dtype) if p else BufferSpec(nodes[i].shape, nodes[i].dtype)
        for i, p in zip(spec.inputs, layouts, strict=True)
    )
    outputs = tuple(BufferSpec(nodes[o].shape, nodes[o].dtype) for o in spec.outputs)
    return Signature(inputs, outputs, scratch, layouts)
