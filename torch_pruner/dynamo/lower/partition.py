"""Divide a functional ATen graph into regions that are compiled and steps that eager runs.

In: a ``GraphModule`` from AOTAutograd with fake tensors. Out: a ``PartitionedGraph``: what to run
in which order, and a ``Rejection`` for every operator left to eager. Imports no compiler.

Nodes are placed by level. A level is what eager runs, then what is compiled: going from compiled to
eager raises the level by one, and all compiled nodes of one level and device form one region. Free
nodes (views, copies, constants) belong to no level: every region that reads one imports it again,
and eager runs those that eager or the caller needs, so that aliasing and strides are eager's own.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import has_free_symbols

from torch_pruner.devices.dtypes import DEFAULT_DTYPES
from torch_pruner.dynamo.lower.aten import Rejection, RejectionKind, Unsupported
from torch_pruner.dynamo.lower.importable import output_fakes
from torch_pruner.dynamo.lower.importer import CPU, Probe, Test, import_region, literal, probe
from torch_pruner.dynamo.lower.tensors import spec_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from torch_pruner.dynamo.lower.aten.demand import Range
    from torch_pruner.dynamo.lower.bounds import IndexCheck
    from torch_pruner.graph.ir import Graph

__all__ = [
    "EagerStep", "PartitionedGraph", "Region", "Rejection", "RejectionKind", "partition",
]  # fmt: skip

_EAGER = "eager"


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Nodes compiled together: ``graph`` input i is ``inputs[i]``, output j is ``outputs[j]``.

    ``graph.outputs`` may name one position twice; each output is a tensor of its own all the same.
    With ``flags``, the last output of the graph is theirs (``bounds``), or that of the ``test``,
    which runs before. ``demanding`` are the nodes for which eager may raise.
    """

    graph: Graph
    checks: tuple[IndexCheck, ...]
    flags: tuple[Range, ...]
    demanding: frozenset[fx.Node]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    device: torch.device
    test: Test | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EagerStep:
    """Nodes that eager runs, in this order."""

    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PartitionedGraph:
    """What to run, in order. Placeholders, ``get_attr`` and the output node are the runtime's."""

    steps: tuple[Region | EagerStep, ...]
    rejections: tuple[Rejection, ...]
    ops_total: int
    ops_compiled: int
    flops_total: int
    flops_compiled: int

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(s for s in self.steps if isinstance(s, Region))


@dataclass(slots=True)
class _Plan:
    """Working tables of one partitioning, by node."""

    order: dict[fx.Node, int]
    probes: dict[fx.Node, Probe] = field(default_factory=dict)
    label: dict[fx.Node, str | torch.device] = field(default_factory=dict)
    level: dict[fx.Node, int] = field(default_factory=dict)
    rejections: dict[fx.Node, Rejection] = field(default_factory=dict)
    flops: dict[fx.Node, int] = field(default_factory=dict)

    def free(self, node: fx.Node) -> bool:
        return node in self.probes and self.probes[node].free

    def compiled(self, node: fx.Node) -> bool:
        return node in self.probes and not self.probes[node].free

    def bases(self, node: fx.Node) -> list[fx.Node]:
        """What must exist before a compiled ``node`` can run: free nodes are looked through."""
        found: dict[fx.Node, None] = {}
        stack = list(self.probes[node].reads)
        while stack:
            arg = stack.pop()
            if self.free(arg):
                stack.extend(self.probes[arg].reads)
            else:
                found[arg] = None
        return list(found)


def partition(
    gm: fx.GraphModule,
    *,
    static_inputs: Collection[int] = frozenset(),
    dtypes: Collection[str] = DEFAULT_DTYPES,
    device: torch.device = CPU,
    in_place: Collection[fx.Node] = (),
) -> PartitionedGraph:
    """Partition ``gm``; it is not changed.

    Nodes ``in_place`` may write into their first operand (``lower/inplace.py``).

    ``static_inputs`` are positions of placeholders whose values rarely change; ``dtypes`` are the
    names of the dtypes that may be compiled, on ``device`` alone (none: nothing is).
    """
    nodes = list(gm.graph.nodes)
    plan = _Plan({n: i for i, n in enumerate(nodes)})
    calls = [n for n in nodes if n.op not in ("placeholder", "get_attr", "output")]
    functional = _is_functional(calls)
    for node in calls:
        if functional and node in in_place and _has_gaps(node.meta["val"]):
            _reject(plan, node, RejectionKind.LAYOUT, "an update of what has gaps in memory")
        elif functional:
            _classify(plan, node, dtypes, device)
        elif node.target is not operator.getitem:
            _reject(plan, node, RejectionKind.MUTATION, "the graph writes to tensors midway")
    eager = _run_by_eager(plan, calls, nodes)
    _place(plan, calls, eager)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    static = {n for i, n in enumerate(placeholders) if i in static_inputs}
    steps = _steps(plan, calls, eager, static, in_place)
    running = [n for n in calls if n in plan.probes or n in eager]
    counted = [n for n in running if n.target is not operator.getitem and not _is_number(n)]
    has_region = any(isinstance(s, Region) for s in steps)
    done = [n for n in counted if n in plan.probes and has_region]
    return PartitionedGraph(
        steps=tuple(steps),
        rejections=tuple(plan.rejections[n] for n in counted if n in plan.rejections),
        ops_total=len(counted),
        ops_compiled=len(done),
        flops_total=sum(plan.flops[n] for n in counted),
        flops_compiled=sum(plan.flops[n] for n in counted if plan.compiled(n)),
    )


def _classify(plan: _Plan, node: fx.Node, dtypes: Collection[str], device: torch.device) -> None:
    """Probe one node; tuple plumbing is of the kind of its producer."""
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source in plan.probes and _is_tuple(source):
            plan.probes[node] = Probe(plan.probes[source].free, (source,), 0)
        return
    try:
        plan.probes[node] = probe(node, dtypes, device)
        plan.flops[node] = plan.probes[node].flops
    except Unsupported as err:
        _reject(plan, node, err.kind, err.detail)


def _reject(plan: _Plan, node: fx.Node, kind: RejectionKind, detail: str) -> None:
    plan.rejections[node] = Rejection(describe(node), kind, detail)
    plan.flops[node] = _eager_flops(node)


def _is_functional(calls: list[fx.Node]) -> bool:
    """Whether all writes come last, as AOTAutograd arranges them."""
    wrote = False
    for node in calls:
        op = node.target
        writes = isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable
        if wrote and not writes and op is not operator.getitem:
            return False
        wrote = wrote or writes
    return True


def describe(node: fx.Node) -> str:
    """An operator and its node: ``aten.nonzero.default (%nonzero_1)``."""
    return f"{node.target} (%{node.name})"


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _has_gaps(fake: torch.Tensor) -> bool:
    """Whether elements do not lie densely. Symbols are not asked: that would fix their values."""
    return not has_free_symbols(fake) and not spec_of(fake).dense


def _is_number(node: fx.Node) -> bool:
    """Whether a node is arithmetic on numbers of Python's, such as the length of a cache."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _eager_flops(node: fx.Node) -> int:
    """The operations of a rejected node: torch's formula for contractions, else one per element."""
    from torch.utils.flop_counter import flop_registry

    if "val" not in node.meta:
        return 0
    fakes = [f for f in output_fakes(node) if f is not None]
    sizes = [f.numel() for f in fakes if f.is_floating_point()]
    total = sum(s for s in sizes if isinstance(s, int))
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None or any(
        has_free_symbols(n.meta.get("val")) for n in (*node.all_input_nodes, node)
    ):
        return total
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    count = formula(*args, **kwargs, out_val=node.meta["val"])
    return total + (count if isinstance(count, int) else 0)  # int() of a symbol would fix its value


def _run_by_eager(plan: _Plan, calls: list[fx.Node], nodes: list[fx.Node]) -> set[fx.Node]:
    """Rejected nodes that something needs, and the free nodes that those or the caller need."""
    rejected = {n for n in calls if n not in plan.probes}
    found = {n for n in rejected if _ordered(n)}
    stack = [*found, *(n for n in nodes if n.op == "output" or plan.compiled(n))]
    while stack:
        node = stack.pop()
        for arg in plan.bases(node) if plan.compiled(node) else node.all_input_nodes:
            if (arg in rejected or plan.free(arg)) and arg not in found:
                found.add(arg)
                stack.append(arg)
    return found


def _ordered(node: fx.Node) -> bool:
    """Must keep its order among others like it: draws random numbers, writes, or is opaque."""
    op = node.target
    if op is operator.getitem:
        return False
    if not isinstance(op, torch._ops.OpOverload):
        return isinstance(op, torch._ops.OperatorBase) or node.is_impure()
    seeded = torch.Tag.nondeterministic_seeded in op.tags
    return seeded or op._schema.is_mutable or node.is_impure()


def _place(plan: _Plan, calls: list[fx.Node], eager: set[fx.Node]) -> None:
    """Give every node that runs a label (eager or a device) and a level."""
    last_ordered = 0
    for node in calls:
        if node in eager:
            plan.label[node] = _EAGER
            level = _level(plan, node, node.all_input_nodes)
            if _ordered(node):
                level = last_ordered = max(level, last_ordered, _written_after(plan, node))
            plan.level[node] = level
        elif plan.compiled(node):
            fake = next(f for f in output_fakes(node) if f is not None)
            plan.label[node] = fake.device
            plan.level[node] = _level(plan, node, plan.bases(node))


def _level(plan: _Plan, node: fx.Node, needed: Iterable[fx.Node]) -> int:
    """The earliest level; within one, eager comes before the regions."""
    level = 0
    for arg in needed:
        if arg in plan.label:
            waits = plan.label[node] == _EAGER != plan.label[arg]
            level = max(level, plan.level[arg] + waits)
    return level


def _written_after(plan: _Plan, node: fx.Node) -> int:
    """The level at which everything that reads what ``node`` writes has run."""
    op = node.target
    if isinstance(op, torch._ops.OpOverload) and not op._schema.is_mutable:
        return 0
    earlier = [n for n in plan.level if plan.order[n] < plan.order[node]]
    levels = (plan.level[n] + (plan.label[n] != _EAGER) for n in earlier)
    return max(levels, default=0)


def _steps(
    plan: _Plan,
    calls: list[fx.Node],
    eager: set[fx.Node],
    static: set[fx.Node],
    in_place: Collection[fx.Node],
) -> list[Region | EagerStep]:
    """Per level, what eager runs, then one region per device."""
    groups: dict[tuple[int, str], list[fx.Node]] = {}
    for node in calls:
        if node in plan.label:
            label = plan.label[node]
            key = "" if label == _EAGER else str(label)
            groups.setdefault((plan.level[node], key), []).append(node)
    steps: list[Region | EagerStep] = []
    for (_, key), members in sorted(groups.items()):
        if key:
            steps.append(_region(plan, members, eager, static, in_place))
        else:
            steps.append(EagerStep(tuple(members)))
    return steps


def _region(
    plan: _Plan,
    members: list[fx.Node],
    eager: set[fx.Node],
    static: set[fx.Node],
    in_place: Collection[fx.Node],
) -> Region:
    inside = set(members)
    nodes = sorted(inside | _free_inputs(plan, members), key=plan.order.__getitem__)
    read = dict.fromkeys(
        arg
        for node in nodes
        for arg in plan.probes[node].reads
        if arg not in inside and not plan.free(arg) and literal(arg) is None
    )
    # What is written where it lies is there, though nothing of it may be read.
    read |= dict.fromkeys(cast("fx.Node", n.args[0]) for n in nodes if n in in_place)
    inputs = sorted(read, key=plan.order.__getitem__)
    outputs = [n for n in members if not _is_tuple(n) and _escapes(plan, n, inside, eager)]
    device = plan.label[members[0]]
    assert isinstance(device, torch.device)
    # Eager raises on the CPU; a GPU computes on, or stops for good.
    flagged = device.type == "cpu"
    made = import_region(nodes, inputs, outputs, static, flagged=flagged, in_place=in_place)
    interface = tuple(inputs), tuple(outputs), tuple(members)
    return Region(
        made.graph, made.checks, made.flags, made.demanding, *interface, device, made.test
    )


def _free_inputs(plan: _Plan, members: Iterable[fx.Node]) -> set[fx.Node]:
    """Free nodes that the members read, directly or through other free nodes."""
    found: set[fx.Node] = set()
    stack = list(members)
    while stack:
        for arg in plan.probes[stack.pop()].reads:
            if plan.free(arg) and arg not in found:
                found.add(arg)
                stack.append(arg)
    return found


def _escapes(plan: _Plan, node: fx.Node, inside: set[fx.Node], eager: set[fx.Node]) -> bool:
    """Whether anything outside the region reads ``node``, looking through free nodes."""
    for user in node.users:
        if user.op == "output" or user in eager:
            return True
        if plan.free(user):
            if _escapes(plan, user, inside, eager):
                return True
        elif user in plan.probes and user not in inside and node in plan.probes[user].reads:
            return True
    return False
