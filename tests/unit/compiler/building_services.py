"""What stands in for the process that builds, for tests of who asks it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Scripted:
    """Does what the job says; ``once`` is the path of a file that says that it was done before."""

    def handle(self, message: dict[str, Any], reply: Callable[[dict[str, Any]], None]) -> None:
        if "once" in message and not os.path.exists(message["once"]):
            open(message["once"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if message["cmd"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        reply({"ok": True, "parts": [], "pid": os.getpid(), "job": message["job"]})


def scripted(_argument: str) -> Scripted:
    return Scripted()


def broken(_argument: str) -> Scripted:
    raise ImportError("no compiler here")
