"""Decisions of products of rows in groups, and how their matrices lie.

Matrices of experts are most of a model's memory and are read where they lie: along the reduction,
as linear layers have them, or along the columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.strided import matrix_strides, strided

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Node
    from torch_pruner.graph.strided import Strided

PAIRED = 32  # numbers of a vector of pairs

N = TypeVar("N")


class GroupedProductDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    tm: N  # rows of a register tile; what is left of a group is multiplied row by row
    nc: N  # columns of it, or vectors of columns where those are neighbours
    nb: N  # register tiles side by side in a task
    ku: N  # unrolled steps of the reduction
    par: N  # 1: tasks in parallel
    dots: N  # 1: pairs of bfloat16 are multiplied and added in one step (AVX512-BF16)


@dataclass(frozen=True, slots=True)
class Grouped:
    """A product (S, K) x (E, K, N) -> (S, N) of rows in E groups.

    ``along_k``: the reduction's elements of a matrix are neighbours, else its columns are.
    """

    at: int
    node: Node
    rows: int
    depth: int
    columns: int
    groups: int
    along_k: bool

    @property
    def x(self) -> int:
        return self.node.inputs[0]

    @property
    def matrices(self) -> int:
        return self.node.inputs[1]

    @property
    def ends(self) -> int:
        """Where groups end."""
        return self.node.inputs[2]

    def lanes(self, most: int) -> int:
        """Elements of a vector: whole ones fill the axis that lies in memory."""
        return math.gcd(most, self.depth if self.along_k else self.columns)

    def units(self, vl: int) -> int:
        """Columns, or vectors of columns, of a matrix."""
        return self.columns if self.along_k else self.columns // vl


def pairs_of(spec: Graph, found: Grouped) -> tuple[Strided, Strided] | None:
    """Where rows and matrices lie if pairs of bfloat16 along the reduction can be read as words,
    whole vectors of them."""
    places = strided(spec, found.x), strided(spec, found.matrices)
    if found.node.dtype != "bfloat16" or found.depth % PAIRED or None in places:
        return None
    x, matrices = places
    assert x is not None
    assert matrices is not None
    return (x, matrices) if x.strides[-1] == 1 and matrices.strides[-2] == 1 else None


def grouped_of(spec: Graph) -> Grouped:
    """The product of rows in groups of a kernel graph that has one."""
    at = next(i for i, node in enumerate(spec.nodes) if node.kind is OpKind.GROUPED)
    node = spec.nodes[at]
    groups, depth, columns = spec.nodes[node.inputs[1]].shape
    strides = matrix_strides(spec, node.inputs[1])
    along_k = strides is not None and strides[0] == 1 and strides[1] != 1
    return Grouped(at, node, node.shape[0], depth, columns, groups, along_k)
