"""Locks that a forked child finds free.

A thread of the parent may hold one while another forks, and in the child that thread does not
exist. What a lock guards is then as it was at that moment: use these for work that may be begun
anew, and ``cache.fork_hooks`` for objects that have to start over. Imports nothing of ours.
"""

from __future__ import annotations

import os
import threading


def lock() -> threading.Lock:
    """A ``threading.Lock``, free in every child that is forked."""
    made = threading.Lock()
    _free_in_children(made)
    return made


def rlock() -> threading.RLock:
    """A ``threading.RLock``, likewise."""
    made = threading.RLock()
    _free_in_children(made)
    return made


def _free_in_children(made: threading.Lock | threading.RLock) -> None:
    # What Python's own modules do with theirs. For locks that live as long as the process.
    if (renew := getattr(made, "_at_fork_reinit", None)) is not None:
        os.register_at_fork(after_in_child=renew)
