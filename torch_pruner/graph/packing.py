"""Layouts in which kernels want their constant operand, and the function that packs it. numpy only.

A contraction reads its constant operand as panels: ``[group][column block][k][column]``, columns
padded with zeros to whole blocks, so that the inner loop streams it with aligned vector loads and
never strides. Instructions that multiply pairs along k want ``[k pair][column][2]`` instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_pruner.graph.coded import Places, coded, used
from torch_pruner.graph.ir import Graph, Shape
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.reference import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_pruner.graph.ir import Node

Array = npt.NDArray[Any]

_FORMS: dict[str, Callable[[Array, int], Array]] = {}


@dataclass(frozen=True, slots=True)
class PackLayout:
    """How the constant operand of one contraction is laid out.

    ``view`` takes the raw input to the operand as the contraction sees it (views, and perhaps a
    cast); ``form`` says how that operand's axes become ``(group, k, n)``; ``block`` is the width of
    a panel in elements.
    """

    view: Graph
    form: str
    groups: int
    block: int
    shape: Shape  # of the packed array: (groups, n blocks, k / pair, block * pair)
    pair: int = 1  # neighbours along k that lie together; k is padded to what ``shape`` holds
    code: int = 0  # lanes of vectors for which numbers are coded (``graph.coded``); 0: they are not

    def pack(self, array: Array, out: Array | None = None) -> Array:
        """The packed copy of ``array`` (any dtype; ``view`` alone changes it), in ``out`` if given.

        ``out`` is dense and has ``shape``. No second copy is made of what is large.

        Raises ``NotCodedError`` where numbers are to be coded and cannot be.
        """
        operand = to_gkn(evaluate(self.view, [array])[0], self.form, self.groups)
        if self.code:
            words: Array = np.empty(self.shape, operand.dtype) if out is None else out
            coded(operand[0], self.code, words.reshape(-1).view(np.uint16))
            return words
        groups, _, n = operand.shape
        blocks, rows = self.shape[1:3]
        result: Array = np.empty(self.shape, operand.dtype) if out is None else out
        # Axes (group, column block, k / pair, pair, column): a view, whatever ``pair`` is.
        panels = result.reshape(groups, blocks, rows, self.block, self.pair).swapaxes(3, 4)
        whole = n // self.block
        for first in range(self.pair):
            given = operand[:, first :: self.pair]
            count = given.shape[1]
            panels[:, :, count:, first] = 0
            panels[:, :whole, :count, first] = (
                given[:, :, : whole * self.block]
                .reshape(groups, count, whole, self.block)
                .transpose(0, 2, 1, 3)
            )
            if whole < blocks:
                panels[:, whole, :count, first, : n - whole * self.block] = given[
                    :, :, whole * self.block :
                ]
                panels[:, whole, :count, first, n - whole * self.block :] = 0
        return result

    def used(self, packed: Array) -> int:
        """Elements of a packed copy that kernels may read: all but room that coding left."""
        if not self.code:
            return packed.size
        depth, columns = self.view.nodes[self.view.outputs[0]].shape[-2:]
        return used(packed.reshape(-1).view(np.uint16), Places(columns, depth, self.code))

    @property
    def dtype(self) -> str:
        """Of the packed copy's elements."""
        return self.view.nodes[self.view.outputs[0]].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the packed copy, at most."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def to_json(self) -> dict[str, Any]:
        return {
            "view": self.view.to_json(),
            "form": self.form,
            "groups": self.groups,
            "block": self.block,
            "shape": list(self.shape),
            "pair": self.pair,
            **({"code": self.code} if self.code else {}),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PackLayout:
        shape = tuple(int(d) for d in data["shape"])
        view = Graph.from_json(data["view"])
        groups, block, pair = (int(data[name]) for name in ("groups", "block", "pair"))
        code = int(data.get("code", 0))
        return PackLayout(view, str(data["form"]), groups, block, shape, pair, code)


def strided_layout(node: Node, axes: Sequence[tuple[int, int]]) -> PackLayout:
    """The layout with ``axes`` of (extent, stride in elements of the input ``node``), outermost
    first.

    Raises ValueError unless each element of the input is met once.
    """
    from torch_pruner.graph.ir import GraphBuilder

    real = [(extent, stride) for extent, stride in axes if extent > 1]
    nested = sorted(real, key=lambda axis: -axis[1])
    inner = 1
    for extent, stride in reversed(nested):
        if stride != inner:
            raise ValueError(f"axes {list(axes)} are no layout of {node.shape}")
        inner *= extent
    if inner != node.numel:
        raise ValueError(f"axes {list(axes)} are no layout of {node.shape}")
    b = GraphBuilder()
    split = b.reshape(b.input(0, node.shape, node.dtype), tuple(extent for extent, _ in nested))
    moved = b.permute(split, tuple(nested.index(axis) for axis in real))
    view = b.finish([b.reshape(moved, (1, inner))])
    return PackLayout(view, "matmul", 1, inner, (1, 1, 1, inner))


def operand_form(name: str, arrange: Callable[[Array, int], Array]) -> None:
    """Let layouts of the form ``name`` arrange their operand by ``arrange``: to (group, k, n), of
    as many groups as it is given."""
    _FORMS[name] = arrange


def to_gkn(operand: Array, form: str, groups: int) -> Array:
    """The operand with axes (group, k, n).

    Forms: ``matmul`` (*batch, k, n); ``conv`` (o, i, *r); ``depthwise`` (c, 1, *r);
    ``conv_transpose`` (i, o, *r), flipped; and those of ``operand_form``.
    """
    if form == "matmul":
        return operand.reshape(-1, *operand.shape[-2:])
    if (arranged := _FORMS.get(form)) is not None:
        return arranged(operand, groups)
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
