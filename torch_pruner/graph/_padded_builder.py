"""A graph that is written node by node with a book on what is padding of each value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph._bucket_rules import RULES, Operand
from torch_pruner.graph._padding import NotAlikeError, Padding, Pair
from torch_pruner.graph.ir import GraphBuilder, Node, const_value

if TYPE_CHECKING:
    from collections.abc import Sequence

COUNT_DTYPE = "int32"


class PaddedBuilder:
    """Appends nodes and knows the padding of each (``known``); ``counts`` are the inputs that say
    how much of an extent counts, after the graph's own ``inputs``."""

    def __init__(self, inputs: int) -> None:
        self.builder = GraphBuilder()
        self.known: dict[int, Padding] = {}
        self.counts: dict[Pair, int] = {}
        self._inputs = inputs
        self._twins: dict[tuple[int, tuple[tuple[Pair, ...], ...]], int] = {}

    def operands(self, at: Sequence[int]) -> list[Operand]:
        return [Operand(i, self.builder.dtype(i), self.known[i]) for i in at]

    def emit(self, node: Node, operands: Sequence[int], pairs: Sequence[Pair]) -> int:
        """``node`` over ``operands``, nodes of the new graph; ``pairs`` are its extents."""
        padding = RULES[node.op].padding(node, tuple(pairs), self.operands(operands))
        if padding.pairs != tuple(pairs):
            raise NotAlikeError(f"{node.op}: its extents are not those of its operands")
        at = self.builder.append(node.op, operands, node.shape, node.dtype, **dict(node.attrs))
        return self.kept(at, padding)

    def kept(self, at: int, padding: Padding) -> int:
        """A node with what is known of it: another one like it, where it is known to vary
        otherwise. So positions along an axis that happens to be as long at the large size stay
        apart from those along one that varies."""
        if self.known.setdefault(at, padding).dims == padding.dims:
            return at
        twin = self._twins.setdefault((at, padding.dims), len(self.builder.nodes))
        if twin == len(self.builder.nodes):
            self.builder.nodes.append(self.builder.nodes[at])
            self.known[twin] = padding
        return twin

    def make(
        self, op: str, operands: Sequence[int], pairs: Sequence[Pair], dtype: str, **attrs: object
    ) -> int:
        """A node that neither graph has."""
        shape = tuple(large for large, _ in pairs)
        return self.emit(Node(op, (), shape, dtype, tuple(attrs.items())), operands, pairs)  # type: ignore[arg-type]

    def const(self, value: float | bool, dtype: str) -> int:
        at = self.builder.const(value, dtype)
        self.known.setdefault(at, Padding((), value=const_value(self.builder.nodes[at])))
        return at

    def count(self, pair: Pair) -> int:
        """The input that says how much of an extent counts."""
        if pair not in self.counts:
            index = self._inputs + len(self.counts)
            self.counts[pair] = self.builder.input(index, (), COUNT_DTYPE, counts=True)
            self.known[self.counts[pair]] = Padding(())
        return self.counts[pair]

    def scalar(self, op: str, number: int, pair: Pair, dtype: str) -> int:
        """A number and an extent that counts, ``op`` of them."""
        extent = self.count(pair)
        if dtype != COUNT_DTYPE:
            extent = self.make("cast", [extent], (), dtype)
        return self.make(op, [number, extent], (), dtype)
