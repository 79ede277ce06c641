"""Objects that have to start over in a forked child, and to end well with their process.

A connection to sqlite, a lock that another thread held and an open lock file are all useless or
harmful in a child. ``renew_after_fork`` calls ``after_fork`` on every living registered object, in
the child, before it runs anything else. ``close_at_exit`` calls ``close`` when the process ends by
itself.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class _Renewable(Protocol):
    def after_fork(self) -> None: ...


class _Closable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()
_living: weakref.WeakSet[_Renewable] = weakref.WeakSet()


def renew_after_fork(thing: _Renewable) -> None:
    """Call ``thing.after_fork()`` in every child that this process forks while ``thing`` lives."""
    _living.add(thing)


def close_at_exit(thing: _Closable) -> None:
    """Call ``thing.close()`` when this process ends by itself, if ``thing`` lives then."""
    _open.add(thing)


def _close() -> None:
    for thing in list(_open):
        thing.close()


def _renew() -> None:
    for thing in list(_living):
        thing.after_fork()


os.register_at_fork(after_in_child=_renew)
atexit.register(_close)
