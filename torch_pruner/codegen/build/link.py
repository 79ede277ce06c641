"""Links object files into a shared library. Needs a C compiler, and no TVM."""

from __future__ import annotations

import os
import subprocess
import tempfile
from typing import TYPE_CHECKING

from torch_pruner import exc
from torch_pruner.config import COMPILERS, c_compiler

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_ROOM = 16 << 20  # bytes that object files and libraries stay below


def link_objects(objects: Sequence[Path], library: Path) -> None:
    """Link ``objects``, whose symbols are each other's before they are any other library's.

    Raises ``CompileError`` when there is no C compiler or it fails, ``OSError`` without room.
    """
    compiler = c_compiler()
    if compiler is None:
        raise exc.CompileError.no_compiler("the kernel library", COMPILERS)
    make_room(library)
    command = [compiler, "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", str(library)]
    done = subprocess.run(
        [*command, *map(str, objects)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        log = done.stdout + done.stderr
        raise exc.CompileError("the kernel library", f"{compiler} failed", log=log)


def make_room(path: Path) -> None:
    """Raise OSError unless ``_ROOM`` bytes fit beside ``path``: LLVM ends the process if not."""
    with tempfile.TemporaryFile(dir=path.parent) as file:
        os.posix_fallocate(file.fileno(), 0, _ROOM)
