"""Graphs of symbolic sizes whose programs are made beside the calls: no call waits for one.

A size without a program runs in the program of a larger one if there is one, and else in eager.
What is decided about sizes (``SizedCall``) is decided in the queue's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

from torch_pruner import log
from torch_pruner.background.queue import Job, JobQueue
from torch_pruner.dynamo.sizes.sized_call import CLOSE, MOST_NOTED, SizedCall, given_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from torch_pruner.dynamo.lower.calls import BoxedCall, RuntimeValue
    from torch_pruner.dynamo.sizes.sized_call import Build, Larger, Share, Sizes
    from torch_pruner.dynamo.sizes.symbolic import SizedArgument, SizedArguments

_log = log.logger(__name__)


class BackgroundSizes(SizedCall):
    """A ``SizedCall`` that builds in the thread of ``queue``; until then sizes run in ``eager``."""

    def __init__(
        self,
        gm: fx.GraphModule,
        build: Build,
        general: Callable[[], BoxedCall],
        *,
        limit: int,
        name: str,
        larger: Larger | None,
        eager: BoxedCall,
        queue: JobQueue,
        strict: bool,
    ) -> None:
        super().__init__(gm, build, general, limit=limit, name=name, larger=larger)
        self._eager, self._queue = eager, queue
        self._wishes: OrderedDict[object, Callable[[], object]] = OrderedDict()
        self._job = _Sizes(name, self._wishes, strict=strict)

    def __call__(self, args: list[RuntimeValue]) -> list[RuntimeValue]:
        self._queue.poke()
        key = self._sizes(args)
        call = self._calls.get(key)
        if call is not None:
            self._latest = key
            return call(args)
        near = self._near.get(key)
        if near is None and self._larger is not None:
            call = self._larger.known(args)
            near = None if call is None else (1.0, self._serve(key, 1.0, call))
        if near is None or near[0] > CLOSE:
            given = given_of(args)
            self._wish(key, partial(self._decide, key, given, self._latest))
        self._latest = key
        run = self._other or self._eager if near is None else near[1]
        return run(args)

    def prepare(self, args: SizedArguments, build: Build, share: Share | None = None) -> None:
        key = self._latest = self._sizes(args)
        given = given_of(args)
        self._wish((key, build), partial(self._prepare, key, given, build, share))

    def _wish(self, name: object, work: Callable[[], object]) -> None:
        """Have ``work`` done, unless what has this ``name`` is waiting already."""
        wishes = self._wishes
        if name not in wishes and len(wishes) < MOST_NOTED:
            wishes[name] = work
            self._queue.submit(self._job)

    def _prepare(
        self, key: Sizes, given: list[SizedArgument], build: Build, share: Share | None
    ) -> None:
        with self._lock:
            self._prepared(key, given, build, share)

    def _decide(self, key: Sizes, given: list[SizedArgument], before: Sizes) -> None:
        """What a blocking call would have done, with nobody waiting."""
        with self._lock:
            self._call_for(key, given, before)


class _Sizes(Job):
    """The sizes that wait for somebody to see to them, the oldest first."""

    def __init__(
        self, name: str, wishes: OrderedDict[object, Callable[[], object]], *, strict: bool
    ) -> None:
        self.name, self._wishes, self._strict = name, wishes, strict

    def step(self) -> bool:
        if not self._wishes:
            return False
        key = list(self._wishes)[0]  # noqa: RUF015  at once: a caller may add one meanwhile
        try:
            self._wishes[key]()
        finally:
            del self._wishes[key]
        return bool(self._wishes)

    def failed(self, error: Exception) -> None:
        _log.warning("a size of %s runs in eager: %s", self.name, error)
        self.error = error if self._strict else None
