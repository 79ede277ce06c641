"""Graphs of symbolic sizes: one compiled call for each of the sizes that come.

AOTAutograd captures such a graph once, and the extents of a kernel are numbers. So for the sizes of
a call the graph is written down anew with numbers in place of symbols, which makes it a graph like
any other; it is compiled and kept. That takes seconds, and sizes may come once and never again (a
sequence that grows by a token): so the first few sizes are compiled when they come, later ones and
those of something that grows when they come again, and how many is bounded. Others run in the graph
as it was captured, in which eager runs what depends on a size.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from torch_pruner.log import logger, warn_once

__all__ = ["Given", "SizedCall", "depends_on_sizes", "hinted", "with_sizes"]

Call = Callable[[list[Any]], Any]
Build = Callable[[Sequence[Any], str], Call]

log = logger(__name__)
AT_ONCE = 8  # sizes that are compiled when they first come
MOST_NOTED = 4096  # sizes that came once are remembered
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


def hinted(example_inputs: Sequence[Any]) -> list[Any] | None:
    """The arguments that a graph was captured with; None if some size was never known."""
    try:
        return [Given.of(v) if isinstance(v, torch.Tensor) else _number(v) for v in example_inputs]
    except ValueError:
        return None


def _number(value: Any) -> Any:
    """A symbol's value while the graph was captured; anything else as it is."""
    if not isinstance(value, _SYMBOLIC):
        return value
    hint = value.node.hint  # asking the symbol itself would fix it for all calls
    if hint is None:
        raise ValueError(f"{value} has no value yet")
    return hint


def with_sizes(gm: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    """``gm`` for arguments of the sizes of ``args``: tensors, ``Given`` or numbers.

    Takes the same arguments and has no symbols. What was computed from sizes alone is a constant.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    graph, given = fx.Graph(), iter(args)
    values: dict[fx.Node, Any] = {}  # fake tensors and numbers
    copies: dict[fx.Node, Any] = {}  # what stands for a node: its copy, or a number
    with torch.no_grad(), torch._C._DisableAutocast():
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = _fake(mode, next(given))
            elif node.op == "get_attr":
                values[node] = _fake(mode, _attribute(gm, str(node.target)))
            elif node.op != "output":
                taken, named = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                with mode:
                    values[node] = node.target(*taken, **named)
                if _is_number(values[node]):
                    copies[node] = values[node]
                    continue
                if values[node] is None and all(map(_is_number, tree_leaves((taken, named)))):
                    continue  # an assertion about sizes, which held
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {**node.meta, "val": values.get(node)}
            if node.op == "placeholder" and _is_number(values[node]):
                copies[node] = values[node]
    return fx.GraphModule(gm, graph)


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = Given.of(value)
    if not isinstance(value, Given):
        return value
    with mode:
        return torch.empty_strided(
            value.shape, value.stride, dtype=value.dtype, device=value.device
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part)
    return value


class SizedCall:
    """A graph whose sizes vary, boxed: the call for the sizes that came, made when it pays.

    ``build`` compiles the graph for given arguments, of which the text names the sizes. At most
    ``limit`` results are kept, the first ``AT_ONCE`` made for sizes that never came before.
    ``general`` makes the call for all other sizes, when it is first needed. Safe for several
    threads: one builds, others wait.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        build: Build,
        general: Callable[[], Call],
        *,
        limit: int,
        name: str,
    ) -> None:
        # Of the instance: torch wraps a backward and copies its __dict__ only.
        self._boxed_call = True
        self._build, self._general = build, general
        self._limit, self._name = limit, name
        self._numbers, self._tensors = _where_sizes_are(gm)
        self._calls: dict[Any, Call] = {}
        self._once: dict[Any, None] = {}  # sizes that came once, the latest last
        self._latest: Any = ()  # the sizes that were new last
        self._other: Call | None = None
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> Any:
        key = self._sizes(args)
        call = self._calls.get(key)
        if call is None:
            with self._lock:
                call = self._call_for(key, args)
        return call(args)

    def prepare(self, args: Sequence[Any], build: Build) -> None:
        """Have the call for ``args`` ready, made by another ``build``."""
        with self._lock:
            self._latest = self._sizes(args)
            self._made(self._latest, args, build)

    def _sizes(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return (*[args[i] for i in self._numbers], *[args[i].shape for i in self._tensors])

    def _call_for(self, key: Any, args: Sequence[Any]) -> Call:
        if key in self._calls:  # another thread was first
            return self._calls[key]
        grows, self._latest = _grown(self._latest, key), key
        if len(self._calls) < min(self._limit, AT_ONCE) and not grows:
            return self._made(key, args, self._build)
        if key in self._once and len(self._calls) < self._limit:
            del self._once[key]
            return self._made(key, args, self._build)
        self._note(key)
        if self._other is None:
            self._other = self._general()
        return self._other

    def _note(self, key: Any) -> None:
        if key in self._once and len(self._calls) >= self._limit:
            warn_once(
                log,
                f"sizes {self._name}",
                "%s was compiled for %d sizes; of others, eager runs what depends on a size; "
                "pad inputs to fewer sizes, or raise the option max_sizes",
                self._name,
                self._limit,
            )
        self._once.pop(key, None)
        self._once[key] = None
        if len(self._once) > MOST_NOTED:
            del self._once[next(iter(self._once))]

    def _made(self, key: Any, args: Sequence[Any], build: Build) -> Call:
        self._calls[key] = build(args, _text(key))
        return self._calls[key]


def _grown(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether a size is one more than it was: it goes on growing, and none will come again soon."""
    numbers = [[k if isinstance(k, tuple) else (k,) for k in key] for key in (before, now)]
    pairs = zip(*map(itertools.chain.from_iterable, numbers), strict=False)
    return any(b - a == 1 for a, b in pairs)


def _where_sizes_are(gm: fx.GraphModule) -> tuple[list[int], list[int]]:
    """Positions of the numbers, and of the tensors whose shapes say what the numbers do not."""
    numbers, tensors, known = [], [], set()
    values = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    for i, value in enumerate(values):
        if isinstance(value, torch.SymInt):
            numbers.append(i)
            known |= {value.node.expr} & free_symbols(value)
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor) and (new := free_symbols(value) - known):
            tensors.append(i)
            # A shape tells its plain symbols; of an expression it tells the value alone.
            plain: list[Any] = [d for d in value.shape if isinstance(d, torch.SymInt)]
            known |= {d.node.expr for d in plain} & new
    return numbers, tensors


def _text(key: tuple[Any, ...]) -> str:
    return ",".join("x".join(map(str, k)) if isinstance(k, tuple) else str(k) for k in key)
