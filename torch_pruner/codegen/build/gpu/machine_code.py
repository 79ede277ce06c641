"""CUDA C to machine code that keeps what it needs in registers, if it can.

The assembler looks for a balance between registers of a thread and blocks that a multiprocessor
holds at once, and spills a few for that. Kernels that do are compiled again as if one block were
enough: they then have as many registers as a block may have.
"""

from __future__ import annotations

import re

from torch_pruner import exc
from torch_pruner.codegen.build.gpu import nvrtc

_SPILLS = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<bytes>\d+) bytes spill stores", re.DOTALL
)
_BOUNDS = r'(extern "C" __global__ void __launch_bounds__\(\d+)\)( {}\()'


def machine_code(source: str, arch: str) -> tuple[bytes, str]:
    """As ``nvrtc.compile_cubin``; raises what that does."""
    image, log = nvrtc.compile_cubin(source, arch)
    roomy = source
    for name in (n for n, spilled in spills(log).items() if spilled):
        roomy = re.sub(_BOUNDS.format(re.escape(name)), r"\1, 1)\2", roomy)
    if roomy == source:
        return image, log
    try:
        again, second = nvrtc.compile_cubin(roomy, arch)
    except exc.CompileError:
        return image, log
    fewer = sum(spills(second).values()) < sum(spills(log).values())
    return (again, second) if fewer else (image, log)


def spills(log: str) -> dict[str, int]:
    """Bytes that each kernel of an assembler's log stores because registers were too few."""
    return {found["name"]: int(found["bytes"]) for found in _SPILLS.finditer(log)}
