"""A process that builds: it does jobs one by one and answers each.

Started by ``pool`` through ``torch_pruner.tuner.measure.worker``, whose pipes it uses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from torch_pruner.compiler.building.jobs import answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.tuner.measure.protocol import Message


class BuildService:
    """Does jobs; no exception leaves it."""

    def handle(self, message: Message, reply: Callable[[Message], None]) -> None:
        reply({**answer(message), "job": message["job"]})


def make(_argument: str) -> BuildService:
    """What ``worker --relay`` calls, in a process of its own. TVM is imported at once."""
    importlib.import_module("torch_pruner.codegen.build.objects")
    return BuildService()
