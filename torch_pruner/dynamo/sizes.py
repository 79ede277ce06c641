"""Graphs of symbolic sizes: one compiled call for each of the sizes that come.

AOTAutograd captures such a graph once, and the extents of a kernel are numbers. So for the sizes of
a call the graph is written down anew with numbers in place of symbols, which makes it a graph like
any other; it is compiled and kept. That takes seconds, and sizes may come once and never again (a
sequence that grows by a token): so the first few sizes are compiled when they come, later ones and
those of something that grows when they come again, and how many is bounded. A size that comes while
a larger one is at hand runs in that one's program (``dynamo/buckets.py``). Others run in the graph
as it was captured, in which eager runs what depends on a size.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from torch_pruner.log import logger, warn_once

__all__ = ["Given", "Larger", "SizedCall", "depends_on_sizes", "hinted", "rounded_up", "with_sizes"]

Call = Callable[[list[Any]], Any]
Build = Callable[[Sequence[Any], str], Call]

log = logger(__name__)
AT_ONCE = 8  # sizes that are compiled when they first come
MOST_NOTED = 4096  # sizes that came once are remembered
CLOSE = 1.25  # times larger sizes that serve as well as a size's own: it never gets any
FARTHEST = 8.0  # times larger sizes that still serve, until the size has come often
OFTEN = 16  # calls' worth of work that a size spends in a larger one before it is compiled
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


class Larger(Protocol):
    """What computes sizes in programs for larger ones (``dynamo/buckets.py``)."""

    def call(self, args: Sequence[Any], large: Sequence[Any], text: str) -> Call | None:
        """A call for the sizes of ``args`` in the program for those of ``large``, or None."""

    def ready(self, args: Sequence[Any]) -> bool:
        """Whether the cache has the kernels for these sizes."""


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


def rounded_up(
    gm: fx.GraphModule, args: Sequence[Any], before: Sequence[Any] | None = None
) -> list[Any] | None:
    """``args`` with every size that varies rounded up to a power of two.

    If there were arguments ``before``, only sizes that are one more than they were, and to the next
    power above. No further than Dynamo found that a size goes (a table of positions). None where
    some are not computed from sizes that an argument has.
    """
    values = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    now, then = _symbols(values, args), _symbols(values, before or ())
    known: dict[Any, int] = {}
    most = _most(values)
    for symbol, number in now.items():
        if before is None:
            known[symbol] = 1 << (number - 1).bit_length()
        else:
            known[symbol] = 1 << number.bit_length() if number - then[symbol] == 1 else number
        known[symbol] = max(number, min(known[symbol], most.get(symbol, known[symbol])))
    expressions = [
        v for v in tree_leaves([_extents(v) for v in values]) if isinstance(v, _SYMBOLIC)
    ]
    if any(v.node.expr.free_symbols - known.keys() for v in expressions):
        return None

    def larger(value: Any) -> Any:
        return int(value.node.expr.xreplace(known)) if isinstance(value, _SYMBOLIC) else value

    found: list[Any] = []
    for value, arg in zip(values, args, strict=True):
        if isinstance(value, torch.Tensor):
            shape, stride = (tuple(map(larger, x)) for x in (value.shape, value.stride()))
            found.append(Given(shape, stride, arg.dtype, arg.device))
        else:
            found.append(larger(value) if isinstance(value, _SYMBOLIC) else arg)
    return found


def _most(values: Sequence[Any]) -> dict[Any, int]:
    """The largest numbers that symbols may stand for, where Dynamo knows them."""
    found = {}
    for leaf in tree_leaves([_extents(v) for v in values]):
        if isinstance(leaf, torch.SymInt):
            ranges = getattr(leaf.node.shape_env, "var_to_range", {})
            upper = getattr(ranges.get(leaf.node.expr), "upper", None)
            if upper is not None and getattr(upper, "is_Integer", False):
                found[leaf.node.expr] = int(upper)
    return found


def _symbols(values: Sequence[Any], args: Sequence[Any]) -> dict[Any, int]:
    """The numbers that stand for the symbols of a graph's arguments ``values``."""
    found: dict[Any, int] = {}
    for value, arg in zip(values, args, strict=False):
        symbols = [(value, arg)]
        if isinstance(value, torch.Tensor):
            symbols = list(zip(value.shape, arg.shape, strict=True))
        for symbol, number in symbols:
            if isinstance(symbol, torch.SymInt) and symbol.node.expr.is_Symbol:
                found[symbol.node.expr] = number
    return found


def _extents(value: Any) -> Any:
    return [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else value


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
    ``larger``, if given, computes sizes in programs for larger ones: those that come first while
    there is such a program, and for good where that is not much larger. ``general`` makes the call
    for all other sizes, when it is first needed. Safe for several threads: one builds, others wait.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        build: Build,
        general: Callable[[], Call],
        *,
        limit: int,
        name: str,
        larger: Larger | None = None,
    ) -> None:
        # Of the instance: torch wraps a backward and copies its __dict__ only.
        self._boxed_call = True
        self._gm, self._build, self._general, self._larger = gm, build, general, larger
        self._limit, self._name = limit, name
        self._numbers, self._tensors = _where_sizes_are(gm)
        self._calls: dict[Any, Call] = {}
        self._given: dict[Any, list[Any]] = {}  # arguments of those sizes
        self._near: dict[Any, tuple[float, Call]] = {}  # in programs so many times larger
        self._times: dict[Any, int] = {}  # that sizes came which were not compiled, the latest last
        self._latest: Any = ()  # the sizes that were new last
        self._latest_args: list[Any] = []
        self._other: Call | None = None
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> Any:
        key = self._sizes(args)
        call = self._calls.get(key)
        if call is None:
            near = self._near.get(key)
            if near is not None and near[0] <= CLOSE:
                return near[1](args)
            with self._lock:
                call = self._call_for(key, args)
        return call(args)

    def prepare(self, args: Sequence[Any], build: Build) -> None:
        """Have the call for ``args`` ready, made by another ``build``."""
        with self._lock:
            self._latest, self._latest_args = self._sizes(args), _given(args)
            self._made(self._latest, args, build)

    def _sizes(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return (*[args[i] for i in self._numbers], *[args[i].shape for i in self._tensors])

    def _call_for(self, key: Any, args: Sequence[Any]) -> Call:
        if key in self._calls:  # another thread was first
            return self._calls[key]
        grows = _grown(self._latest, key)
        near = self._nearest(key, args, self._latest_args if grows else None)
        self._latest, self._latest_args = key, _given(args)
        if near is not None and not self._pays(key, patience(near[0])):
            self._note(key)
            return near[1]
        if len(self._calls) < min(self._limit, AT_ONCE) and not grows:
            return self._made(key, args, self._build)
        if self._pays(key, 1):
            return self._made(key, args, self._build)
        self._note(key)
        if self._other is None:
            self._other = self._general()
        return self._other

    def _pays(self, key: Any, times: float) -> bool:
        """Whether a size has come so many times before and there is room for it."""
        return self._times.get(key, 0) >= times and len(self._calls) < self._limit

    def _nearest(
        self, key: Any, args: Sequence[Any], before: Sequence[Any] | None
    ) -> tuple[float, Call] | None:
        """The call for a new size in the program of a larger one, and how much larger that is.

        The larger size is one that came before. Where there is none, it is a power of two if the
        cache has its kernels (somebody tuned them for this), or if sizes go on growing, from those
        that were ``before``. None where the cache has the kernels of the size itself.
        """
        if key in self._near or self._larger is None:
            return self._near.get(key)
        if key in self._times:
            return None
        sizes = [(times_larger(other, key), other) for other in self._given]
        ratio, other = min(sizes, key=lambda s: s[0], default=(math.inf, ()))
        given = self._given.get(other)
        if ratio > 2.0:
            up = rounded_up(self._gm, args, before)
            rounded = math.inf if up is None else times_larger(self._sizes(up), key)
            if up and 1.0 < rounded < ratio and (before or self._larger.ready(up)):
                ratio, given = rounded, up
        if given is None or ratio > FARTHEST or self._larger.ready(args):
            return None
        call = self._larger.call(args, given, _text(self._sizes(given)))
        if call is None:
            return None
        self._near[key] = ratio, call
        if len(self._near) > MOST_NOTED:
            del self._near[next(iter(self._near))]
        return self._near[key]

    def _note(self, key: Any) -> None:
        if key in self._times and key not in self._near and len(self._calls) >= self._limit:
            warn_once(
                log,
                f"sizes {self._name}",
                "%s was compiled for %d sizes; of others, eager runs what depends on a size; "
                "pad inputs to fewer sizes, or raise the option max_sizes",
                self._name,
                self._limit,
            )
        self._times[key] = self._times.pop(key, 0) + 1
        if len(self._times) > MOST_NOTED:
            del self._times[next(iter(self._times))]

    def _made(self, key: Any, args: Sequence[Any], build: Build) -> Call:
        self._calls[key] = build(args, _text(key))
        self._times.pop(key, None)
        self._given[key] = _given(args)
        return self._calls[key]


def patience(times: float) -> float:
    """How often a size runs in one that is so many times larger before it is compiled."""
    return math.inf if times <= CLOSE else math.ceil(OFTEN / (times - 1))


def times_larger(large: tuple[Any, ...], small: tuple[Any, ...]) -> float:
    """How many times more one size is to compute than another; infinite if it is not larger.

    Extents that vary together count once, and the work is taken to be proportional to each.
    """
    flat = [
        [d for k in key for d in (k if isinstance(k, tuple) else (k,))] for key in (large, small)
    ]
    if len(flat[0]) != len(flat[1]) or any(a < b for a, b in zip(*flat, strict=True)):
        return math.inf
    return math.prod((a / b for a, b in set(zip(*flat, strict=True))), start=1.0)


def _given(args: Sequence[Any]) -> list[Any]:
    """Arguments without their values."""
    return [Given.of(a) if isinstance(a, torch.Tensor) else a for a in args]


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
