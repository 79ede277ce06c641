"""Layouts in which kernels want their constant operand, and the function that packs it. numpy only.

A contraction reads its constant operand as panels: ``[group][column block][k][column]``, columns
padded with zeros to whole blocks, so that the inner loop streams it with aligned vector loads and
never strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_pruner.graph.ir import Graph, Shape
from torch_pruner.graph.reference import evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class PackLayout:
    """How the constant operand of one contraction is laid out.

    ``view`` takes the raw input to the operand as the contraction sees it (views only); ``form``
    says how that operand's axes become ``(group, k, n)``; ``block`` is the width of a panel in
    elements.
    """

    view: Graph
    form: str
    groups: int
    block: int
    shape: Shape  # of the packed array: (groups, n blocks, k, block)

    def pack(self, array: Array) -> Array:
        """The packed copy of ``array`` (any dtype; the element type is kept)."""
        operand = to_gkn(evaluate(self.view, [array])[0], self.form, self.groups)
        groups, k, n = operand.shape
        blocks = self.shape[1]
        packed = np.zeros((groups, blocks, k, self.block), operand.dtype)
        whole = n // self.block
        packed[:, :whole] = (
            operand[:, :, : whole * self.block]
            .reshape(groups, k, whole, self.block)
            .transpose(0, 2, 1, 3)
        )
        if whole < blocks:
            packed[:, whole, :, : n - whole * self.block] = operand[:, :, whole * self.block :]
        return packed

    def to_json(self) -> dict[str, Any]:
        return {
            "view": self.view.to_json(),
            "form": self.form,
            "groups": self.groups,
            "block": self.block,
            "shape": list(self.shape),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PackLayout:
        shape = tuple(int(d) for d in data["shape"])
        view = Graph.from_json(data["view"])
        return PackLayout(view, str(data["form"]), int(data["groups"]), int(data["block"]), shape)


def to_gkn(operand: Array, form: str, groups: int) -> Array:
    """The operand with axes (group, k, n).

    Forms: ``matmul`` (*batch, k, n); ``conv`` (o, i, *r); ``depthwise`` (c, 1, *r);
    ``conv_transpose`` (i, o, *r), flipped.
    """
    if form == "matmul":
        return operand.reshape(-1, *operand.shape[-2:])
    spatial = tuple(range(2, operand.ndim))
    if form == "depthwise":
        return operand.reshape(1, operand.shape[0], -1).transpose(0, 2, 1)
    if form == "conv":
        out = operand.reshape(groups, operand.shape[0] // groups, *operand.shape[1:])
        axes = (0, *(d + 1 for d in spatial), 2, 1)
    elif form == "conv_transpose":
        out = np.flip(operand, spatial).reshape(
            groups, operand.shape[0] // groups, *operand.shape[1:]
        )
        axes = (0, *(d + 1 for d in spatial), 1, 2)
    else:
        raise ValueError(f"unknown operand form {form!r}")
    moved = out.transpose(axes)
    return moved.reshape(groups, -1, moved.shape[-1])
