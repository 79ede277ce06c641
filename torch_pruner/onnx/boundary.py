"""Where whatever goes wrong with somebody's model becomes the one error that says so."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch_pruner.exc import PrunerError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

# What nodes, shapes and numbers that do not fit together make Python, numpy, torch and protobuf
# raise. Among them are errors of operators on inputs that they refuse, as torch's eager does.
ERRORS = (
    ArithmeticError, AssertionError, AttributeError, BufferError, LookupError, MemoryError,
    OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


@contextmanager
def unsupported(model: str, doing: str, *more: type[Exception]) -> Iterator[None]:
    """Raises ``UnsupportedModel`` in place of whatever ``ERRORS`` and ``more`` list; ours stay as
    they are."""
    caught: tuple[type[Exception], ...] = (*ERRORS, *more)
    try:
        yield
    except caught as err:
        raise_typed(model, doing, err)


def raise_typed(model: str, doing: str, err: Exception) -> None:
    """Raises ours behind ``err``, or an ``UnsupportedModel`` that names it."""
    inner = getattr(err, "inner_exception", err)  # torch wraps what a backend raises
    if isinstance(inner, PrunerError):
        raise inner from None
    lines = str(err).strip().splitlines()
    reason = f"{doing} raised {type(err).__name__}" + (f": {lines[0][:300]}" if lines else "")
    raise UnsupportedModel(model, reason) from err
