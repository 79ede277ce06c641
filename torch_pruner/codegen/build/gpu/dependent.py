"""Kernels that are launched before those in front of them are done, and wait by themselves.

A launch after another kernel costs microseconds: the device starts a kernel only when the one
before has ended and its writes are seen. From compute capability 9.0 on a kernel may be launched
earlier ("programmatic dependent launch"): its blocks take their places as soon as all blocks of the
one before say so or have ended, and the kernel itself waits until all that was written is seen: at
its start, or after it has said which weights it will want (``codegen.parts.gpu.early``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch_pruner import exc
from torch_pruner.codegen.parts.gpu import early

if TYPE_CHECKING:
    from collections.abc import Collection

SINCE = 90  # the first architecture that has it
WAIT = "griddepcontrol.wait"
_WAIT = f'  asm volatile("{WAIT};\\n" ::: "memory");\n'
# At the end, and not at once: blocks that wait take places from those that work. With the launch at
# the start BERT-base, GPT-2 and Llama on an H100 took 0.95 to 1.38 of the time without any of this,
# with the launch at the end 0.95 to 0.99.
_GO_ON = '  asm volatile("griddepcontrol.launch_dependents;\\n" ::: "memory");\n'
_KERNEL = re.compile(r'(?=^extern "C" __global__)', re.MULTILINE)
_OPENED = re.compile(
    r'^extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\([^)]*\) \{\n', re.MULTILINE
)
_ASKED = re.compile(rf"^  {early.ENDED}\(\);\n", re.MULTILINE)  # in no branch and no loop
_RETURN = re.compile(r"\breturn\b")
_ARCH = re.compile(r"sm_(\d+)[af]?")


def allowed(arch: str) -> bool:
    """Whether kernels for ``arch`` (``sm_80``, ``sm_90a``, ...) may be launched early."""
    found = _ARCH.fullmatch(arch)
    return found is not None and int(found[1]) >= SINCE


def waiting(code: str, symbols: Collection[str]) -> str:
    """CUDA C whose kernels, named ``symbols``, wait at their start, or where
    ``early`` says, and let others go at their end.

    Raises ``CompileError`` where one is not found: launched early it would read what is not there.
    """
    parts = _KERNEL.split(code)
    found = set()
    for n, part in enumerate(parts):
        if head := _OPENED.match(part):
            found.add(head[1])
            end = part.rindex("\n}") + 1
            body = part[head.end() : end]
            if _RETURN.search(body):  # never by an emitter of ours; it would skip the end
                raise exc.CompileError("kernels", f"{head[1]} returns before its end")
            before, *after = _ASKED.split(body)
            if len(after) > 1 or early.ENDED in "".join([before, *after]):
                raise exc.CompileError("kernels", f"{head[1]} does not wait at one place")
            waits = [before, _WAIT, *after] if after else [_WAIT, body]
            parts[n] = "".join([head[0], *waits, _GO_ON, part[end:]])
    if missing := set(symbols) - found:
        raise exc.CompileError("kernels", f"no definition of {', '.join(sorted(missing))}")
    return "".join(parts)
