"""What goes wrong in compiling: the boundary behind which eager runs, and what is raised after all.

Dynamo wraps what a backend raises in ``BackendCompilerFailed``, and then ``except CacheMiss`` does
not catch it; but it lets its own exceptions through as they are. So ours is raised as a class that
is both, made when it is first needed: ``exc`` knows nothing of torch.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import torch
from torch._dynamo.exc import BackendCompilerFailed

from torch_pruner import exc, log
from torch_pruner.dynamo.run import reports

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch_pruner.config import Config

P = ParamSpec("P")
Result = TypeVar("Result")

_log = log.logger(__name__)


@dataclass(frozen=True, slots=True)
class Fallback:
    """What stands in for something that cannot be compiled: it is reported as ``name``."""

    name: str
    config: Config

    def unless_failed(
        self, attempt: Callable[[], Result], eager: Callable[[], Result], *, again: bool
    ) -> Result:
        """``unless_broken`` and ``unless_missing`` both."""
        return self.unless_missing(lambda: self.unless_broken(attempt, eager), eager, again=again)

    def unless_broken(
        self,
        attempt: Callable[[], Result],
        eager: Callable[[], Result],
        *,
        quietly: bool = False,
        instead: str = "runs in eager",
    ) -> Result:
        """``attempt``; what goes wrong in it is reported once, and then it is ``eager``.

        ``instead`` says in the warning what that is. With ``quietly`` the attempt is a short cut:
        what goes wrong in it will do so on the long way. Misses and wrong options are raised, and
        so is everything with ``strict``.
        """
        try:
            return attempt()
        except (exc.CacheMiss, exc.OptionError, torch._dynamo.exc.RestartAnalysis):
            raise  # the last is Dynamo's own: it captures once more, knowing better
        except Exception as err:
            if self.config.strict or self.config.fallback == "error":
                raise
            if quietly:
                _log.debug("%s: a short cut failed", self.name, exc_info=True)
                return eager()
            kind = type(err).__name__
            _log.warning("%s is not compiled and %s: %s: %s", self.name, instead, kind, err)
            _log.debug("the failure", exc_info=True)
            reports.failed(self.name, f"{kind}: {err}")
            return eager()

    def unless_missing(
        self, attempt: Callable[[], Result], eager: Callable[[], Result], *, again: bool
    ) -> Result:
        """``attempt``; what the cache lacks is raised, or if it is compiled ``again`` said once.

        The first compilation was the time to refuse; a request is not failed for its size.
        """
        try:
            return attempt()
        except exc.CacheMiss as err:
            if not again:
                raise
            first_line = str(err).split("\n")[0]
            log.warn_once(_log, self.name, "sizes of %s run in eager: %s", self.name, first_line)
            reports.failed(self.name, f"{type(err).__name__}: {err}")
            return eager()


def raised_as_both(backend: Callable[P, Result]) -> Callable[P, Result]:
    """``backend``, whose every ``PrunerError`` is torch's ``BackendCompilerFailed``, too."""

    @functools.wraps(backend)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return backend(*args, **kwargs)
        except exc.PrunerError as err:
            both = _both(type(err))(backend, err, inspect.currentframe())
            raise both.with_traceback(err.__traceback__) from None

    return call


_made: dict[type[exc.PrunerError], type[BackendCompilerFailed]] = {}


def _both(kind: type[exc.PrunerError]) -> type[BackendCompilerFailed]:
    """A subclass of ``kind`` and of torch's exception, with the fields of both."""
    if (known := _made.get(kind)) is not None:
        return known

    def init(
        self: BackendCompilerFailed,
        backend: Callable[..., object],
        err: exc.PrunerError,
        frame: FrameType | None,
    ) -> None:
        BackendCompilerFailed.__init__(self, backend, err, frame)
        self.__dict__.update(err.__dict__)

    def reduce(self: BackendCompilerFailed) -> str | tuple[object, ...]:
        # In another process, where this class may not have been made, it is ours alone.
        return self.inner_exception.__reduce__()

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    bases = (BackendCompilerFailed, kind)
    made = type(kind.__name__, bases, {**names, "__init__": init, "__reduce__": reduce})
    return _made.setdefault(kind, cast("type[BackendCompilerFailed]", made))
