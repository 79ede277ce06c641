"""What leaves the backend as an exception: torch's for a backend that failed, and ours, at once.

Dynamo wraps what a backend raises in ``BackendCompilerFailed``, and then ``except CacheMiss`` does
not catch it; but it lets its own exceptions through as they are. So ours is raised as a class that
is both, made when it is first needed: ``exc`` knows nothing of torch.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch._dynamo.exc import BackendCompilerFailed

from torch_pruner import exc

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
Result = TypeVar("Result")


def raised_as_both(backend: Callable[P, Result]) -> Callable[P, Result]:
    """``backend``, whose every ``PrunerError`` is torch's ``BackendCompilerFailed``, too."""

    @functools.wraps(backend)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return backend(*args, **kwargs)
        except exc.PrunerError as err:
            kind: Any = type(err)
            both = _both(kind)(backend, err, inspect.currentframe())
            raise both.with_traceback(err.__traceback__) from None

    return call


@functools.cache
def _both(kind: Any) -> Callable[..., BackendCompilerFailed]:
    """A subclass of ``kind`` and of torch's exception, with the fields of both."""

    def init(self: Any, backend: Any, err: exc.PrunerError, frame: Any) -> None:
        BackendCompilerFailed.__init__(self, backend, err, frame)
        self.__dict__.update(err.__dict__)

    def reduce(self: Any) -> tuple[Any, ...]:
        # In another process, where this class may not have been made, it is ours alone.
        plain: tuple[Any, ...] = self.inner_exception.__reduce__()
        return plain

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(
        kind.__name__,
        (BackendCompilerFailed, kind),
        {**names, "__init__": init, "__reduce__": reduce},
    )
