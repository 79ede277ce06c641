"""Indices that a caller hands in: eager raises where one is out of bounds; a kernel would clamp it.

Only indices that are an input of the region are checked; what the graph itself computes is clamped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_pruner.dynamo.partition import Region

aten = torch.ops.aten

_KEEPS_VALUES = frozenset(
    (
        *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default),
        *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
        *(aten.permute.default, aten.t.default, aten.transpose.int, aten.clone.default),
        *(aten.alias.default, aten.detach.default, aten._to_copy.default),
    )
)


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """Input ``input`` must lie in ``low <= index < high`` or be ``ignored``.

    If it does not, the operator of this ``kind`` (a key of ``KINDS``) raises as eager does.
    """

    input: int
    low: int
    high: int
    ignored: int | None
    kind: str

    def __call__(self, index: torch.Tensor) -> None:
        if self._holds(index):
            return
        if self.ignored is not None:
            index = index[index != self.ignored]
            if index.numel() == 0 or self._holds(index):
                return
        KINDS[self.kind](self.high, index)
        raise IndexError(f"index out of range: needs {self.low} <= index < {self.high}")

    def _holds(self, index: torch.Tensor) -> bool:
        least, most = torch.aminmax(index)
        return bool(least.item() >= self.low and most.item() < self.high)


class _Use(NamedTuple):
    """An index argument, the size it indexes into, whether -1 is the last, and the operator."""

    argument: fx.Node
    size: int
    wraps: bool
    kind: str


def index_checks(region: Region) -> tuple[IndexCheck, ...]:
    """The checks that the region's operators ask for, each input and range once."""
    found: dict[tuple[int, int, int, int | None], IndexCheck] = {}
    positions = {node: k for k, node in enumerate(region.inputs)}
    for node in region.nodes:
        for use in _uses(node):
            source, ignored = _source(use.argument)
            if source in positions:
                low = -use.size if use.wraps else 0
                key = positions[source], low, use.size, ignored
                found.setdefault(key, IndexCheck(*key, use.kind))
    return tuple(found.values())


def guarded(
    run: Callable[[list[Any]], Sequence[Any]], checks: Sequence[IndexCheck]
) -> Callable[[list[Any]], Sequence[Any]]:
    """``run`` after all ``checks`` of its inputs."""
    if not checks:
        return run

    def call(inputs: list[Any]) -> Sequence[Any]:
        for check in checks:
            check(inputs[check.input])
        return run(inputs)

    return call


def _uses(node: fx.Node) -> list[_Use]:
    op = node.target
    args: tuple[Any, ...] = node.args
    if op is aten.embedding.default:
        size = _shape(args[0])[0]
        return [_Use(args[1], size, False, "embedding")]
    if op in (aten.index_select.default, aten.gather.default):
        shape = _shape(args[0])
        size = shape[args[1]] if shape else 1
        kind = "index_select" if op is aten.index_select.default else "gather"
        return [_Use(args[2], size, False, kind)]
    if op is aten.index.Tensor:
        return [
            _Use(index, size, True, "index")
            for index, size in zip(args[1], _shape(args[0]), strict=False)
            if index is not None
        ]
    return []


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _blank(*shape: int) -> torch.Tensor:
    """A tensor of this shape and almost no memory."""
    return torch.zeros(()).expand(shape)


# What eager does with indices into a dimension of some size: it raises in its own words.
KINDS: Mapping[str, Callable[[int, torch.Tensor], Any]] = {
    "embedding": lambda size, index: torch.embedding(_blank(size, 1), index),
    "index_select": lambda size, index: torch.index_select(_blank(size), 0, index.flatten()),
    "gather": lambda size, index: torch.gather(_blank(size), 0, index.flatten()),
    "index": lambda size, index: _blank(size)[index],
}


def _source(node: fx.Node) -> tuple[fx.Node, int | None]:
    """Where the same numbers come from, and which of them a loss replaces: the class to ignore."""
    ignored: int | None = None
    while True:
        node = _unviewed(node)
        if node.target is not aten.where.self or ignored is not None:
            return node, ignored
        condition, kept, _ = node.args
        assert isinstance(condition, fx.Node)
        if condition.target is not aten.ne.Scalar or condition.args[0] is not kept:
            return node, None
        (node, *_), number = condition.all_input_nodes, condition.args[1]
        assert isinstance(number, int)
        ignored = number


def _unviewed(node: fx.Node) -> fx.Node:
    while node.target in _KEEPS_VALUES:
        (source, *_) = node.all_input_nodes
        if source.meta["val"].is_floating_point():
            break
        node = source
    return node
