"""Processes that give way to everything else on the machine, and what they start, too.

A process that begins a session of its own is in a group of its own as well, where Linux groups
processes by sessions: groups share the processor as equals, whatever their members' nice values
are. So the group has to be nice, too.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NICE = 19
_GROUP = Path("/proc/self/autogroup")


def give_way() -> None:
    """Take what nobody else wants of the processor, from now on and for good."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    _let_group_give_way()


def give_way_as_parent() -> None:
    """In a process that begins a session: as the one that started it."""
    if os.nice(0) >= NICE:
        _let_group_give_way()


def _let_group_give_way() -> None:
    with contextlib.suppress(OSError):
        _GROUP.write_text(str(NICE))
