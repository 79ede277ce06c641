"""Stand-ins for the process that compiles, which end, refuse, talk nonsense or never answer."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

MARK = Path(tempfile.gettempdir()) / f"torch_pruner-died-once-{os.getppid()}"


class Service:
    def __init__(self, act):
        self._act = act

    def handle(self, message, reply):
        self._act(reply)


def _fine(reply):
    reply({"ok": True, "choices": {}, "seconds": {}})


def _dies_once(reply):
    if MARK.exists():
        MARK.unlink()
        _fine(reply)
    else:
        MARK.touch()
        os._exit(3)


def dies_once(_argument):
    return Service(_dies_once)


def dies(_argument):
    return Service(lambda reply: os._exit(3))


def refuses(_argument):
    return Service(lambda reply: reply({"ok": False, "error": "no room"}))


def babbles(_argument):
    return Service(lambda reply: reply({"ok": True, "choices": 7}))


def hangs(_argument):
    return Service(lambda reply: time.sleep(600))
