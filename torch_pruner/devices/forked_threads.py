"""A child that was forked from a process that compiles: torch's own kernels run on one thread too.

The pool of OpenMP that torch's kernels share is without threads in a child, and GNU's, which torch
comes with, waits for them for ever. Eager runs beside our kernels (the first-call check, operators
that are not compiled), so such a child does what workers of torch's ``DataLoader`` do.
"""

from __future__ import annotations

import functools
import os

import torch

_before = 0  # torch's threads in the parent; 0: this process was not forked


@functools.cache
def watch() -> None:
    """From now on see to it that children that are forked can run what is compiled."""
    os.register_at_fork(after_in_child=_after_fork)


def threads() -> int:
    """How many threads torch is meant to use: in a child as many as in its parent, unless the child
    chose itself, so that it finds its parent's kernels."""
    now = torch.get_num_threads()
    return _before if _before and now == 1 else now


def _after_fork() -> None:
    global _before
    _before = threads()
    torch.set_num_threads(1)
