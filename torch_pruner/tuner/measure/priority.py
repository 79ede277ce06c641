"""Processes that give way to everything else on the machine, and what they start, too.

A process that begins a session of its own is in a group of its own as well, where Linux groups
processes by sessions: groups share the processor as equals, whatever their members' nice values
are. So the group has to be nice, too.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_GROUP = Path("/proc/self/autogroup")


def give_way(nice: int) -> None:
    """Be so nice from now on, for good."""
    with contextlib.suppress(OSError):
        os.nice(nice)
    give_way_as_parent()


def give_way_as_parent() -> None:
    """In a process that begins a session: have its group be as nice as it is itself."""
    if (nice := os.nice(0)) > 0:
        with contextlib.suppress(OSError):
            _GROUP.write_text(str(nice))
