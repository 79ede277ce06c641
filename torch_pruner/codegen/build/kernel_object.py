"""A kernel as machine code that waits to be linked: what builds it, keeps it and calls it shares.

Needs no TVM.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

_MAGIC, _LENGTH = b"torch_pruner kernel 1\n", struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Division:
    """How a part of a kernel is divided among threads.

    It does one of ``tasks`` tasks and takes its number as well; all of the work where that is None.
    ``alone``: it launches threads by itself. ``steps``: it is done so many times, all tasks of a
    step before those of the next, and takes the step's number as well.
    """

    tasks: int | None = None
    alone: bool = False
    steps: int | None = None

    def to_json(self) -> list[int | bool | None]:
        return [self.tasks, self.alone, *(() if self.steps is None else (self.steps,))]


@dataclass(frozen=True, slots=True)
class KernelObject:
    """An object file with the functions ``function_name(name, i)``, one for each part."""

    code: bytes
    parts: tuple[Division, ...] = ()

    def to_bytes(self) -> bytes:
        """As a file; ``from_bytes`` is the inverse."""
        head = json.dumps([part.to_json() for part in self.parts]).encode()
        return b"".join((_MAGIC, _LENGTH.pack(len(head)), head, self.code))

    @staticmethod
    def from_bytes(data: bytes) -> KernelObject:
        """Raises ``ValueError`` for what ``to_bytes`` did not write."""
        begin = len(_MAGIC) + _LENGTH.size
        if len(data) < begin or not data.startswith(_MAGIC):
            raise ValueError("no kernel")
        end = begin + _LENGTH.unpack_from(data, len(_MAGIC))[0]
        return KernelObject(data[end:], divisions(json.loads(data[begin:end])))


def divisions(listed: list[list[int | bool | None]]) -> tuple[Division, ...]:
    """The parts of a kernel from what JSON has of them: tasks, ``alone`` and perhaps steps."""
    return tuple(
        Division(None if tasks is None else int(tasks), bool(alone), *(int(s or 0) for s in steps))
        for tasks, alone, *steps in listed
    )


def function_name(kernel: str, part: int) -> str:
    """The symbol of a part, in whichever library it is."""
    return f"{kernel}_{part}"
