"""Kernels that are launched before those in front of them are done, and wait by themselves.

A launch after another kernel costs microseconds: the device starts a kernel only when the one
before has ended and its writes are seen. From compute capability 9.0 on a kernel may be launched
earlier ("programmatic dependent launch"): its blocks take their places as soon as all blocks of the
one before have theirs, and the kernel itself waits before it touches memory that others write.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch_pruner import exc

if TYPE_CHECKING:
    from collections.abc import Collection

SINCE = 90  # the first architecture that has it
# The kernel after this one may be launched right away: all blocks of this one have their places by
# then, and it waits, too. What this one waits for is that everything before has ended, so what
# follows may rely on all that lies before this one as well.
_WAIT = (
    '  asm volatile("griddepcontrol.launch_dependents;\\n'
    '  griddepcontrol.wait;\\n" ::: "memory");\n'
)
WAIT = "griddepcontrol.wait"
_OPENED = re.compile(
    r'^extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\([^)]*\) \{\n', re.MULTILINE
)
_ARCH = re.compile(r"sm_(\d+)[af]?")


def allowed(arch: str) -> bool:
    """Whether kernels for ``arch`` (``sm_80``, ``sm_90a``, ...) may be launched early."""
    found = _ARCH.fullmatch(arch)
    return found is not None and int(found[1]) >= SINCE


def waiting(code: str, symbols: Collection[str]) -> str:
    """CUDA C whose kernels, named ``symbols``, wait at their start for all in front of them.

    Raises ``CompileError`` where one is not found: launched early it would read what is not there.
    """
    found = set()

    def opened(head: re.Match[str]) -> str:
        found.add(head[1])
        return head[0] + _WAIT

    code = _OPENED.sub(opened, code)
    if missing := set(symbols) - found:
        raise exc.CompileError("kernels", f"no definition of {', '.join(sorted(missing))}")
    return code
