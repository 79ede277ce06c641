"""Graphs of symbolic sizes, written down for the sizes of a call.

AOTAutograd captures such a graph once, and the extents of a kernel are numbers. With numbers in
place of symbols it is a graph like any other. Which sizes are compiled, and when, is for
``sizes/sized_call.py`` to say.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from torch_pruner.dynamo.lower.aten.registry import VARIES
from torch_pruner.dynamo.lower.importer import attribute

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from torch_pruner.dynamo.lower.calls import RuntimeValue

__all__ = [
    "Given", "SizedArgument", "SizedArguments", "allows", "depends_on_sizes", "growing_in",
    "guards_allow", "hinted", "most_of", "rounded_up", "symbols_in", "symbols_of", "with_sizes",
    "with_symbols",
]  # fmt: skip

SizedArgument: TypeAlias = "RuntimeValue | Given"
"""An argument of a graph, of which only the size matters."""
SizedArguments: TypeAlias = "Sequence[SizedArgument]"
Extents: TypeAlias = tuple[int, ...]
Number = TypeVar("Number")
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class Given:
    """What is known of a tensor argument before its values are: enough for a graph of its size."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Given:
        """``tensor`` may be fake, with symbols for sizes; then those that it was captured with."""
        shape = tuple(_number(d) for d in tensor.shape)
        stride = tuple(_number(s) for s in tensor.stride())
        return Given(shape, stride, tensor.dtype, tensor.device)


def depends_on_sizes(gm: fx.GraphModule) -> bool:
    """Whether the sizes of the arguments, and nothing else, say what the graph's symbols are.

    Not so for sizes that depend on values (``nonzero``), and for numbers that are no sizes: of
    those every call may have another.
    """
    values = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    sizes = {s for v in values if isinstance(v, torch.Tensor) for s in free_symbols(v)}
    numbers = [v for v in values if isinstance(v, _SYMBOLIC)]
    if not sizes or any(
        not isinstance(v, torch.SymInt) or free_symbols(v) - sizes for v in numbers
    ):
        return False
    found = (leaf for n in gm.graph.nodes for leaf in tree_leaves(n.meta.get("val")))
    return not any(
        free_unbacked_symbols(leaf)
        for leaf in found
        if isinstance(leaf, (torch.Tensor, *_SYMBOLIC))
    )


def hinted(example_inputs: Sequence[RuntimeValue]) -> list[SizedArgument] | None:
    """The arguments that a graph was captured with; None if some size was never known."""
    try:
        return [Given.of(v) if isinstance(v, torch.Tensor) else _number(v) for v in example_inputs]
    except ValueError:
        return None


def _number(value: Number) -> Number:
    """A symbol's value while the graph was captured; anything else as it is."""
    if not isinstance(value, _SYMBOLIC):
        return value
    hint = value.node.hint  # asking the symbol itself would fix it for all calls
    if hint is None:
        raise ValueError(f"{value} has no value yet")
    return cast("Number", hint)


def rounded_up(
    gm: fx.GraphModule,
    args: SizedArguments,
    before: Sequence[SizedArgument | Extents] | None = None,
) -> list[SizedArgument] | None:
    """``args`` with every size that varies rounded up to a power of two.

    If there were arguments ``before`` (of tensors the shapes will do, and None for those without
    new symbols), only sizes that are one more than they were, by as much as takes the largest of
    them to the next power above. No further than Dynamo found that a size goes (a table of
    positions). None where some are not computed from sizes that an argument has.
    """
    values = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    now, then = symbols_in(values, args), symbols_in(values, before or ())
    most, known = _most(values), dict(now)
    for symbol, number in now.items() if before is None else ():
        known[symbol] = max(number, min(1 << (number - 1).bit_length(), most.get(symbol, 1 << 62)))
    # What grows together keeps its distance: a mask is one longer than the cache was.
    grown = [] if before is None else [s for s, n in now.items() if n - then[s] == 1]
    if grown:
        top = max(now[s] for s in grown)
        room = [(1 << top.bit_length()) - top, *(most[s] - now[s] for s in grown if s in most)]
        known |= {s: now[s] + max(min(room), 0) for s in grown}
    return with_symbols(gm, args, known)


def symbols_of(gm: fx.GraphModule, args: SizedArguments) -> dict[Hashable, int]:
    """The numbers that stand for the symbols of a graph's arguments."""
    return symbols_in([n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")], args)


def most_of(gm: fx.GraphModule) -> dict[Hashable, int]:
    """The largest numbers that symbols of a graph may stand for, where Dynamo knows them."""
    return _most([n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")])


def growing_in(gm: fx.GraphModule) -> set[Hashable]:
    """The symbols of extents along which a graph returns an argument with more behind it: those of
    a cache that goes from call to call."""
    found: set[Hashable] = set()
    results = set(tree_leaves(gm.graph.output_node().args))
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for user in node.users if isinstance(value, torch.Tensor) else ():
            if user.target is torch.ops.aten.cat.default and user in results:
                operands, dim = user.args[0], user.args[1] if len(user.args) > 1 else 0
                if operands[0] is node:
                    found |= free_symbols(value.shape[dim])
    return found


def allows(gm: fx.GraphModule, known: Mapping[Hashable, int]) -> bool:
    """Whether Dynamo would call the graph with these numbers for symbols, as far as its guards on
    them were known when it was captured."""
    for env in _environments(gm):
        if not _guards_allow(env, known):
            return False
        for symbol, number in known.items():
            limits = getattr(env, "var_to_range", {}).get(symbol)
            if limits is not None and not limits.lower <= number <= limits.upper:
                return False
    return True


def guards_allow(gm: fx.GraphModule, known: Mapping[Hashable, int]) -> bool:
    """The same as far as guards go that the graph gave rise to, and not what the caller said."""
    return all(_guards_allow(env, known) for env in _environments(gm))


def _environments(gm: fx.GraphModule) -> list[object]:
    values = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    leaves = tree_leaves([_extents(v) for v in values])
    found = [v.node.shape_env for v in leaves if isinstance(v, _SYMBOLIC)]
    return list({id(env): env for env in found}.values())


def _guards_allow(env: object, known: Mapping[Hashable, int]) -> bool:
    guards = getattr(env, "guards", ())
    # Sympy's, or undecided.
    return not any(g.expr.xreplace(dict(known)) == False for g in guards)  # noqa: E712


def with_symbols(
    gm: fx.GraphModule, args: SizedArguments, known: Mapping[Hashable, int]
) -> list[SizedArgument] | None:
    """``args`` with these numbers for symbols; None where some sizes are not computed from them."""
    values = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    expressions = [
        v for v in tree_leaves([_extents(v) for v in values]) if isinstance(v, _SYMBOLIC)
    ]
    if any(v.node.expr.free_symbols - known.keys() for v in expressions):
        return None

    def larger(value: RuntimeValue) -> int:
        if isinstance(value, _SYMBOLIC):
            return int(value.node.expr.xreplace(known))
        return cast("int", value)

    found: list[SizedArgument] = []
    for value, arg in zip(values, args, strict=True):
        if isinstance(value, torch.Tensor):
            shape, stride = (tuple(map(larger, x)) for x in (value.shape, value.stride()))
            assert isinstance(arg, (torch.Tensor, Given))
            found.append(Given(shape, stride, arg.dtype, arg.device))
        else:
            found.append(larger(value) if isinstance(value, _SYMBOLIC) else arg)
    return found


def _most(values: Sequence[RuntimeValue]) -> dict[Hashable, int]:
    """The largest numbers that symbols may stand for, where Dynamo knows them."""
    found = {}
    for leaf in tree_leaves([_extents(v) for v in values]):
        if isinstance(leaf, torch.SymInt):
            ranges = getattr(leaf.node.shape_env, "var_to_range", {})
            upper = getattr(ranges.get(leaf.node.expr), "upper", None)
            if upper is not None and getattr(upper, "is_Integer", False):
                found[leaf.node.expr] = int(upper)
    return found


def symbols_in(
    values: Sequence[RuntimeValue], args: Sequence[SizedArgument | Extents]
) -> dict[Hashable, int]:
    """The numbers that stand for the symbols of a graph's arguments ``values``, of which ``args``
    are what they are, or their shapes."""
    found: dict[Hashable, int] = {}
    for value, arg in zip(values, args, strict=False):
        symbols: list[tuple[object, object]] = [(value, arg)] if arg is not None else []
        if isinstance(value, torch.Tensor) and symbols:
            shape = arg.shape if isinstance(arg, (torch.Tensor, Given)) else arg
            symbols = list(zip(value.shape, cast("Extents", shape), strict=True))
        for symbol, number in symbols:
            if isinstance(symbol, torch.SymInt) and symbol.node.expr.is_Symbol:
                found[symbol.node.expr] = cast("int", number)
    return found


def _extents(value: RuntimeValue) -> list[int] | RuntimeValue:
    return [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else value


def with_sizes(gm: fx.GraphModule, args: SizedArguments) -> fx.GraphModule:
    """``gm`` for arguments of the sizes of ``args``: tensors, ``Given`` or numbers.

    Takes the same arguments and has no symbols. What was computed from sizes alone is a constant.
    Raises what an operator raises of sizes that do not fit it.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    graph, given = fx.Graph(), iter(args)
    values: dict[fx.Node, RuntimeValue] = {}  # fake tensors and numbers
    copies: dict[
        fx.Node, fx.Node | RuntimeValue
    ] = {}  # what stands for a node: its copy, or a number
    with torch.no_grad(), torch._C._DisableAutocast(), _untold():
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = _fake(mode, next(given))
            elif node.op == "get_attr":
                values[node] = _fake(mode, attribute(gm, str(node.target)))
            elif node.op != "output":
                taken, named = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                with mode:
                    values[node] = node.target(*taken, **named)
                if _is_number(values[node]):
                    copies[node] = values[node]
                    continue
                if values[node] is None and all(map(_is_number, tree_leaves((taken, named)))):
                    continue  # an assertion about sizes, which held
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            copy.meta = {**node.meta, "val": values.get(node)}
            copy.meta[VARIES] = any(_is_number(values[x]) for x in node.all_input_nodes)
            if node.op == "placeholder" and _is_number(values[node]):
                copies[node] = values[node]
    return fx.GraphModule(gm, graph)


@contextmanager
def _untold() -> Iterator[None]:
    """Keeps torch from logging, with a traceback, that an operator refuses its sizes: whether they
    fit is what this thread wants to know."""
    logger, mine = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def told(record: logging.LogRecord) -> bool:
        return record.thread != mine or not record.msg.startswith("failed while attempting")

    logger.addFilter(told)
    try:
        yield
    finally:
        logger.removeFilter(told)


def _fake(mode: FakeTensorMode, value: SizedArgument) -> RuntimeValue:
    if isinstance(value, torch.Tensor):
        value = Given.of(value)
    if not isinstance(value, Given):
        return value
    with mode:
        return torch.empty_strided(
            value.shape, value.stride, dtype=value.dtype, device=value.device
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float, str))
