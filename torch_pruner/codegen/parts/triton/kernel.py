"""What stands for a kernel that Triton compiles: its text and how it is launched.

Nothing here needs Triton, or TVM.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache

SYMBOL = "kernel"  # the function's name in every text
HEADER = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice

"""
EARLY = "EARLY"
_ASSEMBLY = """\
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.{}; // $0", "=r,~{{memory}}", [], dtype=tl.int32, is_pure=False, pack=1)
"""
WAIT, GO_ON = _ASSEMBLY.format("wait"), _ASSEMBLY.format("launch_dependents")
"""As ``dependent`` puts them at the ends of other kernels: see there."""


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """One launch. The text defines ``SYMBOL``, whose parameters are pointers, and one constant.

    ``parameters`` are positions among the kernel's buffers (inputs, outputs, scratch), ``types``
    those of what the pointers lead to, in Triton's words ("fp16"). The constant, ``EARLY``, says
    whether the kernel waits by itself for those in front of it.
    """

    text: str
    parameters: tuple[int, ...]
    types: tuple[str, ...]
    blocks: int
    warps: int
    stages: int


POINTEES = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int8": "i8",
    "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "bool": "i8",
}  # fmt: skip
"""Triton's names of what pointers lead to, by dtypes of buffers."""


@cache
def available() -> bool:
    """Whether Triton is installed, as every CUDA build of torch brings it; it is not imported."""
    return importlib.util.find_spec("triton") is not None
