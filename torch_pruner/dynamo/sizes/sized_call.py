"""Graphs of symbolic sizes: one compiled call for each of the sizes that come.

AOTAutograd captures such a graph once, and the extents of a kernel are numbers. So for the sizes of
a call the graph is written down anew with numbers in place of symbols, which makes it a graph like
any other; it is compiled and kept. That takes seconds, and sizes may come once and never again (a
sequence that grows by a token): so the first few sizes are compiled when they come, later ones and
those of something that grows when they come again, and how many is bounded. A size that comes while
a larger one is at hand runs in that one's program (``sizes/buckets.py``). Others run in the graph
as it was captured, in which eager runs what depends on a size.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch.fx.experimental.symbolic_shapes import free_symbols

from torch_pruner.dynamo.lower.calls import picker
from torch_pruner.dynamo.sizes.symbolic import Given, rounded_up
from torch_pruner.log import logger, warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from torch_pruner.dynamo.lower.calls import BoxedCall, RuntimeValue
    from torch_pruner.dynamo.sizes.symbolic import Extents, SizedArgument, SizedArguments

    Build = Callable[[SizedArguments, str], BoxedCall]
    Share = Callable[[SizedArguments], BoxedCall | None]
    Sizes = tuple[int | Extents, ...]
    """Numbers among the arguments, then the shapes of tensors that say what those do not."""

__all__ = ["Larger", "SizedCall"]


log = logger(__name__)
AT_ONCE = 8  # sizes that are compiled when they first come
MOST_NOTED = 4096  # sizes that came once are remembered
CLOSE = 1.25  # times larger sizes that serve as well as a size's own: it never gets any
FARTHEST = 8.0  # times larger sizes that still serve, until the size has come often
_shape = operator.attrgetter("shape")
OFTEN = 16  # calls' worth of work that a size spends in a larger one before it is compiled


class Larger(Protocol):
    """What computes sizes in programs for larger ones (``sizes/buckets.py``)."""

    def known(self, args: SizedArguments) -> BoxedCall | None:
        """A call in a program for every size that is there already, or None."""

    def shared(self, args: SizedArguments) -> BoxedCall | None:
        """A call in the program for every size up to some, compiled if need be, or None."""

    def call(self, args: SizedArguments, large: SizedArguments, text: str) -> BoxedCall | None:
        """A call for the sizes of ``args`` in the program for those of ``large``, or None."""

    def ready(self, args: SizedArguments) -> bool:
        """Whether the cache has the kernels for these sizes."""


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
        general: Callable[[], BoxedCall],
        *,
        limit: int,
        name: str,
        larger: Larger | None = None,
    ) -> None:
        # On the instance: torch wraps a backward and copies its __dict__ only.
        self._boxed_call = True
        self._gm, self._build, self._general, self._larger = gm, build, general, larger
        self._limit, self._name = limit, name
        self._numbers, self._tensors = _where_sizes_are(gm)
        self._pick_numbers: Callable[[SizedArguments], SizedArguments] = picker(self._numbers)
        self._pick_tensors: Callable[[SizedArguments], SizedArguments] = picker(self._tensors)
        self._calls: dict[Sizes, BoxedCall] = {}
        self._given: dict[Sizes, list[SizedArgument]] = {}  # arguments of those sizes
        self._near: dict[Sizes, tuple[float, BoxedCall]] = {}  # in programs so many times larger
        self._times: dict[Sizes, int] = {}  # that sizes came uncompiled, the latest last
        self._latest: Sizes = ()  # the sizes of the call before
        self._other: BoxedCall | None = None
        self._lock = threading.Lock()

    def __call__(self, args: list[RuntimeValue]) -> list[RuntimeValue]:
        key = self._sizes(args)
        call = self._calls.get(key)
        if call is None:
            near = self._near.get(key)
            if near is not None and near[0] <= CLOSE:
                self._latest = key
                return near[1](args)
            with self._lock:
                call = self._call_for(key, args, self._latest)
        self._latest = key
        return call(args)

    def prepare(self, args: SizedArguments, build: Build, share: Share | None = None) -> None:
        """Have the call for ``args`` ready, made by ``share`` or else by another ``build``."""
        with self._lock:
            self._latest = self._sizes(args)
            self._prepared(self._latest, args, build, share)

    def _prepared(
        self, key: Sizes, args: SizedArguments, build: Build, share: Share | None
    ) -> None:
        """What is shared takes the place of all that was; not where the cache has the kernels of
        the size itself."""
        larger = self._larger
        found = None
        if share is not None and larger is not None and not larger.ready(args):
            found = share(args)
        if found is None:
            self._made(key, args, build)
        else:
            self._near.clear()
            self._serve(key, 1.0, found)

    def _sizes(self, args: SizedArguments) -> Sizes:
        numbers = cast("Sequence[int]", self._pick_numbers(args))
        return (*numbers, *map(_shape, self._pick_tensors(args)))

    def _arguments(self, key: Sizes) -> list[SizedArgument | Extents]:
        """What ``_sizes`` looks at, in its place: numbers, and shapes for tensors."""
        at = dict(zip((*self._numbers, *self._tensors), key, strict=True))
        return [at.get(i) for i in range(max(at) + 1)]

    def _call_for(self, key: Sizes, args: SizedArguments, before: Sizes) -> BoxedCall:
        """``before``: the sizes of the call before."""
        if key in self._calls:  # another thread was first
            return self._calls[key]
        grows = _grown(before, key)
        if (call := self._share(key, args)) is not None:
            return call
        near = self._nearest(key, args, self._arguments(before) if grows else None)
        if near is not None and grows:
            return near[1]  # there are as many sizes as tokens: none is worth a stop
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

    def _share(self, key: Sizes, args: SizedArguments) -> BoxedCall | None:
        """The call for a size in the program for every size; None where the cache has the kernels
        of the size itself before there is such a program."""
        if self._larger is None or key in self._near:
            return None
        call = self._larger.known(args)
        if call is None and not self._larger.ready(args):
            call = self._larger.shared(args)
        return None if call is None else self._serve(key, 1.0, call)

    def _serve(self, key: Sizes, ratio: float, call: BoxedCall) -> BoxedCall:
        """Have sizes computed by the program of a size that is ``ratio`` times larger."""
        self._near[key] = ratio, call
        if len(self._near) > MOST_NOTED:
            del self._near[next(iter(self._near))]
        return call

    def _pays(self, key: Sizes, times: float) -> bool:
        """Whether a size has come so many times before and there is room for it."""
        return self._times.get(key, 0) >= times and len(self._calls) < self._limit

    def _nearest(
        self, key: Sizes, args: SizedArguments, before: Sequence[SizedArgument | Extents] | None
    ) -> tuple[float, BoxedCall] | None:
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
        return ratio, self._serve(key, ratio, call)

    def _note(self, key: Sizes) -> None:
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

    def _made(self, key: Sizes, args: SizedArguments, build: Build) -> BoxedCall:
        self._calls[key] = build(args, _text(key))
        self._times.pop(key, None)
        self._given[key] = given_of(args)
        return self._calls[key]


def patience(times: float) -> float:
    """How often a size runs in one that is so many times larger before it is compiled."""
    return math.inf if times <= CLOSE else math.ceil(OFTEN / (times - 1))


def times_larger(large: Sizes, small: Sizes) -> float:
    """How many times more one size is to compute than another; infinite if it is not larger.

    Extents that vary together (they are as much larger) count once, and the work is taken to be
    proportional to each.
    """
    flat = [
        [d for k in key for d in (k if isinstance(k, tuple) else (k,))] for key in (large, small)
    ]
    if len(flat[0]) != len(flat[1]) or any(a < b for a, b in zip(*flat, strict=True)):
        return math.inf
    times: dict[int, float] = {}
    for a, b in zip(*flat, strict=True):
        if a > b:
            times[a - b] = max(times.get(a - b, 1.0), a / b if b else math.inf)
    return math.prod(times.values(), start=1.0)


def given_of(args: SizedArguments) -> list[SizedArgument]:
    """Arguments without their values."""
    return [Given.of(a) if isinstance(a, torch.Tensor) else a for a in args]


def _grown(before: Sizes, now: Sizes) -> bool:
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
            shape = cast("Sequence[torch.SymInt | int]", value.shape)
            plain = [d for d in shape if isinstance(d, torch.SymInt)]
            known |= {d.node.expr for d in plain} & new
    return numbers, tensors


def _text(key: Sizes) -> str:
    return ",".join("x".join(map(str, k)) if isinstance(k, tuple) else str(k) for k in key)
