"""Turn fx nodes of a functional ATen graph into IR nodes, one operator rule at a time.

In: fx nodes with fake tensors in ``meta["val"]``. Out: an ``Imported`` for a set of nodes
(``import_region``) or, for a single node, whether it can be imported and what it would cost
(``probe``). Whether a node can be imported depends on that node alone, never on its neighbours.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from torch_pruner.devices.dtypes import DEFAULT_DTYPES
from torch_pruner.dynamo.lower.aten import (
    OpCall,
    RejectionKind,
    Unsupported,
    Value,
    dtype_name,
    rule_of,
)
from torch_pruner.dynamo.lower.aten.registry import VARIES
from torch_pruner.dynamo.lower.aten.value import DTYPE_NAMES, Number
from torch_pruner.dynamo.lower.bounds import watched
from torch_pruner.dynamo.lower.importable import check, output_fakes, turns, used_outputs
from torch_pruner.graph.describe import grouped_flops, recurrence_flops
from torch_pruner.graph.ir import Graph, GraphBuilder, Node
from torch_pruner.graph.ops import FLOATS, OpKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch.fx.node import Argument

    from torch_pruner.dynamo.lower.aten.demand import Demand, Range
    from torch_pruner.dynamo.lower.bounds import IndexCheck

    # What a rule is given: tensors are values, in lists of arguments, too.
    _RuleArgument: TypeAlias = "Values | Argument | Sequence[_RuleArgument]"

CPU = torch.device("cpu")

# Arguments that say where a result lives, which its fake tensor says as well.
_COPIES = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)
_PLACEMENT = frozenset(("layout", "device", "pin_memory", "memory_format", "non_blocking"))

Values = Value | tuple[Value | None, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """What importing one node would give.

    ``free`` nodes are views, constants, and copies that eager makes as fast: they do no arithmetic.
    ``reads`` are the argument nodes whose elements the result depends on.
    """

    free: bool
    reads: tuple[fx.Node, ...]
    flops: int


def probe(
    node: fx.Node, dtypes: Collection[str] = DEFAULT_DTYPES, device: torch.device = CPU
) -> Probe:
    """Import ``node`` on its own, for ``device``.

    Raises ``Unsupported`` if it has to stay with eager.
    """
    check(node, dtypes, device)
    builder = GraphBuilder()
    env: dict[fx.Node, Values] = {}
    inputs = list(node.all_input_nodes)
    for arg in inputs:
        env[arg] = _inputs_for(builder, arg, len(builder.nodes))
    result = import_node(builder, node, env)
    results = result if isinstance(result, tuple) else (result,)
    graph_outputs = [v.id for v in results if v is not None]
    reached = _reachable(builder, graph_outputs)
    reads = tuple(arg for arg in inputs if any(v.id in reached for v in _flat(env[arg])))
    nodes = [builder.nodes[i] for i in sorted(reached)]
    if device.type != CPU.type and any(n.op == "accumulate" for n in nodes):
        raise Unsupported(RejectionKind.DEVICE, f"no kernels that add up rows on {device.type}")
    if device.type != CPU.type and any(n.kind is OpKind.GROUPED for n in nodes):
        raise Unsupported(RejectionKind.DEVICE, f"no kernels for rows in groups on {device.type}")
    free = all(n.kind in (OpKind.VIEW, OpKind.LEAF) for n in nodes)
    free = free and not (device.type == CPU.type and turns(node))
    return Probe(free, reads, 0 if free else _flops(builder, nodes, results))


@dataclass(frozen=True, slots=True)
class Imported:
    """A graph, and what its inputs have to be and one more output shows: see ``bounds``."""

    graph: Graph
    checks: tuple[IndexCheck, ...] = ()
    flags: tuple[Range, ...] = ()
    demanding: frozenset[fx.Node] = frozenset()  # the nodes that ask for it
    test: Test | None = None


@dataclass(frozen=True, slots=True)
class Test:
    """What shows the flags of a graph before it runs: ``graph`` of its inputs ``inputs``."""

    graph: Graph
    inputs: tuple[int, ...]


def import_region(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    static: Collection[fx.Node] = (),
    *,
    flagged: bool = False,
    in_place: Collection[fx.Node] = (),
) -> Imported:
    """The graph that computes ``outputs`` from ``inputs`` through ``nodes`` (in topological order).

    Equal outputs share a position. ``inputs`` are numbered in the given order. What operators
    demand of values that the graph computes is in ``flags`` if they are to be ``flagged``: one more
    output shows them, or, where nodes write ``in_place``, a graph of their own, the ``test``.
    """
    builder = GraphBuilder()
    env: dict[fx.Node, Values] = {}
    for node in nodes:
        for arg in node.all_input_nodes:
            if arg not in env and (number := literal(arg)) is not None:
                fake = arg.meta["val"]
                scalar = Value(builder, builder.const(number, dtype_name(fake.dtype)))
                env[arg] = Value(builder, scalar.broadcast(fake.shape).id, fake)
    for index, node in enumerate(inputs):
        fake = node.meta["val"]
        position = builder.input(index, fake.shape, dtype_name(fake.dtype), static=node in static)
        env[node] = Value(builder, position, fake)
    demands: dict[fx.Node, list[Demand]] = {}
    for node in nodes:
        asked = demands.setdefault(node, [])
        env[node] = import_node(builder, node, env, asked, in_place=node in in_place)
    positions = []
    for node in outputs:
        value = env[node]
        assert isinstance(value, Value), node
        positions.append(value.id)
    every = [demand for of in demands.values() for demand in of]
    watch = watched(builder, every, flagged=flagged)
    asking, test = frozenset(node for node, of in demands.items() if of), None
    if watch.output is not None:
        if any(node in in_place for node in nodes):  # nothing may be written before the test
            test = _tested(builder, watch.output)
        else:
            positions.append(watch.output)
    return Imported(builder.finish(positions), watch.checks, watch.flags, asking, test)


def _tested(builder: GraphBuilder, output: int) -> Test:
    """The graph of one node, of the inputs that it needs."""
    whole = builder.finish([output])
    read = {j for node in whole.nodes for j in node.inputs}
    kept = [i for i in whole.inputs if i in read or i in whole.outputs]
    alone = GraphBuilder()
    new: dict[int, int] = {}
    for i, node in enumerate(whole.nodes):
        if node.op != "input":
            operands = [new[j] for j in node.inputs]
            new[i] = alone.again(node, operands)
        elif i in kept:
            new[i] = alone.input(kept.index(i), node.shape, node.dtype)
    graph = alone.finish([new[o] for o in whole.outputs])
    return Test(graph, tuple(int(whole.nodes[i].attr("index")) for i in kept))


def import_node(
    builder: GraphBuilder,
    node: fx.Node,
    env: Mapping[fx.Node, Values],
    demands: list[Demand] | None = None,
    *,
    in_place: bool = False,
) -> Values:
    """Append what ``node`` computes, and what it demands.

    ``in_place``: it may write into its first argument. Arguments missing from ``env`` are not read
    by any result.
    """
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        values = env[source]
        assert isinstance(values, tuple)
        assert isinstance(index, int)
        value = values[index]
        assert value is not None, node
        return value
    assert isinstance(node.target, torch._ops.OpOverload)
    asked = [] if demands is None else demands
    call = OpCall(
        builder,
        output_fakes(node),
        used_outputs(node),
        asked,
        in_place,
        bool(node.meta.get(VARIES)),
    )

    def replaced(arg: fx.Node) -> Values:
        return env[arg] if arg in env else _unread(builder, arg)

    args = [_replace(arg, replaced) for arg in node.args]
    kwargs = {k: _replace(v, replaced) for k, v in node.kwargs.items() if k not in _PLACEMENT}
    own = rule_of(node.target)
    assert own is not None, node
    result = own(call, *args, **kwargs)
    if not isinstance(result, tuple):
        if isinstance(node.meta["val"], (tuple, list)):
            result = (result,)
        else:
            return _conformed(result, node.meta["val"])
    return tuple(
        None if value is None or fake is None or i not in call.used else _conformed(value, fake)
        for i, (value, fake) in enumerate(zip(result, call.outputs, strict=True))
    )


def _replace(arg: Argument, fn: Callable[[fx.Node], Values]) -> _RuleArgument:
    """``arg`` with fx nodes replaced; nested lists become lists."""
    if isinstance(arg, fx.Node):
        return fn(arg)
    if isinstance(arg, (list, tuple)):
        replaced = [_replace(a, fn) for a in arg]
        return replaced if isinstance(arg, list) else tuple(replaced)
    return arg


def _conformed(value: Value, fake: torch.Tensor) -> Value:
    """``value`` in the dtype and shape that torch promises."""
    shape = tuple(int(d) for d in fake.shape)
    out = value.cast(dtype_name(fake.dtype))
    if out.shape != shape:
        out = out.broadcast(shape)
    return Value(out.builder, out.id, fake)


def literal(node: fx.Node) -> Number | None:
    """The number that a constant of one element holds, as ``torch.tensor([-1])`` makes one; None
    for any other node."""
    if node.op != "get_attr" or "val" not in node.meta or node.meta["val"].numel() != 1:
        return None
    if any(user.target not in _COPIES for user in node.users):  # it may be written to
        return None
    assert node.graph.owning_module is not None
    with _disable_current_modes():
        value = attribute(node.graph.owning_module, str(node.target))
        if type(value) is not torch.Tensor or value.dtype not in DTYPE_NAMES:
            return None
        number: Number = value.item()
    return number


def attribute(gm: torch.nn.Module, path: str) -> torch.Tensor:
    """A constant of a graph, by the target of the node that reads it."""
    value: object = gm
    for part in path.split("."):
        value = getattr(value, part)
    return cast("torch.Tensor", value)


def _inputs_for(builder: GraphBuilder, arg: fx.Node, start: int) -> Values:
    fakes = output_fakes(arg)
    values: list[Value | None] = []
    for i, fake in enumerate(fakes):
        if fake is None:
            values.append(None)
            continue
        position = builder.input(start + i, fake.shape, dtype_name(fake.dtype))
        values.append(Value(builder, position, fake))
    if isinstance(arg.meta["val"], (tuple, list)):
        return tuple(values)
    assert values[0] is not None, arg
    return values[0]


def _unread(builder: GraphBuilder, arg: fx.Node) -> Value:
    """A stand-in for an argument of which only the shape and dtype matter."""
    fake = arg.meta["val"]
    zero = Value(builder, builder.const(0, dtype_name(fake.dtype)))
    return Value(builder, zero.broadcast(fake.shape).id, fake)


def _flat(values: Values) -> tuple[Value, ...]:
    return tuple(v for v in values if v is not None) if isinstance(values, tuple) else (values,)


def _reachable(builder: GraphBuilder, roots: Sequence[int]) -> set[int]:
    found: set[int] = set()
    stack = list(roots)
    while stack:
        i = stack.pop()
        if i not in found:
            found.add(i)
            stack.extend(builder.nodes[i].inputs)
    return found


def _flops(builder: GraphBuilder, nodes: Sequence[Node], results: Sequence[Value | None]) -> int:
    """Two per multiply-add of contractions, one per element of other floating results."""
    total = 0
    for node in nodes:
        if node.kind is OpKind.CONTRACT:
            total += contraction_flops(node, [builder.nodes[i] for i in node.inputs])
        elif node.kind is OpKind.RECURRENCE:
            total += recurrence_flops(node, builder.nodes[node.inputs[1]])
        elif node.kind is OpKind.GROUPED:
            total += grouped_flops(node, builder.nodes[node.inputs[1]])
    return total + sum(v.builder.nodes[v.id].numel for v in results if v and v.dtype in FLOATS)


def contraction_flops(node: Node, operands: Sequence[Node]) -> int:
    """Two per multiply-add of a matmul, conv or conv_transpose."""
    a, b = operands
    if node.op == "matmul":
        return 2 * node.numel * a.shape[-1]
    if node.op == "conv":
        return 2 * node.numel * math.prod(b.shape[1:])
    return 2 * a.numel * math.prod(b.shape[1:])
