"""Attention of few queries: what its heads share, how it is cut, and scratch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.graph.attention import MIN_QUERIES, attention_of
from torch_pruner.graph.contraction import accumulator
from torch_pruner.graph.ir import const_value
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.shared_heads import heads_together
from torch_pruner.graph.signature import BufferSpec
from torch_pruner.graph.strided import adjacent

if TYPE_CHECKING:
    from torch_pruner.graph.attention import Attention
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")


class DecodeDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector, a power of two
    nq: N  # rows of a tile of scores, which has ``vl`` scores in all
    kb: N  # keys of a block, a multiple of ``vl``
    nr: N  # rows of a tile of sums
    nc: N  # vectors of columns of a tile of sums
    shares: N  # parts into which the keys of a group of heads are divided
    ahead: N  # 1: values are fetched while keys are read, 2: the next keys while values are, too
    tasks: N  # parallel tasks


@dataclass(frozen=True, slots=True)
class FewQueries:
    """Attention whose keys and values are read where they lie, once for all heads that share them.

    ``together`` neighbouring heads share keys and values: a row is a query of one of them.
    ``ruling`` are nodes of the shape of the scores that rule a key out where they are -inf or
    false.
    """

    att: Attention
    together: int
    ruling: tuple[int, ...]

    @property
    def groups(self) -> int:
        """Groups of heads, of all batches."""
        return self.att.groups // self.together

    @property
    def rows(self) -> int:
        return self.together * self.att.queries


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A unit is one share of the keys of one group of heads; ``slots`` vectors cover a value."""

    units: int
    tasks: int
    per_task: int
    blocks: int
    slots: int
    chunks: int


def few_queries_of(graph: Graph) -> FewQueries | None:
    """Such an attention that the kernel graph is, or None."""
    att = attention_of(graph)
    if att is None or att.row is not None or att.queries >= MIN_QUERIES:
        return None
    keys, values = graph.nodes[att.scores].inputs[1], graph.nodes[att.out].inputs[1]
    if not (adjacent(graph, keys, -2) and adjacent(graph, values, -1)):
        return None
    return FewQueries(att, heads_together(graph, att), _ruling(graph, att))


def _ruling(graph: Graph, att: Attention) -> tuple[int, ...]:
    """Terms that make a score -inf, whatever a finite product is, for tests of whole blocks."""
    found: list[int] = []
    at = att.masked
    while at in att.inner and at != att.scores:
        node = graph.nodes[at]
        if node.op == "add":
            others = [i for i in node.inputs if i not in att.inner]
            found += others
        elif node.op == "where":
            otherwise = graph.nodes[node.inputs[2]]
            if otherwise.op == "const" and const_value(otherwise) == -math.inf:
                found.append(node.inputs[0])
        elif node.op not in ("cast", "reshape"):
            break
        inner = [i for i in node.inputs if i in att.inner]
        if len(inner) != 1 or graph.nodes[inner[0]].shape != att.shape:
            break
        at = inner[0]
    return tuple(i for i in found if graph.nodes[i].shape == att.shape)


def same_for_heads(graph: Graph, node: int) -> bool:
    """Whether a full node is the same for all heads of a batch, as its broadcasts tell."""
    at = graph.nodes[node]
    if at.op == "broadcast":
        source = graph.nodes[at.inputs[0]].shape
        tail = (1,) * (len(at.shape) - len(source)) + source
        return len(tail) > 2 and tail[-3] == 1
    if at.kind is not OpKind.POINTWISE:
        return at.op == "const"
    return all(same_for_heads(graph, i) for i in at.inputs)


def plan_of(few: FewQueries, decisions: DecodeDecisions[int]) -> DecodePlan:
    """The cut that ``decisions`` make."""
    units = few.groups * decisions.shares
    per_task = -(-units // max(1, min(decisions.tasks, units)))
    return DecodePlan(
        units=units,
        tasks=-(-units // per_task),
        per_task=per_task,
        blocks=-(-few.att.keys // decisions.kb),
        slots=-(-few.att.width // decisions.vl),
        chunks=-(-few.att.depth // decisions.vl),
    )


def scratch(spec: Graph, decisions: DecodeDecisions[int]) -> tuple[BufferSpec, ...]:
    """Per task queries and scores of a block; per unit sums, maxima and sums of powers."""
    few = few_queries_of(spec)
    assert few is not None
    plan, vl, rows = plan_of(few, decisions), decisions.vl, few.rows
    dtype = accumulator(spec.nodes[few.att.out].dtype)
    return (
        BufferSpec((plan.tasks, rows, plan.chunks * vl), dtype),
        BufferSpec((plan.tasks, rows, decisions.kb), dtype),
        BufferSpec((plan.tasks, rows), dtype),
        BufferSpec((plan.units, rows, plan.slots * vl), dtype),
        BufferSpec((plan.units, rows), dtype),
        BufferSpec((plan.units, rows, vl), dtype),
    )
